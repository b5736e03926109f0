"""Log-probability of given tokens, and entropy, straight from hidden states, without holding all logits.

One row (a position whose next token is wanted) costs V logits; for long agent trajectories N x V floats is the largest
tensor of a training step. Here rows are processed in chunks, forward and backward, and logits are recomputed in the
backward pass. Callers pass only the rows they train on.

Invariants: the result does not depend on the chunk size beyond rounding; logits, softmax and sums are float32 whatever the
inputs are; peak memory beyond the inputs is two chunk x V buffers and one float32 gradient of the weight.

The vocabulary may be cut among the ranks of a process group; each then passes its rows of the weight.

Left out: nucleus masks, and a second derivative.

Shape legend: N rows, D hidden size, V vocabulary (of this rank).
"""

from __future__ import annotations

from typing import Any

import torch

# Rows of the weight converted to float32 at a time where the machine has no mixed-precision product.
_CAST_ROWS = 8192


def selected_log_probs_and_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float,
    chunk_size: int,
    bias: torch.Tensor | None = None,
    with_entropy: bool = True,
    vocab_group: torch.distributed.ProcessGroup | None = None,
    vocab_start: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax((h W^T + b) / temperature)[target] and the entropy of that softmax, per row, float32 [N].

    `targets_N`: int64 ids below V. With `vocab_group` (collective) the rank's weight holds the ids from `vocab_start` on, possibly
    none, and the gradient of hidden is the rank's part: its sum over the group is the whole. `chunk_size`: rows at a time. Gradients reach hidden, weight and bias through the
    log-probabilities, and through the entropy only with `with_entropy` (otherwise the entropy is a plain number to report).

    Raises ValueError for a temperature or chunk size that is not positive, or for shapes that do not fit.
    """
    if temperature <= 0:
        raise ValueError(f"the temperature must be positive, got {temperature}; set --rollout-temperature above 0")
    if chunk_size < 1:
        raise ValueError(f"the chunk size must be at least 1, got {chunk_size}; set --log-probs-chunk-size")
    if hidden_ND.dim() != 2 or hidden_ND.shape[1] != weight_VD.shape[1] or targets_N.shape != hidden_ND.shape[:1]:
        shapes = f"hidden {tuple(hidden_ND.shape)}, weight {tuple(weight_VD.shape)}, targets {tuple(targets_N.shape)}"
        raise ValueError(f"expected hidden [N, D], weight [V, D], targets [N]; got {shapes}")
    log_probs_N, entropy_N = _ChunkedHead.apply(
        hidden_ND, weight_VD, bias, targets_N - vocab_start, float(temperature), chunk_size, vocab_group
    )
    return log_probs_N, entropy_N if with_entropy else entropy_N.detach()


def _has_mixed_product(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether 16-bit inputs can be multiplied into a float32 result without converting the weight."""
    return x.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)


def _chunk_logits(h_CD: torch.Tensor, weight_VD: torch.Tensor, bias: torch.Tensor | None, temp: float) -> torch.Tensor:
    """Float32 logits [C, V] of one chunk, divided by the temperature."""
    if weight_VD.dtype == torch.float32:
        logits_CV = h_CD.float() @ weight_VD.t()
    elif _has_mixed_product(h_CD, weight_VD):
        logits_CV = torch.mm(h_CD.to(weight_VD.dtype), weight_VD.t(), out_dtype=torch.float32)
    else:
        logits_CV = h_CD.new_empty(h_CD.shape[0], weight_VD.shape[0], dtype=torch.float32)
        for start in range(0, weight_VD.shape[0], _CAST_ROWS):
            block = weight_VD[start : start + _CAST_ROWS].float()
            torch.mm(h_CD.float(), block.t(), out=logits_CV[:, start : start + len(block)])
    if bias is not None:
        logits_CV += bias.float()
    return logits_CV.div_(temp)


