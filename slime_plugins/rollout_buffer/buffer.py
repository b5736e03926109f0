"""The rollout buffer as an HTTP service: generators write trajectories, the trainer's rollout function reads whole groups.

    python -m slime_plugins.rollout_buffer.buffer --port 8889

Routes: POST `/start_rollout` (begin generating with the generator of a task type), POST `/buffer/write` (one item),
POST `/get_rollout_data` (all complete groups). Answers have the form `{"success", "message", "data"}`.
Invariants: one buffer per service; a new `/start_rollout` makes a new one; nothing that a request holds is executed, and only
generators in `generator/` can be started. It listens on 127.0.0.1 unless told otherwise. Left out: authentication.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import pkgutil
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

import uvicorn
from fastapi import BackgroundTasks, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from slime_plugins.rollout_buffer import generator
from slime_plugins.rollout_buffer.group_queue import (
    BufferQueue,
    RolloutBuffer,
    default_get_group_data_meta_info,
    default_is_valid_group,
)

__all__ = [
    "BufferQueue",
    "BufferResponse",
    "RolloutBuffer",
    "app",
    "default_get_group_data_meta_info",
    "default_is_valid_group",
    "discover_generators",
    "get_rollout_data",
    "run_rollout",
    "set_body_size",
    "start_rollout",
    "write_to_buffer",
]

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8889
MAX_BODY_BYTES = 2 * 1024**3

app = FastAPI(title="rollout buffer")
buffer = RolloutBuffer()


class BufferResponse(BaseModel):
    """Form of every answer."""

    success: bool
    message: str = ""
    data: dict[str, Any] | None = None


def discover_generators() -> dict[str, ModuleType]:
    """Task type -> module, of all modules in `generator/` with a `TASK_TYPE` and a `run_rollout`.

    Raises ValueError when two have the same task type.
    """
    found: dict[str, ModuleType] = {}
    for info in pkgutil.iter_modules(generator.__path__, prefix=f"{generator.__name__}."):
        module = importlib.import_module(info.name)
        task_type = getattr(module, "TASK_TYPE", None)
        if task_type is None or not hasattr(module, "run_rollout"):
            continue
        if task_type in found:
            raise ValueError(f"{info.name} and {found[task_type].__name__} both have TASK_TYPE {task_type!r}")
        found[task_type] = module
    return found


@app.middleware("http")
async def set_body_size(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuses bodies larger than 2 GiB."""
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        return JSONResponse(
            status_code=413, content=BufferResponse(success=False, message="body too large").model_dump()
        )
    return await call_next(request)


@app.post("/buffer/write")
async def write_to_buffer(request: Request) -> Any:
    """Adds one item `{uid, instance_id, messages, reward, extra_info}`. 500 when it cannot be added."""
    try:
        item = buffer.write(await request.json())
    except (KeyError, TypeError, ValueError) as error:
        answer = BufferResponse(success=False, message=f"item not written: {error!r}")
        return JSONResponse(status_code=500, content=answer.model_dump())
    return BufferResponse(success=True, message="written", data={"data": [item], "meta_info": ""})


@app.post("/get_rollout_data")
async def get_rollout_data(request: Request) -> BufferResponse:
    """All complete groups, which leave the buffer; `success` is False when there is none."""
    result = buffer.read()
    if not result["data"]:
        return BufferResponse(success=False, message="no complete group", data=result)
    message = f"{len(result['data'])} items of {len(result['meta_info']['finished_groups'])} groups"
    return BufferResponse(success=True, message=message, data=result)


def run_rollout(data: dict[str, Any]) -> None:
    """Makes a new buffer and runs the generator of `data["task_type"]` to its end.

    Raises ValueError for an unknown task type.
    """
    global buffer
    generators = discover_generators()
    task_type = data["task_type"]
    if task_type not in generators:
        raise ValueError(f"unknown task_type {task_type!r}; known: {', '.join(sorted(generators))}")
    module = generators[task_type]
    buffer = RolloutBuffer(
        group_size=int(data["num_repeat_per_sample"]),
        task_type=task_type,
        transform_group_func=getattr(module, "transform_group", None),
        is_valid_group_func=getattr(module, "is_valid_group", None),
        get_group_data_meta_info_func=getattr(module, "get_group_data_meta_info", None),
    )
    logger.info("generating for task type %s", task_type)
    module.run_rollout(data)


@app.post("/start_rollout")
async def start_rollout(request: Request, background: BackgroundTasks) -> dict[str, str]:
    """Starts generating in the background and answers at once."""
    payload = await request.json()
    background.add_task(run_rollout, payload)
    return {"message": f"rollout of task type {payload.get('task_type')!r} started"}


def main(argv: list[str] | None = None) -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description="rollout buffer service", allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="port to listen on")
    args = parser.parse_args(argv)
    uvicorn.run(app, host=args.host, port=args.port, log_level="info")


if __name__ == "__main__":
    main()
