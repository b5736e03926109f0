"""Weight changes as bytes on disk: which elements changed and to what, digests, and reading single tensors.

Input: numpy arrays of bytes or elements, and checkpoint directories of safetensors files. Invariants: everything is
little-endian, so a file means the same everywhere; `apply_delta` after `encode_delta` gives the new bytes.
Left out: files of a delta (`slime.backends.common.delta_files`), who sends one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def overwrite_encode(new: np.ndarray, changed_mask: np.ndarray) -> np.ndarray:
    """uint8 array: count (u4), positions of the changed elements (u4 each), then their new bytes.

    `changed_mask` is boolean, flat, with as many entries as `new` has elements. Raises ValueError otherwise.
    """
    flat = np.ascontiguousarray(new).reshape(-1)
    mask = np.asarray(changed_mask).reshape(-1)
    if mask.shape != flat.shape:
        raise ValueError(f"the mask has {mask.size} entries for {flat.size} elements")
    positions = np.flatnonzero(mask).astype("<u4")
    header = np.array([positions.size], dtype="<u4")
    values = flat[positions]
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return np.concatenate([part.view(np.uint8).reshape(-1) for part in (header, positions, little)])


def overwrite_decode(old: np.ndarray, payload: np.ndarray) -> np.ndarray:
    """The new elements (flat) from the old ones and what `overwrite_encode` gave. Raises ValueError for another length."""
    count = int(payload[:4].view("<u4")[0])
    size = 4 + count * (4 + old.dtype.itemsize)
    if payload.size != size:
        raise ValueError(f"a delta of {count} elements has {payload.size} bytes instead of {size}")
    new = old.reshape(-1).copy()
    positions = payload[4 : 4 + 4 * count].view("<u4")
    new[positions] = payload[4 + 4 * count :].view(old.dtype.newbyteorder("<"))
    return new


def encode_delta(encoding: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """uint8 array that turns `old` into `new` (unsigned integers of the same shape). `encoding`: `xor` or `overwrite`."""
    if encoding == "xor":
        return np.bitwise_xor(old, new).reshape(-1).view(np.uint8)
    return overwrite_encode(new, old != new)


def apply_delta(encoding: str, old: np.ndarray, payload: np.ndarray) -> np.ndarray:
    """The new elements, in the shape of `old`. Raises ValueError for a payload that does not fit."""
    if encoding == "overwrite":
        return overwrite_decode(old, payload).reshape(old.shape)
    if payload.size != old.nbytes:
        raise ValueError(f"a delta of {payload.size} bytes does not fit a tensor of {old.nbytes}")
    return np.bitwise_xor(old, payload.view(old.dtype).reshape(old.shape))


def checksum(algorithm: str, buf: Any) -> str:
    """Hexadecimal digest of a buffer. Raises KeyError for an unknown algorithm, ImportError for a missing package."""
    return _DIGESTS[algorithm](memoryview(buf).cast("B"))


def _xxh3(data: memoryview) -> str:
    import xxhash

    return str(xxhash.xxh3_128_hexdigest(data))


def _blake3(data: memoryview) -> str:
    import blake3

    return str(blake3.blake3(data).hexdigest())


def _adler32(data: memoryview) -> str:
    return f"{zlib.adler32(data):08x}"


_DIGESTS: dict[str, Callable[[memoryview], str]] = {"xxh3-128": _xxh3, "blake3": _blake3, "adler32": _adler32}


def make_tensor_reader(ckpt_dir: str) -> Callable[[str], Any]:
    """A function that reads one tensor of a safetensors checkpoint by name, from whichever shard holds it.

    Raises FileNotFoundError without such a checkpoint; the function raises KeyError for an unknown name.
    """
    folder = Path(ckpt_dir)
    shards = shards_by_name(folder)

    def read(name: str) -> Any:
        from safetensors import safe_open

        with safe_open(folder / shards[name], framework="pt", device="cpu") as file:
            return file.get_tensor(name)

    return read


def shards_by_name(folder: Path) -> dict[str, str]:
    """Tensor name -> file, of a safetensors checkpoint. Raises FileNotFoundError when there is none."""
    if (folder / _INDEX).is_file():
        return dict(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"])
    if not (folder / _SINGLE).is_file():
        raise FileNotFoundError(f"{folder}: neither {_INDEX} nor {_SINGLE}")
    from safetensors import safe_open

    with safe_open(folder / _SINGLE, framework="pt", device="cpu") as file:
        return dict.fromkeys(file.keys(), _SINGLE)
