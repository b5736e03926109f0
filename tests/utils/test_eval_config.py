"""eval_config: precedence of the four layers, shapes of the dataset list, errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from slime.utils.eval_config import EvalDatasetConfig, build_eval_dataset_configs, ensure_dataset_list

ARGS = SimpleNamespace(
    eval_temperature=None,
    rollout_temperature=1.0,
    eval_top_p=0.9,
    rollout_top_p=1.0,
    rollout_max_response_len=64,
    n_samples_per_eval_prompt=2,
    input_key="input",
    eval_input_key=None,
    rollout_stop=["END"],
)


def build(entry: dict[str, Any], defaults: dict[str, Any] | None = None) -> EvalDatasetConfig:
    return build_eval_dataset_configs(ARGS, [{"name": "n", "path": "p.jsonl", **entry}], defaults or {})[0]


def test_precedence_entry_defaults_eval_flag_rollout_flag() -> None:
    assert build({}).temperature == 1.0
    assert build({}).top_p == 0.9
    assert build({}, {"top_p": 0.8}).top_p == 0.8
    assert build({"top_p": 0.7}, {"top_p": 0.8}).top_p == 0.7
    assert build({"top_p": None}, {"top_p": 0.8}).top_p == 0.8
    assert build({"temperature": 0}).temperature == 0
    config = build({})
    assert (config.stop, config.max_response_len, config.n_samples_per_eval_prompt) == (["END"], 64, 2)
    assert config.input_key == "input" and config.repetition_penalty is None


def test_dataset_list_shapes() -> None:
    as_list = [{"name": "a", "path": "x"}, {"name": "b", "path": "y"}]
    assert ensure_dataset_list(as_list) == as_list
    assert ensure_dataset_list({"a": {"path": "x"}, "b": {"path": "y"}}) == as_list
    assert ensure_dataset_list(None) == []
    for bad in ("a", 3, ["a"], {"a": "x"}):
        with pytest.raises(ValueError, match="mapping"):
            ensure_dataset_list(bad)


@pytest.mark.parametrize(
    ("entry", "defaults", "message"),
    [
        ({"temprature": 0}, {}, "eval dataset 'n': unknown key 'temprature'; did you mean 'temperature'"),
        ({}, {"n_sample": 3}, "eval.defaults: unknown key 'n_sample'"),
        ({}, {"path": "x"}, "eval.defaults: unknown key 'path'"),
        ({"path": ""}, {}, "'path' is missing"),
        ({"n_samples_per_eval_prompt": 0}, {}, "n_samples_per_eval_prompt 0: must be at least 1"),
        ({"multimodal_keys": {"image": "images"}}, {}, "text prompts only"),
        ({"temperature": -1}, {}, "temperature -1: must not be negative"),
    ],
)
def test_bad_entries(entry: dict[str, Any], defaults: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(entry, defaults)


def test_a_name_may_be_used_once() -> None:
    with pytest.raises(ValueError, match="'a': the name is used twice"):
        build_eval_dataset_configs(ARGS, [{"name": "a", "path": "x"}, {"name": "a", "path": "y"}], {})


def test_inject_metadata_does_not_change_its_input() -> None:
    config = build({"rm_type": "math", "metadata_overrides": {"k": 2}})
    original = {"k": 1, "other": 3}
    assert config.inject_metadata(original) == {"k": 2, "other": 3, "rm_type": "math"}
    assert original == {"k": 1, "other": 3}
    assert build({}).inject_metadata(None) == {}


def test_cache_key_follows_what_is_loaded() -> None:
    assert build({}).cache_key == build({"temperature": 0.3}).cache_key
    for change in ({"path": "other"}, {"input_key": "q"}, {"apply_chat_template_kwargs": {"a": 1}}):
        assert build(change).cache_key != build({}).cache_key


def test_datasets_may_come_from_omegaconf() -> None:
    entries = ensure_dataset_list(OmegaConf.create([{"name": "a", "path": "p"}]))
    assert entries == [{"name": "a", "path": "p"}]
