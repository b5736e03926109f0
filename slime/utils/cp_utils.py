"""Context parallelism as arithmetic: which part of a sequence a rank owns, cutting responses, putting them together.

A sequence of L tokens is padded to 2 * cp_size equal chunks; rank r owns chunks r and 2 * cp_size - 1 - r (zig-zag, so that causal
attention costs every rank the same). The logit at position t predicts token t + 1, so of a response of R tokens behind P = L - R
prompt tokens a rank owns the log-probs whose logits, at [P - 1, L - 1), lie in its two chunks.

Invariants: every response token belongs to exactly one rank; cp_size 1 changes nothing; the sum over ranks of reduced values
(`slime.utils.loss_reducers` with the same `cp_size`, `cp_rank`) equals the value of one rank with everything, and so do gradients
summed over ranks. Rank and size are arguments; only `all_gather_with_cp` talks to other ranks.

Left out: attention across ranks (the backend's), and sequences that are split without zig-zag.

Shape legend: L tokens of a sequence, R of its response, r of them on this rank, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Span = tuple[int, int]
Values = TypeVar("Values", list[float], torch.Tensor)
Padding = int | float | Callable[[torch.Tensor, int], torch.Tensor]


def get_logits_and_tokens_offset_with_cp(
    total_length: int, response_length: int, *, cp_size: int, cp_rank: int
) -> tuple[int, tuple[Span, Span], tuple[Span, Span], tuple[Span, Span]]:
    """`(chunk size, chunks, logits, tokens)`: for each of the rank's two chunks, half-open spans of positions in the sequence.

    `logits` are the rank's positions that predict response tokens, `tokens` the predicted ones (each + 1); both are (0, 0)
    where the chunk holds none.
    """
    chunk = -(-total_length // (2 * cp_size))
    first, second = cp_rank, 2 * cp_size - 1 - cp_rank
    chunks = (first * chunk, (first + 1) * chunk), (second * chunk, (second + 1) * chunk)
    low, high = total_length - response_length - 1, total_length - 1
    logits_0, logits_1 = (_overlap(span, low, high) for span in chunks)
    return chunk, chunks, (logits_0, logits_1), (_next(logits_0), _next(logits_1))


def _overlap(span: Span, low: int, high: int) -> Span:
    start, end = max(span[0], low), min(span[1], high)
    return (start, end) if start < end else (0, 0)


def _next(span: Span) -> Span:
    return (span[0] + 1, span[1] + 1) if span != (0, 0) else (0, 0)


def response_spans(total_length: int, response_length: int, *, cp_size: int, cp_rank: int) -> tuple[Span, Span]:
    """The rank's two spans of offsets into the response (0 .. R); empty ones are (0, 0)."""
    if cp_size == 1:
        return (0, response_length), (0, 0)
    tokens = get_logits_and_tokens_offset_with_cp(total_length, response_length, cp_size=cp_size, cp_rank=cp_rank)[3]
    prompt = total_length - response_length
    a, b = ((start - prompt, end - prompt) if end else (0, 0) for start, end in tokens)
    return a, b


def slice_with_cp(tokens: torch.Tensor, pad_value: Padding, *, cp_size: int, cp_rank: int) -> torch.Tensor:
    """The rank's two chunks of a sequence [L, ...], one behind the other: [2 C, ...].

    The sequence is first padded at its end with `pad_value`, or by `pad_value(tokens, count)` when that is a function.
    """
    if cp_size == 1:
        return tokens
    chunk = -(-len(tokens) // (2 * cp_size))
    missing = 2 * cp_size * chunk - len(tokens)
    if callable(pad_value):
        tokens = pad_value(tokens, missing)
    elif missing:
        tokens = torch.cat([tokens, tokens.new_full((missing, *tokens.shape[1:]), pad_value)])
    chunks = tokens.split(chunk)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


def slice_log_prob_with_cp(
    log_prob: Values, total_length: int, response_length: int, *, cp_size: int, cp_rank: int
) -> Values:
    """The rank's part [r] of values aligned to the response [R] (list or tensor). AssertionError when the length is not R."""
    assert (
        len(log_prob) == response_length
    ), f"{len(log_prob)} values for a response of {response_length} tokens (of {total_length} in all)"
    if cp_size == 1:
        return log_prob
    a, b = response_spans(total_length, response_length, cp_size=cp_size, cp_rank=cp_rank)
    first, second = log_prob[a[0] : a[1]], log_prob[b[0] : b[1]]
    return torch.cat([first, second]) if isinstance(first, torch.Tensor) else first + second  # type: ignore[list-item,operator]


def take_response_logits(
    local_2CX: torch.Tensor, total_length: int, response_length: int, *, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """Rows [r, ...] of a rank's model output [2 C, ...] that predict its response tokens, in the order of `slice_log_prob_with_cp`."""
    if cp_size == 1:
        return local_2CX[total_length - response_length - 1 : total_length - 1]
    chunk, chunks, logits, _ = get_logits_and_tokens_offset_with_cp(
        total_length, response_length, cp_size=cp_size, cp_rank=cp_rank
    )
    parts = []
    for number, ((start, end), (low, _)) in enumerate(zip(logits, chunks, strict=True)):
        shift = number * chunk - low if end else 0
        parts.append(local_2CX[start + shift : end + shift])
    return torch.cat(parts)


def place_in_response(
    local_r: torch.Tensor, total_length: int, response_length: int, *, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """The rank's values at their place in the response, 0 elsewhere: [R]. Their sum over ranks is the whole. Differentiable."""
    if cp_size == 1:
        return local_r
    (a, b), (c, d) = response_spans(total_length, response_length, cp_size=cp_size, cp_rank=cp_rank)
    if len(local_r) != b - a + d - c:
        raise ValueError(
            f"{len(local_r)} values, but rank {cp_rank} of {cp_size} owns {b - a + d - c} response tokens"
        )
    where = torch.cat([torch.arange(a, b), torch.arange(c, d)]).to(local_r.device)
    full = local_r.new_zeros((response_length, *local_r.shape[1:]))
    return full.index_put((where,), local_r)


def all_gather_with_cp(
    tensor: torch.Tensor,
    total_length: int,
    response_length: int,
    *,
    cp_size: int,
    cp_rank: int,
    group: torch.distributed.ProcessGroup | None = None,
) -> torch.Tensor:
    """The whole response's values [R] on every rank of the group, from each rank's part [r]. Collective, differentiable.

    The gradient of a rank's part is the sum of what all ranks' losses say about it, which is right when every rank
    counts only its own tokens.
    """
    if cp_size == 1:
        return tensor
    import torch.distributed as dist
    from torch.distributed.nn.functional import all_reduce

    placed = place_in_response(tensor, total_length, response_length, cp_size=cp_size, cp_rank=cp_rank)
    return all_reduce(placed, group=group or dist.group.WORLD)
