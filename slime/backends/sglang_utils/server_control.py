"""Blocking control calls on one SGLang server, each with a deadline.

Inputs: the server's base url. A failure is an `EngineError` with url, endpoint, status and body; only the health calls
answer False instead.

The protocol of a weight update (tensor data goes beside it, over the process group or the disk):

    pause_generation -> flush_cache -> begin_weight_update -> update_weights_from_distributed (once a bucket)
      -> end_weight_update -> continue_generation

`update_weights_from_disk` takes the place of begin, update and end. The weight version is a string; the server reports it
in `meta_info.weight_version` of every answer.

Leaves out: retries (only `flush_cache` has them: it fails while requests run), generation, and every tensor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import httpx

from slime.backends.sglang_utils.errors import EngineError
from slime.utils.engine_abort import ABORT_INTERVAL_S as ABORT_RETRY_INTERVAL_SECONDS
from slime.utils.engine_abort import abort_server_until_idle, abort_servers_until_idle, num_requests_from_load

__all__ = [
    "ABORT_RETRY_INTERVAL_SECONDS",
    "abort_all",
    "abort_server_until_idle",
    "abort_servers_until_idle",
    "begin_weight_update",
    "check_weights",
    "continue_generation",
    "destroy_weights_update_group",
    "end_weight_update",
    "flush_cache",
    "get_weight_version",
    "health_generate",
    "init_weights_update_group",
    "is_ok",
    "num_requests_from_load",
    "num_running_requests",
    "pause_generation",
    "release_memory_occupation",
    "request",
    "resume_memory_occupation",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
]

CALL_TIMEOUT_S = 60.0
# A bucket has to cross the network; a rank that died must still show within minutes.
UPDATE_TIMEOUT_S = 600.0
FLUSH_TRIES = 60
FLUSH_INTERVAL_S = 1.0
BODY_CHARS = 2000


def request(
    method: str, url: str, endpoint: str, payload: dict[str, Any] | None = None, timeout_s: float = CALL_TIMEOUT_S
) -> dict[str, Any]:
    """One call. Returns the JSON object of the answer, or {} when the answer is none.

    Raises EngineError for a status of 400 and above and when no answer comes within `timeout_s` seconds.
    """
    try:
        # No proxy from the environment: engines are neighbours.
        with httpx.Client(trust_env=False, timeout=timeout_s) as client:
            answer = client.request(method, url + endpoint, json=payload)
    except httpx.HTTPError as error:
        raise EngineError(url, endpoint, None, f"{type(error).__name__}: {error}") from error
    if answer.status_code >= 400:
        raise EngineError(url, endpoint, answer.status_code, answer.text[:BODY_CHARS])
    is_json = answer.headers.get("content-type", "").startswith("application/json")
    content = answer.json() if is_json and answer.content else {}
    return content if isinstance(content, dict) else {}


def _post(url: str, endpoint: str, payload: dict[str, Any], timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
    return request("POST", url, endpoint, {k: v for k, v in payload.items() if v is not None}, timeout_s)


def is_ok(url: str, endpoint: str, timeout_s: float) -> bool:
    """Whether a GET answers below 400 within the deadline."""
    try:
        request("GET", url, endpoint, timeout_s=timeout_s)
    except EngineError:
        return False
    return True


def health_generate(url: str, timeout_s: float = 5.0) -> bool:
    """Whether the server generates a token (or is busy generating) within the deadline. Takes a second when idle."""
    return is_ok(url, "/health_generate", timeout_s)


def flush_cache(url: str, tries: int = FLUSH_TRIES, interval_s: float = FLUSH_INTERVAL_S) -> None:
    """Empties the prefix cache; waits for running requests to leave. Raises TimeoutError after `tries` tries."""
    last = ""
    for attempt in range(tries):
        if attempt:
            time.sleep(interval_s)
        try:
            request("GET", url, "/flush_cache")
            return
        except EngineError as error:
            if error.status is None:
                raise
            last = str(error)
    raise TimeoutError(f"cache not flushed after {tries} tries, requests are still running: {last}")


def pause_generation(url: str, mode: str = "abort") -> None:
    """Stops the scheduler. `abort`: running requests end with what they have; `retract`: they are computed again later;
    `in_place`: they go on later with their old KV cache."""
    _post(url, "/pause_generation", {"mode": mode})


def continue_generation(url: str) -> None:
    """Lets the scheduler go on."""
    _post(url, "/continue_generation", {})


def begin_weight_update(url: str) -> None:
    """Opens an update session; distributed and tensor updates outside of one are refused with 400."""
    _post(url, "/begin_weight_update", {})


def end_weight_update(url: str) -> None:
    """Closes the update session."""
    _post(url, "/end_weight_update", {}, UPDATE_TIMEOUT_S)


def init_weights_update_group(
    url: str, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
) -> None:
    """Joins the process group `group_name`; blocks until all `world_size` ranks have. The trainer is rank 0."""
    payload = {
        "master_address": master_address,
        "master_port": master_port,
        "rank_offset": rank_offset,
        "world_size": world_size,
        "group_name": group_name,
        "backend": backend,
    }
    _post(url, "/init_weights_update_group", payload, UPDATE_TIMEOUT_S)


def destroy_weights_update_group(url: str, group_name: str) -> None:
    """Leaves the process group."""
    _post(url, "/destroy_weights_update_group", {"group_name": group_name})


def update_weights_from_distributed(
    url: str,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    group_name: str,
    flush_cache: bool = False,
    weight_version: str | None = None,
    load_format: str | None = None,
) -> None:
    """Receives one bucket of tensors that rank 0 of the group broadcasts in this order; blocks until all have arrived.

    Args:
        dtypes: without the prefix `torch.` (removed when given).
        shapes: of the full (unsharded) tensors, in elements.
    """
    payload = {
        "names": list(names),
        "dtypes": [dtype.removeprefix("torch.") for dtype in dtypes],
        "shapes": [list(shape) for shape in shapes],
        "group_name": group_name,
        "flush_cache": flush_cache,
        "weight_version": weight_version,
        "load_format": load_format,
    }
    _post(url, "/update_weights_from_distributed", payload, UPDATE_TIMEOUT_S)


def update_weights_from_tensor(
    url: str,
    serialized_named_tensors: list[str],
    load_format: str | None = None,
    flush_cache: bool = False,
    weight_version: str | None = None,
) -> None:
    """Loads tensors that are shared by handle; one serialised entry per rank of the engine, made by SGLang's serialiser."""
    payload = {
        "serialized_named_tensors": serialized_named_tensors,
        "load_format": load_format,
        "flush_cache": flush_cache,
        "weight_version": weight_version,
    }
    _post(url, "/update_weights_from_tensor", payload, UPDATE_TIMEOUT_S)


