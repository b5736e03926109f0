"""`train_async.py` with real engines: two models with a router each, the fully asynchronous rollout, a checked first sync."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from helpers_ray import TRAIN_ASYNC, World, make_world, run_train

pytestmark = [pytest.mark.slow, pytest.mark.engine]

ROLLOUTS = 4


def flags_of(world: World, *more: str) -> list[str]:
    models = [
        {"name": "actor", "server_groups": [{"worker_type": "regular", "num_gpus": 1}]},
        {
            "name": "judge",
            "update_weights": False,
            "server_groups": [{"worker_type": "regular", "num_gpus": 1, "overrides": {"max_total_tokens": 4096}}],
        },
    ]
    config = world.folder / "engines.yaml"
    config.write_text(yaml.safe_dump({"sglang": models}))
    return [
        *world.common_flags("async"),
        *("--prompt-data", str(world.folder / "prompts.jsonl"), "--label-key", "label", "--apply-chat-template"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "24"),
        *("--custom-rm-path", "helpers_ray.judged_reward", "--num-rollout", str(ROLLOUTS)),
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "2", "--sglang-config", str(config)),
        *("--dump-details", str(world.folder / "dump")),
        *more,
    ]


def test_one_rollout_ahead_with_two_models(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    fully_async = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    flags = flags_of(world, "--rollout-function-path", fully_async, "--rollout-max-staleness", "1")
    log = world.folder / "out.log"
    assert run_train(flags, log, limit_s=900, program=TRAIN_ASYNC) == 0, log.read_text()[-4000:]
    steps = world.metrics("async", "train/step")
    assert [line["train/rollout_id"] for line in steps] == list(range(ROLLOUTS))
    rollouts = [line for line in world.metrics("async", "rollout/step") if "rollout/num_samples" in line]
    assert [line["rollout/step"] for line in rollouts] == list(range(ROLLOUTS))
    assert all(line["rollout/fully_async/staleness_max"] <= 1 for line in rollouts)
    check_dumps(world)


def check_dumps(world: World) -> None:
    """No sample is trained twice; the judge's engine never got the trainer's weights; train data are dumped."""
    indices = []
    for rollout_id in range(ROLLOUTS):
        rows = torch.load(world.folder / "dump" / "rollout_data" / f"{rollout_id}.pt", weights_only=True)["samples"]
        indices += [row["index"] for row in rows]
        assert {row["metadata"]["judge_version"] for row in rows} == {"default"}
        data = torch.load(world.folder / "dump" / "train_data" / f"{rollout_id}.pt", weights_only=True)
        assert data["format_version"] == 2 and len(data["shards"][0]["advantages"]) == 16
    assert len(indices) == len(set(indices)) == 16 * ROLLOUTS
