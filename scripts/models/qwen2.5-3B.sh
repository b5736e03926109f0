# Qwen2.5 3B: its sizes as Megatron-core names them, for tools and --train-backend megatron. Source this file, then use
# "${MODEL_ARGS[@]}". MODEL_ROTARY_BASE replaces the rotary base (a fine-tuned model may have another one).
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 2048
    --ffn-hidden-size 11008
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 2
    --add-qkv-bias
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ROTARY_BASE:-1000000}"
    --vocab-size 151936
)
