"""Small helpers without a better home: dotted-path loading, singletons, ports, grouping, chunking.

Invariants: nothing here imports ray, torch.distributed or a backend at module level.
Leaves out: anything that belongs to one engine.
"""

from __future__ import annotations

import base64
import functools
import importlib
import socket
import subprocess
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def decode_int32_meta_array(meta_info: dict[str, Any], keys: str | Iterable[str]) -> torch.Tensor | None:
    """Return the first of `keys` present in `meta_info` as a flat int32 tensor, or None when all are absent.

    The engine sends such arrays as base64 text of little-endian int32; bytes, lists, arrays and tensors work too.
    Raises ValueError when the value is not a whole number of int32.
    """
    names = (keys,) if isinstance(keys, str) else tuple(keys)
    value = next((meta_info[name] for name in names if meta_info.get(name) is not None), None)
    if value is None:
        return None
    import torch  # programs that only start servers need none of it

    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", torch.int32).flatten()
    if isinstance(value, str):
        value = base64.b64decode(value, validate=True)
    if isinstance(value, (bytes, bytearray, memoryview)):
        value = np.frombuffer(value, dtype="<i4")
    return torch.from_numpy(np.array(value, dtype=np.int32).reshape(-1))


@functools.cache
def load_function(path: str) -> Any:
    """Import the object behind a dotted path such as `pkg.mod.fn` or `pkg.mod.Class.method` (cached).

    Raises ValueError when `path` has no dot, or when module or attribute do not exist. An ImportError from inside
    the user's module is passed on unchanged, so that its cause stays visible.
    """
    parts = path.split(".")
    if len(parts) < 2 or not all(parts):
        raise ValueError(f"'{path}' is not a dotted path like package.module.function")
    module, rest = _import_longest(parts)
    target = module
    for name in rest:
        if not hasattr(target, name):
            raise ValueError(
                f"cannot load '{path}': '{getattr(target, '__name__', target)}' has no attribute '{name}'"
            )
        target = getattr(target, name)
    return target


def _import_longest(parts: list[str]) -> tuple[Any, list[str]]:
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        try:
            return importlib.import_module(name), parts[cut:]
        except ModuleNotFoundError as error:
            # Only "this prefix is no module" lets us try a shorter one; a missing import inside it is the user's bug.
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise
    raise ValueError(f"cannot load '{'.'.join(parts)}': no module named '{parts[0]}' (is it on PYTHONPATH?)")


class SingletonMeta(type):
    """Metaclass: the first call builds the instance, later calls return it and ignore their arguments."""

    _instances: dict[type, Any] = {}
    _lock = threading.RLock()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        with SingletonMeta._lock:
            if cls not in SingletonMeta._instances:
                SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
            return SingletonMeta._instances[cls]

    @classmethod
    def clear_instances(cls, *owners: type) -> None:
        """Forget the singletons of these classes, of every class when none is named (for tests)."""
        with cls._lock:
            for owner in owners or tuple(cls._instances):
                cls._instances.pop(owner, None)


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Run a shell command of ours (never text of a model); its output when asked for. Raises CalledProcessError."""
    done = subprocess.run(["bash", "-c", cmd], check=True, text=True, capture_output=capture_output)
    return done.stdout if capture_output else None


def get_current_node_ip() -> str:
    """IP address under which the other nodes of the Ray cluster reach this one."""
    import ray

    return str(ray.util.get_node_ip_address()).strip("[]")


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """First port p >= start_port such that p .. p + consecutive - 1 can be bound on this machine.

    Raises RuntimeError when there is none. Another process may take it before its user binds it: bind soon.
    """
    port = start_port
    while port + consecutive - 1 <= 65535:
        taken = next((p for p in range(port, port + consecutive) if not _can_bind(p)), None)
        if taken is None:
            return port
        port = taken + 1
    raise RuntimeError(f"no {consecutive} consecutive free ports at or above {start_port}")


def _can_bind(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        # Same option as the servers use, else a port in TIME_WAIT would look taken.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
        except OSError:
            return False
    return True


def should_run_periodic_action(
    rollout_id: int,
    interval: int | None,
    num_rollout_per_epoch: int | None = None,
    num_rollout: int | None = None,
) -> bool:
    """True after every `interval` rollouts, at each epoch end, and (if `num_rollout` is given) on the last rollout.

    `interval=None` turns the action off altogether.
    """
    if interval is None:
        return False
    step = rollout_id + 1
    if num_rollout is not None and step >= num_rollout:
        return True
    return step % interval == 0 or bool(num_rollout_per_epoch and step % num_rollout_per_epoch == 0)


class Box:
    """Wraps a Ray ObjectRef so that Ray does not resolve it when the box is passed as an argument."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def inner(self) -> Any:
        """The wrapped object."""
        return self._inner


def group_by(iterable: Iterable[Any], key: Callable[[Any], Hashable] | None = None) -> dict[Any, list[Any]]:
    """Group items by `key(item)` (default: the item itself); groups and members keep their first-seen order."""
    groups: dict[Any, list[Any]] = {}
    for item in iterable:
        groups.setdefault(item if key is None else key(item), []).append(item)
    return groups


def chunk_named_params_by_size(
    named_params: Iterable[tuple[str, torch.Tensor]], chunk_size: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Cut a stream of named tensors into lists of at most `chunk_size` bytes; a larger tensor comes alone."""
    chunk: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, param in named_params:
        nbytes = param.numel() * param.element_size()
        if chunk and size + nbytes > chunk_size:
            yield chunk
            chunk, size = [], 0
        chunk.append((name, param))
        size += nbytes
    if chunk:
        yield chunk
