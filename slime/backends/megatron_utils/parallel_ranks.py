"""This rank's place in the tensor and expert dimensions, as the converters need it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from slime.backends.megatron_utils.param_names import Sharding


@dataclass(frozen=True)
class ParallelRanks:
    """Rank and size of tensor (`tp`), expert-tensor (`etp`), expert (`ep`) and pipeline (`pp`) parallelism."""

    tp: tuple[int, int] = (0, 1)
    etp: tuple[int, int] = (0, 1)
    ep: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    is_main: bool = True

    @classmethod
    def current(cls) -> ParallelRanks:
        """From `parallel_state`, which must be initialised."""
        from megatron.core import parallel_state as state

        return cls(
            tp=(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
            etp=(state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()),
            ep=(state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
            pp=(state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()),
            is_main=dist.get_rank() == 0,
        )

    def tensor(self, sharding: Sharding) -> tuple[int, int]:
        """Rank and size among the ranks that cut a parameter of this kind."""
        return self.etp if sharding.expert else self.tp
