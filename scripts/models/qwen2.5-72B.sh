# Qwen2.5 72B: its sizes as Megatron-core names them, for tools and --train-backend megatron. Source this file, then use
# "${MODEL_ARGS[@]}". MODEL_ROTARY_BASE replaces the rotary base (a fine-tuned model may have another one).
MODEL_ARGS=(
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 29568
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
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
