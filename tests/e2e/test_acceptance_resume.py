"""A run that is killed after a save goes on as if nothing had happened; one rank and two compute the same step.

No engine is needed: rollouts are scripted from the prompts (`helpers_e2e.scripted_rollout`), recorded, and replayed.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_e2e import RAY_AGENTS, RAY_AGENTS_LIMIT_S, Census
from helpers_ray import TRAIN, World, make_world, run_train

pytestmark = pytest.mark.slow

NUM_ROLLOUT, HELD_AT = 4, 2
RUN_LIMIT_S = 300


class Runs:
    """Runs of `train.py` on one world: policy loss with KL and entropy, two steps a rollout, shuffled prompts."""

    def __init__(self, folder: Path) -> None:
        self.world: World = make_world(folder)
        self.folder, self.hold, self.log = folder, folder / "hold", folder / "out.log"
        (folder / "e2e.yaml").write_text(f"e2e_hold_file: {self.hold}\n")

    def flags(self, run: str, ranks: int, *more: str) -> list[str]:
        dumps = self.folder / run / "{rollout_id}.pt"
        return [
            *self.world.common_flags(run),
            *("--custom-config-path", str(self.folder / "e2e.yaml"), "--debug-train-only"),
            *("--rollout-function-path", "helpers_e2e.scripted_rollout", "--save-debug-rollout-data", str(dumps)),
            *("--prompt-data", str(self.world.folder / "prompts.jsonl"), "--rollout-shuffle"),
            *("--rollout-batch-size", "5", "--n-samples-per-prompt", "4", "--global-batch-size", "10"),
            *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "128", "--entropy-coef", "0.01"),
            *("--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "low_var_kl"),
            *("--ref-load", str(self.world.model), "--num-rollout", str(NUM_ROLLOUT), "--lr-decay-style", "linear"),
            *("--lr-decay-iters", "20", "--actor-num-gpus-per-node", str(ranks), *more),
        ]

    def steps(self, run: str) -> list[dict[str, Any]]:
        return self.world.metrics(run, "train/step")

    def samples(self, run: str, rollout_id: int) -> list[dict[str, Any]]:
        """What the samples of a recorded rollout are: position in the data set, tokens, reward."""
        dump = torch.load(self.folder / run / f"{rollout_id}.pt", weights_only=True)
        names = ("index", "group_index", "prompt", "tokens", "reward")
        return [{name: sample[name] for name in names} for sample in dump["samples"]]

    def done(self, flags: list[str]) -> None:
        assert run_train(flags, self.log) == 0, self.log.read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """With the uninterrupted run on one rank done and recorded as `whole`."""
    runs = Runs(tmp_path_factory.mktemp("resume"))
    runs.done(runs.flags("whole", 1))
    steps = runs.steps("whole")
    assert [step["train/rollout_id"] for step in steps] == [0, 0, 1, 1, 2, 2, 3, 3]
    losses = [step["train/loss"] for step in steps]
    # Equal losses would prove nothing if they hardly changed.
    assert min(abs(a - b) for a, b in zip(losses, losses[1:], strict=False)) > 1e-3
    return runs


def assert_same(steps: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [step["train/step"] for step in steps] == [step["train/step"] for step in expected]
    for step, other in zip(steps, expected, strict=True):
        assert step["train/lr"] == other["train/lr"]
        for name in ("train/loss", "train/grad_norm"):
            assert step[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), (name, step, other)


def saved_rollouts(tracker: Path) -> int:
    return int(tracker.read_text()) if tracker.exists() else 0


def test_two_ranks_equal_one_on_replayed_data(runs: Runs) -> None:
    replay = str(runs.folder / "whole" / "{rollout_id}.pt")
    runs.done(runs.flags("two", 2, "--load-debug-rollout-data", replay))
    assert_same(runs.steps("two"), runs.steps("whole"))


def test_a_killed_run_goes_on(runs: Runs) -> None:
    """SIGKILL while rollout 2 is generated; the same command takes up start id, data position, weights and optimizer."""
    checkpoint = runs.folder / "checkpoint"
    tracker = checkpoint / "latest_checkpointed_iteration.txt"
    flags = runs.flags("killed", 1, "--save", str(checkpoint), "--load", str(checkpoint), "--save-interval", "1")
    runs.hold.touch()
    with Census() as census:
        process = census.start([sys.executable, str(TRAIN), *flags], runs.log)
        census.wait_for(lambda: saved_rollouts(tracker) == HELD_AT, process, RUN_LIMIT_S)
        process.send_signal(signal.SIGKILL)
        process.wait()
        census.assert_empty(allowed=RAY_AGENTS)
        census.assert_empty(RAY_AGENTS_LIMIT_S)
    assert len(runs.steps("killed")) == 2 * HELD_AT
    runs.hold.unlink()

    runs.done(flags)
    assert_same(runs.steps("killed"), runs.steps("whole"))
    for rollout_id in range(NUM_ROLLOUT):
        assert runs.samples("killed", rollout_id) == runs.samples("whole", rollout_id)
