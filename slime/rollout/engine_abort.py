"""Makes the engines behind a router drop everything they are working on.

Input: addresses of the engines. Invariants: every step has a bound, and a server that fails or does not answer is
logged and passed over, because an abort must not stop a run. Left out: the tasks that wait for the requests.
"""

from __future__ import annotations

import asyncio
import logging
import time

import httpx

from slime.utils.http_utils import get, post

logger = logging.getLogger(__name__)

ABORT_INTERVAL_S = 0.5
DRAIN_TIMEOUT_S = 60.0  # how long the engines may take to become idle


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


async def abort_until_idle(urls: list[str]) -> None:
    """Repeats the abort until no engine reports a request, at most `DRAIN_TIMEOUT_S` seconds."""
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    while True:
        await abort_requests(urls)
        busy = sum(await asyncio.gather(*(_num_requests(url) for url in urls)))
        if busy == 0:
            return
        if time.monotonic() > deadline:
            logger.warning("%d requests still run %.0f s after their abort", busy, DRAIN_TIMEOUT_S)
            return
        await asyncio.sleep(ABORT_INTERVAL_S)


async def _num_requests(url: str) -> int:
    """Requests the engine still works on; 0 when it does not say."""
    try:
        loads = await get(f"{url}/v1/loads?include=core")
        return sum(load.get("num_running_reqs", 0) + load.get("num_waiting_reqs", 0) for load in loads["loads"])
    except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
        logger.warning("cannot read the load of %s: %r", url, error)
        return 0
