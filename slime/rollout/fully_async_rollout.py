"""Rollout function that never stops generating: a background worker keeps groups in flight between the rollouts.

`--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async`, usually with `train_async.py`.
A rollout takes the next `rollout_batch_size` finished groups; surplus waits for the next one.

Invariants: a group with an aborted leaf goes back to the data source and goes on later; with
`--rollout-max-staleness N` no group is handed out whose oldest token is more than N weight versions behind the engines
(`staleness.py`), and stale groups are generated again; new work is admitted only while what is in flight and waiting
can still be consumed; an error of a hook ends the rollout that waits for it. Left out: evaluation (use
`--eval-function-path`); what `train_async.py` adds (it trains one rollout behind, so one version more); groups in flight
or waiting when a run ends are not in its checkpoint.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from slime.rollout.base_types import RolloutFnTrainOutput, iter_leaves
from slime.rollout.filter_hub.base_types import MetricGatherer, call_dynamic_filter
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.rollout.sglang_rollout import GenerateState, apply_group_hooks, generate_and_rm_group, get_model_url
from slime.rollout.staleness import Finished, Taken, group_version, parse_version, take_within_bound
from slime.utils.async_utils import run
from slime.utils.engine_abort import worker_urls
from slime.utils.http_utils import get, get_rollout_num_engines
from slime.utils.misc import load_function
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

POLL_S = 0.05
STOP_TIMEOUT_S = 30.0
WAIT_LOG_S = 60.0


@dataclass(frozen=True)
class Admission:
    """A group as it was when its generation began, and the weight version of that moment."""

    group: list[Any]
    version: int


class AsyncRolloutWorker:
    """Keeps up to `concurrency` groups of `data_buffer` in flight on a thread with its own event loop."""

    max_staleness: int | None = None
    version = 0  # newest weight version that is known
    error: BaseException | None = None
    requeued_aborted = 0
    _buffer_lock = threading.Lock()

    def __init__(self, args: Any, data_buffer: Any, concurrency: int = 10) -> None:
        self.args = args
        self.data_buffer = data_buffer
        self.concurrency = concurrency
        self.max_staleness = getattr(args, "rollout_max_staleness", None)
        # Unbounded, so that a finished task never blocks the loop; admission is what is limited.
        self.output_queue: queue.Queue[Finished] = queue.Queue()
        self._admissions: dict[int, Admission] = {}
        self._running = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts generating; does nothing when it already does."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._running.set()
        self._thread = threading.Thread(target=self._run_loop, name="fully-async-rollout", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cancels what is in flight and waits for the thread. Finished groups stay available."""
        self._running.clear()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
            if self._thread.is_alive():
                logger.warning("the rollout worker did not stop within %.0f s", STOP_TIMEOUT_S)
            self._thread = None

    def queue_size(self) -> int:
        """Finished groups that wait."""
        return self.output_queue.qsize()

    def get_completed_groups(self, limit: int | None = None) -> list[tuple[int, list[Sample]]]:
        """Up to `limit` finished groups as (running number, group); stale ones are given back to be made again.

        Raises RuntimeError when a generation task failed.
        """
        return self.take_completed(limit).fresh

    def take_completed(self, limit: int | None = None) -> Taken:
        """As `get_completed_groups`, with the groups that were too old (already given back)."""
        if self.error is not None:
            error, self.error = self.error, None
            raise RuntimeError("a generation task of the fully asynchronous rollout failed") from error
        taken = take_within_bound(self.output_queue, limit, self._version_of, self.version, self.max_staleness)
        if taken.stale:
            self._give_back([fresh_copy(self._admitted_group(*item)) for item in taken.stale])
        for number, _ in [*taken.fresh, *taken.stale]:
            self._admission_of(number, pop=True)
        return taken

    def observe_version(self, version: Any) -> None:
        """Notes a weight version that an engine reported."""
        self.version = max(self.version, parse_version(version))

    def _admission_of(self, number: int, pop: bool = False) -> Admission | None:
        known: dict[int, Admission] = getattr(self, "_admissions", {})
        return known.pop(number, None) if pop else known.get(number)

    def _version_of(self, number: int, group: list[Any]) -> int:
        admission = self._admission_of(number)
        return group_version(group, self.version if admission is None else admission.version)

    def _admitted_group(self, number: int, group: list[Any]) -> list[Any]:
        admission = self._admission_of(number)
        return group if admission is None else admission.group

    def _give_back(self, groups: list[list[Any]]) -> None:
        try:
            with self._buffer_lock:
                self.data_buffer.add_samples(groups)
        except (
            RuntimeError,
            AssertionError,
        ) as error:  # a data source that takes nothing back: the groups would be lost
            self.error = error

    # ---- the worker's thread ----

    def _run_loop(self) -> None:
        asyncio.run(self._keep_in_flight())

    async def _keep_in_flight(self) -> None:
        state = GenerateState(self.args)
        in_flight: set[asyncio.Task[Any]] = set()
        next_number = 0
        while self._running.is_set() and self.error is None:
            in_flight = {task for task in in_flight if not task.done()}
            for group in self._fetch(len(in_flight)):
                self._admissions[next_number] = Admission(copy.deepcopy(group), self.version)
                task = asyncio.create_task(
                    generate_and_rm_group(self.args, group, state.sampling_params.copy(), evaluation=False)
                )
                task.add_done_callback(self._make_done_cb(next_number))
                in_flight.add(task)
                next_number += 1
            await asyncio.sleep(POLL_S)
        for task in in_flight:
            task.cancel()
        await asyncio.gather(*in_flight, return_exceptions=True)

    def _fetch(self, in_flight: int) -> list[list[Sample]]:
        """Groups to start now: as many as places are free, none while too many finished ones wait."""
        room = self.concurrency - in_flight if self.queue_size() < self.concurrency else 0
        if self.max_staleness is not None:
            # What the window of versions can consume; more would only become stale.
            window = (self.max_staleness + 1) * self.args.rollout_batch_size
            room = min(room, window - in_flight - self.queue_size())
        if room <= 0:
            return []
        with self._buffer_lock:
            groups: list[list[Sample]] = self.data_buffer.get_samples(room)
        return groups

    def _make_done_cb(self, number: int) -> Callable[[Any], None]:
        """Callback of one group's task: queue the result, or give a group with an aborted leaf back."""

        def done(task: Any) -> None:
            if task.cancelled():
                admission = self._admission_of(number, pop=True)
                if admission is not None:
                    self._give_back([admission.group])
            elif task.exception() is not None:
                self.error = task.exception()
            else:
                self._finish(number, task.result())

        return done

    def _finish(self, number: int, group: list[Any]) -> None:
        leaves = list(iter_leaves(group))
        for sample in leaves:
            for version in sample.weight_versions:
                self.observe_version(version)
        if any(sample.status is Sample.Status.ABORTED for sample in leaves):
            self.requeued_aborted += 1
            self._give_back([resumable(group, self._admitted_group(number, group))])
            self._admission_of(number, pop=True)
        else:
            self.output_queue.put((number, group))


