"""`train.py` as a user starts it: real Ray, real trainer and, where marked, real SGLang servers on a tiny random model."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from helpers_ray import World, descendants, living, make_world, run_train, start_train, watch

pytestmark = pytest.mark.slow

STOP_LIMIT_S = 60


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)


def sft_flags(world: World, run: str, *more: str) -> list[str]:
    return [
        *world.common_flags(run),
        *("--debug-train-only", "--disable-compute-advantages-and-returns", "--loss-type", "sft_loss"),
        *("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--rollout-batch-size", "6"),
        *("--prompt-data", str(world.folder / "chats.jsonl"), "--rollout-shuffle", "--num-rollout", "4"),
        *more,
    ]


def grpo_flags(world: World, run: str, *more: str) -> list[str]:
    return [
        *world.common_flags(run),
        *("--prompt-data", str(world.folder / "prompts.jsonl"), "--label-key", "label", "--apply-chat-template"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "24"),
        *("--custom-rm-path", "helpers_ray.length_reward", "--use-kl-loss", "--kl-loss-coef", "0.001"),
        *("--kl-loss-type", "low_var_kl", "--ref-load", str(world.model)),
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
        *more,
    ]


def wait_until(condition: object, limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"{what} did not happen within {limit_s} s"
        time.sleep(0.2)


def test_one_and_two_ranks_agree_and_a_killed_run_goes_on(world: World) -> None:
    """Same loss and gradient norm on 1 and 2 ranks; resumed on another number of ranks after `kill -9`."""
    log = world.folder / "out.log"
    one = ["--actor-num-gpus-per-node", "1"]
    two = ["--actor-num-gpus-per-node", "2"]
    assert run_train(sft_flags(world, "one", *one), log) == 0, log.read_text()
    assert run_train(sft_flags(world, "two", *two), log) == 0, log.read_text()
    reference = world.metrics("one", "train/step")
    assert [line["train/rollout_id"] for line in reference] == [0, 1, 2, 3]
    assert_same(world.metrics("two", "train/step"), reference)

    checkpoint = world.folder / "ckpt"
    flags = sft_flags(world, "killed", "--save", str(checkpoint), "--load", str(checkpoint), "--save-interval", "1")
    tracker = checkpoint / "latest_checkpointed_iteration.txt"
    process = start_train([*flags, *one], log)
    driver, seen = psutil.Process(process.pid), set()
    wait_until(lambda: seen.update(descendants(driver)) or tracker.exists(), 400, "the first checkpoint")
    process.kill()
    process.wait()
    # Ranks live on for a moment when their driver is killed, and may finish a step.
    wait_until(lambda: living(seen) == [], 90, "the end of Ray's agents")
    saved, done = int(tracker.read_text()), len(world.metrics("killed", "train/step"))
    assert run_train([*flags, *two], log) == 0, log.read_text()
    resumed = world.metrics("killed", "train/step")[done:]
    assert [line["train/rollout_id"] for line in resumed] == list(range(saved, 4))
    assert_same(resumed, reference[saved:])
    assert int(tracker.read_text()) == 4


def assert_same(lines: list[dict], expected: list[dict]) -> None:
    assert len(lines) == len(expected)
    for line, other in zip(lines, expected, strict=True):
        for name in ("train/loss", "train/grad_norm"):
            assert line[name] == pytest.approx(other[name], rel=1e-5), (name, line, other)
        assert (line["train/step"], line["train/lr"]) == (other["train/step"], other["train/lr"])


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything(world: World, signum: signal.Signals, code: int) -> None:
    flags = sft_flags(world, "run", "--rollout-function-path", "helpers_ray.hanging_rollout")
    process = start_train([*flags, "--actor-num-gpus-per-node", "2"], world.folder / "out.log")
    driver = psutil.Process(process.pid)
    wait_until(lambda: "rollouts:" in (world.folder / "out.log").read_text(), 400, "the loop")
    seen = descendants(driver)
    start = time.monotonic()
    process.send_signal(signum)
    seen |= watch(process, STOP_LIMIT_S)
    assert process.returncode == code and time.monotonic() - start < STOP_LIMIT_S
    assert len(seen) > 5 and living(seen) == []


def test_a_signal_during_start_ends_everything(world: World) -> None:
    process = start_train(sft_flags(world, "run"), world.folder / "out.log")
    driver = psutil.Process(process.pid)
    wait_until(lambda: descendants(driver), 60, "Ray's first process")
    process.terminate()
    seen = watch(process, STOP_LIMIT_S)
    assert process.returncode == 143 and living(seen) == []


def test_a_failure_is_told_once_and_ends_the_run(world: World) -> None:
    log = world.folder / "out.log"
    flags = sft_flags(world, "run", "--rollout-function-path", "helpers_ray.failing_rollout")
    assert run_train([*flags, "--actor-num-gpus-per-node", "1"], log) == 1
    assert log.read_text().count("RuntimeError: the hook is broken") == 1


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--rollout-function-path", "helpers_ray.no_such_function"], "no_such_function"),
        (["--data-source-path", "no_such_module.Source"], "no_such_module"),
    ],
)
def test_a_hook_that_cannot_be_imported_is_bad_input(world: World, flags: list[str], message: str) -> None:
    log = world.folder / "out.log"
    assert run_train([*sft_flags(world, "run"), *flags], log) == 2
    errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0]


def test_a_taken_router_port_is_bad_input(world: World) -> None:
    log = world.folder / "out.log"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert run_train(grpo_flags(world, "run", "--num-rollout", "1", "--sglang-router-port", port), log) == 2
    last = log.read_text().splitlines()[-1]
    assert last.startswith(f"error: --sglang-router-port {port}:")


@pytest.mark.engine
def test_grpo_with_real_engines_survives_a_kill(world: World) -> None:
    """Two runs of one command: the first is killed after a checkpoint, the second goes on from it to the end."""
    log, checkpoint = world.folder / "out.log", world.folder / "ckpt"
    tracker = checkpoint / "latest_checkpointed_iteration.txt"
    flags = grpo_flags(
        world,
        "grpo",
        *("--num-rollout", "4", "--save", str(checkpoint), "--load", str(checkpoint), "--save-interval", "1"),
        *("--eval-interval", "2", "--eval-prompt-data", "count", str(world.folder / "prompts.jsonl")),
    )
    process = start_train(flags, log)
    driver, seen = psutil.Process(process.pid), set()
    wait_until(lambda: seen.update(descendants(driver)) or tracker.exists(), 300, "the first checkpoint")
    process.kill()
    process.wait()
    wait_until(lambda: not any("sglang" in line for line in living(seen)), STOP_LIMIT_S, "the end of all servers")
    wait_until(lambda: living(seen) == [], 90, "the end of Ray's agents")
    saved, done = int(tracker.read_text()), len(world.metrics("grpo", "train/step"))

    assert run_train(flags, log) == 0, log.read_text()
    steps = world.metrics("grpo", "train/step")
    assert [line["train/rollout_id"] for line in steps[done:]] == list(range(saved, 4))
    assert abs(steps[0]["train/kl_loss"]) <= 1e-6 and steps[1]["train/kl_loss"] > 1e-6
    assert all(line["train/train_rollout_logprob_abs_diff"] < 1e-3 for line in steps)
    assert all(line["train/grad_norm"] > 0 for line in steps)
    assert [line["eval/step"] for line in world.metrics("grpo", "eval/step")][0] == 0
    times = [line for line in world.metrics("grpo", "rollout/step") if "perf/update_weights_time" in line]
    assert {"perf/rollout_time", "perf/train_time", "perf/save_time"} <= set(times[-1])
    assert int(tracker.read_text()) == 4 and (checkpoint / "rollout" / "global_dataset_state_dict_3.pt").exists()


@pytest.mark.engine
def test_two_engines_and_interrupt(world: World) -> None:
    """Two engines behind the router get the same weights; Ctrl-C in the middle leaves nothing behind."""
    log = world.folder / "out.log"
    flags = grpo_flags(
        world, "grpo", "--num-rollout", "1000", "--rollout-num-gpus", "2", "--router-policy", "round_robin"
    )
    process = start_train(flags, log)
    driver, seen = psutil.Process(process.pid), set()
    metrics = world.folder / "grpo.jsonl"
    wait_until(lambda: metrics.exists() and len(world.metrics("grpo", "train/step")) >= 3, 300, "three steps")
    seen.update(descendants(driver))
    process.send_signal(signal.SIGINT)
    seen |= watch(process, STOP_LIMIT_S)
    assert process.returncode == 130 and living(seen) == []
    assert all(line["train/train_rollout_logprob_abs_diff"] < 1e-3 for line in world.metrics("grpo", "train/step"))
    assert len(list((world.folder / "logs").glob("engine_*.log"))) == 2
