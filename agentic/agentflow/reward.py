"""Hook `reward_func` (`--custom-rm-path`): 1.0 for a right final answer, else 0.0.

Inputs: samples that went through `rollout.generate`. Invariants: the exact rule comes first, the judge is asked only
where the rule cannot tell (both in `agentic.common.judge`); a trajectory that failed or cannot be scored is removed,
not scored 0, and the judge is not asked about it. Leaves out: partial credit.
"""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from dataclasses import asdict
from functools import partial
from typing import Any

from agentic.agentflow.crew import Crew, get_crew
from agentic.common.errors import ConfigError, Unscored
from agentic.common.failures import mark_failed
from agentic.common.judge import judge
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


async def reward_func(args: Namespace, sample: Sample | list[Sample], **kwargs: Any) -> float | list[float]:
    """Score one sample, or a list of them in order; details are left in `sample.metadata["reward"]`.

    A removed sample (`remove_sample`) gets the placeholder 0.0, which conversion keeps out of all statistics.

    Raises:
        ConfigError: a sample has no label.
    """
    crew = get_crew(args)
    if isinstance(sample, list):
        return list(await asyncio.gather(*(_score(crew, member) for member in sample)))
    return await _score(crew, sample)


async def _score(crew: Crew, sample: Sample) -> float:
    if sample.status in (Sample.Status.FAILED, Sample.Status.ABORTED):
        sample.remove_sample = True
        return 0.0
    if sample.label is None:
        raise ConfigError(f"sample {sample.index} has no label; check --label-key")
    question, answer = sample.metadata["question"], sample.metadata["final_output"]
    try:
        result = await judge(question, answer, sample.label, crew.judge, partial(crew.prompts.render, "judge"))
    except Unscored as error:
        logger.warning("sample %s could not be scored: %s", sample.index, error)
        mark_failed(sample, error)
        sample.status = Sample.Status.FAILED
        return 0.0
    sample.metadata["reward"] = asdict(result)
    return result.score
