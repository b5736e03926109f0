"""Memory of the log-prob head at trained positions against the whole logits, and that both have the same gradients.

Shape legend: T positions, N of them trained, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from slime.utils.logprobs import selected_log_probs_and_entropy

TRAINED_SHARE = 0.25
CHUNK = 128


def measure(positions: int, hidden: int, vocabulary: int) -> dict[str, float | None]:
    """Peak bytes beyond the inputs of ours and of whole logits (None without a GPU), bytes of the weight's gradient, and the
    largest difference of the gradients relative to their largest entry."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(0)
    hidden_TD = torch.randn(positions, hidden, device=device, generator=generator)
    weight_VD = torch.randn(vocabulary, hidden, device=device, generator=generator) / hidden**0.5
    rows_N = torch.arange(0, positions, round(1 / TRAINED_SHARE), device=device)
    targets_N = torch.randint(vocabulary, rows_N.shape, device=device, generator=generator)

    def ours(h_TD: torch.Tensor, w_VD: torch.Tensor) -> torch.Tensor:
        return selected_log_probs_and_entropy(h_TD.index_select(0, rows_N), w_VD, targets_N, 1.0, CHUNK)[0].sum()

    def whole(h_TD: torch.Tensor, w_VD: torch.Tensor) -> torch.Tensor:
        log_probs_TV = (h_TD @ w_VD.t()).log_softmax(-1)
        return log_probs_TV.index_select(0, rows_N).gather(1, targets_N[:, None]).sum()

    own, own_peak = _backward(ours, hidden_TD, weight_VD)
    full, full_peak = _backward(whole, hidden_TD, weight_VD)
    gaps = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(own, full, strict=True)]
    gradient = weight_VD.numel() * weight_VD.element_size()
    return {"peak": own_peak, "peak_whole": full_peak, "weight_gradient": float(gradient), "gap": max(gaps)}


def _backward(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], hidden_TD: torch.Tensor, weight_VD: torch.Tensor
) -> tuple[list[torch.Tensor], float | None]:
    """Gradients of hidden and weight, and the peak of memory beyond these two."""
    inputs = [hidden_TD.clone().requires_grad_(), weight_VD.clone().requires_grad_()]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    loss(*inputs).backward()
    peak = float(torch.cuda.max_memory_allocated() - before) if torch.cuda.is_available() else None
    return [part.grad for part in inputs if part.grad is not None], peak
