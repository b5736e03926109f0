"""One training rank of the Megatron back end: `common.trainer.Trainer` with stages of a megatron-core model.

Invariants: the ranks of a pipeline, of a tensor and of a context group work on the same rows, and hold the same numbers after every pass
(the last stage sends them to the others); the loss is that of whole rows, the same function as in the other back ends.
Left out: interleaved pipelines, asynchronous saving.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from slime.backends.common import loss
from slime.backends.common.batches import Batch, StepPlan, take_rows
from slime.backends.common.hf_files import require_hf_dir
from slime.backends.common.packing import PackedBatch
from slime.backends.common.schedule import learning_rate
from slime.backends.common.trainer import Rows, Trainer, timed
from slime.backends.common.update_weight import WeightSource, WeightUpdater
from slime.backends.megatron_utils.capabilities import check_model, check_supported
from slime.backends.megatron_utils.initialize import init as init_megatron
from slime.utils.misc import load_function

# megatron-core is imported in functions: on a CPU the stand-in must come first (`initialize.prepare_device`).


class MegatronTrainer(Trainer):
    """Stage, optimizer and frozen copies of one rank."""

    model: Any
    optimizer: Any
    reference: Any
    teacher: Any = None

    def init(self, args: Namespace, role: str = "actor", with_ref: bool = False) -> int:
        """See the base class."""
        self._check_role(role)
        check_supported(args)
        check_model(args, role)
        self.args = args
        self.context = init_megatron(args)
        from megatron.core import parallel_state

        from slime.backends.megatron_utils import checkpoint, model

        self.data_group = parallel_state.get_data_parallel_group()
        found = checkpoint.find(args)
        self.model = model.build_trainable(args, self.role)
        if found is None:
            self._load_start(self.model, self._initial_weights())
        self.optimizer = model.build_optimizer(args, self.model)
        self.with_ref = with_ref
        self.reference = self._build_frozen(self._reference_weights()) if with_ref else None
        if self.role == "actor" and args.use_opd and args.opd_type == "megatron":
            self.teacher = self._build_frozen(self._teacher_weights())
        self.updater = WeightUpdater(args, self.context)
        return self._resume(found) if found else 0

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """See the base class. Always synchronous."""
        from slime.backends.megatron_utils import checkpoint

        if self.args.save:
            changing_reference = self.reference if self.args.ref_update_interval else None
            state = checkpoint.TrainState(self.model, self.optimizer, changing_reference)
            checkpoint.save(self.args, state, rollout_id, self.global_step, self.micro_step)
        if self.args.save_hf:
            self._save_hf(Path(self.args.save_hf.format(rollout_id=rollout_id)))

    def weight_source(self) -> WeightSource:
        """See the base class."""
        from slime.backends.megatron_utils.megatron_to_hf import export_hf

        return WeightSource(lambda: export_hf([self.model], self.args), self._save_hf)

    def sleep(self) -> None:
        """See the base class."""
        from slime.backends.megatron_utils import offload

        offload.to_host(self.model, self.optimizer, [self.reference, self.teacher])

    def wake_up(self) -> None:
        """See the base class."""
        from slime.backends.megatron_utils import offload

        offload.to_device(self.model, self.optimizer, [self.reference, self.teacher])

    def parallel_config(self) -> dict[str, int]:
        """See the base class."""
        args = self.args
        return super().parallel_config() | {
            "cp_size": args.context_parallel_size,
            "tp_size": args.tensor_model_parallel_size,
            "pp_size": args.pipeline_model_parallel_size,
        }

    # ---- start ----

    def _reference_weights(self) -> Path:
        """A Hugging Face directory, or a distributed checkpoint."""
        from slime.backends.megatron_utils.checkpoint import weights_dir

        found = weights_dir(self.args.ref_load) if self.args.ref_load else None
        return found or super()._reference_weights()

    def _load_start(self, chunk: Any, folder: Path) -> None:
        from slime.backends.megatron_utils import checkpoint
        from slime.backends.megatron_utils.hf_to_megatron import load_hf_into

        if checkpoint.is_torch_dist(folder):
            checkpoint.load_weights(chunk, folder)
        else:
            load_hf_into([chunk], folder, self.args)

    def _teacher_weights(self) -> Path:
        from slime.backends.megatron_utils.checkpoint import find_checkpoint, weights_dir

        path, step = self.args.opd_teacher_load, self.args.opd_teacher_ckpt_step
        chosen = find_checkpoint(path, step) if step is not None else weights_dir(path)
        return chosen or require_hf_dir(path, "--opd-teacher-load")

    def _build_frozen(self, weights: Path) -> Any:
        from slime.backends.megatron_utils import model

        frozen = model.build_frozen(self.args)
        self._load_start(frozen, weights)
        return frozen

    def _resume(self, found: Path) -> int:
        from slime.backends.megatron_utils import checkpoint

        reference = self.reference if self.args.ref_update_interval else None
        progress = checkpoint.load(found, checkpoint.TrainState(self.model, self.optimizer, reference))
        if progress is None:
            return 0
        self.global_step, self.micro_step = progress.global_step, progress.micro_step
        return progress.next_rollout_id

    # ---- passes without gradients ----

    def _prepare_targets(self, rollout_id: int, data: Batch, num_steps: int, perf: dict[str, float]) -> None:
        if self.teacher is not None:
            with timed(perf, "teacher_log_probs_time"):
                data["teacher_log_probs"] = self._log_probs(self.teacher, data)
        super()._prepare_targets(rollout_id, data, num_steps, perf)

    def _prefix(self, model: Any) -> str:
        return {id(self.reference): "ref_", id(self.teacher): "teacher_"}.get(id(model), "")

    @torch.no_grad()
    def _log_probs_and_entropy(self, model: Any, data: Batch) -> tuple[Rows, Rows]:
        from slime.backends.megatron_utils.log_probs import log_probs_and_entropy

        def compute(stage: Any, hidden: torch.Tensor, batch: Any) -> tuple[Rows, Rows]:
            return log_probs_and_entropy(self.args, stage, hidden, batch, self._chunk_size(), with_entropy=False)

        hook = self.args.custom_megatron_before_log_prob_hook_path
        if hook:
            load_function(hook)(self.args, [model], self._prefix(model))
        log_probs, entropy = self._forward_rows(model, data, compute, columns=2)
        return log_probs, entropy

    def _forward_rows(self, chunk: Any, data: Batch, compute: Any, columns: int) -> list[Rows]:
        """Per-row results of a forward pass over all micro-batches, on every stage. `compute` gives one list of rows per column."""
        from slime.backends.megatron_utils.model import broadcast_from_last_stage, run_passes, unwrap

        results = [[torch.zeros_like(mask_R) for mask_R in data["loss_masks"]] for _ in range(columns)]
        plans = data["micro_batch_indices"]
        batches = [self._stage_batch(data, rows)[2] for rows in plans]

        def keep(number: int, hidden: torch.Tensor) -> torch.Tensor:
            values = compute(unwrap(chunk), hidden, batches[number])
            for column, rows in zip(results, values, strict=True):
                for i, value_R in zip(plans[number], rows, strict=True):
                    column[i] = value_R
            return hidden.new_zeros(())

        run_passes(chunk, batches, keep, forward_only=True)
        lengths = [len(mask_R) for mask_R in data["loss_masks"]]
        return [list(broadcast_from_last_stage(torch.cat(column)).split(lengths)) for column in results]

    def _stage_batch(self, data: Batch, rows: list[int]) -> tuple[Batch, PackedBatch, Any]:
        from slime.backends.megatron_utils.data import stage_batch

        batch, packed = take_rows(data, rows)
        return batch, packed, stage_batch(self.args, batch["tokens"], packed)

    # ---- optimiser steps ----

    def _before_step(self, rollout_id: int, step_id: int) -> None:
        hook = self.args.custom_megatron_before_train_step_hook_path
        if hook:
            # No scheduler object: the learning rate is a function of the number of finished steps.
            load_function(hook)(self.args, rollout_id, step_id, [self.model], self.optimizer, None)

    def _accumulate(self, data: Batch, plan: StepPlan, normaliser: float) -> dict[str, torch.Tensor]:
        from slime.backends.megatron_utils.model import run_passes

        factor = loss.loss_factor(self.args, plan.global_batch_size, normaliser)
        parts = [self._stage_batch(data, rows) for rows in plan.micro_batches]
        sums: dict[str, torch.Tensor] = {}

        def last_stage(number: int, hidden: torch.Tensor) -> torch.Tensor:
            batch, _, stage = parts[number]
            value, report = self._micro_batch_loss(batch, stage, hidden)
            loss.add_report(sums, report)
            return value * factor

        run_passes(self.model, [stage for _, _, stage in parts], last_stage)
        self.micro_step += len(parts)
        return self._share_report(sums)

    def _micro_batch_loss(self, batch: Batch, stage_batch: Any, hidden: torch.Tensor) -> loss.LossOutput:
        from slime.backends.megatron_utils.log_probs import log_probs_and_entropy, whole_logits
        from slime.backends.megatron_utils.model import unwrap

        stage = unwrap(self.model)
        if self.args.loss_type == "custom_loss":
            length = sum(batch["total_lengths"])
            return loss.custom_loss(self.args, batch, whole_logits(stage, hidden)[:, :length])
        rows = log_probs_and_entropy(
            self.args, stage, hidden, stage_batch, self._chunk_size(), with_entropy=self.args.entropy_coef != 0
        )
        return loss.token_loss(self.args, batch, *rows)

    def _share_report(self, sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The last stage's sums on every stage."""
        from megatron.core import parallel_state

        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return sums
        content = [{name: float(value) for name, value in sums.items()}]
        torch.distributed.broadcast_object_list(
            content,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        return {name: torch.tensor(value, device=self.context.device) for name, value in content[0].items()}

    def _optimizer_step(self, trained_tokens: float) -> dict[str, float]:
        from slime.backends.megatron_utils.model import optimizer_step

        rate = learning_rate(self.args, self.global_step)
        norm = optimizer_step(self.optimizer, self.model, rate, do_step=bool(trained_tokens))
        return {"grad_norm": norm, "lr": rate}

    def _reset_optimizer(self) -> None:
        from slime.backends.megatron_utils.model import inner_optimizers

        for optimizer in inner_optimizers(self.optimizer):
            optimizer.state.clear()

    def _copy_to_reference(self) -> None:
        from slime.backends.megatron_utils.model import unwrap

        unwrap(self.reference).load_state_dict(unwrap(self.model).state_dict())

    # ---- small helpers ----

    def _save_hf(self, folder: Path) -> None:
        from slime.backends.common.hf_weights import write_hf_directory

        tensors = self.weight_source().iter_full_tensors()
        if self.context.is_main:
            write_hf_directory(folder, tensors, Path(self.args.hf_checkpoint))
        else:
            for _ in tensors:
                pass
        torch.distributed.barrier()
