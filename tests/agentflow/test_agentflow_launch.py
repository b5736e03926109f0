"""launch.sh, serve.sh and eval.sh: expanded commands, overrides, checks, and children that end with their parent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from helpers_launch import LaunchKit
from helpers_planner import ask_planner

from agentic.agentflow.config import AgentFlowConfig
from agentic.agentflow.crew import ROLES
from agentic.agentflow.launch import LAUNCHER
from agentic.common import launching
from agentic.common.errors import ConfigError
from agentic.common.roles import RoleTable

KIT = LaunchKit(
    LAUNCHER,
    ("train", "serve", "serve-eval", "eval"),
    Path(__file__).with_name("launch_argv.txt"),
    {
        "train with eval_data": ("train", {"eval_data": "data/dev.jsonl"}),
        "eval with trained_model": ("eval", {"trained_model": "hf"}),
    },
)
settings, run = KIT.settings, KIT.run


def test_expanded_commands_are_as_recorded() -> None:
    """After a change: `PYTHONPATH=.:tests python tests/agentflow/test_agentflow_launch.py` records anew."""
    assert KIT.expanded() == KIT.snapshot.read_text()


def test_dry_run_prints_the_command_that_the_parser_accepts(tmp_path: Path) -> None:
    done = run(
        "launch.sh", "--dry-run", "--output", str(tmp_path / "o"), "--max-new-tokens", "512", "--", "--lr", "2e-6"
    )
    assert done.returncode == 0, done.stderr
    assert "note: --model models/Qwen2.5-7B-Instruct is not there yet" in done.stderr
    assert f"--save {tmp_path}/o/checkpoints" in done.stdout and "--rollout-max-response-len 512" in done.stdout
    assert done.stdout.startswith("CUDA_VISIBLE_DEVICES=0,1,2,3 python ") and done.stdout.endswith("--lr 2e-6\n")
    assert not (tmp_path / "o").exists()
    assert "training: DP 4, 20480 tokens per GPU" in done.stderr and "http://127.0.0.1:30001, GPUs 6,7:" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--", "--eps-clipp", "1"], "--eps-clipp"),
        (["--turn-weighting", "turnwise"], "agentflow_turn_weighting is 'turnwise'"),
        (
            ["--frozen-first-gpu", "3"],
            "error: outputs/agentflow/roles.yaml: servers.frozen: GPU 3 belongs to the policy",
        ),
        (["--model", "models/mine"], "error: models/mine: no such model folder, and no known name"),
    ],
)
def test_dry_run_refuses_what_the_parser_refuses(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_ask_planner", ask_planner)
    assert LAUNCHER.main(["train", "--dry-run", *flags]) == 2
    out = capsys.readouterr()
    assert out.err.splitlines()[-1].startswith("error: ") and message in out.err and out.out == ""


@pytest.mark.parametrize(("flags", "roles"), [([], "roles.yaml"), (["eval"], "roles_untrained.yaml")])
def test_serve_has_a_dry_run(flags: list[str], roles: str) -> None:
    done = run("serve.sh", *flags, "--dry-run")
    assert done.returncode == 0 and re.search(rf"serve_roles\.py --roles \S+/{roles} ", done.stdout), done.stderr


def test_eval_has_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert "launch eval" in (KIT.folder / "eval.sh").read_text()
    assert LAUNCHER.main(["eval", "--dry-run", "--trained-model", "hf"]) == 0
    assert "--arms baseline,untrained,trained" in capsys.readouterr().out
    assert LAUNCHER.main(["eval", "--dry-run", "--runs", "0"]) == 2


def test_flags_beat_variables_beat_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENTFLOW_POLICY_GPUS", "2")
    monkeypatch.setenv("AGENTFLOW_SEED", "5")
    monkeypatch.setattr(launching.Launcher, "check_command", lambda *_: "")
    assert LAUNCHER.main(["train", "--dry-run", "--policy-gpus", "8"]) == 0
    assert "--actor-num-gpus-per-node 8 " in (command := capsys.readouterr().out) and "--seed 5 " in command
    assert LAUNCHER.main(["eval", "--dry-run", "--benchmarks", "math=a", "gsm8k=b"]) == 0
    assert "--data math=a gsm8k=b --roles" in capsys.readouterr().out
    monkeypatch.setenv("AGENTFLOW_SEED", "five")
    assert LAUNCHER.main(["train", "--dry-run"]) == 2
    assert "AGENTFLOW_SEED 'five': expected a int such as 1234" in capsys.readouterr().err


def test_every_setting_changes_something() -> None:
    assert KIT.settings_without_effect(trained_model="t", eval_data="e") == []


def test_written_files_are_what_the_programs_read(tmp_path: Path) -> None:
    method = yaml.safe_load((KIT.write(tmp_path, "train") / "agentflow.yaml").read_text())
    config = AgentFlowConfig.from_args(Namespace(**method))
    assert (config.max_steps, config.eval_max_steps, config.train_roles) == (3, 10, ("analysis", "next_step"))
    table = RoleTable.load(config.roles, "http://router", known_roles=ROLES, required=config.required_roles)
    assert [role.name for role in table if role.trained] == ["planner"]
    assert table["python_coder"].url == table.servers["coder"].url != table["executor"].url
    assert {role.temperature for role in table if not role.trained} == {0.0}
    gpus = {name: (s.options["base-gpu-id"], s.options["tp-size"]) for name, s in table.servers.items()}
    assert gpus == {"frozen": (4, 2), "coder": (6, 2)}


def test_role_files_of_an_evaluation_differ_in_the_planner(tmp_path: Path) -> None:
    KIT.write(tmp_path, "eval", trained_model="hf")
    before, after = (
        yaml.safe_load((tmp_path / f"roles_{name}.yaml").read_text()) for name in ("untrained", "trained")
    )
    assert before.pop("roles") | {"planner": {"server": "trained"}} == after.pop("roles") and before == after
    assert set(before["servers"]) == {"frozen", "coder", "policy", "trained"}
    assert "roles_trained.yaml" not in {path.name for path in LAUNCHER.make_plan("eval", settings()).files}


def test_missing_models_stop_a_real_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert LAUNCHER.main(["train", "--output", str(tmp_path / "o")]) == 2
    assert "error: --model models/Qwen2.5-7B-Instruct: no such directory" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def fake_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: str, train: str) -> launching.Settings:
    """`tools/serve_roles.py` and `train.py` replaced by small scripts in a root of their own."""
    for name, body in (("tools/serve_roles.py", serve), ("train.py", train)):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"import os, pathlib, sys, time\nhere = pathlib.Path({str(tmp_path)!r})\n{body}\n")
    monkeypatch.setattr(launching, "ROOT", tmp_path / "root")
    monkeypatch.setattr(launching, "POLL_S", 0.05)
    return settings(output=str(tmp_path / "o"), start_roles_timeout_s=120)


def start_training(values: launching.Settings) -> int:
    plan = LAUNCHER.make_plan("train", values)
    launching.write_files(plan)
    return LAUNCHER.execute("train", values, plan)


SERVE = "(here / 'pid').write_text(str(os.getpid()))\nprint('ALL READY', flush=True)\ntime.sleep(60)"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_role_servers_live_as_long_as_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = fake_programs(tmp_path, monkeypatch, SERVE, "os.kill(int((here / 'pid').read_text()), 0)\nsys.exit(7)")
    assert start_training(values) == 7
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_role_servers_that_fail_are_an_error_with_their_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = fake_programs(tmp_path, monkeypatch, "sys.exit('error: port 30000 is taken')", "")
    with pytest.raises(ConfigError, match="ended with status 1: error: port 30000 is taken; log: "):
        start_training(values)


def test_servers_started_elsewhere_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = fake_programs(tmp_path, monkeypatch, SERVE, "sys.exit(0)") | {"start_roles": False}
    assert start_training(values) == 0
    assert not (tmp_path / "pid").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_what_was_started(tmp_path: Path, number: signal.Signals) -> None:
    child = tmp_path / "child.py"
    child.write_text(
        f"import os, pathlib, time\npathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\ntime.sleep(60)\n"
    )
    program = (
        "import signal, sys; from pathlib import Path; from agentic.common import launching\n"
        "signal.signal(signal.SIGTERM, launching._raise_exit)\n"
        f"plan = launching.Plan([{str(child)!r}], {{}}, {{}})\n"
        "with launching.running(plan) as process: process.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=launching.ROOT)
    deadline = time.monotonic() + 60
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.send_signal(number)
    assert parent.wait(90) == (128 + number if number == signal.SIGTERM else -number)
    deadline = time.monotonic() + 60
    while is_alive(int((tmp_path / "pid").read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_no_host_port_or_absolute_path_in_python() -> None:
    """Addresses belong to the role file and to launch.yaml."""
    assert KIT.addresses_in_python("tiny_world.py", "quickstart.py") == []


def test_scripts_are_thin() -> None:
    assert KIT.scripts() == {"launch.sh", "serve.sh", "eval.sh"}


if __name__ == "__main__":
    KIT.record()
