"""Copies of a set of named tensors on the host, under tags, to switch a model between several weights.

Input: a function that yields the current `(name, tensor)` pairs. Invariants: a tag holds all tensors of one moment;
`restore` writes into the tensors themselves; host copies are pinned when there is a GPU.
Left out: which weights are needed when (the trainer's).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from slime.utils import accelerator

_SourceGetter = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class TensorBackuper(ABC):
    """See `create`."""

    @staticmethod
    def create(source_getter: _SourceGetter, single_tag: str | None) -> TensorBackuper:
        """With a `single_tag` nothing is copied: only that tag exists, and it means the tensors themselves."""
        return _InPlace(source_getter, single_tag) if single_tag is not None else _HostCopies(source_getter)

    def __init__(self, source_getter: _SourceGetter) -> None:
        self._source_getter = source_getter

    @property
    @abstractmethod
    def backup_tags(self) -> list[str]:
        """Tags that exist."""

    @abstractmethod
    def get(self, tag: str) -> dict[str, torch.Tensor]:
        """Tensors of a tag by name. Raises KeyError for an unknown tag."""

    @abstractmethod
    def backup(self, tag: str) -> None:
        """Store the current tensors under a tag."""

    def copy(self, *, src_tag: str, dst_tag: str) -> None:
        """Store what `src_tag` holds under `dst_tag` as well. Raises ValueError where only one tag exists."""
        raise ValueError(f"{type(self).__name__} cannot copy {src_tag!r} to {dst_tag!r}: it has one tag")

    @abstractmethod
    def restore(self, tag: str) -> None:
        """Write the tensors of a tag back into the source."""


class _HostCopies(TensorBackuper):
    def __init__(self, source_getter: _SourceGetter) -> None:
        super().__init__(source_getter)
        self._copies: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def backup_tags(self) -> list[str]:
        return list(self._copies)

    def get(self, tag: str) -> dict[str, torch.Tensor]:
        return self._copies[tag]

    @torch.no_grad()
    def backup(self, tag: str) -> None:
        self._store(tag, self._source_getter())

    @torch.no_grad()
    def copy(self, *, src_tag: str, dst_tag: str) -> None:
        self._store(dst_tag, list(self._copies[src_tag].items()))

    @torch.no_grad()
    def restore(self, tag: str) -> None:
        stored = self._copies[tag]
        for name, tensor in self._source_getter():
            tensor.copy_(stored[name], non_blocking=True)
        accelerator.synchronize()

    def _store(self, tag: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        copies = self._copies.setdefault(tag, {})
        pinned = accelerator.supports("pinned_memory")
        for name, tensor in tensors:
            known = copies.get(name)
            if known is None or known.shape != tensor.shape or known.dtype != tensor.dtype:
                known = copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
            known.copy_(tensor.detach(), non_blocking=True)
        accelerator.synchronize()


class _InPlace(TensorBackuper):
    def __init__(self, source_getter: _SourceGetter, tag: str) -> None:
        super().__init__(source_getter)
        self._tag = tag

    @property
    def backup_tags(self) -> list[str]:
        return [self._tag]

    def get(self, tag: str) -> dict[str, torch.Tensor]:
        self._check(tag)
        return dict(self._source_getter())

    def backup(self, tag: str) -> None:
        self._check(tag)

    def restore(self, tag: str) -> None:
        self._check(tag)

    def _check(self, tag: Any) -> None:
        if tag != self._tag:
            raise KeyError(f"only the tag {self._tag!r} exists, not {tag!r}")
