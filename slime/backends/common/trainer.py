"""One training rank, without Ray and without a model library: what every back end does with a rollout, in this order.

`train` is one rollout's worth of work: reference log-probs, old log-probs (only when they are needed), advantages, the user's
postprocess hook, then optimiser steps x micro-batches. Reported sums run over all data-parallel ranks and are divided by the step's
number of rollout executions (by its trained tokens for `train_rollout_logprob_abs_diff`, and for all with per-token loss).

Invariants: every rank calls every method in the same order; loss, gradient norm and weights do not depend on the number of ranks;
the numbers returned are the same on every rank, and rank 0 writes them to the log once per optimiser step. A step without any
trained token leaves weights and optimizer as they are.

Left out: where rollout data and engine handles come from (`slime.ray`), the model and its optimizer (the back ends), and all
mathematics (`advantages`, `loss`).
"""

from __future__ import annotations

import abc
import logging
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.common.advantages import compute_advantages_and_returns, needs_old_log_probs
from slime.backends.common.batches import Batch, StepPlan, count_trained_tokens, plan_steps, prepare_rollout_data
from slime.backends.common.distributed import DistContext, all_reduce_sums
from slime.backends.common.hf_files import require_hf_dir
from slime.backends.common.update_weight import EngineSet, Wait, WeightSource, WeightUpdater, ray_wait
from slime.observability import logging_utils
from slime.observability.profile_utils import TrainProfiler
from slime.observability.train_data_utils import save_debug_train_data
from slime.utils import accelerator
from slime.utils.misc import load_function

logger = logging.getLogger(__name__)

DEFAULT_CHUNK = 1024
Rows = list[torch.Tensor]


