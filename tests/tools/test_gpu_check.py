"""The GPU checks as far as a CPU can tell: verdicts, skips, resumption, flags that train.py knows, and a smoke run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_source import ROOT

from benchmarks.gpu import checks, hooks, run
from benchmarks.gpu.bounds import Bound
from benchmarks.gpu.checks import CHECKS, Failed, Setting, Skip
from benchmarks.gpu.probe import ProbeResult, run_train

MEGATRON = ROOT / "slime/utils/arguments/megatron.py"
QWEN_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    (tmp_path / "model.safetensors").write_bytes(b"w" * 1000)
    return Setting(tmp_path, tmp_path / "out", 8, False, 10.0, 2000)


def command(*flags: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    line = ["bash", str(ROOT / "scripts/gpu_check.sh"), *flags]
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_without_a_gpu_it_is_one_line_and_code_2(tmp_path: Path) -> None:
    done = command("--out", str(tmp_path / "o"))
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "o").exists()
    assert done.stderr.splitlines() == [run.NO_GPU]


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.main(["--cpu-smoke", "--only", "train_fdsp"]) == 2
    assert "--only train_fdsp: no such check; there are logprob_memory" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run.main(["--model", str(tmp_path), "--out", str(tmp_path / "o")]) == 2
    assert "no config.json there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limits", "value", "on_gpu", "verdict"),
    [
        ({"at_most": 1.0}, 1.0, True, True),
        ({"at_most": 1.0}, 1.1, True, False),
        ({"at_least": 1.0}, 0.9, True, False),
        ({"at_most": 1.0}, 9.0, False, None),
        ({"at_most": 1.0, "gpu_only": False}, 9.0, False, False),
        ({"at_least": 0.3}, None, True, None),
        ({"at_least": 0.3}, math.inf, True, False),
        ({"at_most": 0.3}, math.nan, True, False),
        ({}, 5.0, True, None),
    ],
)
def test_verdicts(limits: dict[str, Any], value: float | None, on_gpu: bool, verdict: bool | None) -> None:
    assert Bound("figure", value, "source", **limits).verdict(on_gpu) is verdict


def outcome(setting: Setting) -> list[Bound]:
    return [Bound("figure", 1.0, "source", at_most=2.0)]


def skipping(setting: Setting) -> list[Bound]:
    raise Skip("one GPU only")


def failing(setting: Setting) -> list[Bound]:
    raise Failed("train.py ended with 1: no")


def slow_figure(setting: Setting) -> list[Bound]:
    return [Bound("figure", 3.0, "source", at_most=2.0, gpu_only=False)]


def test_every_end_of_a_check_is_told_apart_and_what_passed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "tiny_model", lambda folder: write_tiny(folder))
    known = {"good": outcome, "absent": skipping, "broken": failing, "slow": slow_figure}
    monkeypatch.setattr(checks, "CHECKS", known)
    flags = ["--cpu-smoke", "--out", str(tmp_path)]
    assert run.main([*flags, "--only", "good", "absent"]) == 0
    assert run.main(flags) == 1
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    found = {name: (entry["status"], entry["reason"]) for name, entry in report["checks"].items()}
    assert found == {
        "good": ("pass", ""),
        "absent": ("skip", "one GPU only"),
        "broken": ("fail", "train.py ended with 1: no"),
        "slow": ("fail", "out of bounds: figure"),
    }
    assert report["smoke"] is True and report["model"]["name"] and "commit" in report and "gpus" in report["machine"]
    out = capsys.readouterr().out
    assert "pass  good  (before)" in out and "1 passed, 2 failed, 1 skipped" in out
    assert run.main([*flags, "--long-tokens", "7", "--only", "good"]) == 0
    assert "(before)" not in capsys.readouterr().out


def write_tiny(folder: Path) -> Path:
    (folder / "m").mkdir(exist_ok=True)
    (folder / "m/config.json").write_text("{}")
    return folder / "m"


def test_all_flags_are_known_to_train_py(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_docs import train_flags

    seen: dict[str, dict[str, Any]] = {}

    def record(folder: Path, flags: dict[str, Any], limit_s: float) -> ProbeResult:
        seen[folder.name] = flags
        raise Failed("recorded")

    monkeypatch.setattr(checks, "run_train", record)
    monkeypatch.setattr(checks, "plain_seconds", lambda *_: 1.0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Namespace(total_memory=10**6))
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: object())
    for name, check in CHECKS.items():
        if name != "logprob_memory":
            with pytest.raises(Failed, match="recorded"):
                check(setting)
    assert set(seen) == set(CHECKS) - {"logprob_memory"}
    if not MEGATRON.is_file():  # then train.py refuses the backend, and has no flags of it
        seen = {name: flags for name, flags in seen.items() if flags["train-backend"] != "megatron"}
    unknown = {flag for flags in seen.values() for flag in flags if f"--{flag}" not in train_flags()}
    assert not unknown


def test_figures_are_made_of_the_runs_metrics(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {
        "train/engine_kl": [0.001, 0.02],
        "train/train_rollout_logprob_abs_diff": [0.01, 0.03],
        "perf/update_weights_time": [9.0, 2e-6],  # the first one opens the group
        "perf/actor_train_time": [50.0, 3.0, 1.0, 2.0],
        "train/loss": [1.0, math.nan],
    }
    ended = ProbeResult(0, [], setting.folder / "train.log", 1.0, 0, metrics)
    monkeypatch.setattr(checks, "run_train", lambda *_: ended)
    engine = {bound.name: bound for bound in CHECKS["engine_fsdp_nccl"](setting)}
    kl = engine["KL of engine and trainer, nats a token"]
    assert kl.value == 0.02 and kl.verdict(on_gpu=True) is False
    assert engine["seconds of a sync for a GB"].value == pytest.approx(2.0)  # 1000 bytes
    assert engine["mean difference of log-probs, nats"].value == 0.03
    train = {bound.name: bound for bound in CHECKS["train_fsdp"](setting)}
    assert train["seconds of a step"].value == 2.0 and train["tokens a second and GPU"].value == 4 * 4096 / 2.0
    assert train["MFU"].value is None and train["finite losses, share"].verdict(on_gpu=True) is False
    with pytest.raises(Failed, match="wrote no train/loss"):
        del metrics["train/loss"]
        CHECKS["long_fsdp"](setting)


def test_two_engines_need_two_gpus(setting: Setting) -> None:
    with pytest.raises(Skip, match="a GPU for the engine and one for the trainer, there is 1"):
        CHECKS["engine_fsdp_nccl"](replace(setting, gpus=1))


def test_a_model_that_does_not_fit_one_gpu_is_skipped(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 weights of two bytes: a step takes 18 bytes each."""
    for total, fits in ((10_001, True), (9_999, False)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, total=total: Namespace(total_memory=total))
        if fits:
            checks._check_fits(setting)
        else:
            with pytest.raises(Skip, match="take a smaller --model"):
                checks._check_fits(setting)


