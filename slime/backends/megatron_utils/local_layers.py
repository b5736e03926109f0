"""Layers of a decoder without TransformerEngine: torch's RMSNorm and attention under megatron-core's layer names.

Used where TransformerEngine cannot be imported, which is always so on a CPU. The other parts are megatron-core's own. Invariants: packed
rows (`thd`) do not see each other; with context parallelism the result is that of one rank.
Left out: dropout, sliding windows, attention bias, fused kernels.

Shape legend: t packed tokens of this rank, T of all context-parallel ranks, H query heads and G key heads of this rank, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class LocalRMSNorm(nn.RMSNorm):
    """RMSNorm that tells the optimizer when its gradient is a part of the whole (sequence parallelism)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.epsilon = eps
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computed in float32, as Hugging Face models do."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * normed.to(x.dtype)


class PackedAttention(nn.Module):
    """Causal attention of packed rows, row by row; keys and values of other context-parallel ranks are gathered."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        from megatron.core import parallel_state

        self.scale = softmax_scale
        self.cp_group = pg_collection.cp if pg_collection else parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None = None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """[t, H, D] from query [t, H, D], key and value [t, G, D]; the rows are those of `packed_seq_params`."""
        assert packed_seq_params is not None, "this attention knows packed rows only"
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        size, rank = self.cp_group.size(), self.cp_group.rank()
        if size > 1:
            key, value = (_gather_rows(x, lengths, self.cp_group) for x in (key, value))
        queries = query.split([length // size for length in lengths])
        rows = zip(queries, key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([self._row(q, k, v, size, rank) for q, k, v in rows])

    def _row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int, rank: int) -> torch.Tensor:
        query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
        mask = None if size == 1 else _zigzag_mask(len(k), size, rank, q.device)
        shared = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=shared
        )
        return out[0].transpose(0, 1)


def _chunk_order(size: int) -> list[int]:
    """Chunk numbers in the order in which the ranks' parts lie behind each other: 0, 2n - 1, 1, 2n - 2, ..."""
    return [number for rank in range(size) for number in (rank, 2 * size - 1 - rank)]


def _gather_rows(part_tGD: torch.Tensor, lengths: list[int], group: Any) -> torch.Tensor:
    """Whole rows [T, G, D] in their order from each rank's two chunks of every row."""
    size = group.size()
    # gathered on the first dimension, whose backward pass sums over the ranks what they say of one rank's part
    ranks = gather_from_sequence_parallel_region(part_tGD.contiguous(), group=group).chunk(size)
    rows = zip(*(part.split([length // size for length in lengths]) for part in ranks), strict=True)
    order = _chunk_order(size)
    whole = []
    for row in rows:
        chunks = torch.cat(row).chunk(2 * size)
        whole += [chunks[order.index(number)] for number in range(2 * size)]
    return torch.cat(whole)


def _zigzag_mask(length: int, size: int, rank: int, device: torch.device) -> torch.Tensor:
    """[length / size, length]: which keys of a row the rank's two chunks of queries see."""
    chunk = length // (2 * size)
    positions = torch.arange(length, device=device)
    second = 2 * size - 1 - rank
    own = torch.cat([positions[rank * chunk : (rank + 1) * chunk], positions[second * chunk : (second + 1) * chunk]])
    return own[:, None] >= positions[None]


def local_decoder_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The decoder of megatron-core's local layers with this file's norm and attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    layer: ModuleSpec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = LocalRMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    attention.q_layernorm = attention.k_layernorm = LocalRMSNorm if config.qk_layernorm else IdentityOp
    layers = [layer] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=LocalRMSNorm)
