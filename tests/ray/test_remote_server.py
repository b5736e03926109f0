"""A role server on a node of a Ray cluster: it runs there, is asked there, and ends with its actor."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from slime.backends.sglang_utils.role_server import ServiceSpec
from slime.ray.remote_server import RemoteServer, join_cluster, leave_cluster
from slime.utils.misc import get_free_port

SERVICE = """
import http.server, os, pathlib, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
pathlib.Path(sys.argv[sys.argv.index("--pid-file") + 1]).write_text(str(os.getpid()))
print("serving", flush=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def node() -> Iterator[str]:
    """The address of the only node of a cluster of this process."""
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield ray.nodes()[0]["NodeManagerAddress"]
    ray.shutdown()


@pytest.fixture
def spec(tmp_path: Path) -> ServiceSpec:
    (tmp_path / "remote_service.py").write_text(SERVICE)
    options = {"pid-file": str(tmp_path / "pid")}
    env = {"PYTHONPATH": str(tmp_path)}
    return ServiceSpec("remote_service", "127.0.0.1", get_free_port(), options, tmp_path / "log", env)


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.slow
def test_a_server_starts_dies_and_starts_again_on_its_node(node: str, spec: ServiceSpec, tmp_path: Path) -> None:
    server = RemoteServer(spec, node)
    assert not server.is_alive()
    server.start()
    assert soon(server.is_ready) and server.answers() and "serving" in server.log_tail()
    first = int((tmp_path / "pid").read_text())
    os.kill(first, signal.SIGKILL)
    assert soon(lambda: not server.is_alive())
    server.stop()
    server.start()
    assert soon(server.is_ready)
    second = int((tmp_path / "pid").read_text())
    server.stop()
    assert soon(lambda: not runs(second)) and not server.is_alive()


@pytest.mark.slow
def test_a_bad_spec_is_said_as_on_this_machine(node: str, spec: ServiceSpec) -> None:
    spec.options["port"] = 1
    with pytest.raises(ValueError, match="option 'port' is set by the launcher"):
        RemoteServer(spec, node).start()


def test_a_cluster_must_be_there_and_have_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cluster(**_: object) -> None:
        raise ConnectionError("no running cluster")

    monkeypatch.setattr(ray, "init", no_cluster)
    with pytest.raises(ValueError, match="needs a running Ray cluster: no running cluster"):
        join_cluster(["10.0.0.2"])
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "NodeManagerAddress": "10.0.0.1"}])
    with pytest.raises(ValueError, match="node 10.0.0.2 is not in the Ray cluster; its nodes: 10.0.0.1"):
        join_cluster(["10.0.0.1", "10.0.0.2"])
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    join_cluster(["10.0.0.1"])
    leave_cluster()
