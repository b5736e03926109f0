"""The fully asynchronous rollout: bound on staleness over random arrivals, conservation, abort, errors, a fake engine."""

from __future__ import annotations

import asyncio
import itertools
import queue
import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from helpers_rollout import fake_engine, rollout_args, save_tiny_tokenizer, write_jsonl

from slime.rollout import fully_async_rollout as fa
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.staleness import group_version, parse_version, take_within_bound
from slime.utils.http_utils import init_http_client
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample

HERE = __name__


def test_versions() -> None:
    assert [parse_version(v) for v in ("3", 4, "default", None)] == [3, 4, 0, 0]
    assert group_version([Sample(weight_versions=["3", "5"]), [Sample(weight_versions=["4"])]], 9) == 3
    assert group_version([Sample(weight_versions=["3"]), Sample()], 9) == 9


def simulate(rng: random.Random) -> None:
    """One random interleaving of arrivals, version changes and consumption; checks bound and conservation."""
    bound, batch = rng.randrange(3), rng.randrange(1, 4)
    finished: queue.Queue[Any] = queue.Queue()
    versions: dict[int, int] = {}
    numbers = itertools.count()
    waiting: set[int] = set()
    consumed: list[int] = []
    current = 0
    for _ in range(rng.randrange(5, 25)):
        event = rng.random()
        if event < 0.6:
            number = next(numbers)
            versions[number] = max(0, current - rng.randrange(3))  # generation may have begun under older weights
            finished.put((number, []))
            waiting.add(number)
        elif event < 0.8:
            current += 1
        else:
            before = set(waiting)
            taken = take_within_bound(finished, batch, lambda number, group: versions[number], current, bound)
            fresh, stale = [n for n, _ in taken.fresh], [n for n, _ in taken.stale]
            assert len(fresh) <= batch and all(current - versions[n] <= bound for n in fresh)
            assert all(current - versions[n] > bound for n in stale)
            assert set(fresh) | set(stale) <= before and not set(fresh) & set(stale)
            waiting -= {*fresh, *stale}
            consumed += fresh
            for number in stale:  # made again, under the current weights
                versions[number] = current
                finished.put((number, []))
                waiting.add(number)
            assert len(fresh) == batch or not before - {*fresh, *stale}, "stops early only when the queue is empty"
    assert finished.qsize() == len(waiting)
    assert len(consumed) == len(set(consumed)) and set(consumed) | waiting == set(versions)


def test_no_arrival_order_breaks_the_bound_or_loses_a_group() -> None:
    for seed in range(10_000):
        simulate(random.Random(seed))


# --- the worker without an engine -------------------------------------------------------------------------------------


class Source:
    def __init__(self) -> None:
        self.returned: list[Any] = []

    def add_samples(self, groups: list[Any]) -> None:
        self.returned += groups


def bare_worker() -> Any:
    worker = object.__new__(fa.AsyncRolloutWorker)
    worker.output_queue, worker.data_buffer = queue.Queue(), Source()
    return worker


def done_task(group: Any) -> Any:
    return SimpleNamespace(cancelled=lambda: False, exception=lambda: None, result=lambda: group)


