"""Rollout function that replays recorded samples while the engines are up.

    --rollout-function-path slime.rollout.forge_load.generate_rollout --load-forge-rollout-data "dumps/{rollout_id}.pt"

Input: a file of `--save-debug-rollout-data`, or a path with `{rollout_id}`. Unlike `--load-debug-rollout-data` engines
run, so weight syncs and evaluation are part of the run. Invariant: groups are those of the recording.
"""

from __future__ import annotations

import logging
from typing import Any

from slime.observability.rollout_data_utils import load_debug_rollout_data
from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.misc import group_by
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The recorded groups of this rollout; evaluation is generated as usual.

    Raises ValueError without `--load-forge-rollout-data`, FileNotFoundError when there is no recording.
    """
    if evaluation:
        return sglang_rollout.generate_rollout(args, rollout_id, data_source, evaluation=True)
    template = args.load_forge_rollout_data
    if not template:
        raise ValueError("forge_load: --load-forge-rollout-data FILE is needed, the recording to replay")
    samples = load_debug_rollout_data(template, rollout_id=rollout_id)
    logger.info("rollout %d: %d samples replayed from %s", rollout_id, len(samples), template)
    return RolloutFnTrainOutput(samples=_groups(samples))


def _groups(samples: list[Sample]) -> list[list[Sample]]:
    """Samples by `group_index`; a sample without one is a group of its own."""
    numbered = enumerate(samples)
    keys = {id(s): ("sample", i) if s.group_index is None else ("group", s.group_index) for i, s in numbered}
    return list(group_by(samples, key=lambda sample: keys[id(sample)]).values())
