"""HTTP client for the engines, and host and port helpers.

Invariants:
  * `init_http_client(args)` comes first; it fixes the number of simultaneous requests per event loop:
    `sglang_server_concurrency` x engines. This connection limit is the limit around the model call.
  * One client per running event loop, so training, evaluation and background loops can all post.
  * Requests that must overtake waiting generations (`/abort_request`, every GET) use connections of their own and have
    a deadline. A generation has none: the caller bounds it with `asyncio.wait_for` or by cancelling.
Leaves out: spreading posts over Ray actors, and routers that end with their owner (`slime/backends/sglang_utils`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import multiprocessing
import os
import random
import socket
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson

from slime.utils.misc import get_free_port

logger = logging.getLogger(__name__)

_RETRYABLE_CLIENT_ERRORS = (408, 429)
_FIRST_DELAY_S, _MAX_DELAY_S = 0.05, 1.0
_CONTROL_TIMEOUT_S = 60.0
_CONTROL_CONNECTIONS = 64
_MAX_BODY_IN_ERROR = 2000

_max_connections: int | None = None
_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bool, httpx.AsyncClient]]
_clients = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def get_rollout_num_engines(args: Any) -> int:
    """Number of engines: `args.rollout_num_engines` if set, else GPUs / GPUs per engine; 0 GPUs give 0."""
    explicit = getattr(args, "rollout_num_engines", None)
    if explicit is not None:
        return int(explicit)
    if not args.rollout_num_gpus:
        return 0
    return max(1, args.rollout_num_gpus // args.rollout_num_gpus_per_engine)


def init_http_client(args: Any) -> None:
    """Set the connection limit from `args`; without engines this does nothing and `post` stays unavailable."""
    global _max_connections
    num_engines = get_rollout_num_engines(args)
    if num_engines == 0:
        return
    with _lock:
        _max_connections = args.sglang_server_concurrency * num_engines
        # Clients made under an older limit would keep it; the loops they belong to simply make new ones.
        _clients.clear()


def _client(control: bool) -> httpx.AsyncClient:
    loop = asyncio.get_running_loop()
    with _lock:
        clients = _clients.setdefault(loop, {})
        if control not in clients:
            clients[control] = _make_client(control)
        return clients[control]


def _make_client(control: bool) -> httpx.AsyncClient:
    if control:
        limits = httpx.Limits(max_connections=_CONTROL_CONNECTIONS)
        return httpx.AsyncClient(limits=limits, timeout=_CONTROL_TIMEOUT_S, trust_env=False)
    if _max_connections is None:
        raise RuntimeError(
            "HTTP client is not set up: call init_http_client(args) first (it needs at least one engine)"
        )
    limits = httpx.Limits(max_connections=_max_connections, max_keepalive_connections=_max_connections)
    return httpx.AsyncClient(limits=limits, timeout=None, trust_env=False)


async def post(url: str, payload: Any, max_retries: int = 60, headers: dict[str, str] | None = None) -> Any:
    """POST `payload` as JSON and return the decoded JSON answer (or the raw text when it is no JSON).

    Makes at most `max_retries` attempts (at least one) with jittered exponential back-off of at most 1 s between them.
    Raises the last `httpx.HTTPError`. A 4xx answer other than 408 and 429 cannot get better and is raised at once, with
    the server's explanation in the message.
    """
    content = orjson.dumps(payload or {}, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    headers = {"Content-Type": "application/json", **(headers or {})}
    client = _client(control=httpx.URL(url).path.endswith("/abort_request"))
    attempts = max(1, max_retries)
    for attempt in range(1, attempts + 1):
        try:
            response = await client.post(url, content=content, headers=headers)
            _raise_for_status(response)
            return _decode(response)
        except httpx.HTTPError as error:
            if attempt == attempts or not _is_retryable(error):
                raise
            logger.warning("POST %s, attempt %d of %d: %s: %s", url, attempt, attempts, type(error).__name__, error)
        await asyncio.sleep(_back_off(attempt))
    raise AssertionError("unreachable")


async def stream_lines(url: str, payload: Any, headers: dict[str, str] | None = None) -> AsyncIterator[str]:
    """POST `payload` once and yield the answer's lines as they arrive. Raises `httpx.HTTPError`; no retry."""
    content = orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    headers = {"Content-Type": "application/json", **(headers or {})}
    async with _client(control=False).stream("POST", url, content=content, headers=headers) as response:
        if not response.is_success:
            await response.aread()
            _raise_for_status(response)
        async for line in response.aiter_lines():
            yield line


