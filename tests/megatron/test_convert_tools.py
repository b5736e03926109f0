"""The converters as programs: bit-exact round trips, what they refuse and how, and that a failed run leaves no output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import helpers_convert as helpers
import helpers_fsdp
import pytest
import torch
import torch.distributed.checkpoint as dcp

MODEL_ARGS = ["--num-layers", "4", "--hidden-size", "32", "--swiglu", "--norm-epsilon", "1e-6"]


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of every family, most of them in several files."""
    root = tmp_path_factory.mktemp("hf")
    for family in helpers.FAMILIES:
        helpers.save_family(root / family, family, shard_size="20KB" if family != "llama" else "5GB")
    return root


def to_dist(model: Path, save: Path, *flags: str) -> Path:
    assert helpers.run_tool("convert_hf_to_torch_dist", "--hf-checkpoint", model, "--save", save, *flags) == 0
    return save / (save / "latest_checkpointed_iteration.txt").read_text().strip()


@pytest.mark.parametrize("family", helpers.FAMILIES)
def test_hf_to_torch_dist_to_hf_is_bit_exact(hf: Path, tmp_path: Path, family: str) -> None:
    release = to_dist(hf / family, tmp_path / "dist", *MODEL_ARGS)
    flags = ["--input-dir", release, "--output-dir", tmp_path / "back", "--chunk-size", "30000"]
    assert helpers.run_tool("convert_torch_dist_to_hf", *flags, "--origin-hf-dir", hf / family) == 0
    helpers.assert_same_tensors(helpers.tensors_of(tmp_path / "back"), helpers.tensors_of(hf / family))
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(helpers.tensors_of(hf / family))
    for name in ("config.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / "back" / name).read_text()) == json.loads((hf / family / name).read_text())
    assert not list(tmp_path.glob("*.tmp"))


def test_the_name_of_the_family_is_enough_for_the_weights(hf: Path, tmp_path: Path) -> None:
    release = to_dist(hf / "qwen3-moe", tmp_path / "dist", "--padded-vocab-size", "200")
    out = tmp_path / "back"
    flags = ["--input-dir", release, "--output-dir", out, "--model-name", "qwen3_moe"]
    assert helpers.run_tool("convert_torch_dist_to_hf", *flags) == 0
    helpers.assert_same_tensors(helpers.tensors_of(out), helpers.tensors_of(hf / "qwen3-moe"))
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]


