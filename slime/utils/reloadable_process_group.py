"""Process groups that can be closed and opened again, to free the device memory that their back end holds.

`monkey_patch_torch_dist()` makes `torch.distributed.new_group` return `ReloadableProcessGroup`s. `destroy_process_groups()` closes
what they wrap, `reload_process_groups()` opens it again; both are collective, and whoever holds a wrapper keeps a usable group.
The default group is closed as well when it was registered and SLIME_DESTROY_WORLD_PROCESS_GROUP is 1 (the default).

Invariants: groups open in the order in which they were made, as torch requires of every rank; a wrapper between the two
calls raises instead of hanging. Left out: groups of other processes' worlds (`distributed_utils.init_process_group`).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

_WORLD_SWITCH = "SLIME_DESTROY_WORLD_PROCESS_GROUP"
_original: dict[str, Callable[..., Any]] = {}
_world_of_default: dict[str, Any] = {}


def register_default_process_group(timeout: timedelta) -> None:
    """Remember how the default group was made, so that it can be closed and opened again. Not collective."""
    from torch.distributed import distributed_c10d as c10d

    if "store" in _world_of_default:
        return
    dist = torch.distributed
    _world_of_default.update(
        backend=dist.get_backend(),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        timeout=timeout,
        store=c10d._get_default_store(),
        reloads=0,
    )


def monkey_patch_torch_dist() -> None:
    """From now on `torch.distributed.new_group` returns reloadable groups. May be called again."""
    dist = torch.distributed
    if _original:
        return
    _original.update(new_group=dist.new_group, destroy_process_group=dist.destroy_process_group)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        group = _original["new_group"](*args, **kwargs)
        if not isinstance(group, dist.ProcessGroup):
            _non_member_groups(args, kwargs)
            return group
        ranks = dist.get_process_group_ranks(group)
        backend = dist.get_backend(group)
        return ReloadableProcessGroup(group, ranks, creation_args=args, creation_kwargs=kwargs, backend=backend)

    def destroy_process_group(group: Any = None) -> None:
        if isinstance(group, ReloadableProcessGroup):
            # It stays in the list, and opens again with the others: ranks outside of it cannot know that it was closed.
            group.close()
            return
        _original["destroy_process_group"](group)
        if group is None:
            ReloadableProcessGroup.invalidate_process_groups()

    for name, function in (("new_group", new_group), ("destroy_process_group", destroy_process_group)):
        setattr(dist, name, function)


def _new_group() -> Callable[..., Any]:
    return _original.get("new_group", torch.distributed.new_group)


def _destroy() -> Callable[..., Any]:
    return _original.get("destroy_process_group", torch.distributed.destroy_process_group)


def _tables() -> list[dict[Any, Any]]:
    """What torch knows of its groups, by group."""
    from torch.distributed.distributed_c10d import _world

    return [_world.pg_map, _world.pg_names, _world.pg_group_ranks, _world.pg_backend_config]


class _NotAMember:
    """A group that this rank only helps to make: making one is collective over all ranks."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs

    def open(self) -> None:
        _new_group()(*self._args, **self._kwargs)

    def close(self) -> None:
        """Nothing is held."""

    invalidate = close


_members: list[ReloadableProcessGroup | _NotAMember] = []


