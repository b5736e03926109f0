"""Weights as a chain of differences on a shared disk, and a copy on the engine's host that follows it.

The trainer (`DeltaWriter`) keeps the bytes it sent last and writes what changed to `ROOT/weight_v{version:06d}/`: a safetensors file of
compressed payloads by tensor name, with a digest of each new tensor in its metadata, and an index that says which version it builds on.
The owner of an engine (`LocalCheckpoint`) starts from a copy of the original model and applies one version after the other.

Invariants: a version directory appears complete or not at all, on both sides; a tensor whose digest does not match is an error and
leaves the local version as it was; engines on one host share one copy, whoever comes first does the work.
Left out: telling the engine (`update_weight`), original models whose tensors are not elements of 1, 2, 4 or 8 bytes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from safetensors import safe_open
from safetensors.torch import save_file

from slime.backends.common.hf_files import copy_companion_files
from slime.backends.common.hf_weights import INDEX, SafetensorReader, new_directory
from slime.utils.disk_delta import apply_delta, checksum, encode_delta

_LEVEL = 1
_POINTER = "current.json"
_FILE = "model-00001-of-00001.safetensors"
_INTEGERS: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


def version_dir(root: str | Path, version: int) -> Path:
    """Directory of one version, on the shared disk and on the host."""
    return Path(root) / f"weight_v{version:06d}"


def as_integers(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a CPU tensor, as unsigned integers of the same size and shape (a view when it is contiguous)."""
    size = tensor.element_size()
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw.view(_INTEGERS[size]).reshape(tensor.shape)


