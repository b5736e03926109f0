"""Floating-point operations of a transformer's forward pass, for balancing work between ranks.

Input: sequence lengths and the model's sizes (`args.hidden_size`, `num_layers`, ... as Megatron names them). A multiply-add
counts 2. Attention is causal, so half of the score matrix is computed. Mixture-of-experts layers count the experts that a
token uses. Left out: norms, activations, softmax (below one percent), and the backward pass (twice the forward).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def calculate_embedding_flops(seqlen: int, hidden_size: int) -> int:
    """Table look-up, counted as one multiply-add per element."""
    return 2 * seqlen * hidden_size


def calculate_lm_head_flops(seqlen: int, hidden_size: int, vocab_size: int) -> int:
    """Logits of every position."""
    return 2 * seqlen * hidden_size * vocab_size


def _head_dim(args: Any, hidden_size: int, num_attention_heads: int) -> int:
    return int(getattr(args, "kv_channels", None) or hidden_size // num_attention_heads)


def calculate_qkv_projection_flops(
    args: Any, seqlen: int, hidden_size: int, num_attention_heads: int, num_query_groups: int
) -> int:
    """Queries, keys and values; with `q_lora_rank` / `kv_lora_rank` those of multi-latent attention."""
    if getattr(args, "kv_lora_rank", None):
        return _latent_projection_flops(args, seqlen, hidden_size, num_attention_heads)
    width = _head_dim(args, hidden_size, num_attention_heads)
    return 2 * seqlen * hidden_size * width * (num_attention_heads + 2 * num_query_groups)


def _latent_projection_flops(args: Any, seqlen: int, hidden_size: int, heads: int) -> int:
    query_width = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
    rank = getattr(args, "q_lora_rank", None)
    query = rank * (hidden_size + query_width) if rank else hidden_size * query_width
    down = hidden_size * (args.kv_lora_rank + args.qk_pos_emb_head_dim)
    up = args.kv_lora_rank * heads * (args.qk_head_dim + args.v_head_dim)
    return int(2 * seqlen * (query + down + up))


def calculate_attention_flops(args: Any, seqlen: int, num_attention_heads: int) -> int:
    """Scores and weighted values of causal attention: (d_qk + d_v) x heads x seqlen^2."""
    if getattr(args, "kv_lora_rank", None):
        score_width, value_width = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    else:
        score_width = value_width = _head_dim(args, args.hidden_size, num_attention_heads)
    return int(num_attention_heads * seqlen * seqlen * (score_width + value_width))


def calculate_output_flops(seqlen: int, hidden_size: int) -> int:
    """Output projection of attention."""
    return 2 * seqlen * hidden_size * hidden_size


def calculate_mlp_flops(seqlen: int, hidden_size: int, ffn_hidden_size: int) -> int:
    """Gate, up and down projection."""
    return 2 * seqlen * hidden_size * ffn_hidden_size * 3


def calculate_layer_flops(
    args: Any,
    seqlen: int,
    hidden_size: int,
    num_attention_heads: int,
    num_query_groups: int,
    ffn_hidden_size: int,
) -> int:
    """One transformer layer with a feed-forward width of `ffn_hidden_size`."""
    return (
        calculate_qkv_projection_flops(args, seqlen, hidden_size, num_attention_heads, num_query_groups)
        + calculate_attention_flops(args, seqlen, num_attention_heads)
        + calculate_output_flops(seqlen, hidden_size)
        + calculate_mlp_flops(seqlen, hidden_size, ffn_hidden_size)
    )


def calculate_fwd_flops(seqlens: Iterable[int], args: Any) -> int:
    """The whole model over all sequences."""
    groups = getattr(args, "num_query_groups", None) or args.num_attention_heads
    widths = _ffn_widths(args)
    total = 0
    for seqlen in seqlens:
        total += calculate_embedding_flops(seqlen, args.hidden_size)
        total += calculate_lm_head_flops(seqlen, args.hidden_size, args.vocab_size)
        for width in set(widths):
            layer = calculate_layer_flops(args, seqlen, args.hidden_size, args.num_attention_heads, groups, width)
            total += layer * widths.count(width)
    return total


def _ffn_widths(args: Any) -> list[int]:
    """Feed-forward width that a token meets in each layer."""
    if not getattr(args, "num_experts", None):
        return [args.ffn_hidden_size] * args.num_layers
    expert = getattr(args, "moe_ffn_hidden_size", None) or args.ffn_hidden_size
    shared = getattr(args, "moe_shared_expert_intermediate_size", None) or 0
    sparse = expert * getattr(args, "moe_router_topk", 1) + shared
    return [sparse if is_sparse else args.ffn_hidden_size for is_sparse in _sparse_layers(args)]


def _sparse_layers(args: Any) -> list[bool]:
    frequency: int | Sequence[int] = getattr(args, "moe_layer_freq", 1)
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(args.num_layers)]
    return [bool(value) for value in frequency]