def sample(index: int, status: Sample.Status = Sample.Status.COMPLETED, **fields: Any) -> Sample:
    return Sample(index=index, group_index=index // 2, status=status, tokens=[1, 2], response_length=1, **fields)


def test_surplus_stays() -> None:
    worker = bare_worker()
    for number in range(10):
        worker._make_done_cb(number)(done_task([sample(number, weight_versions=["1"])]))
    assert [number for number, _ in worker.get_completed_groups(4)] == [0, 1, 2, 3]
    assert worker.queue_size() == 6 and worker.version == 1
    assert len(worker.get_completed_groups()) == 6


@pytest.mark.parametrize("nested", [False, True])
def test_an_aborted_leaf_sends_the_group_back(nested: bool) -> None:
    worker = bare_worker()
    aborted = sample(1, Sample.Status.ABORTED)
    worker._make_done_cb(0)(done_task([sample(0), [sample(1), aborted] if nested else aborted]))
    assert worker.queue_size() == 0
    (group,) = worker.data_buffer.returned
    assert len(group) == 2 and group[0].tokens == [1, 2]
    # A cut response goes on; a cut fan-out starts over from its prompt.
    assert isinstance(group[1], Sample) and group[1].tokens == ([] if nested else [1, 2])


def test_stale_groups_are_made_again_from_their_prompts() -> None:
    worker = bare_worker()
    worker.max_staleness = 1
    worker._make_done_cb(0)(done_task([sample(0, weight_versions=["1"], reward=1.0, label="x")]))
    worker._make_done_cb(1)(done_task([sample(2, weight_versions=["3"])]))
    assert [number for number, _ in worker.get_completed_groups(2)] == [1]
    ((again,),) = worker.data_buffer.returned
    assert (again.tokens, again.weight_versions, again.reward, again.status) == ([], [], None, Sample.Status.PENDING)
    assert (again.index, again.label) == (0, "x")


def test_a_failed_task_ends_the_rollout_that_waits() -> None:
    worker = bare_worker()
    task = SimpleNamespace(cancelled=lambda: False, exception=lambda: KeyError("bug in the hook"))
    worker._make_done_cb(0)(task)
    with pytest.raises(RuntimeError) as caught:
        worker.get_completed_groups()
    assert isinstance(caught.value.__cause__, KeyError)


# --- whole rollouts ---------------------------------------------------------------------------------------------------

BUSY = {"now": 0, "most": 0}


async def counting_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    BUSY["now"] += 1
    BUSY["most"] = max(BUSY["most"], BUSY["now"])
    await asyncio.sleep(0.01)
    BUSY["now"] -= 1
    sample.tokens, sample.response_length, sample.reward = [1, 2], 1, 1.0
    sample.rollout_log_probs, sample.status, sample.weight_versions = [-1.0], Sample.Status.COMPLETED, ["7"]
    return sample


@pytest.fixture
def args(tmp_path: Any) -> Any:
    SingletonMeta.clear_instances()
    BUSY.update(now=0, most=0)
    data = write_jsonl(tmp_path / "d.jsonl", [{"prompt": f"p{i}"} for i in range(30)])
    with fake_engine() as engine:
        args = rollout_args(
            save_tiny_tokenizer(tmp_path / "tok"),
            prompt_data=data,
            label_key=None,
            sglang_router_port=engine.port,
            custom_generate_function_path=f"{HERE}.counting_generate",
            rollout_max_staleness=1,
        )
        init_http_client(args)
        yield args
        fa.stop_global_worker()
    SingletonMeta.clear_instances()


def test_rollouts_follow_each_other_without_loss_or_repetition(args: Any) -> None:
    source = RolloutDataSourceWithBuffer(args)
    outputs = [fa.generate_rollout_fully_async(args, i, source) for i in range(4)]
    seen = [s.index for output in outputs for group in output.samples for s in group]
    assert len(seen) == 16 == len(set(seen))
    assert all(len(output.samples) == args.rollout_batch_size for output in outputs)
    assert all(s == sorted(s) for s in ([g[0].index for g in o.samples] for o in outputs))
    assert outputs[-1].metrics["rollout/fully_async/staleness_max"] == 0
    # Two versions' worth of groups at most, of two samples each.
    assert BUSY["most"] <= 2 * args.rollout_batch_size * args.n_samples_per_prompt
    fa.stop_global_worker()
    assert not [t for t in threading.enumerate() if t.name == "fully-async-rollout"]


def test_stop_returns_what_is_in_flight(args: Any) -> None:
    source = RolloutDataSourceWithBuffer(args)
    worker = fa.AsyncRolloutWorker(args, source, concurrency=2)
    worker.start()
    deadline = time.monotonic() + 10
    while not BUSY["now"] and time.monotonic() < deadline:
        time.sleep(0.002)
    worker.stop()
    served = source.sample_group_index
    assert served == worker.queue_size() + source.get_buffer_length()


def test_there_is_no_evaluation(args: Any) -> None:
    with pytest.raises(ValueError, match="--eval-function-path"):
        fa.generate_rollout_fully_async(args, 0, None, evaluation=True)