class Trainer(abc.ABC):
    """Step counters and the order of work of one rank. Call `init` before anything else."""

    role = "actor"
    metric_room = "train"

    args: Namespace
    context: DistContext
    updater: WeightUpdater
    model: Any
    reference: Any
    with_ref = False
    values: Rows
    """Of a critic, after `train`: a CPU tensor [R_i] for each of the rank's rows."""
    # The ranks that share a rollout between them; None: all ranks. Ranks outside of it repeat the work of one inside.
    data_group: dist.ProcessGroup | None = None
    global_step = 0
    micro_step = 0

    # ---- what a back end gives ----

    @abc.abstractmethod
    def init(self, args: Namespace, role: str = "actor", with_ref: bool = False) -> int:
        """Join the group, build and load the model. Returns the id of the first rollout to train on.

        Raises `ValueError` for an option or role the class does not have, `FileNotFoundError` for a missing model directory.
        """

    @abc.abstractmethod
    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write the checkpoint after `rollout_id`, and the HF export when `--save-hf` is set."""

    @abc.abstractmethod
    def weight_source(self) -> WeightSource:
        """The trained model's whole weights under Hugging Face names."""

    @abc.abstractmethod
    def sleep(self) -> None:
        """Move everything to host memory."""

    @abc.abstractmethod
    def wake_up(self) -> None:
        """Move everything back to the device."""

    @abc.abstractmethod
    def _log_probs_and_entropy(self, model: Any, data: Batch) -> tuple[Rows, Rows]:
        """Log-probs and entropies of every row, [R_i], 0 at untrained tokens. Collective."""

    @abc.abstractmethod
    def _accumulate(self, data: Batch, plan: StepPlan, normaliser: float) -> dict[str, torch.Tensor]:
        """Forward and backward over the step's micro-batches; returns this rank's sums of reported scalars."""

    @abc.abstractmethod
    def _optimizer_step(self, trained_tokens: float) -> dict[str, float]:
        """Clip, step (only with trained tokens) and zero the gradients. Returns `grad_norm` and `lr`."""

    @abc.abstractmethod
    def _reset_optimizer(self) -> None:
        """Forget the optimizer's moments."""

    @abc.abstractmethod
    def _copy_to_reference(self) -> None:
        """Make the reference equal to the trained model."""

    def data_rank_and_size(self) -> tuple[int, int]:
        """Which share of a rollout this rank works on, of how many."""
        return dist.get_rank(self.data_group), dist.get_world_size(self.data_group)

    def parallel_config(self) -> dict[str, int]:
        """Sizes of the ways in which ranks are divided; `dp_size` is the number of shares of a rollout."""
        return {"dp_size": self.data_rank_and_size()[1], "cp_size": 1, "tp_size": 1, "pp_size": 1}

    # ---- one rollout ----

    def train(self, rollout_id: int, rollout_data: Batch) -> dict[str, float]:
        """Train on this rank's share of one rollout. Returns the last step's `train/*` and the rollout's `perf/*` numbers."""
        perf: dict[str, float] = {}
        with timed(perf, "train_time"):
            data = self._prepare_rows(rollout_data)
            plans = plan_steps(data)
            self._prepare_targets(rollout_id, data, len(plans), perf)
            if self.args.reset_optimizer_states:
                self._reset_optimizer()
            with timed(perf, "actor_train_time"):
                steps = [self._train_step(rollout_id, number, data, plan) for number, plan in enumerate(plans)]
            self._refresh_reference(rollout_id)
        self.profiler.step(rollout_id)
        return {**steps[-1], **perf}

    @cached_property
    def profiler(self) -> TrainProfiler:
        """Records what the flags ask for, from its first use on."""
        profiler = TrainProfiler(self.args)
        profiler.on_init_end()
        return profiler

    def update_weights(
        self,
        engines: Sequence[Any],
        gpu_counts: Sequence[int] | None = None,
        num_new_engines: int = 0,
        wait: Wait | None = None,
    ) -> dict[str, float]:
        """Send the weights to the engines (Ray actor handles). Returns the time it took and the new version.

        `gpu_counts[i]`: ranks of engine i in the update group, default 1 each. `num_new_engines` > 0 makes a new group.
        `wait` resolves what `.remote()` returned; the default is `ray.get` with the distributed timeout.
        """
        perf: dict[str, float] = {}
        wait = wait or ray_wait(self.context.timeout.total_seconds())
        target = EngineSet(engines, gpu_counts or [1] * len(engines), wait)
        with timed(perf, "update_weights_time"):
            self.updater.update(self.weight_source(), target, num_new_engines)
        return {**perf, "weight_version": float(self.updater.version)}

    def clear_memory(self) -> None:
        """Return cached device memory."""
        accelerator.empty_cache()

    def shutdown(self) -> None:
        """Leave all process groups. The process should then end through `distributed.exit_worker`."""
        self.updater.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    # ---- where weights come from ----

    def _check_role(self, role: str) -> None:
        if role != self.role:
            raise ValueError(f"{type(self).__name__} trains the role {self.role!r}, not {role!r}")

    def _initial_weights(self) -> Path:
        """HF directory to start from: `--load` when it is one, else `--ref-load`, else `--hf-checkpoint`."""
        if self.args.load and (Path(self.args.load) / "config.json").is_file():
            return Path(self.args.load)
        return self._reference_weights()

    def _reference_weights(self) -> Path:
        if self.args.ref_load:
            return require_hf_dir(self.args.ref_load, "--ref-load")
        return require_hf_dir(self.args.hf_checkpoint, "--hf-checkpoint")

    # ---- before the optimiser steps ----

    def _prepare_rows(self, rollout_data: Batch) -> Batch:
        return prepare_rollout_data(rollout_data, self.context.device)

    def _prepare_targets(self, rollout_id: int, data: Batch, num_steps: int, perf: dict[str, float]) -> None:
        if self.with_ref:
            with timed(perf, "ref_log_probs_time"):
                data["ref_log_probs"] = self._reference_log_probs(data)
        if needs_old_log_probs(self.args, num_steps):
            with timed(perf, "log_probs_time"):
                data["log_probs"], data["entropy"] = self._old_log_probs(data)
        self._finish_targets(rollout_id, data)

    def _finish_targets(self, rollout_id: int, data: Batch) -> None:
        """Advantages and returns, then the user's hook, which has the last word."""
        if self.args.compute_advantages_and_returns:
            compute_advantages_and_returns(self.args, data, self.data_group)
        if self.args.rollout_data_postprocess_path:
            load_function(self.args.rollout_data_postprocess_path)(self.args, rollout_id, data)
        save_debug_train_data(self.args, rollout_id=rollout_id, rollout_data=data)

    def _reference_log_probs(self, data: Batch) -> Rows:
        return self._log_probs(self.reference, data)

    def _old_log_probs(self, data: Batch) -> tuple[Rows, Rows]:
        """Log-probs and entropies of the policy before the first step."""
        return self._log_probs_and_entropy(self.model, data)

    def _log_probs(self, model: Any, data: Batch) -> Rows:
        return self._log_probs_and_entropy(model, data)[0]

    def _refresh_reference(self, rollout_id: int) -> None:
        interval = self.args.ref_update_interval
        if self.reference is not None and interval and (rollout_id + 1) % interval == 0:
            self._copy_to_reference()

    # ---- optimiser steps ----

    def _before_step(self, rollout_id: int, step_id: int) -> None:  # noqa: B027 (most back ends do nothing here)
        """What a back end does before the passes of each optimiser step (`step_id` counts within the rollout): nothing."""

    def _train_step(self, rollout_id: int, step_id: int, data: Batch, plan: StepPlan) -> dict[str, float]:
        self._before_step(rollout_id, step_id)
        trained, clamped = count_trained_tokens(data, plan)
        tokens = self._sum({"trained": trained, "clamped": clamped})
        sums = self._accumulate(data, plan, tokens["clamped"])
        metrics = self._reduce(sums, plan.global_batch_size, tokens)
        if not tokens["trained"]:
            # Momentum and weight decay would move the weights although nothing was learned.
            logger.warning("optimiser step %d has no trained token on any rank; weights stay", self.global_step)
        metrics.update(self._optimizer_step(tokens["trained"]), num_tokens=tokens["trained"])
        return self._report(rollout_id, metrics)

    def _sum(self, values: dict[str, Any]) -> dict[str, float]:
        return all_reduce_sums(values, self.context.device, self.data_group)

    def _reduce(self, sums: dict[str, torch.Tensor], rollouts: int, tokens: dict[str, float]) -> dict[str, float]:
        divisor = max(tokens["clamped"], 1.0) if self.args.calculate_per_token_loss else rollouts
        gap = "train_rollout_logprob_abs_diff"
        return {
            name: total / (max(tokens["trained"], 1.0) if name == gap else divisor)
            for name, total in self._sum(sums).items()
        }

    def _report(self, rollout_id: int, metrics: dict[str, float]) -> dict[str, float]:
        metrics = {**metrics, "rollout_id": rollout_id, "step": self.global_step}
        named = {f"{self.metric_room}/{name}": value for name, value in metrics.items()}
        self.global_step += 1
        if self.context.is_main:
            logging_utils.log(self.args, named, f"{self.metric_room}/step")
        return named

    def _chunk_size(self) -> int:
        size = self.args.log_probs_chunk_size
        return size if size > 0 else DEFAULT_CHUNK


@contextmanager
def timed(perf: dict[str, float], name: str) -> Iterator[None]:
    """Store the seconds of the block as `perf/<name>`."""
    start = time.perf_counter()
    yield
    perf[f"perf/{name}"] = time.perf_counter() - start
