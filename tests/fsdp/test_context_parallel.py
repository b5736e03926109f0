"""Loss and gradients do not depend on the number of context-parallel ranks: 1, 2 and 4 gloo ranks, one set of processes.

The model sees one position at a time, so that no attention across ranks is needed; everything else is what a step does:
zig-zag slices of inputs, log-probs of the rank's own tokens, whole sequences gathered where the objective needs them (GSPO's mean,
advantages from token-level values), the reducers, and gradients summed over ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers_fsdp as helpers
import pytest
import torch

VOCAB, WIDTH = 17, 8
PROMPTS, MASKS = [3, 1, 6], [[1, 0, 1, 1, 0, 1, 1], [1, 1], [0, 0, 0, 1, 1, 1, 0, 1, 0, 1, 1]]
KINDS = ("grpo", "gspo", "ppo", "reinforce_plus_plus")


def _model() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, VOCAB)
    ).double()


def _advantages(kind: str, where: list[dict[str, int]], group: Any, cp: dict[str, int]) -> list[torch.Tensor]:
    """The rank's part of each row's advantages; token-level inputs are made per rank and gathered, as after a forward pass."""
    from slime.utils import cp_utils, ppo_utils

    rewards, rows = torch.tensor([0.5, -1.0, 0.25], dtype=torch.float64), []
    if kind in ("grpo", "gspo"):
        rows = ppo_utils.get_grpo_returns(rewards, [torch.zeros(len(mask), dtype=torch.float64) for mask in MASKS])
    else:
        kl = []
        for i, spot in enumerate(where):
            whole = torch.sin(torch.arange(len(MASKS[i]), dtype=torch.float64) + i)
            local = cp_utils.slice_log_prob_with_cp(whole, **spot, **cp)
            kl.append(cp_utils.all_gather_with_cp(local, **spot, **cp, group=group))
        lengths, totals = [s["response_length"] for s in where], [s["total_length"] for s in where]
        if kind == "ppo":
            token_rewards = ppo_utils.get_ppo_token_rewards(rewards, kl, 0.1)
            rows, _ = ppo_utils.get_advantages_and_returns_batch(totals, lengths, kl, token_rewards, 0.9, 0.8)
        else:
            masks = [torch.tensor(mask) for mask in MASKS]
            rows = ppo_utils.get_reinforce_plus_plus_returns(rewards, kl, masks, lengths, totals, 0.1, 0.9)
    return [cp_utils.slice_log_prob_with_cp(row, **spot, **cp) for row, spot in zip(rows, where, strict=True)]


def _local_log_probs(model: torch.nn.Module, where: list[dict[str, int]], cp: dict[str, int]) -> list[torch.Tensor]:
    from slime.utils import cp_utils

    rows = []
    for i, spot in enumerate(where):
        tokens = (torch.arange(spot["total_length"]) * 5 + i) % VOCAB
        logits = model(cp_utils.slice_with_cp(tokens, 0, **cp))
        targets = cp_utils.slice_log_prob_with_cp(tokens[PROMPTS[i] :], **spot, **cp)
        picked = cp_utils.take_response_logits(logits, **spot, **cp).log_softmax(-1)
        rows.append(picked.gather(1, targets[:, None])[:, 0])
    return rows


def _loss(kind: str, model: torch.nn.Module, group: Any, cp: dict[str, int]) -> torch.Tensor:
    from slime.utils import cp_utils, ppo_utils
    from slime.utils.loss_reducers import get_sum_of_sample_mean

    where = [{"total_length": p + len(m), "response_length": len(m)} for p, m in zip(PROMPTS, MASKS, strict=True)]
    masks = [torch.tensor(mask) for mask in MASKS]
    new = _local_log_probs(model, where, cp)
    drift = [torch.cos(torch.arange(len(mask), dtype=torch.float64)) / 4 for mask in MASKS]
    old = [
        row.detach() + cp_utils.slice_log_prob_with_cp(shift, **spot, **cp)
        for row, shift, spot in zip(new, drift, where, strict=True)
    ]
    if kind == "gspo":
        full_new, full_old = (
            [
                cp_utils.all_gather_with_cp(row, **spot, **cp, group=group)
                for row, spot in zip(rows, where, strict=True)
            ]
            for rows in (new, old)
        )
        ppo_kl = ppo_utils.compute_gspo_kl(full_new, full_old, new, masks)
    else:
        ppo_kl = torch.cat(old) - torch.cat(new)
    pg, _ = ppo_utils.compute_policy_loss(ppo_kl, torch.cat(_advantages(kind, where, group, cp)), 0.2, 0.28)
    reduce = get_sum_of_sample_mean(
        [s["total_length"] for s in where], [s["response_length"] for s in where], masks, [9.0, 2.0, 9.0], **cp
    )
    return reduce(pg)


def _run(folder: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, results = dist.get_rank(), {}
    for size in (1, 2, 4):
        groups = [dist.new_group(list(range(start, start + size))) for start in range(0, 4, size)]
        group, cp = groups[rank // size], {"cp_size": size, "cp_rank": rank % size}
        for kind in KINDS:
            model = _model()
            value = _loss(kind, model, group, cp)
            value.backward()
            parts = torch.cat(
                [value.detach()[None], *(p.grad.flatten() for p in model.parameters() if p.grad is not None)]
            )
            dist.all_reduce(parts, group=group)
            results[kind, size] = parts
    if rank == 0:
        torch.save(results, folder / "cp.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], torch.Tensor]:
    folder = tmp_path_factory.mktemp("cp")
    helpers.run_workers(_run, 4, folder)
    return torch.load(folder / "cp.pt")


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_do_not_depend_on_the_ranks(
    results: dict[tuple[str, int], torch.Tensor], kind: str
) -> None:
    assert results[kind, 1][1:].abs().max() > 1e-3
    for size in (2, 4):
        torch.testing.assert_close(results[kind, size], results[kind, 1], rtol=1e-9, atol=1e-12)
