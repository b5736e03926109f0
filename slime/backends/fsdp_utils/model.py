"""The policy network: load a Hugging Face causal LM, wrap it, shard it with FSDP2.

Master weights are float32. With `train_dtype` bf16 FSDP's mixed-precision policy casts parameters for the forward and backward pass
and reduces gradients in float32. Each rank first reads the whole checkpoint into host memory, then keeps its shard.

Invariants: the output layer is used *inside* the root module's forward, where FSDP has gathered its weight (also when it is
tied to the embedding); a micro-batch without trained tokens still runs forward and backward, because every rank must take part in
the collectives; dropout is off, so that log-probs are a function of the weights; what leaves the model has the names and forms of
published checkpoints, as `save_pretrained` writes them, what a training checkpoint holds has those in memory.

Left out: models whose logits are not `hidden @ W.T (+ bias)`; they are refused.
"""

from __future__ import annotations

import logging
import re
from argparse import Namespace
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from slime.backends.common.packing import PackedBatch
from slime.backends.common.precision import train_dtype
from slime.backends.common.trainer import DEFAULT_CHUNK
from slime.backends.fsdp_utils.attention import ROW_WISE
from slime.backends.fsdp_utils.distributed import FSDPContext, whole_tensor
from slime.utils.logprobs import selected_log_probs_and_entropy

if TYPE_CHECKING:
    from slime.backends.fsdp_utils.lora import Adapter

logger = logging.getLogger(__name__)

# attributes of a HF config that change logits after the output layer
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
# start of the names of a layer's tensors
_LAYER = re.compile(r"^.*?\.\d+\.")


class PolicyModel(nn.Module):
    """A causal LM that returns log-probs and entropy of chosen tokens instead of logits."""

    adapter: Adapter | None = None

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    def _hidden(self, packed: PackedBatch) -> torch.Tensor:
        # no attention mask: restarting positions make it block diagonal; a mask of ones beside them would not
        body = cast(nn.Module, self.hf.base_model)
        output = body(input_ids=packed.input_ids_1T, position_ids=packed.position_ids_1T, use_cache=False)
        return output.last_hidden_state

    def model_state(self) -> dict[str, torch.Tensor]:
        """All weights under the names of the modules; of tied weights only the one that is stored."""
        tied = getattr(self.hf, "all_tied_weights_keys", None) or {}
        return {name: value for name, value in self.hf.state_dict().items() if name not in tied}

    def stored_state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds: `model_state`, of a model with adapters these alone."""
        return self.adapter.select(self.model_state()) if self.adapter else self.model_state()

    def forward(
        self,
        packed: PackedBatch,
        temperature: float = 1.0,
        chunk_size: int = DEFAULT_CHUNK,
        with_entropy: bool = False,
        full_logits: bool = False,
    ) -> Any:
        """(log_probs_N, entropy_N) in float32 at the trained tokens, of logits / temperature.

        Gradients flow through the entropy only with `with_entropy`. With `full_logits` the float32 logits [1, T, V]
        instead (custom losses only: they are large).
        """
        hidden_1TD = self._hidden(packed)
        head = cast(nn.Module, self.hf.get_output_embeddings())
        if full_logits:
            return head(hidden_1TD).float()
        weight, bias = cast(torch.Tensor, head.weight), cast("torch.Tensor | None", getattr(head, "bias", None))
        # index_select, not indexing: its backward sums in a fixed order, and works without any selected row
        hidden_ND = hidden_1TD[0].index_select(0, packed.select_N)
        return selected_log_probs_and_entropy(
            hidden_ND, weight, packed.targets_N, temperature, chunk_size, bias=bias, with_entropy=with_entropy
        )


def load_hf(args: Namespace, folder: Path) -> PreTrainedModel:
    """Read weights as float32. Raises `ValueError` for an architecture whose logits this back end would get wrong."""
    attention = args.attn_implementation or ("flash_attention_2" if args.use_gpu else ROW_WISE)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    for name in _LOGIT_TRANSFORMS:
        if getattr(hf.config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"{folder}: config.{name} is set; --train-backend fsdp does not know this output layer")
    _disable_dropout(hf)
    return hf


def _disable_dropout(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "attention_dropout", None), float):
            part.attention_dropout = 0.0  # type: ignore[assignment]


def _select_trainable(args: Namespace, module: nn.Module) -> None:
    only, frozen = args.only_train_params_name_list, args.freeze_params_name_list
    for name, parameter in module.named_parameters():
        if only:
            parameter.requires_grad_(any(re.search(pattern, name) for pattern in only))
        elif frozen and any(re.search(pattern, name) for pattern in frozen):
            parameter.requires_grad_(False)


def _decoder_layers(hf: PreTrainedModel) -> list[nn.Module]:
    names = set(hf._no_split_modules or ())
    layers = [module for module in hf.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(f"{type(hf).__name__} does not name its decoder layers (_no_split_modules); cannot shard it")
    return layers


def shard(args: Namespace, model: PolicyModel, context: FSDPContext) -> None:
    """Apply `fully_shard` to each decoder layer and to the root, in place."""
    dtype = train_dtype(args)
    low = dtype if dtype != torch.float32 else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for layer in _decoder_layers(model.hf):
        fully_shard(layer, mesh=context.mesh, mp_policy=policy)
    fully_shard(model, mesh=context.mesh, mp_policy=policy, reshard_after_forward=False)


def build_policy(args: Namespace, folder: Path, context: FSDPContext) -> PolicyModel:
    """The model to train: loaded, parameters chosen or adapters added, sharded, on the rank's device."""
    model = PolicyModel(load_trainable_hf(args, folder))
    if args.lora_rank is not None:
        from slime.backends.fsdp_utils.lora import Adapter  # peft takes seconds to import

        model.adapter = Adapter(args, model.hf)
    shard(args, model, context)
    return model.train()


