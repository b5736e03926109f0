"""sglang-router in a process of its own, and the calls that register workers with it.

Invariants: `add_worker` returns only when the router will send requests to the worker. Circuit breaker and health checks
of the router are off by default: a worker that is paused for a weight update would count as dead, and whether an engine
lives is decided by its owner. The metrics listener is bound to the router's own host, on a free port.

Leaves out: routing policy mathematics (that is the router's).
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.errors import EngineError
from slime.backends.sglang_utils.owned_process import OwnedProcess, base_url, check_port_free, option_flags
from slime.backends.sglang_utils.server_control import is_ok, request

MAIN = Path(__file__).with_name("router_main.py")
FORCED_OPTIONS = ("host", "port", "prometheus-host")
DEFAULT_OPTIONS: dict[str, Any] = {
    "policy": "cache_aware",
    "request-timeout-secs": 14400,
    "log-level": "warn",
    "disable-circuit-breaker": True,
    "disable-health-check": True,
    "shutdown-grace-period-secs": 1,
}


def _free_port(host: str) -> int:
    with socket.create_server(
        (host.strip("[]"), 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
    ) as probe:
        return int(probe.getsockname()[1])


class Router:
    """A router process: `start`, `wait_ready`, `add_worker`, `remove_worker`, `stop`.

    Args:
        host, port: address to listen on.
        log_path: its output is appended to this file.
        options: flags of sglang-router by name; they win over `DEFAULT_OPTIONS`. Raises ValueError for those which are
            set here.
    """

    def __init__(self, host: str, port: int, log_path: Path, options: Mapping[str, Any] | None = None) -> None:
        self.host, self.port, self.url = host, port, base_url(host, port)
        given = {name.replace("_", "-"): value for name, value in (options or {}).items()}
        merged = {"prometheus-port": _free_port(host)} | DEFAULT_OPTIONS | given
        forced = option_flags({"host": host, "port": port, "prometheus-host": host.strip("[]")})
        flags = forced + option_flags(merged, forced=FORCED_OPTIONS)
        command = [sys.executable, str(MAIN), *flags]
        self.process = OwnedProcess(f"router {self.url}", command, log_path)

    def start(self) -> None:
        """Starts the process and returns at once. Raises ValueError when the port is taken."""
        check_port_free(self.host, self.port)
        self.process.start()

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Blocks until the router answers; ServerStartError when it dies or the deadline passes."""
        # /health: the router itself answers, with or without workers.
        self.process.wait_until(lambda: is_ok(self.url, "/health", timeout_s=2.0), timeout_s, interval_s=0.1)

    def add_worker(self, worker_url: str, timeout_s: float = 60.0) -> None:
        """See the function `add_worker`."""
        add_worker(self.url, worker_url, timeout_s)

    def remove_worker(self, worker_url: str, timeout_s: float = 30.0) -> None:
        """See the function `remove_worker`."""
        remove_worker(self.url, worker_url, timeout_s)

    def stop(self) -> None:
        """Ends the router; may be called again."""
        self.process.stop()


def list_workers(router_url: str) -> list[dict[str, Any]]:
    """The router's workers, each with at least `id`, `url` and `is_healthy`."""
    return list(request("GET", router_url, "/workers")["workers"])


def _healthy(router_url: str, worker_url: str) -> bool:
    return any(worker["url"] == worker_url and worker["is_healthy"] for worker in list_workers(router_url))


def add_worker(
    router_url: str,
    worker_url: str,
    timeout_s: float = 60.0,
    worker_type: str | None = None,
    bootstrap_port: int | None = None,
) -> None:
    """Registers a running server and waits until the router lists it as healthy (registration is asynchronous).

    `worker_type` prefill or decode needs a router with `pd-disaggregation`; a prefill worker has a `bootstrap_port`.

    Raises EngineError when the router refuses, TimeoutError when the worker does not appear in time.
    """
    role = {"worker_type": worker_type, "bootstrap_port": bootstrap_port}
    given = {name: value for name, value in role.items() if value is not None}
    request("POST", router_url, "/workers", {"url": worker_url, **given})
    if not _wait(lambda: _healthy(router_url, worker_url), timeout_s):
        raise TimeoutError(
            f"router {router_url} did not take worker {worker_url} within {timeout_s:g} s: is the worker healthy?"
        )


def remove_worker(router_url: str, worker_url: str, timeout_s: float = 30.0) -> None:
    """Removes a worker and waits until the router no longer lists it; does nothing for a worker it does not know."""
    for worker in list_workers(router_url):
        if worker["url"] == worker_url:
            _delete(router_url, str(worker["id"]))
    if not _wait(lambda: all(w["url"] != worker_url for w in list_workers(router_url)), timeout_s):
        raise TimeoutError(f"router {router_url} still lists worker {worker_url} after {timeout_s:g} s")


def _delete(router_url: str, worker_id: str) -> None:
    try:
        request("DELETE", router_url, f"/workers/{worker_id}")
    except EngineError as error:
        if error.status != 404:  # gone meanwhile is what we wanted
            raise


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
