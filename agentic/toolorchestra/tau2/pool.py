"""A small pool of processes for the official evaluators, which hold the interpreter for a second per episode.

Inputs: task and conversation as JSON. Invariants: at most one pool in a process, started with its first use; its
processes die with their owner; a broken or stuck pool is an `InfrastructureError`, and the next call starts a new one.
Leaves out: what is computed there (`scoring`).
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from tau2.data_model.message import Message
from tau2.data_model.tasks import Task

from agentic.common.errors import InfrastructureError
from agentic.toolorchestra.tau2.scoring import MESSAGES, PREMATURE, REGULAR_ENDS, TaskScore, score_json

PR_SET_PDEATHSIG = 1
TIMEOUT_S = 300.0
"""Wait for one evaluation in seconds, its place in the queue included."""
_LOCK = threading.Lock()
_POOL: ProcessPoolExecutor | None = None


async def score_in_pool(
    domain: str, task: Task, messages: Sequence[Message], termination: str, workers: int = 2
) -> TaskScore:
    """`scoring.official_score` in another process. `workers` counts when the pool starts.

    Raises:
        InfrastructureError: the pool broke (`tau2_pool_broken`) or took too long (`tau2_pool_timeout`).
    """
    if termination not in REGULAR_ENDS:
        return PREMATURE
    payload = domain, task.model_dump_json(), MESSAGES.dump_json(list(messages)).decode(), termination
    try:
        future = _pool(workers).submit(score_json, *payload)
        values = await asyncio.wait_for(asyncio.wrap_future(future), TIMEOUT_S)
    except BrokenProcessPool as error:
        close_pool()
        raise InfrastructureError("tau2_pool_broken", f"a process of the evaluation pool ended: {error}") from error
    except asyncio.TimeoutError as error:
        raise InfrastructureError("tau2_pool_timeout", f"no evaluation within {TIMEOUT_S:g} s") from error
    return TaskScore(**values)


def close_pool() -> None:
    """End the pool's processes; the next evaluation starts new ones. Does nothing without a pool."""
    global _POOL
    with _LOCK:
        pool, _POOL = _POOL, None
    if pool is not None:
        pool.shutdown(wait=True, cancel_futures=True)


def _pool(workers: int) -> ProcessPoolExecutor:
    global _POOL
    with _LOCK:
        if _POOL is None:
            # Not forked: the owner has threads, a running event loop and possibly an accelerator.
            context = multiprocessing.get_context("spawn")
            _POOL = ProcessPoolExecutor(workers, context, initializer=_die_with_owner, initargs=(os.getpid(),))
        return _POOL


def _die_with_owner(owner: int) -> None:
    """In a new process of the pool: an owner that is killed cannot tell it to end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        os._exit(1)
