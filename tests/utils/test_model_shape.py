"""Sizes of models: the scripts in scripts/models against transformers' own models, names, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slime.utils.model_shape import (
    SCRIPTS,
    ModelShape,
    config_of_model_args,
    find_script,
    find_shape,
    read_model_args,
    shape_of_config,
    shape_of_model_args,
)

# Parameters as the published checkpoints count them (a tied output layer once).
PUBLISHED = {
    "qwen2.5-0.5B": 494_032_768,
    "qwen2.5-1.5B": 1_543_714_304,
    "qwen2.5-3B": 3_085_938_688,
    "qwen2.5-7B": 7_615_616_512,
    "qwen2.5-14B": 14_770_033_664,
    "qwen2.5-32B": 32_763_876_352,
    "qwen2.5-72B": 72_706_203_648,
    "qwen3-0.6B": 596_049_920,
    "qwen3-1.7B": 1_720_574_976,
    "qwen3-4B": 4_022_468_096,
    "qwen3-8B": 8_190_735_360,
    "qwen3-14B": 14_768_307_200,
    "qwen3-32B": 32_762_123_264,
    "qwen3-30B-A3B": 30_532_122_624,
    "llama3.1-8B": 8_030_261_248,
    "llama3.1-70B": 70_553_706_496,
    "llama3.2-1B": 1_235_814_400,
    "llama3.2-3B": 3_212_749_824,
}


def shape_of(name: str) -> ModelShape:
    return shape_of_model_args(read_model_args(SCRIPTS / f"{name}.sh"), name)


def config_of(name: str) -> dict[str, Any]:
    return config_of_model_args(read_model_args(SCRIPTS / f"{name}.sh"), name)


def test_every_script_is_checked() -> None:
    assert {path.stem for path in SCRIPTS.iterdir()} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_checkpoint(name: str) -> None:
    shape = shape_of(name)
    assert shape.num_params == PUBLISHED[name]
    # Without --kv-channels heads share the hidden size evenly.
    assert "--kv-channels" in read_model_args(SCRIPTS / f"{name}.sh") or shape.query_width == shape.hidden_size


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_library(name: str) -> None:
    """Two layers on the meta device: every term of the count, whatever the size."""
    shape, config = shape_of(name), config_of(name)
    two_layers = {key: value for key, value in config.items() if key != "model_type"} | {"num_hidden_layers": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **two_layers))
    assert [type(model).__name__] == config["architectures"]
    extra_layers = (shape.num_layers - 2) * (shape.dense_layer_params + shape.expert_params)
    assert model.num_parameters() + extra_layers == shape.num_params
    assert shape_of_config(config, "config") == shape


def test_a_folder_is_read_from_its_config(tmp_path: Path) -> None:
    shape = shape_of("qwen3-4B")
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3-4B")))
    assert find_shape(tmp_path) == (shape, str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("model", "script"),
    [
        ("models/Qwen2.5-7B-Instruct", "qwen2.5-7B.sh"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", "qwen2.5-32B.sh"),
        ("Qwen2.5-Math-7B-Instruct/", "qwen2.5-7B.sh"),
        ("Qwen3-30B-A3B-Instruct-2507", "qwen3-30B-A3B.sh"),
        ("Qwen3-8B", "qwen3-8B.sh"),
        ("Meta-Llama-3.1-8B-Instruct", "llama3.1-8B.sh"),
        ("Llama-3.2-1B", "llama3.2-1B.sh"),
    ],
)
def test_a_missing_folder_is_known_by_its_name(model: str, script: str) -> None:
    found = find_script(model)
    assert found is not None and found.name == script
    assert find_shape(model) == (shape_of(found.stem), f"scripts/models/{script}")


def test_an_unknown_name_is_an_error_with_the_known_ones() -> None:
    assert find_script("Qwen2.5-VL-7B-Instruct") is None
    with pytest.raises(FileNotFoundError, match="models/mine: no such model folder, and no known name .*qwen3-8B"):
        find_shape("models/mine")


def test_a_stand_in_names_its_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"stand_in_for": "models/Qwen3-8B"}))
    assert find_shape(tmp_path)[0].num_params == PUBLISHED["qwen3-8B"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-layers", "2"], "a size is missing"),
        (["--num-layer", "2"], "--num-layer is not a flag"),
        (["2"], "'2' belongs to no flag"),
    ],
)
def test_flags_that_make_no_model(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"script: .*{message}"):
        shape_of_model_args(argv, "script")


def test_sizes_that_no_model_has() -> None:
    config = config_of("qwen3-4B")
    with pytest.raises(ValueError, match="config: 32 attention heads cannot share 5 key/value heads"):
        shape_of_config(config | {"num_key_value_heads": 5}, "config")
    with pytest.raises(ValueError, match="model_type 'mamba' is none of qwen2"):
        shape_of_config(config | {"model_type": "mamba"}, "config")
    with pytest.raises(ValueError, match="config does not say vocab_size"):
        shape_of_config({key: value for key, value in config.items() if key != "vocab_size"}, "config")
    with pytest.raises(ValueError, match="cannot use 129 of 128 experts"):
        shape_of_config(config_of("qwen3-30B-A3B") | {"num_experts_per_tok": 129}, "config")


def test_the_rotary_base_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_ROTARY_BASE", "10000")
    argv = read_model_args(SCRIPTS / "qwen2.5-7B.sh")
    assert argv[argv.index("--rotary-base") + 1] == "10000"
