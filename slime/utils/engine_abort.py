"""Makes the engines behind a router drop everything they are working on.

Input: addresses of the engines. Invariants: every step has a bound, and a server that fails or does not answer is
logged and passed over, because an abort must not stop a run. Left out: the tasks that wait for the requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import httpx

from slime.utils.http_utils import get, post

logger = logging.getLogger(__name__)

ABORT_INTERVAL_S = 0.5
DRAIN_TIMEOUT_S = 60.0  # how long an engine may take to become idle

_TOTAL_KEYS = ("num_total_reqs", "num_reqs")
_PART_KEYS = ("num_running_reqs", "num_waiting_reqs")


async def worker_urls(workers_url: str) -> list[str]:
    """Addresses of the engines behind the router whose `/workers` URL is given; none when it does not answer."""
    try:
        workers = await get(workers_url)
    except (httpx.HTTPError, OSError, ValueError) as error:
        logger.warning("cannot list the engines to abort their requests: %r", error)
        return []
    return [worker["url"] for worker in workers["workers"]]


async def abort_requests(urls: list[str]) -> None:
    """Tells every engine once to abort all its requests."""
    calls = [post(f"{url}/abort_request", {"abort_all": True}, max_retries=1) for url in urls]
    for url, result in zip(urls, await asyncio.gather(*calls, return_exceptions=True), strict=True):
        if isinstance(result, BaseException):
            logger.warning("abort request to %s failed: %r", url, result)


async def abort_servers_until_idle(urls: list[str]) -> None:
    """Aborts at all engines at once, each until it is idle; see `abort_server_until_idle`."""
    await asyncio.gather(*(abort_server_until_idle(url) for url in urls))


async def abort_server_until_idle(url: str, retry_interval: float = ABORT_INTERVAL_S) -> None:
    """Repeats the abort until the engine reports no request, at most `DRAIN_TIMEOUT_S` seconds.

    A client may have had a request on its way, so once is not enough. `retry_interval` in seconds.
    """
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    while True:
        await abort_requests([url])
        busy = await _num_requests(url)
        if busy == 0:
            return
        if time.monotonic() > deadline:
            logger.warning("%d requests of %s still run %.0f s after their abort", busy, url, DRAIN_TIMEOUT_S)
            return
        await asyncio.sleep(retry_interval)


async def _num_requests(url: str) -> int:
    """Requests the engine still works on; 0 when it does not say."""
    try:
        return num_requests_from_load(await get(f"{url}/v1/loads?include=core"))
    except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
        logger.warning("cannot read the load of %s: %r", url, error)
        return 0


def num_requests_from_load(load: Any) -> int:
    """Requests running and waiting in an answer of `/v1/loads`: one rank, a list of ranks, or `{"loads": [...]}`.

    Raises ValueError for any other shape.
    """
    if isinstance(load, (list, tuple)):
        return sum(num_requests_from_load(rank) for rank in load)
    if isinstance(load, dict) and "loads" in load:
        return num_requests_from_load(load["loads"])
    if isinstance(load, dict):
        for total in _TOTAL_KEYS:
            if total in load:
                return int(load[total])
        if any(key in load for key in _PART_KEYS):
            return sum(int(load.get(key) or 0) for key in _PART_KEYS)
    raise ValueError(f"not a load report: {load!r:.200}")
