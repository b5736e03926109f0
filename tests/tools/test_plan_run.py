"""tools/plan_run.py: what it says of a run that fits, and the one line for each thing that does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers_planner import PLANNER

SERVER = "  {name}: {{model: {model}, port: {port}, options: {{{options}}}}}\n"


@pytest.fixture(autouse=True)
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that stands for Qwen2.5-7B."""
    (tmp_path / "config.json").write_text(json.dumps({"stand_in_for": "Qwen2.5-7B-Instruct"}))
    return str(tmp_path)


def train(model: str, *more: str, gpus: int = 4) -> list[str]:
    return [
        *("--", "--train-backend", "fsdp", "--hf-checkpoint", model, "--actor-num-gpus-per-node", str(gpus)),
        *("--colocate", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "16384", "--gradient-checkpointing"),
        *("--sglang-mem-fraction-static", "0.5", "--sglang-context-length", "8192", "--rollout-batch-size", "8"),
        *("--rollout-max-response-len", "1024", "--n-samples-per-prompt", "4", "--num-rollout", "1", *more),
    ]


def roles(tmp_path: Path, servers: str, roles: str = "  a: {url: policy}\n") -> list[str]:
    file = tmp_path / "roles.yaml"
    file.write_text(f"servers:\n{servers}roles:\n{roles}")
    return ["--roles", str(file)]


def server(name: str, port: int, options: str = "", model: str = "models/Qwen2.5-7B-Instruct") -> str:
    return SERVER.format(name=name, port=port, options=options, model=model)


def refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    assert PLANNER.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_run_that_fits_is_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str) -> None:
    servers = server("frozen", 30000, "tp-size: 2, base-gpu-id: 4, context-length: 8192")
    assert PLANNER.main([*roles(tmp_path, servers), *train(model)]) == 0
    text = capsys.readouterr().out
    # 7,615,616,512 parameters in float32 over 4 ranks; weights of the engine in 16 bits.
    assert "weights 7.1, gradients 7.1, optimizer 14.2, gathered" in text
    assert "4 x 1 GPUs:  weights 14.2 GiB, KV cache 25.8 GiB = 483,371 tokens" in text
    assert "http://127.0.0.1:30000, GPUs 4,5: weights 7.1 GiB" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--rollout-num-gpus-per-engine", "3", "--rollout-num-gpus", "3"],
            "engines default: tensor parallel size 3: the model has 28",
        ),
        (
            ["--sglang-mem-fraction-static", "0.8"],
            "too little memory: generation needs about 96.4 GiB of a GPU's 80.0",
        ),
        (
            ["--sglang-mem-fraction-static", "0.1"],
            "engines default: too little memory: weights and one context of 8192",
        ),
        (["--max-tokens-per-gpu", "200000"], "too little memory: training needs about"),
        (["--actor-num-gpus-per-node", "16"], "the run needs 16 GPUs on a node, a node has 8"),
        (["--num-rolout", "3"], "unknown flag --num-rolout; did you mean --num-rollout?"),
    ],
)
def test_a_run_that_does_not_fit(
    capsys: pytest.CaptureFixture[str], model: str, more: list[str], message: str
) -> None:
    try:
        line = refused(capsys, train(model, *more))
    except SystemExit as left:  # the parser's own errors
        assert left.code == 2
        line = capsys.readouterr().err
    assert line.startswith("error: ") and message in line


def test_more_memory_or_more_gpus_are_enough(model: str) -> None:
    fraction = ["--sglang-mem-fraction-static", "0.7"]
    assert PLANNER.main(train(model, *fraction)) == 2
    assert PLANNER.main(["--gpu-memory-gib", "141", *train(model, *fraction)]) == 0
    assert PLANNER.main(train(model, *fraction, gpus=8)) == 0


def test_a_model_without_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refused(capsys, roles(tmp_path, server("frozen", 30000, model="models/mine")))
    assert line.startswith("error: models/mine: no such model folder, and no known name")
    (tmp_path / "config.json").write_text(json.dumps({"stand_in_for": "models/mine"}))
    assert "models/mine: no such model folder" in refused(capsys, train(str(tmp_path)))


def test_an_unknown_family_is_not_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert PLANNER.main(roles(tmp_path, server("frozen", 30000, model=str(tmp_path)))) == 0
    assert "note: server frozen: memory and parallel sizes are not checked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("servers", "entries", "message"),
    [
        (
            server("one", 30000) + server("two", 30000, "base-gpu-id: 1"),
            "  a: {url: policy}\n",
            r"servers.one: http://127.0.0.1:30000 is used twice; give each server its own port",
        ),
        (
            server("one", 30000),
            "  search: {url: 'http://127.0.0.1:30000', api: service}\n",
            r"roles.search: http://127.0.0.1:30000 is also the address of servers.one",
        ),
        (server("one", 30000, "base-gpu-id: 7, tp-size: 2"), "  a: {url: policy}\n", r"servers.one: needs GPU 8"),
        (server("one", 30000, "tp-size: 3"), "  a: {url: policy}\n", r"tensor parallel size 3: the model has"),
        (
            server("one", 1, "mem-fraction-static: 0.5") + server("two", 2, "mem-fraction-static: 0.3"),
            "  a: {url: policy}\n",
            r"servers.two: too little memory: .* 0.3 of the 38.0 GiB free gives 11.4",
        ),
    ],
)
def test_servers_that_do_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, servers: str, entries: str, message: str
) -> None:
    assert re.search(message, refused(capsys, roles(tmp_path, servers, entries)))


def test_servers_on_other_machines_have_their_own_gpus(tmp_path: Path) -> None:
    half = "mem-fraction-static: 0.5"
    elsewhere = server("two", 2, half).replace("port: 2", "port: 2, node: 10.0.0.2")
    assert PLANNER.main(roles(tmp_path, server("one", 1, half) + elsewhere)) == 0


def test_a_server_on_the_gpus_of_the_policy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [*roles(tmp_path, server("frozen", 30000, "base-gpu-id: 3")), *train(model)]
    assert "servers.frozen: GPU 3 belongs to the policy" in refused(capsys, both)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert PLANNER.main(both) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert "the run needs 4 GPUs on a node, CUDA_VISIBLE_DEVICES=4,5 names 2" in refused(capsys, both)


def test_the_router_does_not_sit_on_a_server(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str) -> None:
    servers = roles(tmp_path, server("frozen", 30000, "base-gpu-id: 4"))
    line = refused(capsys, [*servers, *train(model, "--sglang-router-port", "30000")])
    assert line == "error: --sglang-router-port 30000: servers.frozen listens there; choose another"


def test_nothing_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert "error: nothing to check" in refused(capsys, [])


def test_retrieval_needs_no_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    entry: dict[str, Any] = {"kind": "retrieval", "port": 8000, "options": {"index": "folder"}}
    assert PLANNER.main(roles(tmp_path, f"  search: {json.dumps(entry)}\n", "  s: {server: search}\n")) == 0
    assert "server search: http://127.0.0.1:8000, retrieval" in capsys.readouterr().out
