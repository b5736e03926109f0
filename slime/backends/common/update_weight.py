"""Send the policy's weights to the inference engines.

Three ways. `nccl`: rank 0 broadcasts whole tensors in buckets over a process group of its own with all engine ranks (gloo when
there is no GPU). `disk`: an HF directory that the engines reload. `disk` with the mode `delta`: only what changed (`delta_files`), which the
owner of each engine applies to a copy on its host before the engine is paused. All run pause -> flush -> update -> continue; the version
counts syncs from 0 and is sent as a string.

Inputs: Ray actor handles of the engines (anything whose methods answer `.remote(...)`). Invariants: no engine generates while its
weights are incomplete; after a failure the engines stay paused, because half-updated weights must not serve; every wait has a deadline.

Left out: quantised engines, tensor sharing on one GPU.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.common.delta_files import DeltaWriter, version_dir
from slime.backends.common.distributed import DistContext, communication_backend, new_external_group
from slime.backends.common.precision import train_dtype
from slime.utils.misc import chunk_named_params_by_size, get_free_port, load_function

logger = logging.getLogger(__name__)

# Away from the ports of engines; runs on one machine start looking at different places.
GROUP_PORTS = range(26000, 32000)

Bucket = list[tuple[str, torch.Tensor]]
Wait = Callable[[list[Any]], list[Any]]


def ray_wait(timeout_s: float) -> Wait:
    """`ray.get` with a deadline. Raises Ray's `GetTimeoutError`, or the engine's own error."""
    import ray

    return lambda refs: ray.get(refs, timeout=timeout_s)


@dataclass(frozen=True)
class WeightSource:
    """A trained model as seen from outside. Both calls are collective over the training ranks.

    `iter_full_tensors()` gives (Hugging Face name, whole tensor) one after the other, at least on rank 0; every rank must exhaust it.
    `save_hf(folder)` writes a Hugging Face directory and returns when it is complete.
    """

    iter_full_tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    save_hf: Callable[[Path], None]


@dataclass
class EngineSet:
    """Engines in rank order. `gpu_counts[i]` is how many ranks engine i has in the update group (1 on a CPU)."""

    engines: Sequence[Any]
    gpu_counts: Sequence[int]
    wait: Wait

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every engine and wait for all answers."""
        return self.wait(self.start(method, *args, **kwargs))

    def start(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every engine without waiting."""
        return [getattr(engine, method).remote(*args, **kwargs) for engine in self.engines]


def iter_buckets(source: WeightSource, limit_bytes: int, dtype: torch.dtype, keep: bool) -> Iterator[Bucket]:
    """Whole tensors cast to `dtype`, in buckets of at most `limit_bytes` (a larger tensor goes alone).

    Collective: every rank must exhaust it. With `keep` False (ranks that only help to gather) nothing is yielded.
    """
    cast = (
        (name, (value.to(dtype) if value.is_floating_point() else value).contiguous())
        for name, value in source.iter_full_tensors()
        if keep
    )
    return chunk_named_params_by_size(cast, limit_bytes)


@dataclass
class WeightUpdater:
    """Keeps the update group and the version counter between syncs. Every rank owns one; only rank 0 talks to engines."""

    args: Namespace
    context: DistContext
    version: int = 0
    _group: dist.ProcessGroup | None = None
    _group_name: str = ""
    _groups_made: int = 0
    _deltas: DeltaWriter | None = None

    def update(self, source: WeightSource, target: EngineSet, num_new: int = 0) -> None:
        """One sync. Collective over the training ranks; `num_new` > 0 says that engines were replaced."""
        self.version += 1
        if self.args.update_weight_mode == "delta":
            self._update_by_delta(source, target)
        elif self.args.update_weight_transport == "disk":
            self._update_from_disk(source, target)
        else:
            self._connect(target, num_new)
            self._update_by_broadcast(source, target)
        dist.barrier()

    def close(self) -> None:
        """Leave the update group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    # ---- broadcast ----

    def _connect(self, target: EngineSet, num_new: int) -> None:
        if not self.context.is_main or (self._group is not None and num_new == 0):
            return
        if self._group is not None:
            target.call("destroy_weights_update_group", self._group_name)
        self.close()
        self._groups_made += 1
        self._group_name = f"slime-train-{self._groups_made}"
        self._group = self._open_group(target)

    def _open_group(self, target: EngineSet) -> dist.ProcessGroup:
        # MASTER_ADDR is the address of rank 0, which is us
        address, port = os.environ["MASTER_ADDR"], get_free_port(random.SystemRandom().choice(GROUP_PORTS))
        world_size = 1 + sum(target.gpu_counts)
        backend = communication_backend(self.args, self.context.device)
        joining, offset = [], 1
        for engine, count in zip(target.engines, target.gpu_counts, strict=True):
            joining.append(
                engine.init_weights_update_group.remote(address, port, offset, world_size, self._group_name, backend)
            )
            offset += count
        group = new_external_group(backend, address, port, 0, world_size, self._group_name, self.context.timeout)
        target.wait(joining)
        return group

    def _update_by_broadcast(self, source: WeightSource, target: EngineSet) -> None:
        main = self.context.is_main
        if main:
            target.call("pause_generation")
            target.call("flush_cache")
            target.call("begin_weight_update")
        for bucket in iter_buckets(source, self.args.update_weight_buffer_size, train_dtype(self.args), keep=main):
            self._send(bucket, target)
        if main:
            target.call("end_weight_update")
            target.call("continue_generation")

    def _send(self, bucket: Bucket, target: EngineSet) -> None:
        waiting = target.start(
            "update_weights_from_distributed",
            [name for name, _ in bucket],
            [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            [list(tensor.shape) for _, tensor in bucket],
            self._group_name,
            flush_cache=False,
            weight_version=str(self.version),
        )
        sending = [dist.broadcast(tensor, src=0, group=self._group, async_op=True) for _, tensor in bucket]
        for work in sending:
            work.wait()
        target.wait(waiting)

    # ---- disk ----

    def _update_from_disk(self, source: WeightSource, target: EngineSet) -> None:
        folder = version_dir(self._disk_root(), self.version)
        source.save_hf(folder)
        self._after_write(folder, target)
        if not self.context.is_main:
            return
        self._reload(folder, target)
        if not self.args.update_weight_disk_keep_files:
            shutil.rmtree(folder)

    def _after_write(self, folder: Path, target: EngineSet) -> None:
        hook = self.args.custom_update_weight_post_write_path
        if hook:
            load_function(hook)(self.args, str(folder), list(target.engines))
            dist.barrier()

    def _reload(self, folder: Path, target: EngineSet) -> None:
        target.call("pause_generation")
        target.call("flush_cache")
        target.call("update_weights_from_disk", str(folder), weight_version=str(self.version))
        target.call("continue_generation")

    def _update_by_delta(self, source: WeightSource, target: EngineSet) -> None:
        root, main = self._disk_root(), self.context.is_main
        if main:
            self._write_delta(source, root, target)
        else:
            for _ in source.iter_full_tensors():
                pass
        dist.barrier()
        self._after_write(version_dir(root, self.version), target)
        if main:
            target.call("pull_weights", self.version)
            self._reload(version_dir(self.args.update_weight_local_checkpoint_dir, self.version), target)

    def _write_delta(self, source: WeightSource, root: Path, target: EngineSet) -> None:
        if self._deltas is None:
            self._deltas = self._first_delta(root, target)
        stats = self._deltas.write(source.iter_full_tensors())
        logger.info(
            "weights %d: %.2f%% changed, %d bytes written", self.version, 100 * stats.density, stats.wire_bytes
        )

    def _first_delta(self, root: Path, target: EngineSet) -> DeltaWriter:
        """Version 0 is the original model, on both sides."""
        args = self.args
        writer = DeltaWriter(
            root, Path(args.hf_checkpoint), args.update_weight_delta_encoding, args.update_weight_delta_checksum
        )
        writer.clear()
        target.call("pull_weights", 0)
        return writer

    def _disk_root(self) -> Path:
        if not self.args.update_weight_disk_dir:
            raise ValueError(
                "--update-weight-transport disk needs --update-weight-disk-dir, a directory all engines can read"
            )
        return Path(self.args.update_weight_disk_dir)
