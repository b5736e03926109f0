"""Flags against the model, refused layouts, configurations: pure parts of the Megatron back end, no process group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helpers_megatron as helpers
import pytest

from slime.backends.megatron_utils.capabilities import check_model, check_supported
from slime.backends.megatron_utils.transformer_config import padded_vocab_size, rotary_of

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return _model(tmp_path)


def check(args: Any) -> None:
    check_supported(args)
    check_model(args)


def _model(folder: Path, **changes: Any) -> Path:
    config = {
        "model_type": "qwen2", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 100,
        "num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 256, "tie_word_embeddings": True, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_flags_of_a_model_script_agree_with_the_model(model: Path) -> None:
    sizes = {"num_layers": 4, "ffn_hidden_size": 96, "norm_epsilon": 1e-6, "rotary_base": 1e6, "add_qkv_bias": True}
    check(helpers.make_args(model, **sizes, swiglu=True))
    with pytest.raises(AssertionError, match=r"--num-layers 5 \(it is 4\), --rotary-base 10000.0 .*--qk-layernorm"):
        check(helpers.make_args(model, num_layers=5, rotary_base=1e4, qk_layernorm=True))


def test_the_critic_has_a_head_of_its_own(model: Path) -> None:
    args = helpers.make_args(model, untie_embeddings_and_output_weights=True)
    check_model(args, "critic")
    with pytest.raises(AssertionError, match="--untie-embeddings-and-output-weights"):
        check_model(args)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tensor_model_parallel_size": 3}, "--tensor-model-parallel-size 3: cannot cut 8 attention heads"),
        ({"pipeline_model_parallel_size": 3}, "--pipeline-model-parallel-size 3: does not divide 4 layers"),
        ({"sequence_parallel": True}, "--sequence-parallel: needs --tensor-model-parallel-size above 1"),
        ({"expert_model_parallel_size": 2}, "--expert-model-parallel-size 2: does not divide the model's 0 experts"),
        ({"context_parallel_size": 2, "actor_num_gpus_per_node": 3}, "3 training ranks .* no multiple of .* 2"),
        (
            {"context_parallel_size": 2, "loss_type": "custom_loss"},
            "--loss-type custom_loss: .*--context-parallel-size 2",
        ),
        ({"attn_implementation": "sdpa"}, "--attn-implementation=sdpa"),
        ({"rollout_top_p": 0.9}, "--rollout-top-p=0.9"),
    ],
)
def test_layouts_that_cannot_be_built_are_refused(model: Path, flags: dict[str, Any], message: str) -> None:
    check(helpers.make_args(model))
    with pytest.raises(ValueError, match=message):
        check(helpers.make_args(model, **flags))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3' is not known"),
        ({"use_sliding_window": True}, "use_sliding_window is set"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary scaling .*yarn"),
    ],
)
def test_models_that_would_be_computed_wrongly_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(helpers.make_args(_model(tmp_path, **changes)))


def test_rotary_settings_of_old_and_new_configurations() -> None:
    assert rotary_of({"rope_theta": 5.0}, "x").base == 5.0
    new = rotary_of({"rope_parameters": {**LLAMA3, "rope_theta": 7.0}}, "x")
    assert (new.base, new.scaling) == (7.0, 8.0)
    with pytest.raises(ValueError, match="only Llama 3's"):
        rotary_of({"rope_scaling": {**LLAMA3, "high_freq_factor": 2.0}}, "x")


def test_the_vocabulary_is_padded_per_tensor_parallel_rank() -> None:
    args = helpers.make_args("x", tensor_model_parallel_size=2)
    assert [padded_vocab_size(args, size) for size in (100, 256, 257)] == [256, 256, 512]
