"""How the ranks of a model are divided, and which divisions a model allows.

Input: a `ModelShape` and the sizes of tensor, pipeline, context and expert parallelism. Invariant: what `check` accepts,
Megatron-core (or, for engines, SGLang) can build; what it refuses is named with the nearest sizes that work.
Left out: the layers of uneven pipeline stages, virtual stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slime.utils.model_shape import ModelShape

# Sizes that a message offers.
LARGEST_NAMED = 64


@dataclass(frozen=True)
class ParallelSizes:
    """`world` ranks = data x tensor x pipeline x context; experts divide the data, context and tensor ranks anew."""

    world: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False

    @property
    def data(self) -> int:
        return self.world // (self.tensor * self.pipeline * self.context)

    def describe(self) -> str:
        """`TP 2, PP 2, DP 4`: the sizes above one, and data parallelism."""
        named = {"TP": self.tensor, "PP": self.pipeline, "CP": self.context, "EP": self.expert}
        parts = [f"{name} {size}" for name, size in named.items() if size > 1]
        return ", ".join([*parts, f"DP {self.data}"])


def check_training(sizes: ParallelSizes, shape: ModelShape, even_stages: bool = True) -> None:
    """Raises ValueError naming the flag, its value and what would work. `even_stages`: all have as many layers."""
    model = sizes.tensor * sizes.pipeline * sizes.context
    if sizes.world % model:
        raise ValueError(
            f"{sizes.world} training ranks cannot be divided by tensor x pipeline x context = {sizes.tensor} x "
            f"{sizes.pipeline} x {sizes.context} = {model}; change --actor-num-nodes, --actor-num-gpus-per-node or a size"
        )
    _check_tensor("--tensor-model-parallel-size", sizes.tensor, shape)
    if even_stages:
        _check_divides("--pipeline-model-parallel-size", sizes.pipeline, shape.num_layers, "layers")
    if sizes.sequence_parallel and sizes.tensor == 1:
        raise ValueError("--sequence-parallel: needs --tensor-model-parallel-size above 1")
    _check_experts(sizes, shape)


def _check_experts(sizes: ParallelSizes, shape: ModelShape) -> None:
    flag = "--expert-model-parallel-size"
    if sizes.expert > 1 and not shape.num_experts:
        raise ValueError(f"{flag} {sizes.expert}: the model has no experts; leave it at 1")
    if shape.num_experts:
        _check_divides(flag, sizes.expert, shape.num_experts, "experts")
    ranks, group = sizes.world // sizes.pipeline, sizes.expert * sizes.expert_tensor
    if ranks % group:
        raise ValueError(f"{flag} {sizes.expert}: does not divide the {ranks} ranks of a pipeline stage")


def check_engine(where: str, tensor: int, pipeline: int, shape: ModelShape) -> None:
    """Sizes of one engine or server. Raises ValueError naming `where`."""
    _check_tensor(f"{where}: tensor parallel size", tensor, shape)
    if pipeline > shape.num_layers:
        raise ValueError(f"{where}: pipeline parallel size {pipeline}: the model has only {shape.num_layers} layers")


def _check_tensor(what: str, size: int, shape: ModelShape) -> None:
    heads, groups = shape.num_attention_heads, shape.num_query_groups

    def fits(candidate: int) -> bool:
        # A key/value head may be kept by several ranks.
        return heads % candidate == 0 and (groups % candidate == 0 or candidate % groups == 0)

    _require(what, size, fits, f"{heads} attention heads and {groups} key/value heads")


def _check_divides(what: str, size: int, count: int, things: str) -> None:
    _require(what, size, lambda candidate: count % candidate == 0, f"{count} {things}")


def _require(what: str, size: int, fits: Callable[[int], bool], things: str) -> None:
    if not fits(size):
        fitting = ", ".join(str(candidate) for candidate in range(1, LARGEST_NAMED + 1) if fits(candidate))
        raise ValueError(f"{what} {size}: the model has {things}; use one of {fitting}")