def _as_tensor(bits: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(bits.reshape(-1).view(np.uint8)).view(like.dtype).reshape(like.shape)


@dataclass
class DeltaStats:
    """`density`: changed elements by all elements; `wire_bytes`: written."""

    changed: int = 0
    elements: int = 0
    wire_bytes: int = 0

    @property
    def density(self) -> float:
        return self.changed / max(1, self.elements)


class DeltaWriter:
    """The trainer's side. Holds one copy of the model's bytes in host memory.

    Args:
        root: shared directory.
        base: the Hugging Face model that version 0 is, whose names and dtypes all versions have.
        encoding, digest: as the flags say.
    """

    def __init__(self, root: Path, base: Path, encoding: str, digest: str) -> None:
        self.root, self.encoding, self.digest = root, encoding, digest
        self.base = SafetensorReader(base)
        self.version = 0
        self._sent: dict[str, np.ndarray] = {}
        self._usable = True

    def clear(self) -> None:
        """Remove what an earlier run left."""
        for folder in self.root.glob("weight_v*"):
            shutil.rmtree(folder)

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> DeltaStats:
        """Write the next version from all tensors of the model. Raises ValueError when they are not those of the base.

        After a failure nothing more can be written: what the engines hold is no longer known.
        """
        if not self._usable:
            raise RuntimeError(
                f"{self.root}: the last version was not written; start the run again from its checkpoint"
            )
        self._usable = False
        following, stats = self.version + 1, DeltaStats()
        payloads: dict[str, torch.Tensor] = {}
        digests: dict[str, str] = {}
        seen: set[str] = set()
        for name, tensor in tensors:
            seen.add(name)
            self._compare(name, tensor, payloads, digests, stats)
        self._check_names(seen)
        with new_directory(version_dir(self.root, following)) as folder:
            save_file(payloads, folder / _FILE, metadata=digests)
            (folder / INDEX).write_text(json.dumps(self._index(following, payloads), indent=2) + "\n")
            stats.wire_bytes = sum(path.stat().st_size for path in folder.iterdir())
        self.version, self._usable = following, True
        return stats

    def _compare(
        self, name: str, tensor: torch.Tensor, payloads: dict[str, Any], digests: dict[str, str], stats: DeltaStats
    ) -> None:
        if name not in self.base.shards:
            raise ValueError(
                f"--update-weight-mode delta: {self.base.folder} has no tensor {name}, which the trainer sends"
            )
        old = self._sent[name] if name in self._sent else as_integers(self.base.get_tensor(name))
        new = as_integers(tensor.to("cpu", self.base.get_dtype(name)))
        if old.shape != new.shape:
            raise ValueError(
                f"--update-weight-mode delta: {name} has shape {new.shape}, in the original model {old.shape}"
            )
        changed = int(np.count_nonzero(old != new))
        stats.changed, stats.elements = stats.changed + changed, stats.elements + new.size
        if changed:
            packed = zstandard.compress(encode_delta(self.encoding, old, new).tobytes(), _LEVEL)
            payloads[name] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
            digests[name] = checksum(self.digest, np.ascontiguousarray(new).reshape(-1).view(np.uint8))
        self._sent[name] = new.copy() if changed or name not in self._sent else old

    def _check_names(self, seen: set[str]) -> None:
        missing = sorted(set(self.base.shards) - seen)
        if missing:
            raise ValueError(
                f"--update-weight-mode delta: the trainer does not send {missing[0]} of {self.base.folder}"
            )

    def _index(self, version: int, payloads: dict[str, torch.Tensor]) -> dict[str, Any]:
        metadata = {
            "version": version,
            "base_version": version - 1,
            "delta_encoding": self.encoding,
            "compression_format": "zstd",
            "checksum_format": self.digest,
        }
        return {"metadata": metadata, "weight_map": dict.fromkeys(payloads, _FILE)}


class LocalCheckpoint:
    """The engine's side: a Hugging Face directory on this host that is brought to the version wanted.

    Args:
        root: directory on this host, of this run alone.
        base: the original model.
    """

    def __init__(self, root: str | Path, base: str | Path) -> None:
        self.root, self.base = Path(root), Path(base)

    def pull(self, source: str | Path, target_version: int) -> Path:
        """The directory of `target_version`, made from the versions below `source` when it is not there. Version 0 is the original.

        Raises ValueError when a version is missing, does not follow the one before, or a digest does not match.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with self._locked():
            current = self._current()
            if target_version == 0 or current is None:
                current = self._start(current)
            if current > target_version:
                raise ValueError(f"{self.root}: holds version {current} already, {target_version} is asked for")
            for version in range(current + 1, target_version + 1):
                self._advance(Path(source), version)
        return version_dir(self.root, target_version)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.root / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _current(self) -> int | None:
        pointer = self.root / _POINTER
        if not pointer.is_file():
            return None
        content = json.loads(pointer.read_text())
        return int(content["version"]) if content["base"] == str(self.base) else None

    def _start(self, current: int | None) -> int:
        """Version 0: a copy of the original model."""
        if current != 0:
            with new_directory(version_dir(self.root, 0)) as folder:
                copy_companion_files(self.base, folder)
                for path in self.base.iterdir():
                    if path.name == "config.json" or path.suffix == ".safetensors" or path.name == INDEX:
                        shutil.copyfile(path, folder / path.name)
            self._point_at(0)
        return 0

    def _advance(self, source: Path, version: int) -> None:
        delta, old = _Delta(version_dir(source, version), version), version_dir(self.root, version - 1)
        with new_directory(version_dir(self.root, version)) as folder:
            touched = delta.files_in(old)
            for path in old.iterdir():
                if path.name in touched:
                    delta.patch(path, folder / path.name)
                else:
                    os.link(path, folder / path.name)
        self._point_at(version)

    def _point_at(self, version: int) -> None:
        """Make a version the current one, then remove all others: every engine has finished loading them."""
        partial = self.root / (_POINTER + ".tmp")
        partial.write_text(json.dumps({"version": version, "base": str(self.base)}))
        os.replace(partial, self.root / _POINTER)
        for folder in self.root.glob("weight_v*"):
            if folder != version_dir(self.root, version):
                shutil.rmtree(folder)


class _Delta:
    """One version on the shared disk."""

    def __init__(self, folder: Path, version: int) -> None:
        if not (folder / INDEX).is_file():
            raise ValueError(
                f"{folder}: no such version; start again from the original model (remove the local directory)"
            )
        index = json.loads((folder / INDEX).read_text())
        self.folder, self.names = folder, dict(index["weight_map"])
        self.info: dict[str, Any] = index["metadata"]
        if self.info["base_version"] != version - 1:
            raise ValueError(
                f"{folder}: builds on version {self.info['base_version']}, the local one is {version - 1}"
            )

    def files_in(self, checkpoint: Path) -> set[str]:
        """Files of a checkpoint that hold a changed tensor."""
        shards = SafetensorReader(checkpoint).shards
        return {shards[name] for name in self.names}

    def patch(self, old: Path, new: Path) -> None:
        """Write a file with its changed tensors replaced."""
        with safe_open(old, framework="pt") as file:
            tensors = {name: self._patched(name, file.get_tensor(name)) for name in file.keys()}
            save_file(tensors, new, metadata=file.metadata())

    def _patched(self, name: str, old: torch.Tensor) -> torch.Tensor:
        if name not in self.names:
            return old
        with safe_open(self.folder / self.names[name], framework="np") as file:
            packed, wanted = file.get_tensor(name), file.metadata()[name]
        payload = np.frombuffer(zstandard.decompress(packed.tobytes()), dtype=np.uint8)
        bits = apply_delta(self.info["delta_encoding"], as_integers(old), payload)
        found = checksum(self.info["checksum_format"], np.ascontiguousarray(bits).reshape(-1).view(np.uint8))
        if found != wanted:
            raise ValueError(
                f"{self.folder}: after applying it {name} has the checksum {found} instead of {wanted}; the delta or the "
                f"local copy is damaged: remove the local directory and start the run again from its checkpoint"
            )
        return _as_tensor(bits, old)