async def get(url: str) -> Any:
    """GET `url` once and return the decoded JSON. Raises `httpx.HTTPError`, or ValueError when it is no JSON."""
    response = await _client(control=True).get(url)
    _raise_for_status(response)
    return orjson.loads(response.content)


def _raise_for_status(response: httpx.Response) -> None:
    if response.is_success:
        return
    request = response.request
    body = response.text[:_MAX_BODY_IN_ERROR]
    message = f"{request.method} {request.url} answered {response.status_code}: {body}"
    raise httpx.HTTPStatusError(message, request=request, response=response)


def _is_retryable(error: httpx.HTTPError) -> bool:
    if not isinstance(error, httpx.HTTPStatusError):
        return True
    status = error.response.status_code
    return status >= 500 or status in _RETRYABLE_CLIENT_ERRORS


def _decode(response: httpx.Response) -> Any:
    try:
        return orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return response.text


def _back_off(attempt: int) -> float:
    """Seconds before attempt `attempt + 1`; jitter keeps many clients from knocking in step."""
    return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** min(attempt, 10)) * random.uniform(0.5, 1.0)


def is_port_available(port: int) -> bool:
    """True when nothing on this machine listens on TCP `port` and it can be bound."""
    try:
        return get_free_port(port) == port
    except RuntimeError:
        return False


def find_available_port(base_port: int) -> int:
    """First available port at or above `base_port`. Raises RuntimeError when there is none."""
    return get_free_port(base_port)


def get_host_info() -> tuple[str, str]:
    """(hostname, IP under which other nodes reach this host).

    `SLIME_HOST_IP` wins; `SLIME_PREFER_IPV6=1` looks for an IPv6 address first. A host without a network answers with
    its loopback address.
    """
    hostname = socket.gethostname()
    if os.environ.get("SLIME_HOST_IP"):
        return hostname, os.environ["SLIME_HOST_IP"]
    v4, v6 = (socket.AF_INET, "192.0.2.1", "127.0.0.1"), (socket.AF_INET6, "2001:db8::1", "::1")
    families = (v6, v4) if os.environ.get("SLIME_PREFER_IPV6") == "1" else (v4, v6)
    for family, probe, loopback in families:
        address = _route_source(family, probe)
        if address is not None and address != loopback:
            return hostname, address
    return hostname, families[0][2]


def run_router(args: Any) -> None:
    """Run sglang-router in this process until it ends; `args` is a `RouterArgs`. For a process of one's own.

    Raises RuntimeError when it cannot start, whatever the reason, and when it ends.
    """
    from sglang_router.launch_router import launch_router

    try:
        router = launch_router(args)
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        raise RuntimeError(f"the router cannot start: {error}") from error
    if router is None:
        raise RuntimeError("the router ended")


def terminate_process(process: multiprocessing.Process, timeout: float = 1.0) -> None:
    """End a process: politely, and when it is still there after `timeout` seconds, by force. Does nothing when it ended."""
    if not process.is_alive():
        return
    process.terminate()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()


def _route_source(family: socket.AddressFamily, probe: str) -> str | None:
    """Source address of the route to `probe` (a documentation address; connecting UDP sends nothing)."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((probe, 9))
            return str(sock.getsockname()[0])
    except OSError:
        return None


def _wrap_ipv6(host: str) -> str:
    """`host` ready for a URL: an IPv6 address gets brackets, everything else stays."""
    try:
        return f"[{ipaddress.IPv6Address(host.strip('[]'))}]"
    except ValueError:
        return host