def load_trainable_hf(args: Namespace, folder: Path) -> PreTrainedModel:
    """`load_hf` with gradient checkpointing and frozen parameters as the flags say."""
    hf = load_hf(args, folder)
    if args.gradient_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    _select_trainable(args, hf)
    return hf


def build_reference(args: Namespace, folder: Path, context: FSDPContext) -> PolicyModel:
    """A frozen, sharded copy for reference log-probs."""
    model = PolicyModel(load_hf(args, folder)).requires_grad_(False)
    shard(args, model, context)
    return model.eval()


def reshard(model: PolicyModel) -> None:
    """Drop the root's gathered parameters (kept after a forward pass), so that its parameters are DTensors again."""
    cast(FSDPModule, model).reshard()


@torch.no_grad()
def copy_weights(source: PolicyModel, target: PolicyModel) -> None:
    """Copy every local shard from one sharded model to another of the same shape and layout."""
    reshard(source)
    reshard(target)
    for new, old in zip(source.parameters(), target.parameters(), strict=True):
        old.copy_(new)


def sharded_state(model: PolicyModel) -> dict[str, torch.Tensor]:
    """`stored_state` with sharded values."""
    reshard(model)
    return model.stored_state()


@torch.no_grad()
def iter_full_tensors(model: PolicyModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in a published checkpoint, whole tensor) one after the other, adapters merged.

    Collective: all ranks must exhaust it together.
    """
    reshard(model)
    state = model.model_state()
    gathered = ((name, whole_tensor(value)) for name, value in state.items())
    whole = model.adapter.iter_merged(state) if model.adapter else gathered
    # transformers holds some weights in another form than checkpoints and engines do, such as all experts of a layer in one tensor.
    for _, layer in groupby(whole, key=lambda named: _LAYER.findall(named[0])[:1]):
        yield from revert_weight_conversion(model.hf, dict(layer)).items()
