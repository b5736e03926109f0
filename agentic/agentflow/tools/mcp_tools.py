"""Tools of MCP servers (Model Context Protocol), over standard input and output or streamable HTTP.

Input: a YAML file.

    servers:
      calculator: {command: python, args: [server.py], env: {KEY: $KEY}, cwd: DIR}
      library: {url: "http://127.0.0.1:9000/mcp", headers: {Authorization: Bearer $TOKEN}, timeout_s: 30}

Each entry has `command` or `url`; `tools` limits it to the named tools, `prefix` goes before their names, `timeout_s`
is the deadline of a call (60). `$NAME` in `env` and `headers` is taken from the environment.
Invariants: one connection per server and process, on an event loop of its own; arguments are checked against the
tool's JSON schema before they are sent; every call has a deadline; a lost server is an InfrastructureError and is
connected again with the next call; servers that we started end with this process, however it ends.
Left out: resources, prompts, sampling, sign-in; images and other results that are not text are only mentioned.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agentic.agentflow.tools.base import ToolResult, ToolSpec
from agentic.common.errors import ConfigError, InfrastructureError
from agentic.common.roles import nearest

logger = logging.getLogger(__name__)

TETHER = Path(__file__).with_name("_tether.py")
START_S = 60.0
STOP_S = 10.0
SLACK_S = 5.0
"""On top of a call's deadline, for the way there and back."""
SIMPLE_TYPES = ("string", "number", "integer", "boolean")


@dataclass(frozen=True)
class ServerSettings:
    """One entry of the file."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    tools: tuple[str, ...] | None = None
    prefix: str = ""
    timeout_s: float = 60.0


@dataclass(frozen=True)
class McpSpec(ToolSpec):
    """A description made from the server's: the parameters are those of a JSON schema."""

    schema: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """Name, description, and each parameter with its type; the whole schema where types refer to definitions."""
        required = self.schema.get("required", ())
        lines = [f"{self.name}: {self.description}", "  Parameters:"]
        for name, schema in self.schema.get("properties", {}).items():
            optional = "" if name in required else ", optional"
            lines.append(f"    - {name} ({_type_name(schema)}{optional}): {_meaning(schema)}")
        if "$defs" in self.schema:
            lines.append(f"  JSON schema: {json.dumps(self.schema)}")
        return "\n".join([*lines, f"  Limits: {self.limitation}", f"  Best practice: {self.best_practice}"])

    def argument_error(self, kwargs: Mapping[str, Any]) -> str | None:
        """What the schema says against the arguments; None when they fit."""
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import best_match

        try:
            problem = best_match(Draft202012Validator(dict(self.schema)).iter_errors(plain(kwargs)))
        except TypeError as error:
            return f"{self.name}: {error}; use numbers, texts, lists and dictionaries only"
        if problem is None:
            return None
        where = ".".join(map(str, problem.absolute_path))
        return f"{self.name}: {where + ': ' if where else ''}{problem.message}; it takes {', '.join(self.parameters)}"


