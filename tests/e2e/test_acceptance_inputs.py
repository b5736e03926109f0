"""Bad input: one clear line on stderr and exit code 2, before any server or Ray starts.

Most checks call the programs' own entry points in this process; three run as a user would, and are watched for children.
`tests/sglang/test_serve_roles.py` has those of `tools/serve_roles.py`.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from helpers_e2e import Census, load_tool
from helpers_ray import ROOT

from slime.utils.arguments import parse_args

ROLES = ("executor", "verifier", "base_generator", "python_coder", "generator")
RECORD = {"prompt": [{"role": "user", "content": "1 + 1?"}], "label": "2"}


class Inputs:
    """Good input files of an AgentFlow run; a test breaks one of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.data = folder / "model", folder / "data.jsonl"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        self.write_data([json.dumps(RECORD)] * 20)
        self.roles = {"planner": {"url": "policy"}, **{name: {"server": "frozen"} for name in ROLES}}
        self.settings = {"agentflow_roles": str(folder / "roles.yaml"), "agentflow_judge": "rule_only"}

    def write_data(self, lines: list[str]) -> None:
        self.data.write_text("".join(line + "\n" for line in lines))

    def argv(self, *more: str) -> list[str]:
        """Flags of `train.py`, after the role file and the settings were written."""
        servers = {"frozen": {"model": str(self.model), "port": 30000}}
        (self.folder / "roles.yaml").write_text(yaml.safe_dump({"servers": servers, "roles": self.roles}))
        (self.folder / "agentflow.yaml").write_text(yaml.safe_dump(self.settings))
        return [
            *("--train-backend", "fsdp", "--hf-checkpoint", str(self.model), "--rollout-num-gpus", "1"),
            *("--actor-num-gpus-per-node", "1", "--prompt-data", str(self.data), "--input-key", "prompt"),
            *("--label-key", "label", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"),
            *("--rollout-max-response-len", "8", "--num-rollout", "1"),
            *("--custom-config-path", str(self.folder / "agentflow.yaml")),
            *("--custom-generate-function-path", "agentic.agentflow.rollout.generate"),
            *more,
        ]


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    return Inputs(tmp_path)


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    return load_tool("quickstart")


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def only_line(text: str) -> str:
    """The message of the one line on stderr."""
    (line,) = text.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def train_refuses(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parse_args(argv=argv)
    assert caught.value.code == 2
    return only_line(capsys.readouterr().err)


def quickstart_refuses(capsys: pytest.CaptureFixture[str], tool: ModuleType, *argv: str) -> str:
    try:
        assert tool.main(argv) == 2
    except SystemExit as stop:
        assert stop.code == 2
    return only_line(capsys.readouterr().err)


def test_good_input_is_accepted(inputs: Inputs) -> None:
    args = parse_args(argv=inputs.argv())
    assert args.agentflow_judge == "rule_only"


def test_data_file_is_missing(inputs: Inputs, capsys: pytest.CaptureFixture[str], quickstart: ModuleType) -> None:
    inputs.data.unlink()
    assert f"--prompt-data: {inputs.data}: no such data file" in train_refuses(capsys, inputs.argv())
    flags = ("--model", "smollm2", "--data", str(inputs.data), "--output", str(inputs.folder / "out"))
    assert f"{inputs.data}: no such data file" in quickstart_refuses(capsys, quickstart, *flags)
    assert not (inputs.folder / "out").exists()


def test_line_17_is_broken(inputs: Inputs, capsys: pytest.CaptureFixture[str], quickstart: ModuleType) -> None:
    inputs.write_data([json.dumps(RECORD)] * 16 + ['{"prompt": '])
    where = f"{inputs.data}:17: not valid JSON"
    assert where in train_refuses(capsys, inputs.argv())
    flags = ("--model", "smollm2", "--data", str(inputs.data), "--output", str(inputs.folder / "out"))
    assert where in quickstart_refuses(capsys, quickstart, *flags)


def test_record_without_prompt(inputs: Inputs, capsys: pytest.CaptureFixture[str], quickstart: ModuleType) -> None:
    inputs.write_data([json.dumps(RECORD)] * 2 + ['{"question": "1 + 1?", "label": "2"}'])
    message = train_refuses(capsys, inputs.argv())
    assert f"{inputs.data}:3: record has no key 'prompt'" in message and "question" in message
    flags = ("--model", "smollm2", "--data", str(inputs.data), "--output", str(inputs.folder / "out"))
    assert f"{inputs.data}:3: record has no key 'prompt'" in quickstart_refuses(capsys, quickstart, *flags)


def test_role_file(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    """Checked with the flags, long before the first trajectory asks for a role."""
    inputs.roles["executer"] = inputs.roles.pop("executor")
    message = train_refuses(capsys, inputs.argv())
    assert "roles.yaml: unknown role 'executer' (did you mean 'executor'?)" in message
    inputs.roles.pop("executer")
    assert "roles.yaml: missing role 'executor'" in train_refuses(capsys, inputs.argv())
    inputs.settings["agentflow_roles"] = "no_roles.yaml"
    assert "role file no_roles.yaml does not exist" in train_refuses(capsys, inputs.argv())


def test_method_settings(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    inputs.settings["agentflow_max_stepz"] = "3"
    message = train_refuses(capsys, inputs.argv())
    assert message == "unknown setting agentflow_max_stepz (did you mean 'max_steps'?)"
    del inputs.settings["agentflow_max_stepz"]
    inputs.settings["agentflow_prompt_set"] = "standart"
    assert "no set or directory 'standart'" in train_refuses(capsys, inputs.argv())
    inputs.settings |= {"agentflow_prompt_set": "compact", "agentflow_judge": "rule_first"}
    assert "missing role 'judge'" in train_refuses(capsys, inputs.argv())


def test_settings_of_an_evaluation_hook_are_checked_as_well(
    inputs: Inputs, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs.roles["referee"] = {"server": "frozen"}
    argv = inputs.argv()
    hook = argv.index("--custom-generate-function-path")
    path = argv[hook + 1]
    del argv[hook : hook + 2]
    parse_args(argv=argv)  # nobody asks for the roles
    entry = {"name": "dev", "path": str(inputs.data), "custom_generate_function_path": path}
    config = inputs.folder / "eval.yaml"
    config.write_text(yaml.safe_dump({"eval": {"datasets": [entry]}}))
    assert "unknown role 'referee'" in train_refuses(capsys, [*argv, "--eval-config", str(config)])


def test_recorded_rollouts_need_no_roles(inputs: Inputs) -> None:
    inputs.settings["agentflow_roles"] = "no_roles.yaml"
    parse_args(argv=inputs.argv("--load-debug-rollout-data", "dump_{rollout_id}.pt"))


def test_router_port_is_taken(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    with taken_port() as port:
        message = train_refuses(capsys, inputs.argv("--sglang-router-port", str(port)))
    assert message.startswith(f"--sglang-router-port {port}: ")


def test_misspelt_flag(inputs: Inputs, capsys: pytest.CaptureFixture[str], quickstart: ModuleType) -> None:
    message = train_refuses(capsys, inputs.argv("--n-sample-per-prompt", "4"))
    assert message == "unknown flag --n-sample-per-prompt; did you mean --n-samples-per-prompt?"
    message = quickstart_refuses(capsys, quickstart, "--num-rollouts", "4")
    assert message == "unknown flag --num-rollouts; did you mean --num-rollout?"


def test_numbers_that_make_no_run(inputs: Inputs, capsys: pytest.CaptureFixture[str], quickstart: ModuleType) -> None:
    message = train_refuses(capsys, inputs.argv("--n-samples-per-prompt", "0"))
    assert message == "--n-samples-per-prompt 0: must be at least 1"
    assert "--num-rollout 1: must be at least 2" in quickstart_refuses(capsys, quickstart, "--num-rollout", "1")


@pytest.mark.parametrize("flag", ["--hf-checkpoint", "--ref-load"])
def test_checkpoint_without_config(inputs: Inputs, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    empty = inputs.folder / "empty"
    empty.mkdir()
    argv = inputs.argv("--use-kl-loss", "--ref-load", str(inputs.model), flag, str(empty))
    assert train_refuses(capsys, argv).startswith(f"{flag} {empty}: holds no config.json")


def run(command: list[str], log: Path) -> list[str]:
    """stderr and stdout lines of a program that must end with 2 and start no other process."""
    with Census() as census:
        process = census.start(command, log)
        assert census.end_of(process, 60) == 2, log.read_text()
        assert {seen.pid for seen in census.seen} <= {process.pid}
    return log.read_text().splitlines()


def test_train_as_a_user_starts_it(inputs: Inputs) -> None:
    """The role file is the last thing checked: what comes before it must not add lines to the message."""
    inputs.roles["planer"] = {"server": "frozen"}
    lines = run([sys.executable, str(ROOT / "train.py"), *inputs.argv()], inputs.folder / "log")
    assert [line for line in lines if " INFO " not in line] == lines[-1:]
    assert lines[-1].startswith("error: ") and "unknown role 'planer' (did you mean 'planner'?)" in lines[-1]


def test_quickstart_as_a_user_starts_it(inputs: Inputs) -> None:
    command = [sys.executable, str(ROOT / "tools" / "quickstart.py"), "--modle", "tiny"]
    lines = run(command, inputs.folder / "log")
    assert lines == ["error: unknown flag --modle; did you mean --model?"]


def test_serve_roles_as_a_user_starts_it(inputs: Inputs) -> None:
    with taken_port() as port:
        servers = {"frozen": {"model": str(inputs.model), "port": port}}
        (inputs.folder / "roles.yaml").write_text(yaml.safe_dump({"servers": servers}))
        tool = [sys.executable, str(ROOT / "tools" / "serve_roles.py"), "--roles", str(inputs.folder / "roles.yaml")]
        (line,) = run([*tool, "--log-dir", str(inputs.folder / "logs")], inputs.folder / "log")
    assert line.startswith("error: ") and "servers.frozen" in line and f"port {port}" in line
