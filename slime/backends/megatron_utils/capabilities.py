"""What the Megatron back end can do. An option that would be ignored is refused, with the reason and the way out.

Pure: reads the parsed arguments and `config.json` of the model only; nothing of megatron-core.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.backends.megatron_utils.transformer_config import read_text_config, rotary_of
from slime.utils.model_shape import SIZE_KEYS, ModelShape, shape_of_config

# flag name -> values that this back end honours
_REFUSED: dict[str, tuple[Any, ...]] = {
    "attn_implementation": (None,),
    "optimizer": ("adam",),
    "keep_old_actor": (False,),
    "lora_rank": (None,),
    "lora_alpha": (None,),
    "lora_dropout": (0.0,),
    "lora_target_modules": (None,),
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_supported(args: Namespace) -> None:
    """Raise `ValueError` naming the first flag that this back end cannot honour."""
    for name, allowed in _REFUSED.items():
        value = getattr(args, name, allowed[0])
        if value not in allowed:
            raise ValueError(f"{_flag(name)}={value} is not available with --train-backend megatron; remove it")
    budget = getattr(args, "log_probs_max_tokens_per_gpu", None)
    if budget not in (None, args.max_tokens_per_gpu):
        raise ValueError(
            f"--log-probs-max-tokens-per-gpu={budget} is not available with --train-backend megatron: forward passes use "
            f"the micro-batches of the training steps (--max-tokens-per-gpu {args.max_tokens_per_gpu}); remove it"
        )
    if getattr(args, "rollout_top_p", 1.0) != 1.0:
        raise ValueError(
            f"--rollout-top-p={args.rollout_top_p}: replay of the nucleus is not available with --train-backend megatron, "
            "so trainer and engine log-probs would differ; use --rollout-top-p 1.0"
        )
    if args.loss_type == "custom_loss" and args.context_parallel_size > 1:
        raise ValueError(
            "--loss-type custom_loss: its logits are those of whole rows, which no rank has with "
            f"--context-parallel-size {args.context_parallel_size}; use 1"
        )


def check_model(args: Namespace, role: str = "actor") -> None:
    """What the flags say of the model and how they cut it. Raises ValueError, or AssertionError for contradictions of its config."""
    config = read_text_config(args.hf_checkpoint)
    check_model_flags(args, config, role)
    _check_parallel_sizes(args, shape_of_config(config, args.hf_checkpoint))


def check_model_flags(args: Namespace, config: dict[str, Any], role: str = "actor") -> None:
    """Raise AssertionError naming every size or switch of the command line that the model does not have.

    The head of the critic is its own, whatever the model's is.
    """
    where = f"--hf-checkpoint {args.hf_checkpoint}"
    shape, rotary = shape_of_config(config, where), rotary_of(config, where)
    known: dict[str, Any] = {name: getattr(shape, name) for name in SIZE_KEYS}
    known |= {"norm_epsilon": config.get("rms_norm_eps"), "rotary_base": rotary.base}
    known["rope_scaling_factor"] = rotary.scaling
    wrong = [
        f"{_flag(name)} {given} (it is {found})"
        for name, found in known.items()
        if (given := getattr(args, name, None)) is not None and found is not None and given != found
    ]
    facts = {
        "group_query_attention": True,
        "disable_bias_linear": True,
        "swiglu": True,
        "use_rotary_position_embeddings": True,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_layernorm,
        "use_rope_scaling": rotary.scaling is not None,
        "untie_embeddings_and_output_weights": shape.untied or role == "critic",
    }
    wrong += [f"{_flag(name)} (it has not)" for name, true in facts.items() if getattr(args, name, False) and not true]
    assert not wrong, f"{where} is another model than the flags say: {', '.join(wrong)}"


def _check_parallel_sizes(args: Namespace, shape: ModelShape) -> None:
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    heads, groups, layers = shape.num_attention_heads, shape.num_query_groups, shape.num_layers
    if heads % tensor or (groups % tensor and tensor % groups):
        raise ValueError(
            f"--tensor-model-parallel-size {tensor}: cannot cut {heads} attention heads and {groups} key/value heads"
        )
    _check_ranks(args)
    uneven = args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers
    if layers % pipeline and not uneven:
        raise ValueError(
            f"--pipeline-model-parallel-size {pipeline}: does not divide {layers} layers; choose another, or give "
            "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
        )
    if args.sequence_parallel and tensor == 1:
        raise ValueError("--sequence-parallel: needs --tensor-model-parallel-size above 1")
    _check_experts(args, shape.num_experts)


def _check_ranks(args: Namespace) -> None:
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    ranks = getattr(args, "actor_num_nodes", 1) * getattr(args, "actor_num_gpus_per_node", model)
    if ranks % model:
        raise ValueError(
            f"{ranks} training ranks (--actor-num-nodes x --actor-num-gpus-per-node) are no multiple of tensor x pipeline x "
            f"context parallel sizes = {model}"
        )


def _check_experts(args: Namespace, experts: int) -> None:
    size = args.expert_model_parallel_size
    if size > 1 and (not experts or experts % size):
        raise ValueError(f"--expert-model-parallel-size {size}: does not divide the model's {experts} experts")
    if experts and args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise ValueError(
            "--tensor-model-parallel-size above 1 with a mixture of experts: needs --sequence-parallel (megatron-core)"
        )
