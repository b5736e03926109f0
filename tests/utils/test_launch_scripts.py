"""Parts of launch scripts: what they run, what they skip, what they refuse."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from slime.utils.external_utils import command_utils as commands
from slime.utils.external_utils.typer_utils import dataclass_cli


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a model script and a program that writes down how it was called."""
    monkeypatch.setattr(commands, "REPOSITORY", tmp_path)
    for name in ("RAY_ADDRESS", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "scripts/models").mkdir(parents=True)
    (tmp_path / "scripts/models/tiny.sh").write_text('MODEL_ARGS=(--num-layers 2 --name "two words")\n')
    program = (
        "import json, os, sys\nopen('call.json', 'w').write(json.dumps([sys.argv[1:], os.environ.get('MINE')]))\n"
    )
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/fp8_cast_bf16.py").write_text(program)
    return tmp_path


def call_of(repository: Path) -> list[object]:
    import json

    return json.loads((repository / "call.json").read_text())


def test_training_gets_model_arguments_then_its_own(repository: Path) -> None:
    order: list[str] = []
    commands.execute_train(
        "--lr 1e-6",
        num_gpus_per_node=4,
        megatron_model_type="tiny",
        before_ray_job_submit=lambda: order.append("before"),
        extra_env_vars={"MINE": "a b"},
    )
    words = ["--num-layers", "2", "--name", "two words", "--num-gpus-per-node", "4", "--lr", "1e-6"]
    assert call_of(repository) == [words, "a b"] and order == ["before"]


def test_training_without_model_arguments(repository: Path) -> None:
    config = commands.ExecuteTrainConfig(extra_env_vars="MINE=1 OTHER='x y'", cuda_core_dump=True)
    commands.execute_train("", 1, None, config=config)
    assert call_of(repository) == [["--num-gpus-per-node", "1"], "1"]


def test_a_failed_run_is_an_error(repository: Path) -> None:
    (repository / "train.py").write_text("raise SystemExit(3)")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        commands.execute_train("", 1, None)
    assert caught.value.returncode == 3


@pytest.mark.parametrize(
    ("config", "model", "error", "text"),
    [
        ({"num_nodes": 2}, None, ValueError, "RAY_ADDRESS"),
        ({"extra_env_vars": "MINE"}, None, ValueError, "NAME=value"),
        ({}, "huge", FileNotFoundError, "known: tiny"),
    ],
)
def test_what_cannot_run_is_refused(
    repository: Path, config: dict[str, object], model: str | None, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        commands.execute_train("", 1, model, config=commands.ExecuteTrainConfig(**config))  # type: ignore[arg-type]
    assert not (repository / "call.json").exists()


def test_conversion(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model_torch_dist").mkdir()
    done = commands.convert_checkpoint("model", "tiny", 1, dir_dst=str(tmp_path))
    assert done == str(tmp_path / "model_torch_dist")
    with pytest.raises(FileNotFoundError, match="no such model"):
        commands.convert_checkpoint("other", "tiny", 1, dir_dst=str(tmp_path), hf_checkpoint=str(tmp_path / "no"))
    (tmp_path / "hf").mkdir()
    with pytest.raises(FileNotFoundError, match="convert_hf_to_torch_dist"):
        commands.convert_checkpoint("other", "tiny", 1, dir_dst=str(tmp_path), hf_checkpoint=str(tmp_path / "hf"))
    (tmp_path / "tools/convert_hf_to_torch_dist.py").touch()
    run: list[str] = []
    monkeypatch.setattr(commands, "exec_command", run.append)
    commands.convert_checkpoint("other", "tiny", 4, dir_dst=str(tmp_path), hf_checkpoint=str(tmp_path / "hf"))
    assert f"source {tmp_path}/scripts/models/tiny.sh && " in run[0]
    assert "-m torch.distributed.run --nproc-per-node=4 --standalone" in run[0]
    assert f'"${{MODEL_ARGS[@]}}" --hf-checkpoint {tmp_path}/hf --save {tmp_path}/other_torch_dist' in run[0]
    with pytest.raises(RuntimeError, match="SLURM_JOB_NUM_NODES"):
        commands.convert_checkpoint(
            "third", "tiny", 1, True, dir_dst=str(tmp_path), hf_checkpoint=str(tmp_path / "hf")
        )


def test_casting_is_not_done_twice(repository: Path, tmp_path: Path) -> None:
    commands.fp8_cast_bf16("in", str(tmp_path / "out"))
    assert call_of(repository)[0] == ["--input-fp8-hf-path", "in", "--output-bf16-hf-path", str(tmp_path / "out")]
    (repository / "call.json").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model.safetensors.index.json").write_text("{}")
    commands.fp8_cast_bf16("in", str(tmp_path / "out"))
    assert not (repository / "call.json").exists()


def test_switches_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, value in (("1", True), ("True", True), ("0", False), ("", False)):
        monkeypatch.setenv("SLIME_TEST_ENABLE_INFINITE_RUN", text)
        assert commands.get_env_enable_infinite_run() is value
    monkeypatch.setenv("X", "maybe")
    with pytest.raises(ValueError, match="X=maybe"):
        commands.get_bool_env_var("X")
    assert commands.get_bool_env_var("NOT_SET", "true")


def test_tracking_is_named_after_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert commands.get_default_wandb_args("run_tiny.py") == ""
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    words = commands.get_default_wandb_args("dir/run_tiny.py", "ci", "7")
    assert "--wandb-group ci-run_tiny-7" in words and "secret" not in words
    assert commands.create_run_id() != commands.create_run_id()


def test_texts_become_files() -> None:
    path = commands.save_to_temp_file("a: 1\n", "yaml")
    assert path.endswith(".yaml") and Path(path).read_text() == "a: 1\n"
    os.unlink(path)


def test_nvlink_is_read_from_the_topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for topology, found in (("GPU0 X NV18", True), ("GPU0 X PIX", False)):
        tool.write_text(f"#!/bin/sh\necho '{topology}'\n")
        tool.chmod(0o755)
        assert commands.check_has_nvlink() is found


@dataclass
class Settings:
    model: str
    num_nodes: int = 1
    dry: bool = False
    names: list[str] = field(default_factory=list)


def test_a_dataclass_is_a_command_line() -> None:
    seen: list[Settings] = []

    def main(args: Settings) -> None:
        seen.append(args)

    app, runner = Typer(), CliRunner()
    app.command()(dataclass_cli(main))
    assert runner.invoke(app, ["--model", "m", "--dry", "--names", "a", "--names", "b"]).exit_code == 0
    assert runner.invoke(app, ["--model", "m"], env={"SLIME_SCRIPT_NUM_NODES": "4"}).exit_code == 0
    assert seen == [Settings("m", 1, True, ["a", "b"]), Settings("m", 4)]
    assert runner.invoke(app, []).exit_code != 0, "a field without a default must be given"
    with pytest.raises(TypeError, match="dataclass"):
        dataclass_cli(lambda args: args)
