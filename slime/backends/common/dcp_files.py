"""Tensors of torch's distributed checkpoint format (DCP), read and written piece by piece, on any number of ranks.

Both back ends store it: FSDP its state under Hugging Face names, Megatron ("torch_dist") its parameters stacked over layers.
Invariants: nothing but known classes is unpickled from `.metadata`, and tensors are read with `weights_only`, so that a foreign
checkpoint cannot run code; a piece is read when it is asked for, and made when it is written.
Left out: entries that are no tensors, but for empty ones that a reader insists on.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

_SAFE_MODULES = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem", "planner"))
# megatron-core's own classes only add to these.
_STAND_INS = {"MCoreMetadata": Metadata, "MCoreSavePlan": SavePlan}
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_SAFE_NAMES = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch._utils", "_rebuild_device"),
    ("builtins", "set"),
    ("pathlib", "PosixPath"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == _MEGATRON and name in _STAND_INS:
            return _STAND_INS[name]
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if module in _SAFE_MODULES or (module, name) in _SAFE_NAMES or is_dtype:
            return super().find_class(module, name)
        raise ValueError(f"it names {module}.{name}, which is not part of a checkpoint")


def load_plain(path: Path, classes: Sequence[type]) -> Any:
    """Content of a file of `torch.save` that holds plain values and objects of `classes`. Raises ValueError when it holds others."""
    with torch.serialization.safe_globals(list(classes)):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise ValueError(f"{path}: holds more than plain values ({' '.join(str(error).split())[:200]})") from error


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        with path.open("rb") as file:
            try:
                return _MetadataUnpickler(file).load()
            except (ValueError, pickle.UnpicklingError, EOFError) as error:
                raise ValueError(f"{path}: not the metadata of a distributed checkpoint: {error}") from error


class _OnePiece(DefaultLoadPlanner):
    def __init__(self, piece: torch.Tensor) -> None:
        super().__init__()
        self.piece = piece

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            if dim == 0:
                part = self.piece
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: the piece was filled in place."""


class DcpReader:
    """Tensors of one checkpoint directory. Raises FileNotFoundError or ValueError when it is none."""

    def __init__(self, folder: Path) -> None:
        if not (folder / ".metadata").is_file():
            raise FileNotFoundError(f"{folder}: no .metadata there, so it is no (complete) distributed checkpoint")
        self.folder = folder
        self._reader = _Reader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._places: dict[tuple[str, int], dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}
        entries = self._metadata.state_dict_metadata
        self._tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor."""
        return tuple(self._tensors[name].size)

    def dtype(self, name: str) -> torch.dtype:
        """Its dtype."""
        return self._tensors[name].properties.dtype

    def read(self, name: str, index: Sequence[int] = ()) -> torch.Tensor:
        """The part at `index` of the first dimensions, without them; the whole tensor when `index` is empty.

        Only the stored pieces that overlap with it are read.
        """
        rest = self.shape(name)[len(index) :]
        entry = replace(self._tensors[name], chunks=self._stored_at(name, len(index))[tuple(index)])
        offsets = (*index, *(0 for _ in rest))
        piece = torch.empty((*(1 for _ in index), *rest), dtype=self.dtype(name))
        chunk = ChunkStorageMetadata(torch.Size(offsets), piece.shape)
        plan = LoadPlan(create_read_items_for_chunk_list(name, entry, [chunk]))
        self._reader.read_data(plan, _OnePiece(piece)).wait()
        return piece.reshape(rest)

    def _stored_at(self, name: str, depth: int) -> dict[tuple[int, ...], list[ChunkStorageMetadata]]:
        """The stored pieces by position in the first `depth` dimensions; searching thousands of experts each time is slow."""
        if (name, depth) not in self._places:
            table: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
            for chunk in self._tensors[name].chunks:
                ranges = zip(chunk.offsets[:depth], chunk.sizes[:depth], strict=True)
                for place in product(*(range(start, start + size) for start, size in ranges)):
                    table.setdefault(place, []).append(chunk)
            self._places[name, depth] = table
        return self._places[name, depth]


@dataclass(frozen=True)
class Piece:
    """A part of a tensor to write: `make()` gives it, without the leading dimensions of `index` (each of size 1).

    `shape` and `whole` are the shapes of the part and of the whole tensor, with those dimensions.
    """

    name: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]


class _PiecePlanner(DefaultSavePlanner):
    def __init__(self, pieces: Sequence[Piece], empty: Sequence[str], report: Callable[[str], None]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = {self._position(piece): piece for piece in pieces}
        self.empty, self.report = list(empty), report

    @staticmethod
    def _position(piece: Piece) -> tuple[str, torch.Size]:
        return piece.name, torch.Size((*piece.index, *(0 for _ in piece.shape[len(piece.index) :])))

    def create_local_plan(self) -> SavePlan:
        items = [self._item(position, piece) for position, piece in self.pieces.items()]
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self.empty]
        self.plan = SavePlan(items)
        return self.plan

    def _item(self, position: tuple[str, torch.Size], piece: Piece) -> WriteItem:
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(position[1], torch.Size(piece.shape)),
            properties=TensorProperties(dtype=piece.dtype),
            size=torch.Size(piece.whole),
        )
        return WriteItem(MetadataIndex(*position), WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self.report(write_item.index.fqn)
        if write_item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save([None], buffer)  # megatron-core stores lists of objects
            return buffer
        assert write_item.index.offset is not None
        piece = self.pieces[write_item.index.fqn, write_item.index.offset]
        return piece.make().to(piece.dtype).reshape(piece.shape).contiguous()


def write_pieces(
    folder: Path, pieces: Sequence[Piece], empty: Sequence[str] = (), report: Callable[[str], None] = lambda _: None
) -> None:
    """Write a checkpoint of this rank's pieces, and of objects that are None. Collective when there is a process group.

    `report` is called with the name of every entry before it is made.
    """
    planner = _PiecePlanner(pieces, empty, report)
    dcp.save({}, checkpoint_id=folder, planner=planner, no_dist=not dist.is_initialized())
