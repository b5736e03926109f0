"""Profiles of a training rank: where its time goes (torch.profiler), and where its memory goes.

Inputs: `--use-pytorch-profiler` with `--profile-target`, `--profile-step-start` and `--profile-step-end`;
`--record-memory-history` with `--memory-recorder`, `--memory-snapshot-num-steps` and `--memory-snapshot-dir`. A step is a rollout.
Traces are Chrome traces, one file per rank, in `--memory-snapshot-dir`. Without these flags nothing is recorded.
Left out: profiles of the engines (`SGLangEngine.start_profile`).
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch

from slime.utils import accelerator

logger = logging.getLogger(__name__)

T = TypeVar("T")
_MAX_HISTORY_ENTRIES = 1_000_000


class TrainProfiler:
    """Call `on_init_end` once, `step` after every rollout; wrap the micro-batches of a pass in `iterate_*`."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self._rank = _rank()
        self._memory = ExitStack()
        self._rollouts = self._files = 0
        self._overall: Any = None
        self._targets = tuple(args.profile_target) if getattr(args, "use_pytorch_profiler", False) else ()
        self._records_memory = bool(getattr(args, "record_memory_history", False))

    def on_init_end(self) -> None:
        """The model stands: recording starts here. Raises RuntimeError when the recorder does not work on this device."""
        if "train_overall" in self._targets:
            self._overall = self._profiler("train_overall")
            self._overall.start()
        if self._records_memory:
            self._start_memory_recorder()

    def step(self, rollout_id: int) -> None:
        """One rollout is trained."""
        self._rollouts += 1
        if self._overall is not None:
            self._overall.step()
            if self._rollouts >= self.args.profile_step_end:
                self._overall.stop()
                self._overall = None
        if self._records_memory and self._rollouts == self.args.memory_snapshot_num_steps:
            self._memory.close()

    def iterate_train_actor(self, iterator: Iterable[T]) -> Iterator[T]:
        """The micro-batches of optimiser steps, recorded if that is a target."""
        return self._iterate(iterator, "train_actor")

    def iterate_train_log_probs(self, iterator: Iterable[T]) -> Iterator[T]:
        """The micro-batches of a pass for log-probs, recorded if that is a target."""
        return self._iterate(iterator, "train_log_probs")

    def _iterate(self, iterator: Iterable[T], target: str) -> Iterator[T]:
        if target not in self._targets or not (
            self.args.profile_step_start <= self._rollouts < self.args.profile_step_end
        ):
            yield from iterator
            return
        with self._profiler(target, every_step=True) as profiler:
            for item in iterator:
                yield item
                profiler.step()

    def _profiler(self, target: str, every_step: bool = False) -> Any:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if accelerator.device_type() == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        schedule = None
        if not every_step:
            start, end = self.args.profile_step_start, self.args.profile_step_end
            warmup = min(start, 1)
            schedule = torch.profiler.schedule(wait=start - warmup, warmup=warmup, active=end - start, repeat=1)
        return torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=lambda profiler: self._write_trace(profiler, target),
            record_shapes=True,
            profile_memory=True,
        )

    def _write_trace(self, profiler: Any, target: str) -> None:
        path = self._file(f"{target}_rollout_{self._rollouts}", "json.gz")
        profiler.export_chrome_trace(str(path))
        logger.info("profile of %s: %s", target, path)

    def _start_memory_recorder(self) -> None:
        if self.args.memory_recorder == "memray":
            import memray

            path = self._file("memory", "memray")
            self._memory.enter_context(memray.Tracker(path))
            logger.info("memory of this process: %s", path)
            return
        if not accelerator.supports("memory_snapshot"):
            raise RuntimeError(
                f"--record-memory-history: torch records no memory on {accelerator.device_type()}; "
                "use --memory-recorder memray"
            )
        accelerator.memory_module()._record_memory_history(max_entries=_MAX_HISTORY_ENTRIES, stacks="python")
        self._memory.callback(self._write_snapshot, "memory")
        accelerator.attach_oom_observer(lambda *_: self._write_snapshot("out_of_memory"))

    def _write_snapshot(self, name: str) -> None:
        path = self._file(name, "pickle")
        accelerator.memory_module()._dump_snapshot(str(path))
        logger.info("memory snapshot: %s", path)

    def _file(self, name: str, suffix: str) -> Path:
        folder = Path(self.args.memory_snapshot_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._files += 1
        return folder / f"{name}_rank_{self._rank}_{self._files}.{suffix}"


def _rank() -> int:
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
