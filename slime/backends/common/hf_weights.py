"""Weights of a Hugging Face directory: read single tensors, write shards as a stream.

Invariants: a tensor is read when it is asked for, and written as soon as a shard is full, so that memory holds one shard at a
time; a directory under its final name is complete (it is written beside itself and renamed).
Left out: what the tensors mean; formats other than safetensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slime.backends.common.hf_files import copy_companion_files, replace_directory
from slime.utils.disk_delta import shards_by_name

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 * 1024**3


def read_config(folder: str | Path) -> dict[str, Any]:
    """Content of `config.json`. Raises FileNotFoundError or ValueError naming the file and the remedy."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: no config.json there; give a Hugging Face model directory")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    return dict(content)


class SafetensorReader:
    """Tensors of a directory by name. Raises FileNotFoundError when it has no safetensors files."""

    def __init__(self, path: str | Path) -> None:
        self.folder = Path(path)
        self.shards = shards_by_name(self.folder)
        self._open: dict[str, Any] = {}

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor on the CPU. Raises KeyError for a name that the directory does not have."""
        return self._file(name).get_tensor(name)

    def get_shape(self, name: str) -> list[int]:
        """Its shape, without reading it."""
        return list(self._file(name).get_slice(name).get_shape())

    def get_dtype(self, name: str) -> torch.dtype:
        """Its dtype; reads one element at most."""
        part = self._file(name).get_slice(name)
        return part[tuple(slice(0, 1) for _ in part.get_shape())].dtype

    def _file(self, name: str) -> Any:
        if name not in self.shards:
            raise KeyError(f"{self.folder}: no tensor {name}")
        shard = self.shards[name]
        if shard not in self._open:
            self._open[shard] = safe_open(self.folder / shard, framework="pt", device="cpu")
        return self._open[shard]


class ShardWriter:
    """Collects tensors and writes a shard whenever `shard_bytes` would be passed (a larger tensor has its own)."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        self.total_bytes = 0
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._names: set[str] = set()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a copy of a tensor. Raises ValueError for a name that was there before."""
        if name in self._names:
            raise ValueError(f"tensor {name} is written twice")
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.shard_bytes:
            self._flush()
        self._names.add(name)
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size
        self.total_bytes += size

    def _flush(self) -> None:
        save_file(self._pending, self._part(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}"

    def close(self) -> None:
        """Write what is left, give the shards their names, and write the index when there are several."""
        if self._pending:
            self._flush()
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self.folder / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            final = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self.folder / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_hf_directory(
    target: Path, tensors: Iterable[tuple[str, torch.Tensor]], origin: Path | None, shard_bytes: int = SHARD_BYTES
) -> int:
    """Write `tensors` with the configuration and companion files of `origin`; replaces `target`. Returns bytes of weights.

    The dtype that `config.json` names becomes that of the first floating-point tensor.
    """
    with new_directory(target) as partial:
        writer, dtype = ShardWriter(partial, shard_bytes), None
        for name, tensor in tensors:
            dtype = dtype or (tensor.dtype if tensor.is_floating_point() else None)
            writer.add(name, tensor)
        writer.close()
        if origin is not None:
            copy_companion_files(origin, partial)
            _write_config(origin, partial, dtype)
    return writer.total_bytes


def _write_config(origin: Path, target: Path, dtype: torch.dtype | None) -> None:
    config = read_config(origin)
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
        config[key] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A fresh directory to fill, which takes the name `target` at the end of the block, and stays `*.tmp` after an error."""
    partial = target.with_name(target.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    replace_directory(partial, target)