def test_megatron_without_its_parts_is_skipped(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Skip, match="megatron.core is not installed"):
        CHECKS["train_megatron"](setting)


def test_mfu_counts_six_flops_a_weight_and_token(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """7.6 billion weights; at 4096 tokens attention adds a few percent."""
    monkeypatch.setattr(checks, "peak_flops", lambda: 1e15)
    mfu = checks._mfu(setting, [4096] * 8, seconds=4.0)
    assert mfu == pytest.approx(6 * 7.6e9 * 4096 * 8 / 4.0 / 1e15 / 8, rel=0.1)


def test_the_distance_of_equal_log_probs_is_zero() -> None:
    rows = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5])]
    other = [torch.tensor([-1.0, -2.5]), torch.tensor([-0.5])]
    call = {"pg_loss": torch.zeros(3), "loss_masks": [torch.ones(2), torch.ones(1)], "train_log_probs": rows}
    same, moved = (hooks.engine_distance(rollout_log_probs=each, **call)[2]["engine_kl"] for each in (rows, other))
    assert same.tolist() == [0.0, 0.0, 0.0]
    assert moved.tolist() == pytest.approx([0.0, math.exp(0.5) - 1 - 0.5, 0.0])


def test_a_refused_run_says_why(tmp_path: Path) -> None:
    result = run_train(tmp_path, {"train-backend": "nothing"}, 120)
    assert result.code == 2 and "--train-backend" in result.problem() and str(result.log) in result.problem()


@pytest.mark.slow
@pytest.mark.engine
def test_smoke_of_trainer_and_engine(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "scripts/gpu_check.sh", "--cpu-smoke", "--out", str(tmp_path)]
        + ["--only", "logprob_memory", "overhead_fsdp", "engine_fsdp_nccl", "long_fsdp"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {entry["status"] for entry in report["checks"].values()} == {"pass"} and len(report["checks"]) == 4
    engine = {bound["name"]: bound for bound in report["checks"]["engine_fsdp_nccl"]["bounds"]}
    assert engine["KL of engine and trainer, nats a token"]["value"] < 1e-4
    assert engine["seconds of a sync for a GB"]["ok"] is None  # a CPU is not judged by it