def plain(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON has it (tuples become lists). Raises TypeError for what JSON has not."""
    result: dict[str, Any] = json.loads(json.dumps(dict(kwargs)))
    return result


def _type_name(schema: Any) -> str:
    if isinstance(schema, dict) and schema.get("type") in SIMPLE_TYPES and "enum" not in schema:
        return str(schema["type"])
    return json.dumps({k: v for k, v in schema.items() if k not in ("description", "title", "default")})


def _meaning(schema: Any) -> str:
    default = f" (default {json.dumps(schema['default'])})" if "default" in schema else ""
    return str(schema.get("description") or schema.get("title") or "no description") + default


class Server:
    """One connection; all its methods but `call` run on the hub's loop."""

    def __init__(self, settings: ServerSettings, submit: Callable[[Coroutine[Any, Any, Any]], Future[Any]]) -> None:
        self.settings = settings
        self._submit = submit
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._lock = asyncio.Lock()

    async def tools(self) -> list[Any]:
        """All tools the server lists, following its pages."""
        client = await self._connected()
        found, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                return found

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool from any event loop.

        Raises:
            InfrastructureError: the server is gone, or cannot be reached.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        timeout_s = self.settings.timeout_s
        try:
            future = asyncio.wrap_future(self._submit(self._call(tool, arguments)))
            return _result(await asyncio.wait_for(future, timeout_s + SLACK_S))
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                await asyncio.wrap_future(self._submit(self.close()))
                raise InfrastructureError(f"mcp_unavailable:{self.settings.name}", str(error)) from error
            if error.code == REQUEST_TIMEOUT:
                return _too_late(timeout_s)
            return ToolResult(False, f"Error: {error}", {"error": "mcp", "code": error.code})
        except asyncio.TimeoutError:
            return _too_late(timeout_s)
        except (RuntimeError, ValueError) as error:  # what the client raises for an answer that breaks the protocol
            raise InfrastructureError(f"mcp_bad_response:{self.settings.name}", _innermost(error)) from error

    async def _call(self, tool: str, arguments: dict[str, Any]) -> Any:
        client = await self._connected()
        return await client.call_tool(tool, arguments, read_timeout_seconds=self.settings.timeout_s)

    async def _connected(self) -> Any:
        async with self._lock:
            if self._client is None:
                ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                self._stop.clear()
                self._task = asyncio.create_task(self._hold(ready))
                self._client = await ready
            return self._client

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        """Keep the connection open; opened and closed by the same task, as its cancel scopes demand."""
        try:
            async with AsyncExitStack() as stack:
                client = await asyncio.wait_for(_open(self.settings, stack), START_S)
                ready.set_result(client)
                await self._stop.wait()
        except Exception as error:  # whatever a transport raises (groups of errors among it) means: not reachable
            if ready.done():
                logger.warning("MCP server %s ended with %s", self.settings.name, _innermost(error))
            else:
                detail = f"cannot connect: {_innermost(error)}"
                ready.set_exception(InfrastructureError(f"mcp_unavailable:{self.settings.name}", detail))
        finally:
            self._client = None

    async def close(self) -> None:
        self._stop.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=STOP_S)


async def _open(settings: ServerSettings, stack: AsyncExitStack) -> Any:
    from mcp import Client, StdioServerParameters
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    if settings.url:
        http = await stack.enter_async_context(create_mcp_http_client(headers=dict(settings.headers)))
        return await stack.enter_async_context(Client(streamable_http_client(settings.url, http_client=http)))
    arguments = ["-I", str(TETHER), settings.command, *settings.args]
    return await stack.enter_async_context(
        Client(
            StdioServerParameters(
                command=sys.executable, args=arguments, env=dict(settings.env) or None, cwd=settings.cwd
            )
        )
    )


def _innermost(error: BaseException) -> str:
    while getattr(error, "exceptions", None):
        error = error.exceptions[0]  # type: ignore[attr-defined]
    return f"{type(error).__name__}: {error}"


def _too_late(timeout_s: float) -> ToolResult:
    return ToolResult(False, f"Error: no answer within {timeout_s:g} s", {"error": "timeout"})


def _result(reply: Any) -> ToolResult:
    parts = [getattr(block, "text", None) or f"[{block.type}]" for block in reply.content]
    if not parts and reply.structured_content is not None:
        parts = [json.dumps(reply.structured_content)]
    text = "\n".join(parts).strip() or "(no text)"
    return ToolResult(not reply.is_error, f"Error: {text}" if reply.is_error else text)


class McpTool:
    """One tool of one server."""

    def __init__(self, server: Server, described: Any) -> None:
        schema = described.input_schema
        self._server, self._name = server, described.name
        self.spec = McpSpec(
            name=server.settings.prefix + described.name,
            aliases=(),
            description=" ".join((described.description or described.title or "no description").split()),
            parameters={name: _meaning(value) for name, value in schema.get("properties", {}).items()},
            limitation=f"a service; answers within {server.settings.timeout_s:g} s or fails",
            best_practice="give every parameter by name, with a value of the stated type",
            schema=schema,
        )

    async def run(self, **arguments: Any) -> ToolResult:
        """The text of the server's answer; an error that it reports is a failed call."""
        return await self._server.call(self._name, plain(arguments))


