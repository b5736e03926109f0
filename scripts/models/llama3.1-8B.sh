# Llama 3.1 8B: its sizes as Megatron-core names them, for tools and --train-backend megatron. Source this file, then use
# "${MODEL_ARGS[@]}". MODEL_ROTARY_BASE replaces the rotary base (a fine-tuned model may have another one).
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ROTARY_BASE:-500000}"
    --use-rope-scaling
    --rope-scaling-factor 8.0
    --vocab-size 128256
    --untie-embeddings-and-output-weights
)
