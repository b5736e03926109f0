"""Join the group of training ranks and divide it: tensor, context, expert, data and pipeline parallelism.

Inputs are the usual variables RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and the sizes on the command line.
Left out: the model.
"""

from __future__ import annotations

from argparse import Namespace

import torch

from slime.backends.common.distributed import DistContext, init_distributed, set_seed
from slime.utils.misc import load_function


def prepare_device() -> None:
    """Make megatron-core usable on this machine; must come before any other import of it."""
    if not torch.cuda.is_available():
        from slime.backends.megatron_utils.cpu_standin import install

        install()


def init(args: Namespace) -> DistContext:
    """Process groups, seeds and the user's `--custom-megatron-init-path`. Returns the rank's place among all ranks."""
    prepare_device()
    from megatron.core import parallel_state, tensor_parallel

    context = init_distributed(args)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            distributed_timeout_minutes=args.distributed_timeout_minutes,
            create_gloo_process_groups=True,
        )
    set_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    if args.custom_megatron_init_path:
        load_function(args.custom_megatron_init_path)(args)
    return context


def is_megatron_main_rank() -> bool:
    """Whether this rank speaks for its pipeline: first in data, context and tensor parallelism, on the last stage."""
    from megatron.core import parallel_state as state

    first = (
        state.get_data_parallel_rank(with_context_parallel=True) == 0 and state.get_tensor_model_parallel_rank() == 0
    )
    return first and state.is_pipeline_last_stage()