def resumable(group: list[Any], admitted: list[Any]) -> list[Any]:
    """The group as it can be submitted again: an aborted fan-out cannot go on from its pieces and starts over."""
    members = []
    for position, member in enumerate(group):
        if isinstance(member, list) and any(s.status is Sample.Status.ABORTED for s in iter_leaves(member)):
            member = fresh_copy(admitted)[position]
        members.append(member)
    return members


def fresh_copy(group: list[Any]) -> list[Sample]:
    """The group's prompts without anything that was generated, one sample per member."""
    return [_without_response(next(iter_leaves(member))) for member in group]


def _without_response(sample: Sample) -> Sample:
    blank = copy.deepcopy(sample)
    blank.tokens, blank.response, blank.response_length = [], "", 0
    blank.loss_mask = blank.rollout_log_probs = blank.teacher_log_probs = None
    blank.rollout_top_p_token_ids = blank.rollout_top_p_token_offsets = blank.rollout_routed_experts = None
    blank.weight_versions, blank.reward, blank.rollout_id, blank.train_metadata = [], None, None, None
    blank.status, blank.remove_sample, blank.non_generation_time = Sample.Status.PENDING, False, 0.0
    blank.spec_info, blank.prefix_cache_info = Sample.SpecInfo(), Sample.PrefixCacheInfo()
    blank.metadata.pop("start_rollout_id", None)
    return blank