def test_bf16_and_an_existing_output(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release = to_dist(hf / "llama", tmp_path / "dist", "--bf16")
    flags = ["--input-dir", release, "--output-dir", tmp_path / "back", "--origin-hf-dir", hf / "llama"]
    assert helpers.run_tool("convert_torch_dist_to_hf", *flags) == 0
    wanted = {name: tensor.bfloat16() for name, tensor in helpers.tensors_of(hf / "llama").items()}
    helpers.assert_same_tensors(helpers.tensors_of(tmp_path / "back"), wanted)
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "bfloat16"
    assert helpers.run_tool("convert_torch_dist_to_hf", *flags) == 2
    assert "exists already; remove it" in capsys.readouterr().err
    assert helpers.run_tool("convert_torch_dist_to_hf", *flags, "-f") == 0


def test_what_the_checkpoint_lacks_comes_from_the_origin(hf: Path, tmp_path: Path) -> None:
    release = to_dist(hf / "qwen3", tmp_path / "dist")
    origin = tmp_path / "origin"
    shutil.copytree(hf / "qwen3", origin)
    config = json.loads((origin / "config.json").read_text())
    (origin / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    index = json.loads((origin / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["model.norm.weight"]
    tensors = helpers.tensors_of(origin)
    extra = torch.randn(helpers.VOCAB, 32)
    helpers.rewrite_shard(origin / shard, {"lm_head.weight": extra})
    index["weight_map"]["lm_head.weight"] = shard
    (origin / "model.safetensors.index.json").write_text(json.dumps(index))
    flags = ["--input-dir", release, "--output-dir", tmp_path / "back", "--origin-hf-dir", origin]
    assert helpers.run_tool("convert_torch_dist_to_hf", *flags) == 2 and not (tmp_path / "back").exists()
    assert helpers.run_tool("convert_torch_dist_to_hf", *flags, "-a") == 0
    helpers.assert_same_tensors(helpers.tensors_of(tmp_path / "back"), {**tensors, "lm_head.weight": extra})


def test_fsdp_checkpoint_to_hf(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For the experts too, which transformers keep merged in memory and apart in files."""
    for family in ("qwen3-moe", "qwen2"):
        state = helpers.fsdp_state(hf / family)
        dcp.save({"model_state": {"model": state}}, checkpoint_id=tmp_path / family / "model", no_dist=True)
        flags = ["--input-dir", tmp_path / family, "--output-dir", tmp_path / "back", "-f"]
        assert helpers.run_tool("convert_fsdp_to_hf", *flags, "--origin-hf-dir", hf / family) == 0
        helpers.assert_same_tensors(helpers.tensors_of(tmp_path / "back"), helpers.tensors_of(hf / family))
    assert (tmp_path / "back/tokenizer_config.json").is_file()
    assert helpers.run_tool("convert_fsdp_to_hf", *flags, "--origin-hf-dir", hf / "llama") == 2
    assert "not a checkpoint of --origin-hf-dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    "tool, flags, message",
    [
        (
            "convert_hf_to_torch_dist",
            ["--num-layers", "5", "--qk-layernorm"],
            "--num-layers 5 (it is 4), --qk-layernorm (it has not)",
        ),
        ("convert_hf_to_torch_dist", ["--padded-vocab-size", "8"], "--padded-vocab-size 8: the model has 106 rows"),
        ("convert_hf_to_torch_dist", ["--allgather-cp"], "--allgather-cp: not available"),
        ("convert_hf_to_torch_dist", ["--bf16", "--fp16"], "give one of them"),
        ("convert_hf_to_torch_dist", ["--hf-checkpoint", "nowhere"], "nowhere: no config.json there"),
        ("convert_hf_to_torch_dist", ["--num-layer", "4"], "did you mean --num-layers"),
        ("convert_torch_dist_to_hf", ["--output-dir", "o", "--input-dir", "nowhere"], "--origin-hf-dir: needed"),
        (
            "convert_torch_dist_to_hf",
            ["--output-dir", "o", "--input-dir", "nowhere", "--model-name", "qwen3"],
            "no .metadata",
        ),
        (
            "convert_fsdp_to_hf",
            ["--output-dir", "o", "--input-dir", "i", "--origin-hf-dir", "nowhere"],
            "no config.json there",
        ),
    ],
)
def test_bad_input_is_one_line(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tool: str, flags: list[str],
    message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    given: list[Any] = ["--hf-checkpoint", hf / "llama", "--save", "out"] if tool == "convert_hf_to_torch_dist" else []
    assert helpers.run_tool(tool, *given, *flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not list(tmp_path.iterdir())


def _through_megatron(hf: str, out: str) -> None:
    """Each rank runs the program: load at tensor-parallel size 2, compare, write; then something that differs."""
    model = Path(hf) / "qwen3"
    flags = ["--hf-checkpoint", model, "--tensor-model-parallel-size", 2, "--make-vocab-size-divisible-by", 16]
    assert helpers.run_tool("convert_to_hf", *flags, "--load", model, "--check-same", "--output-dir", out) == 0


def test_through_the_megatron_model(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    helpers_fsdp.run_workers(_through_megatron, 2, str(hf), str(tmp_path / "back"))
    helpers.assert_same_tensors(helpers.tensors_of(tmp_path / "back"), helpers.tensors_of(hf / "qwen3"))
    assert helpers.run_tool("convert_to_hf", "--hf-checkpoint", hf / "qwen3", "--load", hf / "qwen3") == 2
    assert "--output-dir or --check-same: needed" in capsys.readouterr().err
