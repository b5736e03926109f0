"""`eval --serve`: the evaluation runs while its servers are ready, and they end with it. What cannot work starts nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from agentic.common.errors import ConfigError
from agentic.common.launching import Launcher, Plan

SERVERS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path(sys.argv[2]).write_text("ended") and 0))
print("ALL READY", flush=True)
time.sleep(60)
"""
EVALUATION = "import pathlib, sys; sys.exit(pathlib.Path(sys.argv[2]).exists() or 5)"


def launcher(folder: Path, servers: str = SERVERS) -> Launcher:
    (folder / "servers.py").write_text(servers)
    (folder / "evaluation.py").write_text(EVALUATION)
    entry = {"files": "none", "inputs": [], "folder": str(folder)}
    commands = {
        name: {**entry, "program": [str(folder / f"{program}.py")], "flags": [{"--mark": str(folder / "mark")}]}
        for name, program in (("serve-eval", "servers"), ("eval", "evaluation"), ("train", "evaluation"))
    }
    template = {"settings": {"eval_output": str(folder)}, "inputs": {}, "outputs": [], "files": {"none": {}}}
    (folder / "launch.yaml").write_text(yaml.safe_dump({**template, "commands": commands}))
    return Launcher("some.method.launch", folder / "launch.yaml", lambda *_: "")


def test_servers_end_with_the_evaluation(tmp_path: Path) -> None:
    assert launcher(tmp_path).main(["eval", "--serve"]) == 5  # the code of the evaluation, which saw no mark yet
    assert (tmp_path / "mark").read_text() == "ended"
    assert "ALL READY" in (tmp_path / "role_servers.log").read_text()


def test_servers_that_do_not_start_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher(tmp_path, "import sys; sys.exit('no such model')").main(["eval", "--serve"]) == 2
    assert "model servers: ended with status 1: no such model; log: " in capsys.readouterr().err


def test_a_dry_run_prints_both_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher(tmp_path).main(["eval", "--serve", "--dry-run"]) == 0
    servers, evaluation = capsys.readouterr().out.splitlines()
    assert "servers.py" in servers and "evaluation.py" in evaluation


def test_a_plan_that_is_refused_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check(command: str, _: Plan) -> str:
        if command == "eval":
            raise ConfigError("too little memory")
        return "server one: GPU 0\n"

    checked = dataclasses.replace(launcher(tmp_path), check=check)
    assert checked.main(["eval", "--serve"]) == 2
    assert capsys.readouterr().err == "server one: GPU 0\nerror: too little memory\n"
    assert {path.name for path in tmp_path.iterdir()} == {"servers.py", "evaluation.py", "launch.yaml"}


def test_only_an_evaluation_has_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher(tmp_path).main(["train", "--serve"]) == 2
    assert "--serve: `train` has no servers" in capsys.readouterr().err
