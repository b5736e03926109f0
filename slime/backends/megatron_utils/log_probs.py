"""From the last stage's hidden states to log-probs and entropies of whole rows.

The vocabulary is cut among tensor-parallel ranks, tokens among context-parallel ranks (and, with sequence parallelism, again among
tensor-parallel ones). Invariants: afterwards every rank of the last stage holds the same values for all response tokens, so
that the loss is the one of a single rank; a gradient reaches each rank's part once; padding of the vocabulary has no probability.

Shape legend: n trained tokens read on this rank, S response tokens of the micro-batch, D hidden size.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel

from slime.backends.megatron_utils.data import StageBatch
from slime.utils.logprobs import selected_log_probs_and_entropy

Rows = list[torch.Tensor]


def selected_hidden(hidden_t1D: torch.Tensor, batch: StageBatch, sequence_parallel: bool) -> torch.Tensor:
    """Hidden states [n, D] at the trained tokens, ready for a head whose parts are summed over tensor-parallel ranks."""
    if sequence_parallel:
        hidden_t1D = tensor_parallel.gather_from_sequence_parallel_region(hidden_t1D)
    else:
        hidden_t1D = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_t1D)
    return hidden_t1D[:, 0].index_select(0, batch.select_n)


def whole_rows(values_n: torch.Tensor, batch: StageBatch) -> Rows:
    """Per-row values [R_i] on every context-parallel rank, 0 at untrained tokens. Differentiable in this rank's part."""
    values_S = batch.scatter(values_n)
    if parallel_state.get_context_parallel_world_size() > 1:
        group = parallel_state.get_context_parallel_group()
        values_S = tensor_parallel.reduce_from_tensor_model_parallel_region(values_S, group=group)
    return list(values_S.split(list(batch.response_lengths)))


def log_probs_and_entropy(
    args: Namespace, stage: Any, hidden_t1D: torch.Tensor, batch: StageBatch, chunk_size: int, with_entropy: bool
) -> tuple[Rows, Rows]:
    """Log-probs of the trained tokens and entropies, of logits / `--rollout-temperature`, float32."""
    hidden_nD = selected_hidden(hidden_t1D, batch, stage.config.sequence_parallel)
    weight, start = own_vocabulary(stage)
    log_probs_n, entropy_n = selected_log_probs_and_entropy(
        hidden_nD,
        weight,
        batch.targets_n,
        args.rollout_temperature,
        chunk_size,
        with_entropy=with_entropy,
        vocab_group=_vocabulary_group(),
        vocab_start=start,
    )
    return whole_rows(log_probs_n, batch), whole_rows(entropy_n, batch)


def own_vocabulary(stage: Any) -> tuple[torch.Tensor, int]:
    """This rank's rows of the output layer without padding (maybe none), and the id of the first."""
    weight = stage.head_weight()
    start = parallel_state.get_tensor_model_parallel_rank() * len(weight)
    return weight[: max(min(stage.real_vocab_size - start, len(weight)), 0)], start


def _vocabulary_group() -> Any:
    several = parallel_state.get_tensor_model_parallel_world_size() > 1
    return parallel_state.get_tensor_model_parallel_group() if several else None


def values(stage: Any, hidden_t1D: torch.Tensor, batch: StageBatch) -> Rows:
    """A critic's values of the selected tokens, float32; the head is the same on all tensor-parallel ranks."""
    hidden_nD = selected_hidden(hidden_t1D, batch, stage.config.sequence_parallel)
    size = parallel_state.get_tensor_model_parallel_world_size()
    # Every rank computes the whole value; of the gradient each passes on its share, whose sum is the whole.
    hidden_nD = hidden_nD / size + (hidden_nD * (1 - 1 / size)).detach()
    head = stage.output_layer
    return whole_rows(head(hidden_nD.to(head.weight.dtype)).squeeze(-1).float(), batch)


def whole_logits(stage: Any, hidden_t1D: torch.Tensor) -> torch.Tensor:
    """Float32 logits [1, T, V] of all packed tokens, for custom losses. One context-parallel rank only."""
    if stage.config.sequence_parallel:
        hidden_t1D = tensor_parallel.gather_from_sequence_parallel_region(hidden_t1D)
    else:
        hidden_t1D = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_t1D)
    weight = stage.head_weight()
    part = hidden_t1D[:, 0].to(weight.dtype) @ weight.t()
    whole = tensor_parallel.gather_from_tensor_model_parallel_region(part)
    return whole[None, :, : stage.real_vocab_size].float()
