"""Expert routings: recorded, replayed forward and backward, released."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from slime.utils import routing_replay
from slime.utils.routing_replay import RoutingReplay, consume_ordered_topk, register_ordered_topk_capture


def topk(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = torch.topk(scores, k, dim=1)
    return values, indices


class Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.compute_topk = routing_replay.get_routing_replay_compute_topk(topk)

    def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.compute_topk(scores, 2)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ENABLE_ROUTING_REPLAY", "1")
    monkeypatch.setattr(RoutingReplay, "all_replays", [])
    yield
    RoutingReplay.clear_all()


@pytest.fixture
def router() -> Router:
    made = Router()
    routing_replay.register_routing_replay(made)
    return made


def at(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    monkeypatch.setenv("ROUTING_REPLAY_STAGE", stage)


def test_replayed_passes_use_the_recorded_experts(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = [torch.rand(4, 6), torch.rand(3, 6)]
    at(monkeypatch, "record")
    recorded = [router(s)[1] for s in scores]
    other = [torch.rand(4, 6, requires_grad=True), torch.rand(3, 6, requires_grad=True)]
    for stage in ("replay_forward", "replay_backward"):
        at(monkeypatch, stage)
        for before, now in zip(recorded, other, strict=True):
            probs, indices = router(now)
            assert torch.equal(indices, before) and torch.equal(probs, now.gather(1, before))
            assert probs.requires_grad, "the current scores are what is trained"
    RoutingReplay.assert_all_consumed()
    with pytest.raises(IndexError, match="never recorded"):
        router(other[0])


def test_passes_cut_differently_are_noticed(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, "record")
    router(torch.rand(4, 6))
    with pytest.raises(AssertionError, match="0 of 1"):
        RoutingReplay.assert_all_consumed()
    at(monkeypatch, "replay_forward")
    with pytest.raises(ValueError, match="3 tokens"):
        router(torch.rand(3, 6))
    RoutingReplay.clear_all_forward()
    router(torch.rand(4, 6))


def test_nothing_happens_without_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_ROUTING_REPLAY", "0")
    at(monkeypatch, "record")
    router = Router()
    routing_replay.register_routing_replay(router)
    router(torch.rand(4, 6))
    assert not hasattr(router, "routing_replay") and not RoutingReplay.all_replays


def test_fallthrough_routes_by_the_scores(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, "fallthrough")
    scores = torch.rand(4, 6)
    assert torch.equal(router(scores)[1], topk(scores, 2)[1]) and not router.routing_replay.top_indices_list
    at(monkeypatch, "rewind")
    with pytest.raises(ValueError, match="ROUTING_REPLAY_STAGE=rewind"):
        router(scores)


def test_lazy_routings_are_freed_by_their_last_reader(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, made = [], []

    class Resource:
        def close(self) -> None:
            closed.append(True)

    def read() -> torch.Tensor:
        made.append(True)
        return torch.tensor([[1, 0]])

    router.routing_replay.record(read)
    RoutingReplay.register_lazy_resource(Resource())
    RoutingReplay.begin_lazy_pass("replay_backward")
    for stage in ("replay_forward", "replay_backward"):
        assert not closed
        at(monkeypatch, stage)
        router(torch.rand(1, 6))
    assert len(made) == 2 and closed == [True]
    router.routing_replay.backward_index = 0
    with pytest.raises(IndexError, match="released"):
        router(torch.rand(1, 6))
    with pytest.raises(ValueError, match="record"):
        RoutingReplay.begin_lazy_pass("record")


def test_order_of_the_experts_is_captured() -> None:
    router = Router()
    register_ordered_topk_capture(router)
    scores = torch.tensor([[0.1, 0.9, 0.5]])
    router(scores)
    assert consume_ordered_topk(router).tolist() == [[1, 2]]
    with pytest.raises(RuntimeError, match="no top-k"):
        consume_ordered_topk(router)