def check_weights(url: str, action: str) -> dict[str, Any]:
    """`snapshot` remembers the weights, `reset_tensors` spoils them, `compare` fails when they are not as remembered."""
    return request("POST", url, "/weights_checker", {"action": action}, UPDATE_TIMEOUT_S)


def update_weights_from_disk(
    url: str, model_path: str, load_format: str | None = None, weight_version: str | None = None
) -> None:
    """Loads a Hugging Face checkpoint folder. The caller has checked its shapes: other shapes end the server."""
    payload = {"model_path": model_path, "load_format": load_format, "weight_version": weight_version}
    _post(url, "/update_weights_from_disk", payload, UPDATE_TIMEOUT_S)


def get_weight_version(url: str) -> str:
    """The version set by the last update ("default" before the first)."""
    return str(request("GET", url, "/model_info")["weight_version"])


def release_memory_occupation(url: str) -> None:
    """Gives device memory back after a flush (colocated engines)."""
    flush_cache(url)
    _post(url, "/release_memory_occupation", {}, UPDATE_TIMEOUT_S)


def resume_memory_occupation(url: str, tags: list[str] | None = None) -> None:
    """Takes device memory again, all of it or the named parts ("weights", "kv_cache", "cuda_graph")."""
    _post(url, "/resume_memory_occupation", {"tags": tags}, UPDATE_TIMEOUT_S)


def num_running_requests(url: str) -> int:
    """Requests running or waiting, over all data-parallel ranks."""
    return num_requests_from_load(request("GET", url, "/v1/loads?include=core"))


def abort_all(url: str, timeout_s: float = CALL_TIMEOUT_S, interval_s: float = 0.2) -> None:
    """Aborts every request and waits until none is left; each comes back with what it has and finish reason `abort`.

    Aborts again in every round, since a client may have had a request on its way. Raises TimeoutError.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        _post(url, "/abort_request", {"abort_all": True})
        if num_running_requests(url) == 0:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} still has requests {timeout_s:g} s after the abort")
        time.sleep(interval_s)
