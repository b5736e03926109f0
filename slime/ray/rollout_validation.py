"""Checks that a group of engines fits on the GPUs of the run, before any engine starts. Pure."""

from __future__ import annotations


def validate_server_group_gpu_indices(
    *,
    worker_type: str,
    gpu_offset: int,
    num_gpus_per_engine: int,
    num_gpus_per_engine_on_node: int,
    num_engines: int,
    num_available_gpus: int,
    rollout_num_gpus: int,
    rollout_num_gpus_per_engine: int,
) -> None:
    """Raises ValueError naming the group and the flags when an engine would stand on a GPU that is not reserved.

    Args:
        gpu_offset: position of the group's first GPU among those of all engines.
        num_gpus_per_engine_on_node: GPUs of an engine on one node (less than `num_gpus_per_engine` over several nodes).
        num_engines: node parts of engines in the group.
        num_available_gpus: GPUs reserved for all engines.
    """
    last = gpu_offset + num_engines * num_gpus_per_engine_on_node
    if gpu_offset < 0 or last > num_available_gpus:
        raise ValueError(
            f"{worker_type} server group: {num_engines} engine parts of {num_gpus_per_engine_on_node} GPUs "
            f"({num_gpus_per_engine} per engine) from GPU {gpu_offset} on need {last} GPUs, but {num_available_gpus} are "
            f"reserved; check --rollout-num-gpus {rollout_num_gpus}, --rollout-num-gpus-per-engine "
            f"{rollout_num_gpus_per_engine}, --num-gpus-per-node and the GPU counts of --sglang-config"
        )
