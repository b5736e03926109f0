"""Small Ray helpers: environment of actors, the lock that serialises weight buckets.

Ray hides all accelerators from an actor that asks for a fraction of one. Our actors choose the device themselves (a
training rank takes its own GPU, an engine several of them), so that masking is switched off for every vendor Ray knows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from slime.ray.ray_actor import RayActor

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]

NOSET_VISIBLE_DEVICES_ENV_VARS_LIST = [
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HABANA_VISIBLE_MODULES",
    "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES",
    "RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS",
    "RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR",
]


def ray_noset_visible_devices(env_vars: Mapping[str, str] = os.environ) -> bool:
    """True when Ray was told to leave the visible devices alone for any vendor."""
    return any(env_vars.get(name) for name in NOSET_VISIBLE_DEVICES_ENV_VARS_LIST)


def add_default_ray_env_vars(env_vars: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """Environment every actor gets; what the caller already set wins."""
    repository = str(REPOSITORY_ROOT)
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != repository]
    defaults = {name: "1" for name in NOSET_VISIBLE_DEVICES_ENV_VARS_LIST}
    defaults["PYTHONPATH"] = os.pathsep.join([repository, *inherited])
    defaults["TOKENIZERS_PARALLELISM"] = os.environ.get("TOKENIZERS_PARALLELISM", "false")
    # Spinning threads of one process starve the others on a machine with fewer cores than processes.
    defaults["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    return {**defaults, **(env_vars or {})}


def get_physical_gpu_id() -> int | str:
    """Index (or UUID) of the GPU that Ray reserved for the calling actor, as the driver numbers them."""
    import ray

    gpu_ids = ray.get_gpu_ids()
    if not gpu_ids:
        raise RuntimeError("this actor reserved no GPU, so it has no physical GPU id")
    gpu_id = str(gpu_ids[0])
    return int(gpu_id) if gpu_id.isdigit() else gpu_id


def as_actor(cls: type, **options: Any) -> Any:
    """Ray's remote form of a plain class, with its resources and environment; call `.remote(...)` on it."""
    import ray

    return ray.remote(cls).options(**options)  # type: ignore[attr-defined]


def wait_all(refs: list[Any]) -> list[Any]:
    """Values of `refs` in order; raises the first failure as soon as it happens instead of waiting for the others.

    One dead training rank leaves its peers blocked in a collective, so waiting in order could take minutes.
    """
    import ray

    pending = list(refs)
    while pending:
        ready, pending = ray.wait(pending, num_returns=1)
        ray.get(ready)
    return ray.get(refs)


class Lock(RayActor):
    """Mutual exclusion between training ranks; poll `acquire` until it returns True."""

    def __init__(self) -> None:
        self._locked = False

    def acquire(self) -> bool:
        """Take the lock if it is free; False when somebody else holds it."""
        if self._locked:
            return False
        self._locked = True
        return True

    def release(self) -> None:
        """Give the lock back; releasing a free lock is a programming error."""
        if not self._locked:
            raise RuntimeError("release() of a lock that nobody holds")
        self._locked = False
