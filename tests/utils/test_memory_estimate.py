"""Estimates of memory against what is published and against what autograd saves; parallel sizes against Megatron's rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slime.utils.memory_estimate import (
    GIB,
    activation_bytes,
    activation_bytes_per_token,
    engine_memory,
    fsdp_memory,
    kv_bytes_per_token,
    logit_bytes,
    megatron_memory,
    stage_params,
)
from slime.utils.model_shape import SCRIPTS, ModelShape, read_model_args, shape_of_config, shape_of_model_args
from slime.utils.parallel_sizes import ParallelSizes, check_engine, check_training


def shape(name: str) -> ModelShape:
    return shape_of_model_args(read_model_args(SCRIPTS / f"{name}.sh"), name)


QWEN7, QWEN8, MOE, LLAMA70 = shape("qwen2.5-7B"), shape("qwen3-8B"), shape("qwen3-30B-A3B"), shape("llama3.1-70B")


# --------------------------------------------------------------------------------------------------------------------
# States.


def test_bytes_of_a_parameter_are_those_of_the_optimizers() -> None:
    """Mixed precision: 16 a parameter in float32; Megatron's distributed optimizer with 16-bit weights: 6 + 12 / d."""
    whole = fsdp_memory(QWEN7, ParallelSizes(1), 0, True, with_reference=False)
    assert whole.weights + whole.gradients + whole.optimizer == 16 * QWEN7.num_params and whole.gathered == 0
    for data in (1, 2, 8):
        split = megatron_memory(QWEN7, ParallelSizes(data), 0, True, with_reference=True)
        per_param = (split.weights + split.gradients + split.optimizer) / QWEN7.num_params
        assert per_param == pytest.approx(6 + 12 / data, rel=1e-6) and split.reference == 0


def test_fsdp_divides_all_states_by_the_ranks() -> None:
    one, four = (fsdp_memory(QWEN8, ParallelSizes(n), 0, True, with_reference=True) for n in (1, 4))
    for part in ("weights", "gradients", "optimizer", "reference"):
        assert getattr(one, part) == pytest.approx(4 * getattr(four, part), rel=1e-6)
    assert four.state - four.other == pytest.approx(20 * QWEN8.num_params / 4, rel=1e-6)


def test_stages_and_experts_divide_the_parameters() -> None:
    assert sum(stage_params(MOE, ParallelSizes(1))) == MOE.num_params
    dense, experts = stage_params(MOE, ParallelSizes(8, expert=8))
    assert (dense, experts) == (
        MOE.num_params - MOE.num_layers * MOE.expert_params,
        MOE.num_layers * MOE.expert_params // 8,
    )
    half, _ = stage_params(QWEN7, ParallelSizes(2, pipeline=2))
    assert half == 14 * QWEN7.dense_layer_params + QWEN7.embedding_params + QWEN7.hidden_size
    assert stage_params(QWEN7, ParallelSizes(2, tensor=2))[0] == QWEN7.num_params // 2


