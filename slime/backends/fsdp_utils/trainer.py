"""One training rank of the FSDP2 back end, without Ray.

`train` is one rollout's worth of work: reference log-probs, old log-probs (only when they are needed), advantages, the user's
postprocess hook, then optimiser steps x micro-batches. Reported sums run over all ranks and are divided by the step's number of
rollout executions (by its trained tokens for `train_rollout_logprob_abs_diff`, and for all with per-token loss).

Invariants: every rank calls every method in the same order; loss, gradient norm and weights do not depend on the number of ranks;
the numbers returned are the same on every rank, and rank 0 writes them to the log once per optimiser step. A step without any
trained token leaves weights and optimizer as they are.

Left out: where rollout data and engine handles come from (`slime.ray`), and all mathematics (`advantages`, `loss`).
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.fsdp_utils import checkpoint, loss, offload
from slime.backends.fsdp_utils.advantages import compute_advantages_and_returns, needs_old_log_probs
from slime.backends.fsdp_utils.batches import (
    Batch,
    StepPlan,
    count_trained_tokens,
    iter_micro_batches,
    plan_steps,
    prepare_rollout_data,
    take_rows,
)
from slime.backends.fsdp_utils.capabilities import check_supported
from slime.backends.fsdp_utils.distributed import all_reduce_sums, init_distributed, set_seed
from slime.backends.fsdp_utils.hf_export import save_hf
from slime.backends.fsdp_utils.model import (
    DEFAULT_CHUNK,
    PolicyModel,
    build_policy,
    build_reference,
    copy_weights,
    require_hf_dir,
    reshard,
)
from slime.backends.fsdp_utils.optimizer import build_optimizer, clip_gradients, learning_rate, set_learning_rate
from slime.backends.fsdp_utils.update_weight import EngineSet, Wait, WeightUpdater, ray_wait
from slime.observability import logging_utils
from slime.observability.train_data_utils import save_debug_train_data
from slime.utils.misc import load_function

logger = logging.getLogger(__name__)


class FSDPTrainer:
    """Model, optimizer and step counters of one rank. Call `init` before anything else."""

    role = "actor"
    metric_room = "train"

    model: PolicyModel
    optimizer: torch.optim.Optimizer
    reference: PolicyModel | None

    def init(self, args: Namespace, role: str = "actor", with_ref: bool = False) -> int:
        """Join the group, build and load the model. Returns the id of the first rollout to train on.

        Raises `ValueError` for an option or role this class does not have, `FileNotFoundError` for a missing model directory.
        """
        if role != self.role:
            raise ValueError(f"{type(self).__name__} trains the role {self.role!r}, not {role!r}")
        check_supported(args)
        self.args = args
        self.context = init_distributed(args)
        set_seed(args.seed)
        self.global_step = self.micro_step = 0
        found = checkpoint.find_checkpoint(args.load, args.ckpt_step)
        self.model = self._build_model(self._initial_weights())
        self.optimizer = build_optimizer(args, self.model)
        self.reference = build_reference(args, self._reference_weights(), self.context) if with_ref else None
        self.updater = WeightUpdater(args, self.context)
        return self._resume(found) if found else 0

    def train(self, rollout_id: int, rollout_data: Batch) -> dict[str, float]:
        """Train on this rank's share of one rollout. Returns the last step's `train/*` and the rollout's `perf/*` numbers."""
        perf: dict[str, float] = {}
        with timed(perf, "train_time"):
            data = prepare_rollout_data(rollout_data, self.context.device)
            plans = plan_steps(data)
            self._prepare_targets(rollout_id, data, len(plans), perf)
            if self.args.reset_optimizer_states:
                self.optimizer.state.clear()
            with timed(perf, "actor_train_time"):
                steps = [self._train_step(rollout_id, data, plan) for plan in plans]
            self._refresh_reference(rollout_id)
        return {**steps[-1], **perf}

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write the checkpoint after `rollout_id`, and the HF export when `--save-hf` is set. Always synchronous."""
        if self.args.save:
            optimizer = None if self.args.no_save_optim else self.optimizer
            changing_reference = self.reference if self.args.ref_update_interval else None
            state = checkpoint.TrainState(self.model, optimizer, changing_reference)
            progress = checkpoint.Progress.after(rollout_id, self.global_step, self.micro_step)
            checkpoint.save(Path(self.args.save), state, progress)
        if self.args.save_hf:
            target = Path(self.args.save_hf.format(rollout_id=rollout_id))
            save_hf(self.model, target, Path(self.args.hf_checkpoint))

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
            self.updater.update(self.model, target, num_new_engines)
        return {**perf, "weight_version": float(self.updater.version)}

    def sleep(self) -> None:
        """Move everything to host memory."""
        self._move(torch.device("cpu"))

    def wake_up(self) -> None:
        """Move everything back to the device."""
        self._move(self.context.device)

    def clear_memory(self) -> None:
        """Return cached device memory."""
        offload.release_cached_memory(self.context.device)

    def shutdown(self) -> None:
        """Leave all process groups. The process should then end through `distributed.exit_worker`."""
        self.updater.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    # ---- start ----

    def _build_model(self, weights: Path) -> PolicyModel:
        return build_policy(self.args, weights, self.context)

    def _initial_weights(self) -> Path:
        """HF directory to start from: `--load` when it is one, else `--ref-load`, else `--hf-checkpoint`."""
        if self.args.load and (Path(self.args.load) / "config.json").is_file():
            return Path(self.args.load)
        return self._reference_weights()

    def _reference_weights(self) -> Path:
        if self.args.ref_load:
            return require_hf_dir(self.args.ref_load, "--ref-load")
        return require_hf_dir(self.args.hf_checkpoint, "--hf-checkpoint")

    def _resume(self, folder: Path) -> int:
        reference = self.reference if self.args.ref_update_interval else None
        progress = checkpoint.load(folder, checkpoint.TrainState(self.model, self.optimizer, reference))
        self.global_step, self.micro_step = progress.global_step, progress.micro_step
        return progress.next_rollout_id

    # ---- before the optimiser steps ----

    def _prepare_targets(self, rollout_id: int, data: Batch, num_steps: int, perf: dict[str, float]) -> None:
        if self.reference is not None:
            with timed(perf, "ref_log_probs_time"):
                data["ref_log_probs"] = self._log_probs(self.reference, data)
        if needs_old_log_probs(self.args, num_steps):
            with timed(perf, "log_probs_time"):
                data["log_probs"], data["entropy"] = self._log_probs_and_entropy(self.model, data)
        self._finish_targets(rollout_id, data)

    def _finish_targets(self, rollout_id: int, data: Batch) -> None:
        """Advantages and returns, then the user's hook, which has the last word."""
        if self.args.compute_advantages_and_returns:
            compute_advantages_and_returns(self.args, data)
        if self.args.rollout_data_postprocess_path:
            load_function(self.args.rollout_data_postprocess_path)(self.args, rollout_id, data)
        save_debug_train_data(self.args, rollout_id=rollout_id, rollout_data=data)

    def _log_probs(self, model: PolicyModel, data: Batch) -> list[torch.Tensor]:
        return self._log_probs_and_entropy(model, data)[0]

    @torch.no_grad()
    def _log_probs_and_entropy(self, model: PolicyModel, data: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Log-probs and entropies of every row, [R_i], 0 at untrained tokens. Collective."""
        log_probs, entropy = ([torch.zeros_like(mask_R) for mask_R in data["loss_masks"]] for _ in range(2))
        for rows, packed in iter_micro_batches(data):
            values = model(packed, self.args.rollout_temperature, self._chunk_size())
            for column, values_N in zip((log_probs, entropy), values, strict=True):
                for i, value_R in zip(rows, packed.scatter(values_N), strict=True):
                    column[i] = value_R
        reshard(model)
        return log_probs, entropy

    def _refresh_reference(self, rollout_id: int) -> None:
        interval = self.args.ref_update_interval
        if self.reference is not None and interval and (rollout_id + 1) % interval == 0:
            copy_weights(self.model, self.reference)

    # ---- optimiser steps ----

    def _train_step(self, rollout_id: int, data: Batch, plan: StepPlan) -> dict[str, float]:
        trained, clamped = count_trained_tokens(data, plan)
        tokens = all_reduce_sums({"trained": trained, "clamped": clamped}, self.context.device)
        sums = self._accumulate(data, plan, tokens["clamped"])
        metrics = self._reduce(sums, plan.global_batch_size, tokens)
        metrics.update(self._optimizer_step(tokens["trained"]), num_tokens=tokens["trained"])
        return self._report(rollout_id, metrics)

    def _optimizer_step(self, trained_tokens: float) -> dict[str, float]:
        grad_norm = clip_gradients(self.model, self.args.clip_grad)
        rate = learning_rate(self.args, self.global_step)
        set_learning_rate(self.optimizer, rate)
        if trained_tokens:
            self.optimizer.step()
        else:
            # Momentum and weight decay would move the weights although nothing was learned.
            logger.warning("optimiser step %d has no trained token on any rank; weights stay", self.global_step)
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": grad_norm, "lr": rate}

    def _accumulate(self, data: Batch, plan: StepPlan, normaliser: float) -> dict[str, torch.Tensor]:
        """Forward and backward over the step's micro-batches; returns this rank's sums of reported scalars."""
        sums: dict[str, torch.Tensor] = {}
        for rows in plan.micro_batches:
            value, report = self._micro_batch_loss(data, rows)
            loss.scale_loss(
                self.args, value, plan.global_batch_size, max(int(normaliser), 1), self.context.world_size
            ).backward()
            self.micro_step += 1
            for name, part in report.items():
                sums[name] = sums.get(name, torch.zeros_like(part)) + part
        return sums

    def _micro_batch_loss(self, data: Batch, rows: list[int]) -> loss.LossOutput:
        batch, packed = take_rows(data, rows)
        reduce = loss.make_reducer(self.args, batch)
        if self.args.loss_type == "custom_loss":
            return loss.custom_loss(self.args, batch, self.model(packed, full_logits=True), reduce)
        log_probs_N, entropy_N = self.model(
            packed, self.args.rollout_temperature, self._chunk_size(), with_entropy=self.args.entropy_coef != 0
        )
        log_probs = packed.scatter(log_probs_N)
        if self.args.loss_type == "sft_loss":
            return loss.sft_loss(log_probs, reduce)
        return loss.policy_loss(self.args, batch, log_probs, packed.scatter(entropy_N), reduce)

    def _reduce(self, sums: dict[str, torch.Tensor], rollouts: int, tokens: dict[str, float]) -> dict[str, float]:
        totals = all_reduce_sums(sums, self.context.device)
        divisor = max(tokens["clamped"], 1.0) if self.args.calculate_per_token_loss else rollouts
        gap = "train_rollout_logprob_abs_diff"
        return {
            name: total / (max(tokens["trained"], 1.0) if name == gap else divisor) for name, total in totals.items()
        }

    def _report(self, rollout_id: int, metrics: dict[str, float]) -> dict[str, float]:
        metrics = {**metrics, "rollout_id": rollout_id, "step": self.global_step}
        named = {f"{self.metric_room}/{name}": value for name, value in metrics.items()}
        self.global_step += 1
        if self.context.is_main:
            logging_utils.log(self.args, named, f"{self.metric_room}/step")
        return named

    # ---- small helpers ----

    def _chunk_size(self) -> int:
        size = self.args.log_probs_chunk_size
        return size if size > 0 else DEFAULT_CHUNK

    def _move(self, device: torch.device) -> None:
        offload.move_model(self.model, device)
        offload.move_optimizer(self.optimizer, device)
        if self.reference is not None:
            offload.move_model(self.reference, device)
        offload.release_cached_memory(self.context.device)


@contextmanager
def timed(perf: dict[str, float], name: str) -> Iterator[None]:
    """Store the seconds of the block as `perf/<name>`."""
    start = time.perf_counter()
    yield
    perf[f"perf/{name}"] = time.perf_counter() - start
