"""Starts the model servers of a role file and keeps them until SIGTERM or Ctrl-C.

    python tools/serve_roles.py --roles FILE [--log-dir DIR]

Reads the `servers:` section. Prints a `START` line per server at once, `READY name url` as each of them generates, `ALL READY`
at the end, and `WAIT` lines in between. Exit code 0 after SIGTERM or SIGINT, 1 when a server dies, 2 (before anything is
started) for a bad role file, a port that is taken or a model folder without `config.json`. However this program ends,
SIGKILL included, its servers end with it.

Leaves out: the policy's engines and router, which a training run starts by itself.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agentic.common.roles import load_servers
from slime.backends.sglang_utils.errors import ServerStartError
from slime.backends.sglang_utils.server import ServerSpec, SGLangServer, default_cpu_options

WAIT_LINE_S = 10.0


class Stopped(BaseException):
    """SIGTERM or SIGINT; not an Exception, so that nothing on the way swallows it."""


def _raise_stopped(_number: int, _frame: FrameType | None) -> None:
    raise Stopped


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Start the model servers of a role file and keep them until SIGTERM or Ctrl-C.", allow_abbrev=False
    )
    parser.add_argument("--roles", type=Path, required=True, help="role file (YAML)")
    parser.add_argument("--log-dir", type=Path, default=Path("outputs/role_servers"), help="one log per server")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="seconds for a server to become ready")
    return parser.parse_args(argv)


def build_specs(roles: Path, log_dir: Path) -> dict[str, ServerSpec]:
    """Specs by server name, checked. Raises ValueError or FileNotFoundError with one line naming the server."""
    entries = load_servers(roles)
    if not entries:
        raise ValueError(f"{roles}: no `servers:` to start; add one such as `frozen: {{model: PATH, port: 30000}}`")
    specs = {}
    for name, entry in entries.items():
        options = {key.lstrip("-").replace("_", "-"): value for key, value in entry.options.items()}
        if entry.tokenizer is not None:
            options["tokenizer-path"] = entry.tokenizer
        spec = ServerSpec(entry.model, entry.host, entry.port, options, log_dir / f"{name}_{entry.port}.log")
        try:
            spec.check()
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"{roles}: servers.{name}: {error}") from error
        specs[name] = spec
    return specs


def add_cpu_options(specs: dict[str, ServerSpec]) -> None:
    """Without a GPU the flags of `default_cpu_options` come first; those of the role file replace them."""
    import torch  # here, so that a bad role file is refused without waiting for it

    if not torch.cuda.is_available():
        for spec in specs.values():
            spec.options = default_cpu_options() | spec.options


def say(line: str) -> None:
    print(line, flush=True)


def wait_ready(name: str, server: SGLangServer, timeout_s: float) -> None:
    """Waits for one server with a line every ten seconds."""
    started, done = time.monotonic(), threading.Event()

    def report() -> None:
        while not done.wait(WAIT_LINE_S):
            say(f"WAIT {name} {time.monotonic() - started:.0f} s")

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        server.wait_ready(timeout_s)
    finally:
        done.set()
        reporter.join()
    say(f"READY {name} {server.url}")


def serve(servers: dict[str, SGLangServer], timeout_s: float) -> None:
    """Starts all, waits for all, then watches them. Raises ServerStartError when one dies."""
    for name, server in servers.items():
        server.start()
        say(f"START {name} {server.spec.model_path} {server.url} log {server.spec.log_path}")
    for name, server in servers.items():
        wait_ready(name, server, timeout_s)
    say("ALL READY")
    while True:
        for name, server in servers.items():
            if not server.is_alive():
                process = server.process
                raise ServerStartError(f"server {name}", "died", process.log_path, process.log_tail())
        time.sleep(1.0)


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    try:
        specs = build_specs(args.roles, args.log_dir)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    add_cpu_options(specs)
    servers = {name: SGLangServer(spec) for name, spec in specs.items()}
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _raise_stopped)
    try:
        serve(servers, args.timeout_s)
    except ServerStartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Stopped:
        say("STOPPING")
    finally:
        # A second Ctrl-C must not leave half of them.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(SGLangServer.stop, servers.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