class McpHub:
    """The connections of one file, on an event loop in a thread of its own."""

    def __init__(self, path: str, servers: list[ServerSettings]) -> None:
        """Connects to all servers. Raises ConfigError when one cannot be reached, or lacks a chosen tool."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._thread.start()
        self.servers = [Server(settings, self._submit) for settings in servers]
        listings = [self._submit(server.tools()) for server in self.servers]
        self.tools: list[McpTool] = []
        try:
            for server, listing in zip(self.servers, listings, strict=True):
                self.tools += _chosen(path, server, listing.result(START_S + SLACK_S))
        except (InfrastructureError, FutureTimeout) as error:
            self.stop()
            raise ConfigError(f"{path}: {error}; check command or url") from error
        except ConfigError:
            self.stop()
            raise

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        """End all connections, and the servers that we started."""
        for closing in [self._submit(server.close()) for server in self.servers]:
            closing.result(STOP_S + SLACK_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)


def _chosen(path: str, server: Server, listed: list[Any]) -> list[McpTool]:
    wanted = server.settings.tools
    names = [described.name for described in listed]
    for name in wanted or ():
        if name not in names:
            raise ConfigError(f"{path}: server {server.settings.name!r} has no tool {name!r}{nearest(name, names)}")
    return [McpTool(server, described) for described in listed if wanted is None or described.name in wanted]


_HUBS: dict[str, McpHub] = {}


def load_mcp_tools(path: str) -> list[McpTool]:
    """The tools of all servers in the file; connected once per process.

    Raises:
        FileNotFoundError, ConfigError: the file, the `mcp` package or a server is not there, or an entry is wrong.
    """
    if path not in _HUBS:
        servers = read_servers(path)
        try:
            import mcp  # noqa: F401
        except ModuleNotFoundError as error:
            raise ConfigError(f"agentflow_mcp_config needs the mcp package ({error}): pip install 'mcp>=2'") from error
        _HUBS[path] = McpHub(path, servers)
    return _HUBS[path].tools


@atexit.register
def stop_servers() -> None:
    """End all connections of this process."""
    while _HUBS:
        _HUBS.popitem()[1].stop()


def read_servers(path: str) -> list[ServerSettings]:
    """Raises FileNotFoundError or ConfigError naming file, server and key."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"agentflow_mcp_config: no file {path}")
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    servers = data.get("servers") if isinstance(data, dict) else None
    if not isinstance(servers, dict) or not servers or set(data) != {"servers"}:
        raise ConfigError(f"{path}: must hold one section `servers` with at least one entry")
    return [_read_server(path, str(name), entry) for name, entry in servers.items()]


_TYPES: dict[str, tuple[type, ...]] = {
    "command": (str,),
    "args": (list,),
    "env": (dict,),
    "cwd": (str,),
    "url": (str,),
    "headers": (dict,),
    "tools": (list,),
    "prefix": (str,),
    "timeout_s": (int, float),
}


def _read_server(path: str, name: str, entry: Any) -> ServerSettings:
    where = f"{path}: server {name!r}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {entry!r}, must have keys such as command or url")
    for key, value in entry.items():
        if key not in _TYPES:
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(str(key), _TYPES)}")
        if not isinstance(value, _TYPES[key]) or isinstance(value, bool):
            raise ConfigError(f"{where}: {key} is {value!r}, must be a {_TYPES[key][0].__name__}")
    if ("command" in entry) == ("url" in entry):
        raise ConfigError(f"{where}: give either command (a program to start) or url (a running service)")
    values = dict(entry)
    for key in ("args", "tools"):
        if key in values:
            values[key] = tuple(map(str, values[key]))
    for key in ("env", "headers"):
        values[key] = {str(k): _expand(where, str(v)) for k, v in entry.get(key, {}).items()}
    return ServerSettings(name, **values)


def _expand(where: str, text: str) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ConfigError(f"{where}: the environment has no {match[1]}; set it, or write $$ for a dollar sign")
        return os.environ[match[1]]

    return "$".join(re.sub(r"\$(\w+)", value, part) for part in text.split("$$"))
