"""The trained network of a rank: stage, data-parallel wrapper, distributed optimizer; and passes through all stages.

Gradients are summed over data- and context-parallel ranks and are not averaged: the loss arrives with the step's denominator.
Invariants: every rank of a pipeline calls the same passes with the same number of micro-batches.
Left out: what the loss is (`trainer`), weights (`hf_to_megatron`, `checkpoint`), interleaved pipelines.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import nn

from slime.backends.common.precision import train_dtype
from slime.backends.common.schedule import check_gradient_norm
from slime.backends.megatron_utils.data import StageBatch
from slime.backends.megatron_utils.model_params import unwrap
from slime.backends.megatron_utils.model_provider import build_stage

# From the last stage's output and the number of the micro-batch to the value to differentiate.
LossFunction = Callable[[int, torch.Tensor], torch.Tensor]


def build_frozen(args: Namespace, role: str = "actor") -> nn.Module:
    """A stage without gradients or optimizer, for reference log-probs. Its weights are not loaded yet."""
    stage = build_stage(args, role).requires_grad_(False)
    return _low_precision(args, stage).eval()


def build_trainable(args: Namespace, role: str = "actor") -> DistributedDataParallel:
    """The stage to train with its gradient buffers. Its weights are not loaded yet."""
    stage = _low_precision(args, build_stage(args, role))
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
    )
    chunk = DistributedDataParallel(unwrap(stage).config, config, stage)
    core = unwrap(chunk).config
    core.finalize_model_grads_func = _finalize
    core.grad_scale_func = None
    return chunk.train()


def _finalize(model: list[nn.Module], num_tokens: torch.Tensor | None, **options: Any) -> None:
    # Without the token count: the loss is scaled already.
    finalize_model_grads(model, None, **options)


def _low_precision(args: Namespace, stage: nn.Module) -> nn.Module:
    return Float16Module(stage.config, stage) if train_dtype(args) == torch.bfloat16 else stage


def build_optimizer(args: Namespace, chunk: DistributedDataParallel) -> Any:
    """Adam with states cut among data-parallel ranks; vectors get no weight decay. Raises ValueError with nothing to train."""
    if not any(parameter.requires_grad for parameter in chunk.parameters()):
        raise ValueError(
            "no parameter is left to train; check --only-train-params-name-list / --freeze-params-name-list"
        )
    low = train_dtype(args) == torch.bfloat16
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        bf16=low,
        params_dtype=train_dtype(args),
        use_distributed_optimizer=True,
        clip_grad=max(args.clip_grad, 0.0),
    )
    optimizer = get_megatron_optimizer(config, [chunk], get_standard_config_overrides(config))
    for group in optimizer.param_groups:
        # Otherwise a scheduler of megatron-core's would do it; the learning rate is ours (`common.schedule`).
        group["weight_decay"] = args.weight_decay * group["wd_mult"]
    return optimizer


def optimizer_step(optimizer: Any, chunk: DistributedDataParallel, rate: float, do_step: bool) -> float:
    """Clip and step with learning rate `rate`, then zero the gradients. Returns the norm over all ranks before clipping."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.prepare_grads()
    norm = check_gradient_norm(float(optimizer.get_grad_norm()))
    if do_step:
        _, _, _ = optimizer.step()
    chunk.zero_grad_buffer()
    optimizer.zero_grad()
    return norm


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside, one per kind of parameter (dense, expert)."""
    return [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]


def run_passes(chunk: nn.Module, batches: list[StageBatch], loss: LossFunction, forward_only: bool = False) -> None:
    """Forward (and backward) of all micro-batches through all stages. `loss` is called on the last stage only. Collective."""
    numbered = iter(enumerate(batches))

    def forward_step(_: Any, model: nn.Module) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        number, batch = next(numbered)
        output = model(
            input_ids=batch.input_ids_1t,
            position_ids=batch.position_ids_1t,
            attention_mask=None,
            packed_seq_params=batch.packed_seq_params,
        )
        count = torch.zeros([], dtype=torch.int, device=output.device)
        return output, lambda hidden: (loss(number, hidden), count, {})

    longest = max(batch.input_ids_1t.shape[1] for batch in batches)
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=None,
        model=[chunk],
        num_microbatches=len(batches),
        seq_length=longest,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def broadcast_from_last_stage(value: torch.Tensor) -> torch.Tensor:
    """The last stage's tensor (same shape and dtype everywhere) on all stages, in place. Collective."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        group = parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.broadcast(value, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return value
