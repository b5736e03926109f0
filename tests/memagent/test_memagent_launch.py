"""launch.sh and eval.sh: expanded commands, overrides, checks, and the files that they write."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from helpers_launch import LaunchKit
from helpers_planner import ask_planner

from agentic.common import launching
from agentic.common.errors import ConfigError
from agentic.common.roles import RoleTable
from agentic.memagent.config import MemAgentConfig
from agentic.memagent.eval_arms import ARMS
from agentic.memagent.launch import LAUNCHER

KIT = LaunchKit(
    LAUNCHER,
    ("train", "serve-eval", "eval"),
    Path(__file__).with_name("memagent_launch_argv.txt"),
    {
        "train with eval_data": ("train", {"eval_data": "data/dev.jsonl"}),
        "eval with documents": ("eval", {"documents": "data/documents.jsonl"}),
    },
)
run, write = KIT.run, KIT.write


def test_expanded_commands_are_as_recorded() -> None:
    """After a change: `PYTHONPATH=.:tests python tests/memagent/test_memagent_launch.py` records anew."""
    assert KIT.expanded() == KIT.snapshot.read_text()


def test_dry_run_prints_the_command_that_the_parser_accepts(tmp_path: Path) -> None:
    done = run("launch.sh", "--dry-run", "--output", str(tmp_path / "o"), "--objective", "paper", "--", "--lr", "2e-6")
    assert done.returncode == 0, done.stderr
    assert "note: --model models/Qwen2.5-7B-Instruct is not there yet" in done.stderr
    assert f"--save {tmp_path}/o/checkpoints" in done.stdout and done.stdout.endswith("--lr 2e-6\n")
    assert done.stdout.startswith("python ") and not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--", "--eps-clipp", "1"], "--eps-clipp"),
        (["--prompts-per-rollout", "3", "--samples-per-prompt", "5"], "--global-batch-size 128"),
        (["--objective", "papers"], "memagent_objective is 'papers'"),
        (["--window", "9000"], "memagent_window_tokens is 9000: --sglang-context-length 8448 is smaller"),
    ],
)
def test_dry_run_refuses_what_the_parser_refuses(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_ask_planner", ask_planner)
    assert LAUNCHER.main(["train", "--dry-run", *flags]) == 2
    out = capsys.readouterr()
    assert out.err.splitlines()[-1].startswith("error: ") and message in out.err and out.out == ""


def test_eval_and_its_servers_have_a_dry_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_ask_planner", ask_planner)
    script = (KIT.folder / "eval.sh").read_text()
    assert "command=serve-eval" in script and "agentic.memagent.launch" in script
    assert LAUNCHER.main(["eval", "--dry-run", "--lengths", "7k", "3.5M"]) == 0
    assert "--lengths 7k 3.5M --roles" in capsys.readouterr().out
    baselines = ["--direct-model", "Qwen2.5-14B-Instruct", "--untrained-model", "Qwen2.5-7B-Instruct"]
    assert LAUNCHER.main(["serve-eval", "--dry-run", *baselines]) == 0
    shown = capsys.readouterr()
    assert "serve_roles.py --roles outputs/memagent_eval/roles.yaml " in shown.out
    assert "GPUs 4,5: weights" in shown.err and "GPUs 6,7: weights" in shown.err
    assert LAUNCHER.main(["eval", "--dry-run", "--lengths", "7q"]) == 2
    assert "--lengths 7q" in capsys.readouterr().err


def test_flags_beat_variables_beat_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMAGENT_POLICY_GPUS", "2")
    monkeypatch.setenv("MEMAGENT_SEED", "5")
    monkeypatch.setattr(launching.Launcher, "check_command", lambda *_: "")
    assert LAUNCHER.main(["train", "--dry-run", "--policy-gpus", "4"]) == 0
    assert "--actor-num-gpus-per-node 4 " in (command := capsys.readouterr().out) and "--seed 5 " in command
    monkeypatch.setenv("MEMAGENT_SEED", "five")
    assert LAUNCHER.main(["train", "--dry-run"]) == 2
    assert "MEMAGENT_SEED 'five': expected a int such as 1234" in capsys.readouterr().err


def test_every_setting_changes_something() -> None:
    assert KIT.settings_without_effect(untrained_model="u", direct_model="d", eval_data="e", documents="x") == []


def test_written_settings_are_what_the_method_reads(tmp_path: Path) -> None:
    values = yaml.safe_load((write(tmp_path, "train") / "memagent.yaml").read_text())
    assert MemAgentConfig.from_args(Namespace(**values)) == MemAgentConfig()
    paper = yaml.safe_load((write(tmp_path, "train", objective="paper") / "memagent.yaml").read_text())
    config = MemAgentConfig.from_args(Namespace(**paper))
    assert config.train_answer and config.turn_credit == "broadcast" and not config.divides_by_std(True)


@pytest.mark.parametrize(
    ("models", "arms"),
    [({}, ["memagent"]), ({"direct_model": "d", "untrained_model": "u"}, ["memagent", "untrained", "direct"])],
)
def test_written_roles_are_the_arms(tmp_path: Path, models: dict[str, str], arms: list[str]) -> None:
    path = write(tmp_path, "eval", **models) / "roles.yaml"
    table = RoleTable.load(path, "http://policy", known_roles=ARMS)
    assert [role.name for role in table] == arms == list(table.servers)
    assert not any(role.trained for role in table) and len({role.url for role in table}) == len(arms)
    gpus = [gpu for server in table.servers.values() for gpu in server.device_ids()]
    assert len(set(gpus)) == len(gpus) and max(gpus) < KIT.settings()["node_gpus"]
    # The memory agent's engine has its window and a margin, whatever the length of the documents.
    assert table.servers["memagent"].options["context-length"] == 8448


def test_missing_models_stop_a_real_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert LAUNCHER.main(["train", "--output", str(tmp_path / "o")]) == 2
    assert "error: --model models/Qwen2.5-7B-Instruct: no such directory" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_run_that_does_not_fit_is_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_ask_planner", ask_planner)
    monkeypatch.setattr(launching, "running", lambda *_: pytest.fail("a program was started"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"stand_in_for": "Qwen2.5-7B-Instruct"}')
    (tmp_path / "data.jsonl").write_text('{"prompt": "1 + 1?", "label": "2"}\n')
    inputs = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "data.jsonl")]
    assert LAUNCHER.main(["train", *inputs, "--output", str(tmp_path / "o"), "--gpu-memory-gib", "40"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and "too little memory" in last and "--gpu-memory-gib" in last
    assert not (tmp_path / "o").exists()


def test_children_end_with_the_block(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text("import time; time.sleep(60)")
    with launching.running(launching.Plan([str(child)], {}, {})) as process:
        assert process.poll() is None
        start = time.monotonic()
    assert process.poll() is not None and time.monotonic() - start < 30


def test_fill_keeps_types_and_leaves_out_what_is_not_wanted() -> None:
    values = {"n": 4, "name": "x", "none": ""}
    template = {
        "a": "${n}",
        "b": "${name}-${n}",
        "c": {"only_if": "${none}", "d": 1},
        "e": [{"only_if": "${n}", "f": 1}],
    }
    assert launching.fill(template, values) == {"a": 4, "b": "x-4", "e": [{"f": 1}]}
    with pytest.raises(ConfigError, match="--n 'x': expected a int"):
        launching.read_settings(Namespace(n="x"), {}, "P_", {"n": 1})


def test_scripts_are_thin() -> None:
    assert KIT.scripts() == {"launch.sh", "eval.sh"}


if __name__ == "__main__":
    KIT.record()
