"""A server that is kept for others: an SGLang server, or a service of our own that answers `/health`.

Inputs: a `ServerSpec` or a `ServiceSpec`; both travel to another machine as they are. `RoleServer` runs it on this machine; it
can be started again after `stop`. Invariants of the process: see owned_process.py.
Leaves out: when to start again (`slime.utils.supervise`), other machines (`slime.ray.remote_server`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slime.backends.sglang_utils import server_control
from slime.backends.sglang_utils.owned_process import OwnedProcess, base_url, check_port_free, option_flags
from slime.backends.sglang_utils.server import ServerSpec

HEALTH_TIMEOUT_S = 5.0


class Spec(Protocol):
    """What to start and where it answers."""

    host: str
    port: int
    log_path: Path

    def command(self) -> list[str]: ...

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]: ...

    def check(self) -> None: ...


@dataclass
class ServiceSpec:
    """A module of ours that serves HTTP and takes `--host` and `--port`; `GET /health` answers 200 when it is ready.

    `options`: its flags by name, as in `ServerSpec`; `env`: additional environment variables.
    """

    module: str
    host: str
    port: int
    options: dict[str, Any]
    log_path: Path
    env: dict[str, str] = field(default_factory=dict)

    def command(self) -> list[str]:
        """The argument vector. Raises ValueError for an option that the launcher sets itself."""
        forced = {"host": self.host, "port": self.port}
        flags = option_flags(forced) + option_flags(self.options, forced=list(forced))
        return [sys.executable, "-m", self.module, *flags]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The complete environment of the process: this checkout can be imported."""
        folders = [str(Path(__file__).resolve().parents[3]), inherited.get("PYTHONPATH", "")]
        path = os.pathsep.join(folder for folder in folders if folder)
        return {**inherited, "PYTHONPATH": path, **self.env}

    def check(self) -> None:
        """Options and port. Raises ValueError."""
        self.command()
        check_port_free(self.host, self.port)


class RoleServer:
    """One server on this machine."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.url = base_url(spec.host, spec.port)
        self.process = OwnedProcess(self.url, spec.command(), spec.log_path, spec.environment(os.environ))
        self._generates = isinstance(spec, ServerSpec)

    def start(self) -> None:
        """Starts the process and returns at once. Raises ValueError or FileNotFoundError when it cannot run."""
        self.spec.check()
        self.process.start()

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process.session is not None and self.process.poll() is None

    def is_ready(self) -> bool:
        """Whether it does its work: a model generates a token."""
        if self._generates:
            return server_control.health_generate(self.url, HEALTH_TIMEOUT_S)
        return server_control.is_ok(self.url, "/health", HEALTH_TIMEOUT_S)

    def answers(self) -> bool:
        """Whether it answers at all; cheaper than `is_ready`, and true of one that has much to do."""
        return server_control.is_ok(self.url, "/health", HEALTH_TIMEOUT_S)

    def log_tail(self) -> str:
        """The last lines since it was started."""
        return self.process.log_tail()

    def stop(self) -> None:
        """Ends all its processes; may be called again."""
        self.process.stop()
