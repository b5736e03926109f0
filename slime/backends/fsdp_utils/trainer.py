"""One training rank of the FSDP2 back end: `common.trainer.Trainer` with a sharded Hugging Face model."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from slime.backends.common import checkpoint_files, loss
from slime.backends.common.batches import Batch, StepPlan, iter_micro_batches, take_rows
from slime.backends.common.distributed import largest_over_ranks, set_seed
from slime.backends.common.schedule import learning_rate, set_learning_rate
from slime.backends.common.trainer import Rows, Trainer
from slime.backends.common.update_weight import WeightSource, WeightUpdater
from slime.backends.fsdp_utils import checkpoint, offload
from slime.backends.fsdp_utils.capabilities import check_supported
from slime.backends.fsdp_utils.distributed import FSDPContext, init_distributed
from slime.backends.fsdp_utils.hf_export import save_hf
from slime.backends.fsdp_utils.model import (
    PolicyModel,
    build_policy,
    build_reference,
    copy_weights,
    iter_full_tensors,
    reshard,
)
from slime.backends.fsdp_utils.old_actor import OldActor
from slime.backends.fsdp_utils.optimizer import build_optimizer, clip_gradients
from slime.utils.seqlen_balancing import first_fit_pack


class FSDPTrainer(Trainer):
    """Model and optimizer of one rank. Every rank is one data-parallel shard."""

    context: FSDPContext
    model: PolicyModel
    optimizer: torch.optim.Optimizer
    reference: PolicyModel | None
    old_actor: OldActor | None = None

    def init(self, args: Namespace, role: str = "actor", with_ref: bool = False) -> int:
        """See the base class."""
        self._check_role(role)
        check_supported(args, role)
        self.args = args
        self.context = init_distributed(args)
        set_seed(args.seed)
        found = checkpoint_files.find_checkpoint(args.load, args.ckpt_step)
        self.model = self._build_model(self._initial_weights())
        self.optimizer = build_optimizer(args, self.model)
        self.with_ref = with_ref
        self.reference = self._build_reference() if with_ref else None
        self.old_actor = OldActor(self.model) if args.keep_old_actor else None
        self.updater = WeightUpdater(args, self.context)
        return self._resume(found) if found else 0

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """See the base class. Always synchronous."""
        if self.args.save:
            optimizer = None if self.args.no_save_optim else self.optimizer
            changing_reference = self.reference if self.args.ref_update_interval else None
            state = checkpoint.TrainState(self.model, optimizer, changing_reference)
            progress = checkpoint_files.Progress.after(rollout_id, self.global_step, self.micro_step)
            checkpoint.save(Path(self.args.save), state, progress)
        if self.args.save_hf:
            self._save_hf(Path(self.args.save_hf.format(rollout_id=rollout_id)))

    def weight_source(self) -> WeightSource:
        """See the base class."""
        return WeightSource(lambda: iter_full_tensors(self.model), self._save_hf)

    def update_weights(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See the base class."""
        perf = super().update_weights(*args, **kwargs)
        if self.old_actor is not None:
            self.old_actor.remember(self.updater.version)
        return perf

    def sleep(self) -> None:
        """See the base class."""
        self._move(torch.device("cpu"))

    def wake_up(self) -> None:
        """See the base class."""
        self._move(self.context.device)

    # ---- start ----

    def _build_model(self, weights: Path) -> PolicyModel:
        return build_policy(self.args, weights, self.context)

    def _build_reference(self) -> PolicyModel | None:
        """None with adapters: the policy without them is the reference."""
        weights = self._reference_weights()
        if self.model.adapter is None:
            return build_reference(self.args, weights, self.context)
        if self._initial_weights() != weights:
            raise ValueError(
                f"--load {self.args.load}: with --lora-rank the reference is the model that training starts from; "
                "give --ref-load the same directory"
            )
        return None

    def _resume(self, folder: Path) -> int:
        reference = self.reference if self.args.ref_update_interval else None
        progress = checkpoint.load(folder, checkpoint.TrainState(self.model, self.optimizer, reference))
        self.global_step, self.micro_step = progress.global_step, progress.micro_step
        return progress.next_rollout_id

    # ---- passes and steps ----

    def _prepare_rows(self, rollout_data: Batch) -> Batch:
        data = super()._prepare_rows(rollout_data)
        budget = self.args.log_probs_max_tokens_per_gpu
        if self.args.use_dynamic_batch_size and budget not in (None, self.args.max_tokens_per_gpu):
            bins = first_fit_pack(data["local_total_lengths"], budget)
            # A rank that needs fewer passes repeats its last one: their collectives must meet.
            missing = largest_over_ranks(len(bins), self.context.device) - len(bins)
            data["forward_micro_batches"] = bins + [bins[-1]] * missing
        return data

    def _reference_log_probs(self, data: Batch) -> Rows:
        if self.model.adapter is None:
            return super()._reference_log_probs(data)
        reshard(self.model)
        with self.model.adapter.disabled():
            return self._log_probs(self.model, data)

    def _old_log_probs(self, data: Batch) -> tuple[Rows, Rows]:
        if self.old_actor is None:
            return super()._old_log_probs(data)
        with self.old_actor.at(data.get("weight_version")):
            return super()._old_log_probs(data)

    @torch.no_grad()
    def _log_probs_and_entropy(self, model: PolicyModel, data: Batch) -> tuple[Rows, Rows]:
        log_probs, entropy = ([torch.zeros_like(mask_R) for mask_R in data["loss_masks"]] for _ in range(2))
        training = model.training
        model.eval()  # adapters may have dropout
        for rows, packed in self.profiler.iterate_train_log_probs(iter_micro_batches(data)):
            values = model(packed, self.args.rollout_temperature, self._chunk_size())
            for column, values_N in zip((log_probs, entropy), values, strict=True):
                for i, value_R in zip(rows, packed.scatter(values_N), strict=True):
                    column[i] = value_R
        reshard(model)
        model.train(training)
        return log_probs, entropy

    def _accumulate(self, data: Batch, plan: StepPlan, normaliser: float) -> dict[str, torch.Tensor]:
        sums: dict[str, torch.Tensor] = {}
        for rows in self.profiler.iterate_train_actor(plan.micro_batches):
            value, report = self._micro_batch_loss(data, rows)
            # FSDP averages gradients over the ranks.
            factor = loss.loss_factor(self.args, plan.global_batch_size, normaliser) * self.context.world_size
            (value * factor).backward()
            self.micro_step += 1
            loss.add_report(sums, report)
        return sums

    def _micro_batch_loss(self, data: Batch, rows: list[int]) -> loss.LossOutput:
        batch, packed = take_rows(data, rows)
        if self.args.loss_type == "custom_loss":
            return loss.custom_loss(self.args, batch, self.model(packed, full_logits=True))
        log_probs_N, entropy_N = self.model(
            packed, self.args.rollout_temperature, self._chunk_size(), with_entropy=self.args.entropy_coef != 0
        )
        return loss.token_loss(self.args, batch, packed.scatter(log_probs_N), packed.scatter(entropy_N))

    def _optimizer_step(self, trained_tokens: float) -> dict[str, float]:
        grad_norm = clip_gradients(self.model, self.args.clip_grad)
        rate = learning_rate(self.args, self.global_step)
        set_learning_rate(self.optimizer, rate)
        if trained_tokens:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": grad_norm, "lr": rate}

    def _reset_optimizer(self) -> None:
        self.optimizer.state.clear()

    def _copy_to_reference(self) -> None:
        assert self.reference is not None
        copy_weights(self.model, self.reference)

    # ---- small helpers ----

    def _save_hf(self, folder: Path) -> None:
        save_hf(self.model, folder, Path(self.args.hf_checkpoint))

    def _move(self, device: torch.device) -> None:
        offload.move_model(self.model, device)
        offload.move_optimizer(self.optimizer, device)
        if self.reference is not None:
            offload.move_model(self.reference, device)
        self.clear_memory()
