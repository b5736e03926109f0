"""Where an agent's command line runs: the protocol of a sandbox, a long command in one, and E2B's service.

Invariants: every command has a deadline; a command that outlives its budget is ended with its process group; what a
sandbox returned is not trusted to be complete (an empty exit-code file means "not yet"). Settings come from
`SLIME_AGENT_<NAME>` (older spelling `SWE_<NAME>`): SANDBOX_TIMEOUT_SEC, RPC_RETRIES, IMAGE_METADATA_KEY.
Leaves out: building images, and what runs inside (`harness`).
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import shlex
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from slime.agent.engine import agent_env, agent_env_number

logger = logging.getLogger(__name__)

EXIT_TIME_BUDGET_EXCEEDED = -1
AGENT_USER = "agent"
POLL_INTERVAL_SEC = 2.0

_FIRST_POLL_SEC = 0.1
_RPC_TIMEOUT_SEC = 60
_KILL_GRACE_SEC = 2
_RETRY_DELAY_SEC = 0.5

FileContent = str | bytes


class ExecResult(NamedTuple):
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str = ""


class CommandFailed(RuntimeError):
    """A command that was to succeed (`check=True`) did not."""


class Sandbox(Protocol):
    """An isolated machine with a shell."""

    sandbox_id: str

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: dict[str, str] | None = None,
        timeout: int = 120,
        check: bool = False,
        idempotent: bool = True,
    ) -> ExecResult:
        """Run `cmd` in bash, at most `timeout` seconds; CommandFailed with `check` and an exit code other than 0.

        `idempotent=False`: it must not be run a second time when the connection breaks.
        """

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None:
        """Create or replace a file."""

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """Text of a file."""


async def exec_and_wait(
    sb: Sandbox,
    *,
    cmd: str,
    time_budget_sec: int,
    tag: str,
    user: str = "root",
    env: dict[str, str] | None = None,
    workdir: str | None = None,
    out_file: str | None = None,
    want_output: bool = False,
) -> tuple[int, str]:
    """Run a command that may take long, detached from the connection; (exit code, output when wanted).

    `time_budget_sec` in seconds: past it the command's process group is ended and the code is
    `EXIT_TIME_BUDGET_EXCEEDED`. `tag` names its files in the sandbox; stdout and stderr go to `out_file`.
    """
    base = f"/tmp/slime_agent_{tag}_{uuid.uuid4().hex[:12]}"
    out = out_file or f"{base}.out"
    await sb.write_file(f"{base}.sh", _script(cmd, workdir, f"{base}.exit"), user=user)
    start = f"setsid nohup bash {base}.sh > {shlex.quote(out)} 2>&1 < /dev/null & echo $! > {base}.pid"
    await sb.exec(start, user=user, env=env, timeout=_RPC_TIMEOUT_SEC, check=True, idempotent=False)
    exit_code = await _wait_for_exit(sb, f"{base}.exit", user, time_budget_sec)
    if exit_code is None:
        logger.warning("%s: %s had no end within %d s", sb.sandbox_id, tag, time_budget_sec)
        await sb.exec(_kill_command(f"{base}.pid"), user=user, timeout=_RPC_TIMEOUT_SEC)
        exit_code = EXIT_TIME_BUDGET_EXCEEDED
    output = await sb.read_file(out, user=user) if want_output else ""
    return exit_code, output


def _script(cmd: str, workdir: str | None, exit_file: str) -> str:
    """Runs `cmd` in a shell of its own and leaves its exit code, whole or not at all."""
    change = f"cd {shlex.quote(workdir)} && " if workdir else ""
    return f"( {change}bash -c {shlex.quote(cmd)} )\necho $? > {exit_file}.part\nmv {exit_file}.part {exit_file}\n"


def _kill_command(pid_file: str) -> str:
    return f"kill -TERM -- -$(cat {pid_file}); sleep {_KILL_GRACE_SEC}; kill -KILL -- -$(cat {pid_file}); true"


async def _wait_for_exit(sb: Sandbox, exit_file: str, user: str, budget_sec: float) -> int | None:
    """The exit code, None when there is none after `budget_sec` seconds."""
    deadline = time.monotonic() + budget_sec
    pause = _FIRST_POLL_SEC
    while True:
        found = await sb.exec(f"cat {exit_file} 2>/dev/null || true", user=user, timeout=_RPC_TIMEOUT_SEC)
        text = found[1].strip()
        if text.lstrip("-").isdigit():
            return int(text)
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, POLL_INTERVAL_SEC)


async def ensure_agent_user(sb: Sandbox, workdir: str) -> None:
    """A user without privileges that owns `workdir`: agents refuse to work unattended as root."""
    home, place = f"/home/{AGENT_USER}", shlex.quote(workdir)
    create = f"id -u {AGENT_USER} >/dev/null 2>&1 || useradd -m -d {home} -s /bin/bash {AGENT_USER}"
    own = f"mkdir -p {home} {place} && chown -R {AGENT_USER} {home} {place}"
    trust = f"if command -v git >/dev/null; then git config --system --add safe.directory {place}; fi"
    await sb.exec(f"({create}) && {own} && {trust}", user="root", timeout=300, check=True)


class E2BSandbox:
    """A sandbox of E2B or of a service that speaks its protocol; used as `async with E2BSandbox(image) as sb`."""

    def __init__(
        self,
        image: str,
        *,
        timeout: int | None = None,
        image_metadata_key: str | None = None,
        rpc_retries: int | None = None,
        size: str | None = None,
    ) -> None:
        """`image` is E2B's template, or goes into the metadata entry `image_metadata_key` of a service that runs
        plain images. `timeout` in seconds until the service ends it; `size` is a metadata entry of that name.

        Raises ImportError when the SDK is not installed.
        """
        self.image, self.size = image, size
        self.timeout = int(timeout or agent_env_number("SANDBOX_TIMEOUT_SEC", 3600))
        self.image_metadata_key = image_metadata_key or agent_env("IMAGE_METADATA_KEY")
        self.rpc_retries = int(agent_env_number("RPC_RETRIES", 3)) if rpc_retries is None else rpc_retries
        self.sandbox_id = ""
        self._sdk = _import_e2b()
        self._handle: Any = None

    async def __aenter__(self) -> E2BSandbox:
        metadata = {self.image_metadata_key: self.image} if self.image_metadata_key else {}
        options: dict[str, Any] = {"timeout": self.timeout}
        options["metadata"] = {**metadata, **({"size": self.size} if self.size else {})}
        if not self.image_metadata_key:
            options["template"] = self.image
        self._handle = await self._sdk.AsyncSandbox.create(**options)
        self.sandbox_id = str(self._handle.sandbox_id)
        return self

    async def __aexit__(self, *exc: object) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            await handle.kill()

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: dict[str, str] | None = None,
        timeout: int = 120,
        check: bool = False,
        idempotent: bool = True,
    ) -> ExecResult:
        """See `Sandbox.exec`."""

        async def run() -> ExecResult:
            try:
                ended = await self._handle.commands.run(cmd, user=user, envs=env or {}, timeout=timeout)
            except self._sdk.CommandExitException as failed:
                ended = failed
            return ExecResult(int(ended.exit_code), ended.stdout or "", ended.stderr or "")

        result = await self._with_retries(run, self.rpc_retries if idempotent else 0)
        if check and result.exit_code != 0:
            raise CommandFailed(f"{self.sandbox_id}: exit code {result.exit_code}: {cmd:.200}: {result.stderr[-500:]}")
        return result

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None:
        """See `Sandbox.write_file`."""
        await self._with_retries(lambda: self._handle.files.write(sandbox_path, content, user=user), self.rpc_retries)

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """See `Sandbox.read_file`."""
        return str(
            await self._with_retries(lambda: self._handle.files.read(sandbox_path, user=user), self.rpc_retries)
        )

    async def _with_retries(self, call: Callable[[], Awaitable[Any]], retries: int) -> Any:
        if self._handle is None:
            raise RuntimeError(f"the sandbox of {self.image!r} is not running: use it inside `async with`")
        for attempt in range(retries + 1):
            try:
                return await call()
            except (self._sdk.SandboxException, ConnectionError, asyncio.TimeoutError) as error:
                if attempt == retries:
                    raise
                logger.warning("%s: %r, attempt %d of %d", self.sandbox_id, error, attempt + 1, retries + 1)
            await asyncio.sleep(_RETRY_DELAY_SEC * 2**attempt)
        raise AssertionError("unreachable")


def _import_e2b() -> Any:
    """E2B's SDK, an optional dependency."""
    try:
        return importlib.import_module("e2b")
    except ImportError as error:
        raise ImportError("E2BSandbox needs E2B's SDK: pip install e2b, and set E2B_API_KEY") from error
