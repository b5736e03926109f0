"""The Megatron backend in whole programs: AgentFlow's quickstart learns with it, and PPO's critic runs on two ranks of one pipeline."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from helpers_ray import ROOT, World, make_world, run_train

pytestmark = [pytest.mark.slow, pytest.mark.engine]


def test_agentflow_grpo_learns(tmp_path: Path) -> None:
    """The planner's success on held-out problems rises, as it does with FSDP; trainer and engine agree on log-probs."""
    command = [sys.executable, str(ROOT / "tools" / "quickstart.py"), "agentflow", "--train-backend", "megatron"]
    command += ["--num-rollout", "30", "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5400)
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["eval_after"] > summary["eval_before"] + 0.1, summary
    lines = (tmp_path / "out" / "run" / "metrics_raw.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if record["step_key"] == "train/step"]
    assert steps and max(step["train/train_rollout_logprob_abs_diff"] for step in steps) < 1e-3


def ppo_flags(world: World, run: str, *more: str) -> list[str]:
    return [
        *world.common_flags(run),
        *("--train-backend", "megatron", "--pipeline-model-parallel-size", "2", "--actor-num-gpus-per-node", "2"),
        *("--prompt-data", str(world.folder / "prompts.jsonl"), "--apply-chat-template", "--rollout-shuffle"),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "16"),
        *("--micro-batch-size", "8", "--rollout-num-gpus", "1", "--custom-rm-path", "helpers_ray.length_reward"),
        *(
            "--advantage-estimator",
            "ppo",
            "--normalize-advantages",
            "--kl-coef",
            "0.001",
            "--ref-load",
            str(world.model),
        ),
        *("--num-critic-only-steps", "1", "--num-steps-per-rollout", "2"),
        *more,
    ]


def test_ppo_with_a_critic_on_a_pipeline_improves_and_resumes(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    log, checkpoint = world.folder / "out.log", world.folder / "ckpt"
    roles = world.folder / "roles.yaml"
    roles.write_text("megatron: [{name: default, role: critic, overrides: {lr: 1e-2}}]\n")
    saving = ("--save", str(checkpoint), "--load", str(checkpoint), "--save-interval", "4")
    common = ppo_flags(world, "ppo", "--megatron-config-path", str(roles), *saving)
    assert run_train([*common, "--num-rollout", "4"], log) == 0, log.read_text()
    assert run_train([*common, "--num-rollout", "8"], log) == 0, log.read_text()
    critic, actor = world.metrics("ppo", "critic/step"), world.metrics("ppo", "train/step")
    assert [line["critic/rollout_id"] for line in critic[::2]] == list(range(8)), "resumed after rollout 3"
    assert all(line["train/train_rollout_logprob_abs_diff"] < 1e-3 for line in actor)
    losses = [line["critic/value_loss"] for line in critic]
    assert fmean(losses[-4:]) < 0.7 * losses[0], losses