_worker: AsyncRolloutWorker | None = None
_worker_lock = threading.Lock()


def get_global_worker(args: Any, data_buffer: Any) -> AsyncRolloutWorker:
    """The process's worker, started on first use and stopped at exit."""
    global _worker
    with _worker_lock:
        if _worker is None:
            limit = args.sglang_server_concurrency * get_rollout_num_engines(args)
            # The engines' limit counts samples, the worker groups of them.
            _worker = AsyncRolloutWorker(args, data_buffer, max(1, limit // args.n_samples_per_prompt))
            atexit.register(stop_global_worker)
        _worker.start()
        return _worker


def stop_global_worker() -> None:
    """Ends the worker; the next rollout starts a new one."""
    global _worker
    with _worker_lock:
        worker, _worker = _worker, None
    if worker is not None:
        worker.stop()


def generate_rollout_fully_async(
    args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """The next `rollout_batch_size` finished groups, sorted by sample index. Blocks until there are enough.

    Raises ValueError for evaluation, RuntimeError when a generation task failed.
    """
    if evaluation:
        raise ValueError(
            "the fully asynchronous rollout has no evaluation; "
            "set --eval-function-path slime.rollout.sglang_rollout.generate_rollout"
        )
    set_current_rollout_id(rollout_id)
    worker = get_global_worker(args, data_buffer)
    _refresh_version(args, worker)
    gatherer = MetricGatherer()
    kept, finished, stale = _collect(args, worker, gatherer)
    versions = [group_version(group, worker.version) for group in kept]
    metrics = {
        "rollout/fully_async/waiting_groups": worker.queue_size(),
        "rollout/fully_async/stale_groups": stale,
        "rollout/fully_async/aborted_groups": worker.requeued_aborted,
        "rollout/fully_async/staleness_max": worker.version - min(versions),
        "rollout/fully_async/staleness_mean": worker.version - sum(versions) / len(versions),
        **gatherer.collect(),
    }
    worker.requeued_aborted = 0
    apply_group_hooks(args, kept, finished, data_buffer.get_samples)
    return RolloutFnTrainOutput(samples=kept, metrics=metrics)


def _collect(
    args: Any, worker: AsyncRolloutWorker, gatherer: MetricGatherer
) -> tuple[list[list[Any]], list[list[Any]], int]:
    """(kept groups, all finished groups, number of stale ones)."""
    path = args.dynamic_sampling_filter_path
    dynamic_filter = load_function(path) if path else None
    kept: list[list[Any]] = []
    finished: list[list[Any]] = []
    stale = 0
    last_log = time.monotonic()
    while len(kept) < args.rollout_batch_size:
        taken = worker.take_completed(args.rollout_batch_size - len(kept))
        stale += len(taken.stale)
        for _, group in taken.fresh:
            finished.append(group)
            output = call_dynamic_filter(dynamic_filter, args, group)
            if output.keep:
                kept.append(group)
            else:
                gatherer.on_dynamic_filter_drop(output.reason)
        if not taken.fresh:
            time.sleep(POLL_S)
        if time.monotonic() - last_log > WAIT_LOG_S:
            logger.info("waiting for groups: %d of %d", len(kept), args.rollout_batch_size)
            last_log = time.monotonic()
    return sorted(kept, key=_first_index), finished, stale


def _first_index(group: list[Any]) -> int:
    return next((s.index for s in iter_leaves(group) if s.index is not None), -1)


def _refresh_version(args: Any, worker: AsyncRolloutWorker) -> None:
    """Asks the engines for their weight version; without an answer the newest one seen in samples counts."""

    async def newest() -> None:
        for url in await worker_urls(get_model_url(args, "default", "/workers")):
            try:
                worker.observe_version((await get(f"{url}/model_info")).get("weight_version"))
            except (httpx.HTTPError, OSError, ValueError) as error:
                logger.warning("%s does not tell its weight version: %r", url, error)

    run(newest())
