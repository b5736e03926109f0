# Qwen2.5 7B: its sizes as Megatron-core names them, for tools and --train-backend megatron. Source this file, then use
# "${MODEL_ARGS[@]}". MODEL_ROTARY_BASE replaces the rotary base (a fine-tuned model may have another one).
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --group-query-attention
    --num-query-groups 4
    --add-qkv-bias
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ROTARY_BASE:-1000000}"
    --vocab-size 152064
    --untie-embeddings-and-output-weights
)
