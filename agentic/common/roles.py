"""The role table: who answers where, with which settings, and who is trained.

Input: one YAML file (`defaults`, `servers`, `roles`) and the URL of the policy's router.
Invariants: a role is trained if and only if its `url` is `policy`; every URL is explicit (no default host or port of
a remote service); unknown keys and unknown role names are errors that suggest the nearest name.
Sampling values under `defaults` are for frozen roles: the policy must be sampled with the trainer's temperature, so
it takes `temperature`, `top_p` and `stop` from the training flags unless its own entry sets them.
Left out: starting servers (the entries under `servers` are read by the launcher) and the calls (`clients`).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from agentic.common.errors import ConfigError

POLICY = "policy"
ENGINE = "engine:"
APIS = ("generate", "chat", "service")
LOOPBACK = "127.0.0.1"
MODEL, RETRIEVAL = KINDS = ("model", "retrieval")
SAMPLING_FIELDS = ("temperature", "top_p", "stop")
FROZEN_DEFAULTS: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "max_new_tokens": 2048}


@dataclass(frozen=True)
class Role:
    """Settings of one role. None means: taken from the training flags (policy only)."""

    name: str
    url: str
    """`policy` (the trained model, behind the run's own router), `engine:NAME` (another model of `--sglang-config`) or an
    address with http:// or https://."""
    api: str = "generate"
    """`generate` (SGLang, token ids in), `chat` (OpenAI chat completions) or `service` (no model: address, deadline,
    retries and concurrency of some other JSON service)."""
    tokenizer: str | None = None
    """Path or hub name; needed by frozen `generate` roles, whose chat template is their own."""
    model: str | None = None
    """Name of the model as a `chat` service knows it; of the others only shown."""
    temperature: float | None = None
    """Sampling temperature; 0 is greedy."""
    top_p: float | None = None
    """Sampling top-p."""
    max_new_tokens: int | None = None
    """Most tokens of one answer."""
    timeout_s: float = 60.0
    """Seconds for one attempt; all attempts together get `timeout_s * (retries + 1)`."""
    retries: int = 2
    """Further attempts after a time-out, a transport error, HTTP 5xx or 429."""
    max_concurrency: int = 64
    """Calls of this role in flight at once."""
    stop: tuple[str, ...] = ()
    """Stop strings."""
    price_in: float = 0.0
    """US dollars for a million prompt tokens; recorded with the role table, and what a method's cost ledger charges."""
    price_out: float = 0.0
    """Likewise for completion tokens."""
    api_key_env: str | None = None
    """Name of the environment variable with the bearer token of a `chat` service."""
    trained: bool = False
    """Follows from `url: policy`; not a key of the file."""


@dataclass(frozen=True)
class ServerEntry:
    """One server of the role file, for the launcher."""

    name: str
    port: int
    """Port to listen on; each server has its own."""
    model: str = ""
    """Hugging Face model directory; none for `kind: retrieval`."""
    kind: str = MODEL
    """`model` (an SGLang server) or `retrieval` (the retrieval service; `options` has its `index` or `corpus`)."""
    host: str = LOOPBACK
    """Address to listen on (default: that of `node`, or the loopback one), and under which the roles ask."""
    node: str | None = None
    """Address of the Ray node that runs it; without it this machine does."""
    gpus: tuple[int, ...] = ()
    """The GPUs it sees, by their number on the node; without it all, from the option `base-gpu-id` on."""
    tokenizer: str | None = None
    """Tokenizer of the roles on this server (default: the model's)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Server flags, names without the leading dashes."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def option(self, name: str) -> Any:
        """The value of a server flag, written with dashes or underscores; None without it."""
        return next((value for key, value in self.options.items() if key.lstrip("-").replace("_", "-") == name), None)

    def size(self, name: str) -> int:
        """A parallel size, 1 by default."""
        return int(self.option(name) or 1)

    def device_ids(self) -> tuple[int, ...]:
        """Numbers of the GPUs that the server uses on its node."""
        first, count = int(self.option("base-gpu-id") or 0), self.size("tp-size") * self.size("pp-size")
        return self.gpus or tuple(range(first, first + count * self.size("dp-size")))


ROLE_KEYS = {f.name for f in fields(Role)} - {"name", "trained"} | {"server"}
DEFAULT_KEYS = ROLE_KEYS - {"url", "server", "tokenizer", "model", "api", "api_key_env"}
SERVER_KEYS = {f.name for f in fields(ServerEntry)} - {"name"}


def nearest(name: str, choices: Collection[str]) -> str:
    """' (did you mean X?)' or the list of choices, for the end of an error message."""
    match = difflib.get_close_matches(str(name), [str(choice) for choice in choices], n=1)
    return f" (did you mean '{match[0]}'?)" if match else f" (known: {', '.join(sorted(map(str, choices)))})"


class RoleTable:
    """All roles of one role file; `table["executor"]` gives a `Role`."""

    def __init__(self, roles: dict[str, Role], servers: dict[str, ServerEntry], source: str) -> None:
        self.roles = roles
        self.servers = servers
        self.source = source

    @classmethod
    def load(
        cls,
        path: str | Path,
        policy_url: str,
        known_roles: Collection[str] | None,
        required: Collection[str] = (),
        engines: Mapping[str, str] | None = None,
    ) -> RoleTable:
        """Read and check the role file; `known_roles=None` accepts any names.

        `engines`: address of each model of `--sglang-config`; None when they are not known yet (to check the file only).

        Raises FileNotFoundError (no such file) or ConfigError (anything wrong inside), before any server is asked.
        """
        source = str(path)
        data = _read_yaml(path)
        _check_keys(data, {"defaults", "servers", "roles"}, source)
        servers = load_servers(path)
        defaults = _section(data, "defaults", source)
        _check_keys(defaults, DEFAULT_KEYS, f"{source}: defaults")
        entries = _section(data, "roles", source)
        _check_names(entries, known_roles, required, source)
        _check_services(entries, servers, source)
        roles = {
            name: _build_role(name, entry, defaults, servers, policy_url, engines, f"{source}: roles.{name}")
            for name, entry in entries.items()
        }
        return cls(roles, servers, source)

    def __getitem__(self, name: str) -> Role:
        if name not in self.roles:
            raise ConfigError(f"{self.source}: no role '{name}'{nearest(name, self.roles)}; add it under `roles:`")
        return self.roles[name]

    def __contains__(self, name: object) -> bool:
        return name in self.roles

    def __iter__(self) -> Iterator[Role]:
        return iter(self.roles.values())

    def describe(self) -> str:
        """The table as aligned text, one role a line, to be shown at start."""
        head = ("role", "trained", "api", "url", "model", "temperature", "max_new_tokens", "timeout_s")
        rows = [head] + [_describe_row(role) for role in self]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def load_servers(path: str | Path) -> dict[str, ServerEntry]:
    """The `servers` section alone, for the launcher. Raises as `RoleTable.load`."""
    section = _section(_read_yaml(path), "servers", str(path))
    servers = {name: _build_server(name, entry, f"{path}: servers.{name}") for name, entry in section.items()}
    addresses = [(server.host, server.port) for server in servers.values()]
    for name, server in servers.items():
        if addresses.count((server.host, server.port)) > 1:
            raise ConfigError(f"{path}: servers.{name}: {server.url} is used twice; give each server its own port")
    return servers


def _read_yaml(path: str | Path) -> dict[str, Any]:
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"role file {file} does not exist; pass the path of a YAML role file")
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}:{line} is not valid YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: must be a mapping with the keys defaults, servers, roles")
    return data


def _section(data: dict[str, Any], key: str, source: str) -> dict[str, Any]:
    value = data.get(key) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: `{key}` must be a mapping, not {type(value).__name__}")
    return value


def _check_keys(entry: dict[str, Any], allowed: Collection[str], where: str) -> None:
    for key in entry:
        if key not in allowed:
            raise ConfigError(f"{where}: unknown key '{key}'{nearest(key, allowed)}")


def _check_names(
    entries: dict[str, Any], known_roles: Collection[str] | None, required: Collection[str], source: str
) -> None:
    for name in entries:
        if known_roles is not None and name not in known_roles:
            raise ConfigError(f"{source}: unknown role '{name}'{nearest(name, known_roles)}")
    missing = [name for name in required if name not in entries]
    if missing:
        similar = difflib.get_close_matches(missing[0], entries, n=1)
        hint = f" ('{similar[0]}' is there)" if similar else ""
        raise ConfigError(f"{source}: missing role '{missing[0]}'{hint}; add `{missing[0]}:` under `roles:`")


def _build_server(name: str, entry: Any, where: str) -> ServerEntry:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be a mapping such as {{model: PATH, port: 30000}}")
    _check_keys(entry, SERVER_KEYS, where)
    if entry.get("kind", MODEL) not in KINDS:
        raise ConfigError(f"{where}: kind '{entry['kind']}' is none of {', '.join(KINDS)}")
    for key in ("model", "port") if entry.get("kind", MODEL) == MODEL else ("port",):
        if key not in entry:
            raise ConfigError(f"{where}: `{key}` is missing")
    port = entry["port"]
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise ConfigError(f"{where}: port {port!r} is not a port number (1 to 65535)")
    options = entry.get("options") or {}
    if not isinstance(options, dict):
        raise ConfigError(f"{where}: options must be a mapping of server flags, not {options!r}")
    options = {key: value for key, value in options.items() if value != ""}  # empty: left out
    gpus, node = tuple(entry.get("gpus") or ()), entry.get("node") or None
    host = entry.get("host", LOOPBACK)
    if node and host == LOOPBACK:
        host = node  # roles ask from other machines
    values = {**entry, "name": name, "model": str(entry.get("model", "")), "options": options}
    server = ServerEntry(**{**values, "gpus": gpus, "host": host, "node": node})
    _check_gpus(server, where)
    return server


def _check_gpus(server: ServerEntry, where: str) -> None:
    if server.kind == RETRIEVAL and not (server.option("index") or server.option("corpus")):
        raise ConfigError(f"{where}: a retrieval service needs `options: {{index: DIR}}` or `{{corpus: FILE}}`")
    if not server.gpus:
        return
    if not all(isinstance(gpu, int) and gpu >= 0 for gpu in server.gpus) or len(set(server.gpus)) < len(server.gpus):
        raise ConfigError(f"{where}: gpus must be different numbers such as [4, 5], not {list(server.gpus)}")
    if server.option("base-gpu-id") is not None:
        raise ConfigError(f"{where}: `gpus` and the option base-gpu-id exclude each other")
    count = server.size("tp-size") * server.size("pp-size") * server.size("dp-size")
    if server.kind == MODEL and len(server.gpus) != count:
        raise ConfigError(f"{where}: {len(server.gpus)} gpus, but tp-size x pp-size x dp-size is {count}")


def _check_services(entries: dict[str, Any], servers: dict[str, ServerEntry], source: str) -> None:
    """A service that is no model has an address of its own."""
    models = {server.url: name for name, server in servers.items() if server.kind == MODEL}
    for name, entry in entries.items():
        url = str(entry.get("url", "")).rstrip("/") if isinstance(entry, dict) else ""
        if url in models and entry.get("api") == "service":
            raise ConfigError(
                f"{source}: roles.{name}: {url} is also the address of servers.{models[url]}; give each its own port"
            )


def _build_role(
    name: str,
    entry: Any,
    defaults: dict[str, Any],
    servers: dict[str, ServerEntry],
    policy_url: str,
    engines: Mapping[str, str] | None,
    where: str,
) -> Role:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be a mapping such as {{server: NAME}} or {{url: policy}}")
    _check_keys(entry, ROLE_KEYS, where)
    if ("url" in entry) == ("server" in entry):
        raise ConfigError(f"{where}: needs exactly one of `url` and `server`")
    trained = entry.get("url") == POLICY
    values = {key: value for key, value in defaults.items() if not (trained and key in SAMPLING_FIELDS)}
    if not trained:
        values = {**FROZEN_DEFAULTS, **values}
    values.update(_address(entry, servers, policy_url, engines, where))
    values.update({key: value for key, value in entry.items() if key not in ("url", "server")})
    stop = values.get("stop", ())
    values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
    role = Role(name=name, trained=trained, **values)
    _check_role(role, where)
    return role


def _address(
    entry: dict[str, Any],
    servers: dict[str, ServerEntry],
    policy_url: str,
    engines: Mapping[str, str] | None,
    where: str,
) -> dict[str, str | None]:
    if "server" not in entry:
        return {"url": _resolve_url(str(entry["url"]), policy_url, engines, where).rstrip("/")}
    if entry["server"] not in servers:
        raise ConfigError(
            f"{where}: no server '{entry['server']}' under `servers:`{nearest(entry['server'], servers)}"
        )
    server = servers[entry["server"]]
    if server.kind == RETRIEVAL:
        if entry.get("api", "service") != "service":
            raise ConfigError(f"{where}: servers.{server.name} is no model; use `api: service`")
        return {"url": server.url, "api": "service"}
    return {"url": server.url, "model": server.model, "tokenizer": server.tokenizer or server.model}


def _resolve_url(url: str, policy_url: str, engines: Mapping[str, str] | None, where: str) -> str:
    if url == POLICY:
        return policy_url
    if not url.startswith(ENGINE):
        return url
    name = url.removeprefix(ENGINE)
    if engines is None:
        return f"http://{name}"
    if name not in engines:
        raise ConfigError(f"{where}: url '{url}': this run has no such model; name it in --sglang-config")
    return engines[name]


def _check_role(role: Role, where: str) -> None:
    if not role.url.startswith(("http://", "https://")):
        raise ConfigError(f"{where}: url '{role.url}' must be `policy` or start with http:// or https://")
    if role.api not in APIS:
        raise ConfigError(f"{where}: api '{role.api}' is none of {', '.join(APIS)}")
    if role.trained and role.api != "generate":
        raise ConfigError(f"{where}: the policy must use `api: generate`, only that returns token ids and log-probs")
    if not role.trained and role.api == "generate" and not role.tokenizer:
        raise ConfigError(
            f"{where}: `api: generate` needs `tokenizer: PATH` (the served model's), or use `server:`; "
            "a service without a model needs `api: service`"
        )
    if role.api == "chat" and not role.model:
        raise ConfigError(f"{where}: `api: chat` needs `model: NAME`")
    limits = {"temperature": (0, True), "top_p": (0, False), "max_new_tokens": (1, True), "timeout_s": (0, False)}
    limits |= {"retries": (0, True), "max_concurrency": (1, True), "price_in": (0, True), "price_out": (0, True)}
    for key, (low, inclusive) in limits.items():
        _check_number(key, getattr(role, key), low, inclusive, where)


def _check_number(key: str, value: Any, low: float, inclusive: bool, where: str) -> None:
    if value is None and key in ("temperature", "top_p", "max_new_tokens"):
        return
    kinds = int if key in ("max_new_tokens", "retries", "max_concurrency") else (int, float)
    fits = isinstance(value, kinds) and not isinstance(value, bool) and (value > low or (inclusive and value == low))
    if not fits:
        kind = "a whole number" if kinds is int else "a number"
        raise ConfigError(f"{where}: {key} is {value!r}, must be {kind} {'>=' if inclusive else '>'} {low}")


def _describe_row(role: Role) -> tuple[str, ...]:
    def show(value: Any) -> str:
        return "(training flag)" if value is None else str(value)

    model = role.model or ("(policy)" if role.trained else "-")
    sampling = (show(role.temperature), show(role.max_new_tokens), str(role.timeout_s))
    return (role.name, "yes" if role.trained else "no", role.api, role.url, model, *sampling)