def _non_member_groups(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    _members.append(_NotAMember(args, kwargs))


class ReloadableProcessGroup(torch.distributed.ProcessGroup):
    """Stands for `group`; every operation goes to the group that is open at that moment.

    Args:
        group: the open group.
        ranks: its members, as ranks of the default group.
        creation_args, creation_kwargs: arguments of `new_group` that make the same group again.
        backend: its back end.
    """

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        ranks: Sequence[int],
        *,
        creation_args: Sequence[Any] = (),
        creation_kwargs: Mapping[str, Any] | None = None,
        backend: str = "nccl",
    ) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._ranks, self._backend = list(ranks), backend
        self._creation_args, self._creation_kwargs = tuple(creation_args), dict(creation_kwargs or {})
        self._rank, self._size, self._name = group.rank(), group.size(), group.group_name
        self._group: torch.distributed.ProcessGroup | None = None
        self._adopt(group)
        _members.append(self)

    @staticmethod
    def destroy_process_groups() -> None:
        """Close all of them, the last one first. Collective."""
        for member in reversed(_members):
            member.close()

    @staticmethod
    def invalidate_process_groups() -> None:
        """Forget what they wrap without closing it: the default group, and with it every other, is gone."""
        for member in _members:
            member.invalidate()

    @staticmethod
    def reload_process_groups() -> None:
        """Open those that are closed, in the order of their making. Collective."""
        for member in _members:
            member.open()

    def _adopt(self, group: torch.distributed.ProcessGroup) -> None:
        """Make torch's tables, which are keyed by group, know the wrapper by what they know of the group."""
        self._group = group
        for table in _tables():
            if group in table:
                table[self] = table[group]

    def open(self) -> None:
        """Open the group if it is closed. Collective."""
        if self._group is None:
            self._adopt(_new_group()(*self._creation_args, **self._creation_kwargs))

    def close(self) -> None:
        """Close the group if it is open. Collective."""
        group = self._group
        self.invalidate()
        if group is not None:
            _destroy()(group)

    def invalidate(self) -> None:
        """Forget the group; the caller closes it."""
        self._group = None
        for table in _tables():
            table.pop(self, None)

    @property
    def inner(self) -> torch.distributed.ProcessGroup:
        """The open group. Raises RuntimeError while it is closed."""
        if self._group is None:
            raise RuntimeError(
                f"process group {self._name} of ranks {self._ranks} is closed: call reload_process_groups() first"
            )
        return self._group

    def rank(self) -> int:
        """This process within the group; known while it is closed as well."""
        return self._rank

    def size(self) -> int:
        """Number of members; known while it is closed as well."""
        return self._size

    def name(self) -> str:
        """Name of the back end."""
        return self._backend

    def shutdown(self) -> None:
        """Shut the open group down; nothing is to do while it is closed."""
        if self._group is not None:
            self._group.shutdown()

    def abort(self) -> None:
        """Abort the open group; nothing is to do while it is closed."""
        if self._group is not None:
            self._group.abort()

    @property
    def bound_device_id(self) -> torch.device | None:  # type: ignore[override]
        """Device that the group is bound to."""
        return self.inner.bound_device_id

    @bound_device_id.setter
    def bound_device_id(self, dev: torch.device | None) -> None:
        self.inner.bound_device_id = dev


def _forward(name: str) -> Callable[..., Any]:
    def operation(self: ReloadableProcessGroup, *a: Any, **kw: Any) -> Any:
        return getattr(self.inner, name)(*a, **kw)

    operation.__name__ = operation.__qualname__ = name
    return operation


def _forward_property(name: str) -> property:
    return property(lambda self: getattr(self.inner, name))


def _forward_everything() -> None:
    """Give the class every operation and property of a process group that it does not define itself."""
    for name, member in inspect.getmembers(torch.distributed.ProcessGroup):
        if name.startswith("__") or name in vars(ReloadableProcessGroup) or inspect.isclass(member):
            continue
        if isinstance(member, property):
            setattr(ReloadableProcessGroup, name, _forward_property(name))
        elif callable(member) and not name.startswith("_pybind11"):
            setattr(ReloadableProcessGroup, name, _forward(name))


_forward_everything()


def destroy_process_groups() -> None:
    """Close every reloadable group, and the default group too where that was asked for. Collective."""
    ReloadableProcessGroup.destroy_process_groups()
    if _closes_world() and torch.distributed.is_initialized():
        _destroy()()


def reload_process_groups() -> None:
    """Open everything that `destroy_process_groups` closed. Collective."""
    if _closes_world() and not torch.distributed.is_initialized():
        _open_world()
    ReloadableProcessGroup.reload_process_groups()


def _closes_world() -> bool:
    return "store" in _world_of_default and os.environ.get(_WORLD_SWITCH, "1") == "1"


def _open_world() -> None:
    from torch.distributed import PrefixStore

    # Keys of the first world are still in the store.
    _world_of_default["reloads"] += 1
    known = {name: _world_of_default[name] for name in ("backend", "rank", "world_size", "timeout")}
    store = PrefixStore(f"reload-{_world_of_default['reloads']}", _world_of_default["store"])
    torch.distributed.init_process_group(store=store, **known)
