"""A real SGLang server and a real router on CPU: generation, weight updates, pause, abort, end.

One server serves the module. Tests that change its weights set them themselves, so that the order does not matter.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_sglang import (
    free_port,
    generate,
    ids_and_log_probs,
    reference_greedy,
    running_server,
    save_tiny_model,
    tiny_model,
)
from transformers import Qwen2ForCausalLM

from slime.backends.common.distributed import new_external_group
from slime.backends.sglang_utils import router, server_control
from slime.backends.sglang_utils.arguments import add_sglang_arguments, validate_sglang_args
from slime.backends.sglang_utils.errors import EngineError, ServerStartError
from slime.backends.sglang_utils.owned_process import session_members
from slime.backends.sglang_utils.router import Router
from slime.backends.sglang_utils.server import ServerSpec, SGLangServer, default_cpu_options
from slime.backends.sglang_utils.sglang_engine import SGLangEngine, launch_server_process
from slime.utils.http_utils import terminate_process

pytestmark = pytest.mark.engine

PROMPT = [1, 60, 70, 80, 90, 17, 33, 5]
GROUP = "test-weights"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three checkpoints of the same shape with different weights."""
    root = tmp_path_factory.mktemp("models")
    for seed in range(3):
        save_tiny_model(root / str(seed), seed)
    return [root / str(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def server(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    with running_server(folders[0], tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest.fixture
def routed(server: SGLangServer, tmp_path: Path) -> Iterator[Router]:
    process = Router("127.0.0.1", free_port(), tmp_path / "router.log")
    process.start()
    process.wait_ready()
    process.add_worker(server.url)
    yield process
    process.stop()


def load_from_disk(url: str, folder: Path, version: int) -> None:
    server_control.pause_generation(url)
    server_control.flush_cache(url)
    server_control.update_weights_from_disk(url, str(folder), weight_version=str(version))
    server_control.continue_generation(url)


def assert_serves(url: str, model: Qwen2ForCausalLM, version: str | None = None) -> None:
    """Greedy ids and log-probs of the server equal those of the model."""
    answer = generate(url, PROMPT)
    ids, log_probs = ids_and_log_probs(answer)
    expected_ids, expected = reference_greedy(model, PROMPT)
    assert ids == expected_ids
    assert torch.tensor(log_probs) == pytest.approx(torch.tensor(expected), abs=1e-3)
    assert answer["meta_info"]["prompt_tokens"] == len(PROMPT)
    if version is not None:
        assert answer["meta_info"]["weight_version"] == version


def test_generate_equals_hugging_face(server: SGLangServer, folders: list[Path]) -> None:
    load_from_disk(server.url, folders[0], 100)
    assert_serves(server.url, tiny_model(0), "100")


def test_many_at_once_equal_one_at_a_time(server: SGLangServer) -> None:
    prompts = [[1, *range(20 + i, 40 + 2 * i)] for i in range(12)]
    alone = [ids_and_log_probs(generate(server.url, prompt)) for prompt in prompts]
    with ThreadPoolExecutor(12) as pool:
        together = [ids_and_log_probs(a) for a in pool.map(lambda p: generate(server.url, p), prompts)]
    assert [ids for ids, _ in together] == [ids for ids, _ in alone]
    for (_, left), (_, right) in zip(together, alone, strict=True):
        assert left == pytest.approx(right, abs=1e-3)


def test_update_from_disk(server: SGLangServer, folders: list[Path]) -> None:
    load_from_disk(server.url, folders[0], 7)
    before = ids_and_log_probs(generate(server.url, PROMPT))[0]
    load_from_disk(server.url, folders[1], 8)
    assert server_control.get_weight_version(server.url) == "8"
    assert_serves(server.url, tiny_model(1), "8")
    assert ids_and_log_probs(generate(server.url, PROMPT))[0] != before


def test_missing_checkpoint_is_a_typed_error(server: SGLangServer, folders: list[Path]) -> None:
    with pytest.raises(EngineError) as caught:
        server_control.update_weights_from_disk(server.url, "/no/such/checkpoint")
    error = caught.value
    assert (error.url, error.endpoint, error.status) == (server.url, "/update_weights_from_disk", 400)
    load_from_disk(server.url, folders[0], 9)
    assert_serves(server.url, tiny_model(0), "9")


def broadcast_weights(url: str, model: Qwen2ForCausalLM, version: int) -> None:
    """The trainer's side of one sync over gloo: rank 0 of a group of two."""
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(server_control.init_weights_update_group, url, "127.0.0.1", port, 1, 2, GROUP, "gloo")
        group = new_external_group("gloo", "127.0.0.1", port, 0, 2, GROUP, timedelta(seconds=60))
        joining.result(60)
        server_control.pause_generation(url)
        server_control.flush_cache(url)
        server_control.begin_weight_update(url)
        tensors = list(model.state_dict().items())
        for start in range(0, len(tensors), 8):
            bucket = tensors[start : start + 8]
            receiving = pool.submit(send_bucket, url, bucket, version)
            for _, tensor in bucket:
                dist.broadcast(tensor, src=0, group=group)
            receiving.result(60)
        server_control.end_weight_update(url)
        server_control.continue_generation(url)
    server_control.destroy_weights_update_group(url, GROUP)
    dist.destroy_process_group(group)


def send_bucket(url: str, bucket: list[tuple[str, torch.Tensor]], version: int) -> None:
    names, dtypes = [name for name, _ in bucket], [str(tensor.dtype) for _, tensor in bucket]
    shapes = [list(tensor.shape) for _, tensor in bucket]
    server_control.update_weights_from_distributed(url, names, dtypes, shapes, GROUP, weight_version=str(version))


def test_update_over_gloo(server: SGLangServer, folders: list[Path]) -> None:
    load_from_disk(server.url, folders[0], 20)
    version = int(server_control.get_weight_version(server.url))
    for seed in (2, 1):  # twice: a group of the same name can be made again
        version += 1
        broadcast_weights(server.url, tiny_model(seed), version)
        assert server_control.get_weight_version(server.url) == str(version)
        assert_serves(server.url, tiny_model(seed), str(version))
    assert version == 22


def test_update_outside_of_a_session_is_refused(server: SGLangServer) -> None:
    with pytest.raises(EngineError, match="status 400"):
        server_control.update_weights_from_distributed(server.url, ["x"], ["float32"], [[1]], "no-such-group")
    assert server_control.health_generate(server.url, 20)


def long_request(url: str, tokens: int = 1500) -> tuple[threading.Thread, dict[str, Any]]:
    """Starts a request of many tokens and waits until it runs."""
    result: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: result.update(generate(url, PROMPT, tokens)))
    thread.start()
    deadline = time.monotonic() + 60
    while server_control.num_running_requests(url) == 0:
        assert time.monotonic() < deadline, "the request never showed up"
        time.sleep(0.02)
    return thread, result


def test_abort_returns_partial_answers(server: SGLangServer) -> None:
    thread, result = long_request(server.url)
    server_control.abort_all(server.url)
    thread.join(20)
    assert result["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(ids_and_log_probs(result)[0]) < 1500
    assert server_control.num_running_requests(server.url) == 0
    assert len(ids_and_log_probs(generate(server.url, PROMPT, 4))[0]) == 4


def test_pause_in_place_holds_requests_until_continue(server: SGLangServer) -> None:
    thread, result = long_request(server.url, 400)
    server_control.pause_generation(server.url, "in_place")
    thread.join(4)
    assert thread.is_alive(), "a paused server went on"
    server_control.continue_generation(server.url)
    thread.join(60)
    assert result["meta_info"]["completion_tokens"] == 400


def test_pause_abort_ends_requests_and_the_cache_can_be_flushed(server: SGLangServer) -> None:
    thread, result = long_request(server.url)
    server_control.pause_generation(server.url)
    thread.join(20)
    assert result["meta_info"]["finish_reason"]["type"] == "abort"
    server_control.flush_cache(server.url, tries=5)
    server_control.continue_generation(server.url)
    assert len(ids_and_log_probs(generate(server.url, PROMPT, 4))[0]) == 4


def test_flush_gives_up_while_requests_run(server: SGLangServer) -> None:
    thread, _ = long_request(server.url)
    with pytest.raises(TimeoutError, match="not flushed after 2 tries"):
        server_control.flush_cache(server.url, tries=2, interval_s=0.05)
    server_control.abort_all(server.url)
    thread.join(20)
    server_control.flush_cache(server.url)


def test_router_passes_requests_on(server: SGLangServer, routed: Router, folders: list[Path]) -> None:
    load_from_disk(server.url, folders[0], 30)
    assert [worker["url"] for worker in router.list_workers(routed.url)] == [server.url]
    assert_serves(routed.url, tiny_model(0), "30")
    routed.remove_worker(server.url)
    assert router.list_workers(routed.url) == []
    routed.remove_worker(server.url)


def test_router_ends_with_its_processes(routed: Router) -> None:
    session = routed.process.session
    assert session is not None and len(session_members(session)) >= 2
    routed.stop()
    routed.stop()
    assert session_members(session) == []


def test_router_refuses_a_dead_worker(routed: Router) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(TimeoutError, match=dead):
        routed.add_worker(dead, timeout_s=1.0)


def test_server_that_cannot_start_shows_its_log(folders: list[Path], tmp_path: Path) -> None:
    options = default_cpu_options() | {"no-such-flag": 1}
    broken = SGLangServer(ServerSpec(str(folders[0]), "127.0.0.1", free_port(), options, tmp_path / "log"))
    broken.start()
    with pytest.raises(ServerStartError, match="no-such-flag"):
        broken.wait_ready(120)
    broken.stop()


def test_server_from_its_own_arguments(folders: list[Path]) -> None:
    from sglang.srt.server_args import ServerArgs

    options = {name.replace("-", "_"): value for name, value in default_cpu_options().items()}
    args = ServerArgs(model_path=str(folders[2]), host="127.0.0.1", port=free_port(), **options)
    process = launch_server_process(args)
    try:
        assert_serves(f"http://127.0.0.1:{args.port}", tiny_model(2))
    finally:
        terminate_process(process, timeout=20)
    assert not process.is_alive() and not server_control.health_generate(f"http://127.0.0.1:{args.port}")


def test_engine_life_cycle(folders: list[Path], tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_sglang_arguments(parser)
    args = parser.parse_args(["--sglang-log-dir", str(tmp_path)])
    vars(args).update(use_gpu=False, rollout_num_gpus_per_engine=1, hf_checkpoint=str(folders[2]), seed=1)
    validate_sglang_args(args)
    gateway = Router("127.0.0.1", free_port(), tmp_path / "router.log")
    engine = SGLangEngine(args, rank=0)
    gateway.start()
    try:
        gateway.wait_ready()
        url = engine.init(None, free_port(), free_port(), router_ip="127.0.0.1", router_port=gateway.port)
        assert engine.get_url() == url and engine.health_generate(20)
        assert_serves(gateway.url, tiny_model(2))
        assert engine.server is not None
        session = engine.server.process.session
        assert session is not None and len(session_members(session)) >= 4
        engine.shutdown()
        engine.shutdown()
        assert session_members(session) == []
        assert router.list_workers(gateway.url) == []
    finally:
        engine.shutdown()
        gateway.stop()
