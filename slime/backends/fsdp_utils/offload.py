"""Move a sharded model and its optimizer state between device and host memory (for `--offload-train`).

On a CPU machine both places are the same and nothing happens. Left out: who decides when.
"""

from __future__ import annotations

import torch

from slime.backends.fsdp_utils.model import PolicyModel, reshard


def move_model(model: PolicyModel, device: torch.device) -> None:
    """Move all shards; gathered copies are dropped first."""
    reshard(model)
    model.to(device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the moments of every parameter (the step counters stay where they are)."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != "step":
                state[name] = value.to(device)
