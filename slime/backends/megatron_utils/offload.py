"""Move a rank's weights, gradient buffers and optimizer states between device and host memory (`--offload-train`).

On a CPU machine both places are the same and nothing happens. Left out: who decides when.
"""

from __future__ import annotations

from typing import Any

import torch


def to_host(chunk: Any, optimizer: Any, frozen: list[Any]) -> None:
    """Free the device: weights and optimizer states are kept on the host, gradients are dropped."""
    if not torch.cuda.is_available():
        return
    for buffer in _buffers(chunk):
        if buffer.param_data is not None:
            buffer.param_data_cpu = buffer.param_data.to("cpu")
            buffer.param_data.untyped_storage().resize_(0)
        buffer.grad_data_size = buffer.grad_data.untyped_storage().size()
        buffer.grad_data.untyped_storage().resize_(0)
    _move_states(optimizer, torch.device("cpu"))
    _move_models(frozen, torch.device("cpu"))
    torch.cuda.empty_cache()


def to_device(chunk: Any, optimizer: Any, frozen: list[Any]) -> None:
    """The inverse of `to_host`; gradients are 0."""
    if not torch.cuda.is_available():
        return
    device = torch.device("cuda", torch.cuda.current_device())
    for buffer in _buffers(chunk):
        if buffer.param_data is not None:
            buffer.param_data.untyped_storage().resize_(buffer.param_data_cpu.untyped_storage().size())
            buffer.param_data.copy_(buffer.param_data_cpu)
            buffer.param_data_cpu = None
        buffer.grad_data.untyped_storage().resize_(buffer.grad_data_size)
        buffer.grad_data.zero_()
    _move_states(optimizer, device)
    _move_models(frozen, device)


def _buffers(chunk: Any) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _move_models(models: list[Any], device: torch.device) -> None:
    for model in models:
        if model is not None:
            model.to(device)


def _move_states(optimizer: Any, device: torch.device) -> None:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in getattr(part, "shard_fp32_from_float16_groups", []):
            for parameter in group:
                parameter.data = parameter.data.to(device)
        for state in part.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and name != "step":
                    state[name] = value.to(device)