def _hidden_gradient(grad_CV: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Float32 gradient [C, D] of one chunk of hidden states."""
    if weight_VD.dtype == torch.float32:
        return grad_CV @ weight_VD
    if _has_mixed_product(grad_CV, weight_VD):
        return torch.mm(grad_CV.to(weight_VD.dtype), weight_VD, out_dtype=torch.float32)
    grad_CD = grad_CV.new_zeros(grad_CV.shape[0], weight_VD.shape[1])
    for start in range(0, weight_VD.shape[0], _CAST_ROWS):
        block = weight_VD[start : start + _CAST_ROWS].float()
        grad_CD.addmm_(grad_CV[:, start : start + len(block)], block)
    return grad_CD


class _ChunkedHead(torch.autograd.Function):
    """Language-model head and softmax in row chunks; saves the log-sum-exp and entropy of each row, never the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias: torch.Tensor | None,
        targets_N: torch.Tensor,
        temperature: float,
        chunk_size: int,
        group: torch.distributed.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs_N = hidden_ND.new_empty(hidden_ND.shape[0], dtype=torch.float32)
        entropy_N, lse_N = torch.empty_like(log_probs_N), torch.empty_like(log_probs_N)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for rows in _chunks(len(hidden_ND), chunk_size):
                z_CV = _chunk_logits(hidden_ND[rows], weight_VD, bias, temperature)
                top_C1 = _row_maxima(z_CV, group)
                z_CV -= top_C1
                target_C = _pick_targets(z_CV, targets_N[rows])
                exp_CV = z_CV.exp()
                # A batched dot product, so that no third chunk x V buffer appears for the products.
                weighted_C = torch.bmm(exp_CV.unsqueeze(1), z_CV.unsqueeze(2)).flatten()
                sums = _over_ranks(torch.stack([exp_CV.sum(dim=-1), target_C, weighted_C]), "SUM", group)
                sum_C, target_C, weighted_C = sums.unbind()
                log_sum_C = sum_C.log()
                log_probs_N[rows] = target_C - log_sum_C
                entropy_N[rows] = log_sum_C - weighted_C / sum_C
                lse_N[rows] = log_sum_C + top_C1.squeeze(1)
        ctx.save_for_backward(hidden_ND, weight_VD, bias, targets_N, lse_N, entropy_N)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        return log_probs_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_probs_N: torch.Tensor, grad_entropy_N: torch.Tensor) -> tuple[Any, ...]:
        hidden_ND, weight_VD, bias, targets_N, lse_N, entropy_N = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_ND) if need_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for rows in _chunks(len(hidden_ND), ctx.chunk_size):
                logits_CV = _chunk_logits(hidden_ND[rows], weight_VD, bias, ctx.temperature)
                upstream = (grad_log_probs_N[rows, None], grad_entropy_N[rows, None])
                grad_CV = _logits_gradient(
                    logits_CV, lse_N[rows, None], entropy_N[rows, None], targets_N[rows], upstream
                )
                grad_CV.div_(ctx.temperature)
                if grad_hidden is not None:
                    grad_hidden[rows] = _hidden_gradient(grad_CV, weight_VD).to(hidden_ND.dtype)
                if grad_weight is not None:
                    _add_weight_gradient(grad_weight, grad_CV, hidden_ND[rows])
                if grad_bias is not None:
                    grad_bias += grad_CV.sum(dim=0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_VD.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _over_ranks(values: torch.Tensor, operation: str, group: torch.distributed.ProcessGroup | None) -> torch.Tensor:
    """Reduced over the ranks that share the vocabulary, in place; unchanged without a group."""
    if group is not None:
        import torch.distributed as dist

        dist.all_reduce(values, op=getattr(dist.ReduceOp, operation), group=group)
    return values


def _row_maxima(z_CV: torch.Tensor, group: torch.distributed.ProcessGroup | None) -> torch.Tensor:
    """Largest logit of each row over the whole vocabulary, [C, 1]."""
    if z_CV.shape[1]:
        top_C1 = z_CV.amax(dim=-1, keepdim=True)
    else:
        top_C1 = z_CV.new_full((len(z_CV), 1), -torch.inf)
    return _over_ranks(top_C1, "MAX", group)


def _here(targets_C: torch.Tensor, size: int) -> torch.Tensor:
    """1.0 where the target is one of this rank's `size` ids, else 0.0."""
    return ((targets_C >= 0) & (targets_C < size)).float()


def _pick_targets(z_CV: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
    """The target's logit where this rank has it, else 0: [C]."""
    size = z_CV.shape[1]
    if not size:
        return z_CV.new_zeros(len(z_CV))
    picked_C = z_CV.gather(1, targets_C.clamp(0, size - 1)[:, None]).squeeze(1)
    return picked_C * _here(targets_C, size)


def _chunks(rows: int, chunk_size: int) -> list[slice]:
    return [slice(start, min(start + chunk_size, rows)) for start in range(0, rows, chunk_size)]


def _logits_gradient(
    logits_CV: torch.Tensor,
    lse_C1: torch.Tensor,
    entropy_C1: torch.Tensor,
    targets_C: torch.Tensor,
    upstream: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """g (onehot - p) - g_H p (log p + H), with p = softmax(logits); overwrites `logits_CV`."""
    grad_log_prob_C1, grad_entropy_C1 = upstream
    log_p_CV = logits_CV.sub_(lse_C1)
    p_CV = log_p_CV.exp()
    factor_CV = log_p_CV.add_(entropy_C1).mul_(grad_entropy_C1).add_(grad_log_prob_C1)
    grad_CV = p_CV.mul_(factor_CV).neg_()
    size = grad_CV.shape[1]
    if not size:
        return grad_CV
    own_C1 = grad_log_prob_C1 * _here(targets_C, size)[:, None]
    return grad_CV.scatter_add_(1, targets_C.clamp(0, size - 1)[:, None], own_C1)


def _add_weight_gradient(grad_VD: torch.Tensor, grad_CV: torch.Tensor, h_CD: torch.Tensor) -> None:
    """grad_VD += grad_CV^T h_CD in float32, without a second V x D buffer."""
    if not _has_mixed_product(grad_CV, h_CD):
        grad_VD.addmm_(grad_CV.t(), h_CD.float())
        return
    for start in range(0, len(grad_VD), _CAST_ROWS):
        block_CB = grad_CV[:, start : start + _CAST_ROWS].to(h_CD.dtype)
        grad_VD[start : start + _CAST_ROWS] += torch.mm(block_CB.t(), h_CD, out_dtype=torch.float32)
