"""Shared by the converter tests: a tiny model of every family on disk, and the Megatron model for it.

The Megatron model is built from megatron-core's own local layers, so that these tests depend on names and shapes alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

VOCAB = 106  # no multiple of anything, so that it needs padding
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, dtype="float32",
)  # fmt: skip
MOE = dict(
    moe_intermediate_size=24,
    num_experts=4,
    num_experts_per_tok=2,
    decoder_sparse_step=1,
    norm_topk_prob=True,
    head_dim=8,
)
# name -> (class, what differs from SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2.5-untied": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 12}),
    "qwen3-moe": ("Qwen3Moe", {"tie_word_embeddings": False, **MOE}),
    "llama": ("Llama", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "llama-tied-bf16": ("Llama", {"tie_word_embeddings": True, "dtype": "bfloat16"}),
}


def save_family(folder: Path, family: str, shard_size: str = "5GB") -> Path:
    """A random model of the family in Hugging Face format, with a stand-in tokenizer file."""
    import transformers

    kind, extra = FAMILIES[family]
    torch.manual_seed(len(family))
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **extra})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):  # at their start all equal, which would hide a mistake
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    model.to(getattr(torch, str(extra.get("dtype", "float32")))).save_pretrained(folder, max_shard_size=shard_size)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    return tensors


def assert_same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Same names, dtypes and bits."""
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def start_megatron(tp: int = 1, pp: int = 1, ep: int = 1) -> None:
    """Megatron's groups on gloo, with these sizes. Experts are cut by tensor parallelism only when they are not spread."""
    import torch.distributed as dist

    from slime.backends.megatron_utils.cpu_standin import install

    install()
    from megatron.core import parallel_state

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    etp = tp if ep == 1 else 1
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)


def megatron_model(folder: Path, tp: int = 1, pp: int = 1, ep: int = 1) -> list[torch.nn.Module]:
    """This rank's part of the model, with random weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime.backends.common.hf_weights import read_config
    from slime.backends.megatron_utils.transformer_config import read_shape

    shape, config = read_shape(folder), read_config(folder)
    dtype = getattr(torch, config["dtype"])
    moe = dict(
        num_moe_experts=shape.num_experts, moe_router_topk=2, moe_ffn_hidden_size=config["moe_intermediate_size"],
    ) if shape.num_experts else {}  # fmt: skip
    sizes = TransformerConfig(
        num_layers=shape.num_layers, hidden_size=shape.hidden_size, num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups, kv_channels=shape.kv_channels, ffn_hidden_size=shape.ffn_hidden_size,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias, qk_layernorm=shape.qk_layernorm, normalization="RMSNorm", use_cpu_initialization=True,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, params_dtype=dtype, pipeline_dtype=dtype, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp, expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp if ep == 1 else 1, **moe,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        shape.num_experts or None, qk_layernorm=shape.qk_layernorm, normalization="RMSNorm"
    )
    model = GPTModel(
        sizes, spec, vocab_size=-(-shape.vocab_size // (16 * tp)) * 16 * tp, max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not shape.untied, position_embedding_type="rope",
    )  # fmt: skip
    return [model.to(dtype)]


def run_tool(name: str, *flags: Any) -> int:
    """`tools/<name>.py` in this process; its exit code."""
    import runpy
    import sys

    path = Path(__file__).resolve().parent.parent / "tools" / f"{name}.py"
    before = sys.argv
    sys.argv = [str(path), *map(str, flags)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def rewrite_shard(path: Path, more: dict[str, torch.Tensor]) -> None:
    """Add tensors to a safetensors file."""
    from safetensors.torch import load_file, save_file

    tensors = {**load_file(path), **more}
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


def fsdp_state(folder: Path) -> dict[str, torch.Tensor]:
    """What the FSDP backend stores of a model: its state under the names in memory, of tied weights only one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {name: value for name, value in model.state_dict().items() if name not in tied}
