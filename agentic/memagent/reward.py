"""Hook `reward_func` (`--custom-rm-path`): the score of the final answer, the same for all siblings of a rollout.

Inputs: samples that went through `rollout.generate`. Invariants: only the answer turn is scored, whichever conversation
the sample holds; no network; a failed rollout is removed, not scored 0. Leaves out: the metrics (`scoring`).
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from agentic.common.errors import ConfigError
from agentic.memagent.config import MemAgentConfig
from agentic.memagent.scoring import reward_of
from slime.utils.types import Sample

# Kind of an item (`metadata["kind"]`) of which all references are wanted.
MULTI_VALUE_KIND = "ruler"


async def reward_func(args: Namespace, sample: Sample | list[Sample], **kwargs: Any) -> float | list[float]:
    """Score one sample, or a list of them in order, with the reward of the settings.

    A removed sample (`remove_sample`) gets the placeholder 0.0, which conversion keeps out of all statistics.

    Raises:
        ConfigError: a sample has no references, or did not come from `generate`.
    """
    config = MemAgentConfig.from_args(args)
    if isinstance(sample, list):
        return [_score(config, member) for member in sample]
    return _score(config, sample)


def _score(config: MemAgentConfig, sample: Sample) -> float:
    if sample.status in (Sample.Status.FAILED, Sample.Status.ABORTED):
        sample.remove_sample = True
        return 0.0
    answer = (sample.metadata or {}).get("answer")
    if not isinstance(answer, str):
        hook = "agentic.memagent.rollout.generate"
        raise ConfigError(f"sample {sample.index} has no answer; set --custom-generate-function-path {hook}")
    name = "multi_value" if sample.metadata.get("kind") == MULTI_VALUE_KIND else config.reward
    return reward_of(name, answer, references_of(sample), config.reward_window_chars)


def references_of(sample: Sample) -> list[str]:
    """`metadata["ground_truth"]`, else the label.

    Raises:
        ConfigError: there is none, or one is not a text.
    """
    given = (sample.metadata or {}).get("ground_truth")
    references = [sample.label] if given is None else given
    if not isinstance(references, (list, tuple)) or not references or not all(isinstance(r, str) for r in references):
        raise ConfigError(
            f"sample {sample.index}: metadata['ground_truth'] is {given!r} and the label {sample.label!r}; "
            "give a list of at least one text, check --metadata-key and --label-key"
        )
    return list(references)