def test_experts_have_fewer_replicas_than_the_rest() -> None:
    """128 experts over 8 of 8 ranks: their optimizer state cannot be divided further, the rest can, by 8."""
    memory = megatron_memory(MOE, ParallelSizes(8, expert=8), 0, True, with_reference=False)
    dense, experts = stage_params(MOE, ParallelSizes(8, expert=8))
    assert memory.optimizer == 12 * (dense // 8 + experts)


# --------------------------------------------------------------------------------------------------------------------
# Activations and logits.

TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def saved_bytes_per_token(kind: str, sizes: dict[str, Any], layers: int, tokens: int = 256) -> float:
    """What autograd keeps of a forward pass beside the parameters, each storage once."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **sizes, num_hidden_layers=layers), attn_implementation="sdpa"
    ).to(torch.bfloat16)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model.model(input_ids=ids, position_ids=torch.arange(tokens)[None], use_cache=False)
    assert output.last_hidden_state.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / tokens


@pytest.mark.parametrize(
    ("kind", "extra"), [("qwen2", {}), ("llama", {}), ("qwen3", {"head_dim": 32}), ("qwen3_moe", EXPERTS)]
)
def test_activations_are_what_autograd_saves(kind: str, extra: dict[str, Any]) -> None:
    sizes = TINY | extra
    layer = saved_bytes_per_token(kind, sizes, 3) - saved_bytes_per_token(kind, sizes, 2)
    tiny = shape_of_config({**sizes, "num_hidden_layers": 2, "model_type": kind}, "tiny")
    assert activation_bytes_per_token(tiny, ParallelSizes(1)) == pytest.approx(layer, rel=0.05)


def test_recomputation_keeps_the_inputs_of_layers() -> None:
    sizes, tokens = ParallelSizes(1), 8192
    layer = activation_bytes_per_token(QWEN7, sizes) * tokens
    assert activation_bytes(QWEN7, sizes, tokens, recompute=False) == 28 * layer
    assert activation_bytes(QWEN7, sizes, tokens, recompute=True) == 28 * 2 * 3584 * tokens + layer


def test_tensor_and_sequence_parallelism_divide_activations() -> None:
    alone, tensor = activation_bytes_per_token(QWEN7, ParallelSizes(1)), ParallelSizes(4, tensor=4)
    assert activation_bytes_per_token(QWEN7, replace(tensor, sequence_parallel=True)) == pytest.approx(
        alone / 4, abs=2
    )
    assert alone / 4 < activation_bytes_per_token(QWEN7, tensor) < alone


def test_logits_are_held_by_the_chunk() -> None:
    gradient = 4 * QWEN7.embedding_params
    assert logit_bytes(QWEN7, ParallelSizes(1), 100_000) == 2 * 4 * 1024 * QWEN7.vocab_size + gradient
    assert logit_bytes(QWEN7, ParallelSizes(1), 10) == 2 * 4 * 10 * QWEN7.vocab_size + gradient


# --------------------------------------------------------------------------------------------------------------------
# KV cache.


@pytest.mark.parametrize(
    ("name", "kib"),
    [("llama3.1-8B", 128), ("llama3.1-70B", 320), ("qwen2.5-7B", 56), ("qwen2.5-14B", 192), ("qwen3-8B", 144)],
)
def test_kv_cache_of_a_token_in_16_bits(name: str, kib: int) -> None:
    assert kv_bytes_per_token(shape(name)) == kib * 1024


def test_kv_heads_are_divided_until_each_gpu_has_one() -> None:
    assert [kv_bytes_per_token(QWEN7, tensor) // 1024 for tensor in (1, 2, 4, 8)] == [56, 28, 14, 14]
    assert kv_bytes_per_token(LLAMA70, tensor=8, pipeline=2) == 320 * 1024 // 16


def test_an_engine_fills_its_fraction() -> None:
    engine = engine_memory(QWEN7, 80 * GIB, 0.5)
    assert engine.total == 40 * GIB and engine.weights == 2 * QWEN7.num_params
    assert engine.tokens == (40 * GIB - engine.weights) // (56 * 1024)
    assert engine_memory(LLAMA70, 80 * GIB, 0.9).tokens < 0


# --------------------------------------------------------------------------------------------------------------------
# Parallel sizes.


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (QWEN7, ParallelSizes(8, tensor=4, sequence_parallel=True)),
        (QWEN7, ParallelSizes(8, pipeline=2, context=2)),
        (QWEN8, ParallelSizes(16, tensor=16)),
        (MOE, ParallelSizes(16, tensor=2, expert=8, sequence_parallel=True)),
        (LLAMA70, ParallelSizes(32, tensor=8, pipeline=4)),
    ],
)
def test_sizes_that_work(model: ModelShape, sizes: ParallelSizes) -> None:
    check_training(sizes, model)
    assert sizes.world == sizes.data * sizes.tensor * sizes.pipeline * sizes.context


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (QWEN7, ParallelSizes(6, tensor=4), "6 training ranks cannot be divided by .* 4 x 1 x 1 = 4"),
        (
            QWEN7,
            ParallelSizes(8, tensor=8),
            "--tensor-model-parallel-size 8: the model has 28 .* 4 .*; use one of 1, 2, 4, 28",
        ),
        (QWEN7, ParallelSizes(7, tensor=7), "7: the model has 28 attention heads and 4 key/value heads"),
        (
            QWEN7,
            ParallelSizes(8, pipeline=8),
            "--pipeline-model-parallel-size 8: the model has 28 layers; use one of 1, 2, 4, 7, 14, 28",
        ),
        (QWEN7, ParallelSizes(8, expert=2), "--expert-model-parallel-size 2: the model has no experts"),
        (MOE, ParallelSizes(6, expert=6), "6: the model has 128 experts"),
        (MOE, ParallelSizes(6, expert=4), "--expert-model-parallel-size 4: does not divide the 6 ranks"),
        (QWEN7, ParallelSizes(8, sequence_parallel=True), "--sequence-parallel: needs --tensor-model-parallel-size"),
    ],
)
def test_sizes_that_do_not(model: ModelShape, sizes: ParallelSizes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_training(sizes, model)
    assert "\n" not in str(caught.value)


def test_sizes_of_an_engine() -> None:
    check_engine("servers.judge", 2, 1, QWEN7)
    with pytest.raises(ValueError, match="servers.judge: tensor parallel size 3: the model has 28"):
        check_engine("servers.judge", 3, 1, QWEN7)
    with pytest.raises(ValueError, match="pipeline parallel size 29: the model has only 28 layers"):
        check_engine("servers.judge", 1, 29, QWEN7)


def test_sizes_are_named_when_above_one() -> None:
    assert ParallelSizes(16, tensor=2, context=2).describe() == "TP 2, CP 2, DP 4"
