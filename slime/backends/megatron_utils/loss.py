"""The parts of the loss that hooks call, under the names they import. Pure functions, no Megatron needed; the losses themselves are
`slime.backends.common.loss`, which every back end shares.
"""

from __future__ import annotations

from argparse import Namespace

from slime.backends.common import advantages
from slime.backends.common.advantages import apply_opd_kl_to_advantages
from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, get_sum_of_sample_mean
from slime.utils.importance_sampling import icepop_function, vanilla_tis_function
from slime.utils.types import RolloutBatch

__all__ = [
    "all_gather_with_cp",
    "apply_opd_kl_to_advantages",
    "compute_advantages_and_returns",
    "get_sum_of_sample_mean",
    "icepop_function",
    "vanilla_tis_function",
]


def compute_advantages_and_returns(args: Namespace, rollout_data: RolloutBatch) -> None:
    """Set `kl`, `advantages` and `returns` (lists of float32 [R_i]) from the log-probs, rewards and values in `rollout_data`.

    Collective over all ranks with `--normalize-advantages`. Raises ValueError when something that the flags ask for is missing.
    """
    rollout_data.setdefault("local_total_lengths", rollout_data.get("total_lengths"))
    advantages.compute_advantages_and_returns(args, rollout_data)
