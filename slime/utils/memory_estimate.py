"""How much GPU memory a run needs, from the sizes of the model: weights, gradients, optimizer, activations, KV cache.

Inputs: a `ModelShape`, the parallel sizes, tokens per GPU. Output: bytes per GPU, by part. All functions are pure.

What is counted is what the trainers of this project keep: 16-bit compute and float32 master weights. Activations are the
tensors that a backward pass needs with an attention that keeps no scores; their count is compared with what autograd
saves (`tests/utils/test_memory_estimate.py`). `OTHER_BYTES` stands for what cannot be computed (CUDA context, NCCL and
library buffers, fragmentation), so the sums are estimates and no promise.
Left out: media encoders, a critic's second model, speculative decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from slime.utils.model_shape import ModelShape
from slime.utils.parallel_sizes import ParallelSizes

GIB = 1024**3
HALF, FULL = 2, 4
ADAM_BYTES = 2 * FULL
OTHER_BYTES = 2 * GIB
# Rows of logits that the trainers hold at a time (`slime.utils.logprobs`).
LOGIT_ROWS = 1024


@dataclass(frozen=True)
class TrainMemory:
    """Bytes on the fullest GPU while it trains."""

    weights: int
    gradients: int
    optimizer: int
    """Moments, and master weights where they are not the weights."""
    reference: int
    """Weights of the reference model."""
    gathered: int
    """Shards of other ranks that are on this GPU for a while, and gradients before they are scattered (FSDP)."""
    activations: int
    logits: int
    other: int = OTHER_BYTES

    @property
    def state(self) -> int:
        """What stays while the engines generate, unless it is moved to host memory."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.other

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU of an engine."""

    weights: int
    kv_cache: int
    bytes_per_token: int
    """Keys and values of a token on this GPU."""

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds; negative when not even the weights fit."""
        return self.kv_cache // self.bytes_per_token

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache


def activation_bytes_per_token(shape: ModelShape, sizes: ParallelSizes) -> int:
    """What autograd keeps of one token in one layer, without recomputation, on a GPU.

    In 16-bit values: the inputs of both norms and of the projections behind them (4 h), queries and the attention's output (2 q),
    keys and values (2 k), and of a gated feed-forward part gate, up, the activated gate and their product (4 f). A norm keeps
    a float32 copy of what it scales (2 h); a head's norm that and its 16-bit input (q + k). Tensor parallelism divides what
    lies between projections, sequence parallelism the rest. With experts, `f` is met once for each expert of a token, each
    with a copy of its input and of its output.
    """
    width = shape.moe_router_topk * shape.moe_ffn_hidden_size if shape.num_experts else shape.ffn_hidden_size
    copies = 2 * shape.moe_router_topk * shape.hidden_size if shape.num_experts else 0
    head_norms = (HALF + FULL) * (shape.query_width + shape.kv_width) if shape.qk_layernorm else 0
    inside = HALF * (2 * shape.query_width + 2 * shape.kv_width + 4 * width + copies) + head_norms
    outside = (4 * HALF + 2 * FULL) * shape.hidden_size
    return inside // sizes.tensor + outside // (sizes.tensor if sizes.sequence_parallel else 1)


def activation_bytes(shape: ModelShape, sizes: ParallelSizes, tokens: int, recompute: bool) -> int:
    """All layers of a micro-batch with `tokens` on this GPU; with `recompute` the inputs of layers and one layer in full.

    The first pipeline stage holds a micro-batch for every stage, so dividing layers by stages saves nothing here.
    """
    one_layer = activation_bytes_per_token(shape, sizes) * tokens
    if not recompute:
        return shape.num_layers * one_layer
    layer_input = HALF * shape.hidden_size * tokens // (sizes.tensor if sizes.sequence_parallel else 1)
    return shape.num_layers * layer_input + one_layer


def logit_bytes(shape: ModelShape, sizes: ParallelSizes, tokens: int) -> int:
    """Two float32 blocks of logits, and the float32 gradient of the output layer."""
    rows = min(tokens, LOGIT_ROWS)
    return (2 * FULL * rows * shape.vocab_size + FULL * shape.embedding_params) // sizes.tensor


def fsdp_memory(
    shape: ModelShape, sizes: ParallelSizes, tokens: int, recompute: bool, with_reference: bool
) -> TrainMemory:
    """Everything sharded over all ranks in float32; layers are gathered in 16 bits, the root's parameters stay gathered."""
    shard = shape.num_params // sizes.world
    layer = shape.dense_layer_params + shape.expert_params
    root = shape.num_params - shape.num_layers * layer
    # Gathered: root and two layers (one is fetched ahead). Gradients: 16-bit ones of both, and their float32 copies.
    gathered = HALF * (root + 2 * layer) + (HALF + FULL) * max(root, layer) if sizes.world > 1 else 0
    return TrainMemory(
        weights=FULL * shard,
        gradients=FULL * shard,
        optimizer=ADAM_BYTES * shard,
        reference=FULL * shard if with_reference else 0,
        gathered=gathered,
        activations=activation_bytes(shape, sizes, tokens, recompute),
        logits=logit_bytes(shape, sizes, tokens),
    )


def stage_params(shape: ModelShape, sizes: ParallelSizes) -> tuple[int, int]:
    """Parameters of the fullest pipeline stage on one GPU: without its experts, and those."""
    layers = -(-shape.num_layers // sizes.pipeline)
    # One stage has the embedding, the last one the output layer; a single stage has both, a tied one is kept twice.
    matrices = 1 if sizes.pipeline > 1 or not shape.untied else 2
    dense = layers * shape.dense_layer_params + matrices * shape.embedding_params + shape.hidden_size
    return dense // sizes.tensor, layers * shape.expert_params // (sizes.expert * sizes.expert_tensor)


def megatron_memory(
    shape: ModelShape, sizes: ParallelSizes, tokens: int, recompute: bool, with_reference: bool
) -> TrainMemory:
    """16-bit weights, float32 gradients, and an optimizer that is distributed over the replicas of each parameter.

    The reference model waits in host memory.
    """
    dense, experts = stage_params(shape, sizes)
    # 12 bytes: master weight and moments. A parameter has as many replicas as data and context parallel ranks see it.
    replicas = sizes.data * sizes.context
    expert_replicas = sizes.world // (sizes.pipeline * sizes.expert * sizes.expert_tensor)
    return TrainMemory(
        weights=HALF * (dense + experts),
        gradients=FULL * (dense + experts),
        optimizer=(FULL + ADAM_BYTES) * (dense // replicas + experts // expert_replicas),
        reference=0,
        gathered=0,
        activations=activation_bytes(shape, sizes, tokens, recompute),
        logits=logit_bytes(shape, sizes, tokens),
    )


def kv_bytes_per_token(shape: ModelShape, tensor: int = 1, pipeline: int = 1, value_bytes: int = HALF) -> int:
    """Keys and values of one token on one GPU of an engine; a head that several GPUs share is kept by each."""
    heads = max(1, shape.num_query_groups // tensor)
    return 2 * -(-shape.num_layers // pipeline) * heads * shape.kv_channels * value_bytes


def engine_memory(
    shape: ModelShape, free: int, fraction: float, tensor: int = 1, pipeline: int = 1, value_bytes: int = HALF
) -> EngineMemory:
    """An SGLang engine that may use `fraction` of what is free when it starts; what its weights leave is KV cache."""
    weights = value_bytes * shape.num_params // (tensor * pipeline)
    return EngineMemory(weights, int(free * fraction) - weights, kv_bytes_per_token(shape, tensor, pipeline))
