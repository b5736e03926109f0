"""PPO with a critic, GRPO with adapters, distillation and SFT as a user starts them: real Ray, trainers and SGLang, tiny model.

Each must improve its objective: PPO and GRPO the reward (share of even token ids), distillation the distance to the teacher,
SFT the likelihood of the chats.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from helpers_ray import World, make_world, run_train
from helpers_sglang import running_server, save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.engine]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)


def flags(world: World, run: str, *more: str) -> list[str]:
    return [
        *world.common_flags(run),
        *("--prompt-data", str(world.folder / "prompts.jsonl"), "--apply-chat-template", "--rollout-shuffle"),
        *("--rollout-batch-size", "8", "--rollout-max-response-len", "16", "--micro-batch-size", "8"),
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
        *more,
    ]


def test_ppo_with_a_critic_improves_and_resumes(world: World) -> None:
    log, checkpoint = world.folder / "out.log", world.folder / "ckpt"
    roles = world.folder / "roles.yaml"
    roles.write_text("megatron: [{name: default, role: critic, overrides: {lr: 1e-2}}]\n")
    common = flags(
        world,
        "ppo",
        *("--n-samples-per-prompt", "4", "--custom-rm-path", "helpers_ray.length_reward"),
        *("--advantage-estimator", "ppo", "--gamma", "1.0", "--lambd", "0.95", "--normalize-advantages"),
        *("--kl-coef", "0.001", "--ref-load", str(world.model), "--megatron-config-path", str(roles)),
        *("--num-critic-only-steps", "1", "--num-steps-per-rollout", "2"),
        *("--save", str(checkpoint), "--load", str(checkpoint), "--save-interval", "6"),
    )
    assert run_train([*common, "--num-rollout", "6"], log) == 0, log.read_text()
    assert run_train([*common, "--num-rollout", "12"], log) == 0, log.read_text()
    critic, actor = world.metrics("ppo", "critic/step"), world.metrics("ppo", "train/step")
    assert [line["critic/rollout_id"] for line in critic[::2]] == list(range(12)), "resumed after rollout 5"
    assert [line["train/rollout_id"] for line in actor[::2]] == list(range(1, 12)), "rollout 0 trained the critic only"
    assert (checkpoint / "critic" / "latest_checkpointed_iteration.txt").read_text().strip() == "12"
    assert all(line["train/train_rollout_logprob_abs_diff"] < 1e-3 for line in actor)
    losses = [line["critic/value_loss"] for line in critic]
    assert fmean(losses[-4:]) < 0.5 * losses[0]
    rewards = [r["rollout/raw_reward"] for r in world.metrics("ppo", "rollout/step") if "rollout/raw_reward" in r]
    assert fmean(rewards[-3:]) > fmean(rewards[:2]) + 0.05, rewards


def test_distillation_from_an_engine_comes_nearer_to_the_teacher(world: World) -> None:
    log = world.folder / "out.log"
    save_tiny_model(world.folder / "teacher", seed=1)
    distillation = "slime.rollout.on_policy_distillation"
    with running_server(world.folder / "teacher", world.folder, max_total_tokens=8192) as teacher:
        command = flags(
            world,
            "opd",
            *("--n-samples-per-prompt", "4", "--num-rollout", "24", "--lr", "4e-3", "--normalize-advantages"),
            *("--use-opd", "--opd-type", "sglang", "--opd-kl-coef", "1.0", "--rm-url", f"{teacher.url}/generate"),
            *("--custom-rm-path", f"{distillation}.reward_func"),
            *("--custom-reward-post-process-path", f"{distillation}.post_process_rewards"),
        )
        assert run_train(command, log) == 0, log.read_text()
    gaps = [line["train/opd_reverse_kl"] for line in world.metrics("opd", "train/step")]
    assert len(gaps) == 24 and gaps[0] > 0
    assert fmean(gaps[-4:]) < 0.8 * gaps[0], gaps


def test_grpo_with_adapters_improves_and_leaves_adapter_and_merged_model(world: World) -> None:
    log, checkpoint = world.folder / "out.log", world.folder / "ckpt"
    command = flags(
        world,
        "lora",
        *("--n-samples-per-prompt", "4", "--custom-rm-path", "helpers_ray.length_reward", "--num-rollout", "16"),
        *(
            "--lora-rank",
            "8",
            "--lr",
            "2e-2",
            "--use-kl-loss",
            "--kl-loss-coef",
            "0.001",
            "--kl-loss-type",
            "low_var_kl",
        ),
        *(
            "--ref-load",
            str(world.model),
            "--save",
            str(checkpoint),
            "--save-hf",
            str(world.folder / "hf_{rollout_id}"),
        ),
        *("--save-interval", "16"),
    )
    assert run_train(command, log) == 0, log.read_text()
    steps = world.metrics("lora", "train/step")
    assert abs(steps[0]["train/kl_loss"]) <= 1e-6 < steps[-1]["train/kl_loss"], "the reference is the start"
    assert all(
        line["train/train_rollout_logprob_abs_diff"] < 1e-3 for line in steps
    ), "engines have the merged weights"
    rewards = [r["rollout/raw_reward"] for r in world.metrics("lora", "rollout/step") if "rollout/raw_reward" in r]
    assert fmean(rewards[-4:]) > fmean(rewards[:3]) + 0.05, rewards
    assert (checkpoint / "iter_0000016" / "adapter" / "adapter_model.safetensors").is_file()
    assert (world.folder / "hf_15" / "model.safetensors").is_file()


def test_sft_improves_the_likelihood(world: World) -> None:
    log = world.folder / "out.log"
    command = [
        *world.common_flags("sft"),
        *("--debug-train-only", "--disable-compute-advantages-and-returns", "--loss-type", "sft_loss", "--lr", "5e-3"),
        *("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--rollout-batch-size", "16"),
        *("--prompt-data", str(world.folder / "chats.jsonl"), "--num-rollout", "10", "--actor-num-gpus-per-node", "1"),
    ]
    assert run_train(command, log) == 0, log.read_text()
    losses = [line["train/loss"] for line in world.metrics("sft", "train/step")]
    assert len(losses) == 10 and losses[-1] < 0.7 * losses[0], losses
