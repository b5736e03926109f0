"""Routing of experts, recorded in one pass and replayed in later ones, so that all passes of a step use the same experts.

One `RoutingReplay` per router. What a router does is chosen by ROUTING_REPLAY_STAGE: `fallthrough` (route as ever), `record`,
`replay_forward`, or `replay_backward` (the recomputation of an activation checkpoint). Nothing happens without ENABLE_ROUTING_REPLAY=1.

Invariants: forward and backward each read the recorded passes once, in order; replayed indices select the *current* scores, so
gradients reach the router. Left out: where routings of an engine come from, and how rows are cut into passes (the trainer).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch

STAGES = ("fallthrough", "record", "replay_forward", "replay_backward")

# A routing is [T, K] expert indices of T tokens, or a function that makes it when it is needed.
Routing = torch.Tensor | Callable[[], torch.Tensor]
ComputeTopk = Callable[..., tuple[torch.Tensor, torch.Tensor]]

_replay: RoutingReplay | None = None
_capturing: Any = None


class RoutingReplay:
    """The routings of one router: recorded once per pass, then read by a forward and a backward cursor."""

    all_replays: ClassVar[list[RoutingReplay]] = []
    _lazy_resources: ClassVar[list[Any]] = []
    _release_stage: ClassVar[str | None] = None

    def __init__(self) -> None:
        self.top_indices_list: list[Routing | None] = []
        self.forward_index = self.backward_index = 0
        self.all_replays.append(self)

    def record(self, top_indices: Routing) -> None:
        """Append one pass. A tensor is kept on the host; a function is called when the pass is read."""
        if isinstance(top_indices, torch.Tensor):
            host = torch.empty_like(top_indices, device="cpu", pin_memory=top_indices.is_cuda)
            top_indices = host.copy_(top_indices.detach())
        self.top_indices_list.append(top_indices)

    def pop_forward(self) -> torch.Tensor:
        """The next pass for the forward cursor. Raises IndexError when all were read."""
        self.forward_index += 1
        return self._read(self.forward_index - 1, "replay_forward")

    def pop_backward(self) -> torch.Tensor:
        """The next pass for the backward cursor. Raises IndexError when all were read."""
        self.backward_index += 1
        return self._read(self.backward_index - 1, "replay_backward")

    def _read(self, index: int, stage: str) -> torch.Tensor:
        if index >= len(self.top_indices_list):
            raise IndexError(f"{stage}: pass {index} was never recorded, only {len(self.top_indices_list)} were")
        routing = self.top_indices_list[index]
        if routing is None:
            raise IndexError(f"{stage}: pass {index} was released after {self._release_stage}")
        value = routing if isinstance(routing, torch.Tensor) else routing()
        if stage == self._release_stage:
            self.top_indices_list[index] = None
            self._release_resources_when_read()
        return value

    def clear(self) -> None:
        """Forget everything."""
        self.top_indices_list = []
        self.forward_index = self.backward_index = 0

    def clear_forward(self) -> None:
        """Let the forward cursor start again."""
        self.forward_index = 0

    @staticmethod
    def clear_all() -> None:
        """`clear` of every router; lazy resources are released."""
        for replay in RoutingReplay.all_replays:
            replay.clear()
        RoutingReplay._release_resources()

    @staticmethod
    def clear_all_forward() -> None:
        """`clear_forward` of every router."""
        for replay in RoutingReplay.all_replays:
            replay.clear_forward()

    @staticmethod
    def assert_all_consumed() -> None:
        """Raises AssertionError when a router did not read each of its passes forward."""
        for number, replay in enumerate(RoutingReplay.all_replays):
            recorded = len(replay.top_indices_list)
            assert replay.forward_index == recorded, (
                f"router {number} replayed {replay.forward_index} of {recorded} recorded passes: the passes of the two "
                "stages were cut differently"
            )

    @staticmethod
    def register_lazy_resource(resource: Any) -> None:
        """Something that the functions given to `record` read from; its `close()` is called once nothing is left to read."""
        RoutingReplay._lazy_resources.append(resource)

    @staticmethod
    def begin_lazy_pass(release_stage: str) -> None:
        """Free each routing when it is read in this stage, which is the last one to read it. Until `clear_all`."""
        if release_stage not in STAGES[2:]:
            raise ValueError(f"release stage {release_stage!r}: must be one of {STAGES[2:]}")
        RoutingReplay._release_stage = release_stage

    @staticmethod
    def _release_resources_when_read() -> None:
        if all(routing is None for replay in RoutingReplay.all_replays for routing in replay.top_indices_list):
            RoutingReplay._release_resources(keep_stage=True)

    @staticmethod
    def _release_resources(keep_stage: bool = False) -> None:
        resources, RoutingReplay._lazy_resources = RoutingReplay._lazy_resources, []
        for resource in resources:
            resource.close()
        if not keep_stage:
            RoutingReplay._release_stage = None


def set_routing_replay(replay: RoutingReplay | None) -> None:
    """The replay of the router that runs next."""
    global _replay
    _replay = replay


def stage() -> str:
    """The stage of this moment. Raises ValueError for a word that is none."""
    if os.environ.get("ENABLE_ROUTING_REPLAY", "0") != "1":
        return "fallthrough"
    value = os.environ.get("ROUTING_REPLAY_STAGE", "fallthrough")
    if value not in STAGES:
        raise ValueError(f"ROUTING_REPLAY_STAGE={value}: must be one of {STAGES}")
    return value


def get_routing_replay_compute_topk(old_compute_topk: ComputeTopk) -> ComputeTopk:
    """`old_compute_topk(scores, topk, ...) -> (probs, top_indices)`, recorded or replayed as the stage says.

    `scores`: [T, experts]. Raises ValueError when a replayed routing has another number of tokens or experts per token.
    """

    def compute_topk(scores: torch.Tensor, topk: int, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        now = stage()
        if now == "fallthrough" or _replay is None:
            probs, top_indices = old_compute_topk(scores, topk, *args, **kwargs)
        elif now == "record":
            probs, top_indices = old_compute_topk(scores, topk, *args, **kwargs)
            _replay.record(top_indices)
        else:
            popped = _replay.pop_forward() if now == "replay_forward" else _replay.pop_backward()
            if tuple(popped.shape) != (scores.shape[0], topk):
                raise ValueError(
                    f"{now}: routing {tuple(popped.shape)} for {scores.shape[0]} tokens of {topk} experts"
                )
            top_indices = popped.to(scores.device, torch.int64)
            probs = scores.gather(1, top_indices)
        if _capturing is not None:
            _capturing._ordered_topk = top_indices
        return probs, top_indices

    return compute_topk


def register_routing_replay(module: torch.nn.Module) -> None:
    """Give a router its replay: `module.routing_replay`, which is the current one while the module runs."""
    if os.environ.get("ENABLE_ROUTING_REPLAY", "0") != "1":
        return
    replay = RoutingReplay()
    module.routing_replay = replay  # type: ignore[assignment]
    module.register_forward_pre_hook(lambda *_: set_routing_replay(replay))
    module.register_forward_hook(lambda *_: set_routing_replay(None))


def register_ordered_topk_capture(module: torch.nn.Module) -> None:
    """Keep the experts of the module's last forward in the order of their scores, which a routing map loses."""

    def start(*_: Any) -> None:
        global _capturing
        _capturing = module

    def stop(*_: Any) -> None:
        global _capturing
        _capturing = None

    module.register_forward_pre_hook(start)
    module.register_forward_hook(stop)


def consume_ordered_topk(module: torch.nn.Module) -> torch.Tensor:
    """[T, K] experts of the module's last forward; they are forgotten. Raises RuntimeError when there are none."""
    captured = module.__dict__.pop("_ordered_topk", None)
    if captured is None:
        raise RuntimeError("no top-k was captured: call register_ordered_topk_capture(module) and run it first")
    return captured
