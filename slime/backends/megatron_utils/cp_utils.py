"""Context parallelism of a Megatron run: `slime.utils.cp_utils` at this rank's place, under the names that hooks import.

The place comes from megatron-core's parallel state, which is asked only when the process has loaded it: a plain script, or a run of
another back end, is one rank with everything. Left out: the layout of `--allgather-cp`.

Shape legend: L tokens of a sequence, R of its response, r of them on this rank, C tokens of one chunk.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from slime.utils import cp_utils
from slime.utils.cp_utils import Padding, Span, Values
from slime.utils.loss_reducers import Reducer
from slime.utils.loss_reducers import get_sum_of_sample_mean as _sum_of_sample_mean


def __getattr__(name: str) -> Any:
    # Loading megatron-core takes seconds, so only who asks for it by this name pays.
    if name == "mpu":
        from megatron.core import parallel_state

        return parallel_state
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _parallel_state() -> Any:
    return globals().get("mpu") or getattr(sys.modules.get("megatron.core"), "mpu", None)


def _place() -> dict[str, int]:
    state = _parallel_state()
    # megatron-core counts 0 ranks as long as no groups exist.
    size = int(state.get_context_parallel_world_size()) if state is not None else 1
    return (
        {"cp_size": size, "cp_rank": int(state.get_context_parallel_rank())}
        if size > 1
        else {"cp_size": 1, "cp_rank": 0}
    )


def get_logits_and_tokens_offset_with_cp(
    total_length: int, response_length: int
) -> tuple[int, tuple[Span, Span], tuple[Span, Span], tuple[Span, Span]]:
    """`(chunk size, chunks, logits, tokens)` of this rank; see `slime.utils.cp_utils`. Spans are half-open, empty ones (0, 0)."""
    return cp_utils.get_logits_and_tokens_offset_with_cp(total_length, response_length, **_place())


def get_sum_of_sample_mean(
    total_lengths: list[int],
    response_lengths: list[int],
    loss_masks: list[torch.Tensor],
    sample_denoms: Sequence[torch.Tensor] | torch.Tensor | None = None,
    calculate_per_token_loss: bool = False,
) -> Reducer:
    """x -> sum_i (x_i * m_i).sum() / max(denom_i, 1), without the division for per-token loss; x holds this rank's tokens [sum r]."""
    return _sum_of_sample_mean(
        total_lengths, response_lengths, loss_masks, sample_denoms, calculate_per_token_loss, **_place()
    )


def all_gather_with_cp(tensor: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
    """The whole response's values [R] from each rank's part [r]. Collective over the context-parallel group, differentiable."""
    place = _place()
    group = _parallel_state().get_context_parallel_group() if place["cp_size"] > 1 else None
    return cp_utils.all_gather_with_cp(tensor, total_length, response_length, **place, group=group)


def slice_with_cp(tokens: torch.Tensor, pad_value: Padding) -> torch.Tensor:
    """This rank's two chunks [2 C, ...] of a sequence [L, ...], padded at its end with `pad_value`."""
    return cp_utils.slice_with_cp(tokens, pad_value, **_place())


def slice_log_prob_with_cp(log_prob: Values, total_length: int, response_length: int) -> Values:
    """This rank's part [r] of values aligned to the response [R] (list or tensor). AssertionError when the length is not R."""
    return cp_utils.slice_log_prob_with_cp(log_prob, total_length, response_length, **_place())
