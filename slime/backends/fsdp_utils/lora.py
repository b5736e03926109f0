"""Low-rank adapters (`--lora-rank`): peft puts them into the policy, only they are trained.

The weights of the model stay as they were loaded and frozen; the same model without its adapters is therefore the reference, and no
second copy is held. Engines get the merged weights, W + alpha / rank * B A, under the names of the model: every transport and every
engine works as without adapters, and a merged layer costs the engine nothing per token (an adapter would cost it two more products,
and a scheme of its own for loading). A training checkpoint holds the adapters only.

Invariants: right after the start the merged weights are the loaded ones (B is 0); names of adapters never reach an engine or an
exported model; every rank starts from the same adapters. Left out: adapters of embeddings and of the output layer, variants of LoRA,
several adapters at once.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from slime.backends.fsdp_utils.distributed import whole_tensor

_NAME = "default"  # of the one adapter, as peft calls it
_BASE, _A, _B = ".base_layer.", f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"

State = dict[str, torch.Tensor]


class Adapter:
    """The adapters inside a model, `hf`, which peft changes in place and which keeps its class."""

    def __init__(self, args: Namespace, hf: PreTrainedModel) -> None:
        """Freezes the model and adds the adapters. Raises `ValueError` when `--lora-target-modules` fits no linear layer."""
        targets = args.lora_target_modules or "all-linear"
        alpha = 2 * args.lora_rank if args.lora_alpha is None else args.lora_alpha
        config = LoraConfig(r=args.lora_rank, lora_alpha=alpha, lora_dropout=args.lora_dropout, target_modules=targets)
        with torch.random.fork_rng():
            torch.manual_seed(args.seed)
            self._peft: PeftModel = get_peft_model(hf, config)
        self._layers = {name: part for name, part in hf.named_modules() if isinstance(part, LoraLayer)}
        for name, layer in self._layers.items():
            if not isinstance(layer.get_base_layer(), nn.Linear):
                raise ValueError(f"--lora-target-modules: {name} is no linear layer; name those of the decoder layers")

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the model is the one that was loaded. For passes without gradients; the parameters must be resharded."""
        trained = [
            p for layer in self._layers.values() for p in cast(nn.Module, layer).parameters() if p.requires_grad
        ]
        with self._peft.disable_adapter():
            # peft also freezes them meanwhile; FSDP would copy that into gathered parameters, which then stay frozen.
            for parameter in trained:
                parameter.requires_grad_(True)
            yield

    def select(self, state: State) -> State:
        """The adapters' part of a state dict of the model."""
        return {name: value for name, value in state.items() if name.endswith((_A, _B))}

    def iter_merged(self, state: State) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of the model with its adapters merged, from a state dict with sharded values. Collective."""
        for name, value in state.items():
            if name.endswith((_A, _B)):
                continue
            path, is_base, rest = name.partition(_BASE)
            whole = whole_tensor(value)
            if is_base and rest == "weight":
                whole = whole + self._delta(path, state).to(whole.dtype)
            yield (f"{path}.{rest}" if is_base else name), whole

    def _delta(self, path: str, state: State) -> torch.Tensor:
        low_rank = whole_tensor(state[path + _B]) @ whole_tensor(state[path + _A])
        return low_rank * self._layers[path].scaling[_NAME]

    def save(self, folder: Path, whole_state: State) -> None:
        """Write a folder that `peft.PeftModel.from_pretrained(base, folder)` loads. `whole_state`: `select`, gathered."""
        state = {f"base_model.model.{name}": value for name, value in whole_state.items()}
        self._peft.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)
