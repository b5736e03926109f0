"""Starts the servers of a role file, keeps them, and ends exactly those.

    python scripts/serve_roles.py ROLES.yaml [--log-dir DIR] [--max-restarts N]

Reads the `servers:` section: models (SGLang) and retrieval, with their GPUs, ports and hosts; one with `node` runs on that node
of a Ray cluster, which must be up. Prints `START` for each, `READY name url` as each of them works, `ALL READY` at the end,
`WAIT` lines in between, and `DIED` when one ended or stopped answering and is started again. Servers that share a GPU start one
after the other, in the order of the file.

Exit code 0 after SIGTERM or SIGINT; 1 when a server fails at its first start or too often; 2 (before anything is started) for a
bad role file, a port that is taken or a model folder without `config.json`. However this program ends, SIGKILL included, its
servers end with it.

Leaves out: the policy's engines and router, which a training run starts by itself.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agentic.common.roles import MODEL, ServerEntry, load_servers
from slime.backends.sglang_utils.role_server import RoleServer, ServiceSpec
from slime.backends.sglang_utils.server import ServerSpec, default_cpu_options
from slime.utils.supervise import Server, ServerFailed, Supervisor

RETRIEVAL_MODULE = "agentic.toolorchestra.retrieval.serve"
TICK_S = 0.25


class Stopped(BaseException):
    """SIGTERM or SIGINT; not an Exception, so that nothing on the way swallows it."""


def _raise_stopped(_number: int, _frame: FrameType | None) -> None:
    raise Stopped


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Start the servers of a role file and keep them until SIGTERM or Ctrl-C.", allow_abbrev=False
    )
    parser.add_argument("file", type=Path, nargs="?", metavar="ROLES.yaml", help="role file")
    parser.add_argument("--roles", type=Path, help="the same as a flag")
    parser.add_argument("--log-dir", type=Path, default=Path("outputs/role_servers"), help="one log per server")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="seconds for a server to become ready")
    parser.add_argument(
        "--max-restarts", type=int, default=5, help="restarts of a server without five minutes of health between them"
    )
    parser.add_argument("--health-interval-s", type=float, default=30.0, help="seconds between two looks at a server")
    args = parser.parse_args(argv)
    if (args.file is None) == (args.roles is None):
        parser.error("give one role file")
    args.roles = args.roles or args.file
    return args


def build_spec(entry: ServerEntry, log_dir: Path) -> ServerSpec | ServiceSpec:
    """What to start for one entry."""
    options = {key.lstrip("-").replace("_", "-"): value for key, value in entry.options.items()}
    env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, entry.gpus))} if entry.gpus else {}
    log = log_dir.resolve() / f"{entry.name}_{entry.port}.log"
    if entry.kind != MODEL:
        return ServiceSpec(RETRIEVAL_MODULE, entry.host, entry.port, options, log, env)
    if entry.tokenizer is not None:
        options["tokenizer-path"] = entry.tokenizer
    return ServerSpec(entry.model, entry.host, entry.port, options, log, env=env)


def build_specs(roles: Path, log_dir: Path) -> tuple[dict[str, ServerEntry], dict[str, ServerSpec | ServiceSpec]]:
    """Entries and specs by name; those of this machine are checked. Raises ValueError or FileNotFoundError with one line."""
    entries = load_servers(roles)
    if not entries:
        raise ValueError(f"{roles}: no `servers:` to start; add one such as `frozen: {{model: PATH, port: 30000}}`")
    specs = {}
    for name, entry in entries.items():
        specs[name] = build_spec(entry, log_dir)
        try:
            if entry.node is None:
                specs[name].check()
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"{roles}: servers.{name}: {error}") from error
    return entries, specs


def add_cpu_options(entries: Mapping[str, ServerEntry], specs: Mapping[str, ServerSpec | ServiceSpec]) -> bool:
    """Whether there is a GPU. Without one the flags of `default_cpu_options` come first; those of the role file replace them."""
    here = [spec for name, spec in specs.items() if isinstance(spec, ServerSpec) and not entries[name].node]
    if not here:
        return False
    import torch  # here, so that a bad role file is refused without waiting for it

    if torch.cuda.is_available():
        return True
    for spec in here:
        spec.options = default_cpu_options() | spec.options
    return False


def devices_of(entry: ServerEntry, has_gpu: bool) -> set[tuple[str, int]]:
    """(machine, GPU) of a model server; nothing where it runs without a GPU."""
    if entry.kind != MODEL or not (has_gpu or entry.node):
        return set()
    return {(entry.node or "here", gpu) for gpu in entry.device_ids()}


def build_servers(
    entries: Mapping[str, ServerEntry], specs: Mapping[str, ServerSpec | ServiceSpec]
) -> dict[str, Server]:
    """Local and remote servers; joins the Ray cluster when there are remote ones. Raises ValueError without it."""
    nodes = {entry.node for entry in entries.values() if entry.node}
    if not nodes:
        return {name: RoleServer(spec) for name, spec in specs.items()}
    from slime.ray.remote_server import RemoteServer, join_cluster  # Ray only where it is needed

    join_cluster(nodes)
    servers: dict[str, Server] = {}
    for name, spec in specs.items():
        node = entries[name].node
        servers[name] = RemoteServer(spec, node) if node else RoleServer(spec)
    return servers


def say(line: str) -> None:
    print(line, flush=True)


def keep(supervisor: Supervisor, servers: Mapping[str, Server]) -> int:
    """Supervise until a signal (0) or a failure for good (1); ends all servers."""
    try:
        while True:
            supervisor.tick()
            time.sleep(TICK_S)
    except (ServerFailed, ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Stopped:
        say("STOPPING")
        return 0
    finally:
        # A second Ctrl-C must not leave half of them.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(lambda server: server.stop(), servers.values()))


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    try:
        entries, specs = build_specs(args.roles, args.log_dir)
        has_gpu = add_cpu_options(entries, specs)
        servers = build_servers(entries, specs)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _raise_stopped)
    for name, entry in entries.items():
        place = f" on {entry.node}" if entry.node else ""
        say(f"START {name} {entry.model or entry.kind} {entry.url}{place} log {specs[name].log_path}")
    supervisor = Supervisor(
        servers,
        {name: devices_of(entry, has_gpu) for name, entry in entries.items()},
        args.timeout_s,
        say,
        args.max_restarts,
        args.health_interval_s,
    )
    return keep(supervisor, servers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
