"""Shared by the acceptance tests: a census of our processes, a recording proxy, rollouts without engine, a small quickstart.

The census finds processes by an environment variable that every descendant inherits, wherever it moved (own session, own
parent); the kernel shows the environment a process started with. Programs that write their title over it (Ray's workers,
SGLang) are therefore noted while they still start, together with everything below a process already noted.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psutil
from helpers_ray import ROOT, descendants, living

MARKER = "SLIME_TEST_CENSUS"
POLL_S = 0.3
END_LIMIT_S = 30
# When the driver is killed, Ray's agents try for a fixed 60 s to tell the store that died as well, then end by themselves.
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
RAY_AGENTS_LIMIT_S = 90


class Census:
    """All processes that carry this census's mark, or descend from one that does. What a failed test leaves is killed."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.seen: set[psutil.Process] = set()

    def __enter__(self) -> Census:
        return self

    def __exit__(self, *error: object) -> None:
        self.look()
        for process in self.seen:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def start(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a marked command; its output is appended to `log`."""
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests"), MARKER: self.mark}
        env["SPT_NOENV"] = "1"  # setproctitle then leaves the environment readable
        env.pop("RAY_ADDRESS", None)
        with log.open("ab") as output:
            return subprocess.Popen(list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)

    def look(self) -> None:
        """Note every process of ours that runs now."""
        mark = f"{MARKER}={self.mark}".encode()
        self.seen |= {process for process in psutil.process_iter() if mark in _environment(process.pid)}
        for process in list(self.seen):
            self.seen |= descendants(process)

    def left(self) -> list[str]:
        """Command lines of those that still run."""
        self.look()
        return living(self.seen)

    def wait_for(self, condition: Callable[[], bool], process: subprocess.Popen[bytes], limit_s: float) -> None:
        """Look around until `condition` holds; AssertionError when `process` ends before it, or time is up."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert process.poll() is None, f"it ended with {process.returncode}"
            assert time.monotonic() < deadline, f"nothing happened within {limit_s} s"
            self.look()
            time.sleep(POLL_S)

    def end_of(self, process: subprocess.Popen[bytes], limit_s: float) -> int:
        """Look around until `process` has ended; its exit code. It is killed when time is up."""
        deadline = time.monotonic() + limit_s
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
                process.wait()
                raise AssertionError(f"it still ran after {limit_s} s")
            self.look()
            time.sleep(POLL_S)
        return process.returncode

    def assert_empty(self, limit_s: float = END_LIMIT_S, allowed: Collection[str] = ()) -> None:
        """AssertionError with the command lines of what is left after `limit_s` seconds, except titles in `allowed`."""
        deadline = time.monotonic() + limit_s
        while left := [line for line in self.left() if line.strip() not in allowed]:
            assert time.monotonic() < deadline, f"{len(left)} processes are left: {left}"
            time.sleep(POLL_S)


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it ended, or belongs to somebody else
        return b""


# --------------------------------------------------------------------------------------------------------------------
# Hooks of the runs under test; Ray's workers import them by name.


def scripted_rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Responses that depend on prompt and sample number only. From rollout 2 on it waits while `e2e_hold_file` exists."""
    from slime.utils.processing_utils import load_tokenizer

    hold = Path(args.e2e_hold_file)
    while rollout_id >= 2 and hold.exists():
        time.sleep(0.1)
    tokenizer = load_tokenizer(args.hf_checkpoint)
    groups = data_source.get_samples(args.rollout_batch_size)
    for sample in (sample for group in groups for sample in group):
        _script(sample, tokenizer)
    return groups


def _script(sample: Any, tokenizer: Any) -> None:
    chance = random.Random(f"{sample.prompt} {sample.index}")
    response = [chance.randrange(3, 250) for _ in range(chance.randint(3, 12))]
    sample.tokens = [*tokenizer.encode(sample.prompt), *response]
    sample.response_length = len(response)
    sample.loss_mask = [1] * len(response)
    sample.rollout_log_probs = [-chance.uniform(0.5, 5.0) for _ in response]
    sample.reward = chance.random()
    sample.status = type(sample).Status.COMPLETED


async def raising_reward(args: Namespace, sample: Any, **kwargs: Any) -> float:
    """A reward with a bug."""
    raise RuntimeError("the reward is broken")


# --------------------------------------------------------------------------------------------------------------------
# The wire.


class _Forwarder(BaseHTTPRequestHandler):
    """Hands every request on to `server.target` and notes the bodies of `/generate` in `server.calls`."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = self._forward(body)
        if self.path == "/generate":
            self.server.calls.append((json.loads(body), json.loads(answer)))  # type: ignore[attr-defined]

    def do_GET(self) -> None:
        self._forward(None)

    def _forward(self, body: bytes | None) -> bytes:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        url = self.server.target + self.path  # type: ignore[attr-defined]
        answer = httpx.request(self.command, url, content=body, headers=headers, timeout=120, trust_env=False)
        self.send_response(answer.status_code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)
        return answer.content

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@contextmanager
def recording_proxy(target: str) -> Iterator[tuple[int, list[tuple[dict[str, Any], dict[str, Any]]]]]:
    """A port of 127.0.0.1 that forwards to `target`, and the `/generate` calls (request, answer) that went through."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Forwarder)
    server.daemon_threads = True
    calls: list[tuple[dict[str, Any], dict[str, Any]]] = []
    server.target, server.calls = target, calls  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port, calls
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# --------------------------------------------------------------------------------------------------------------------
# Tools.


def load_tool(name: str) -> ModuleType:
    """`tools/<name>.py` as a module."""
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def make_small_world(folder: Path, seed: int = 0) -> Path:
    """The tiny model with its tokenizer in `folder/model` and a small world in `folder/world`; returns the model."""
    tool, model = ROOT / "tools" / "make_tiny_model.py", folder / "model"
    sizes = ["--n-sft", "100", "--n-train", "30", "--n-heldout", "8", "--seed", str(seed)]
    command = [sys.executable, str(tool), "--world-dir", str(folder / "world"), "--output", str(model), *sizes]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return model


def small_quickstart() -> int:
    """`tools/quickstart.py` with the tiny recipe cut down to seconds; run by `python -c`."""
    tool = load_tool("quickstart")
    sizes = {"prompts": 2, "samples": 2, "steps_per_rollout": 1, "n_eval": 2, "sft_rows": 32, "sft_rollouts": 1}
    recipes = tool.method_of("agentflow").RECIPES
    recipes["tiny"] = dataclasses.replace(recipes["tiny"], **sizes)
    return int(tool.main(sys.argv[1:]))
