"""Return types of rollout functions, and the one call that also accepts the older bare return values.

Invariant: after `call_rollout_fn` the caller always holds one of the two dataclasses below.
Left out: any check of the samples themselves (see `slime.observability.rollout_data_utils`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slime.utils.types import Sample


@dataclass
class RolloutFnTrainOutput:
    """Groups of one training rollout; a group member is a `Sample` or, after fan-out, a list of them."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Per dataset: `rewards` and, where known, `truncated`, `samples`, `failed`."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Calls a rollout function and wraps a bare return value (list or dict) into the matching dataclass."""
    output = fn(*args, **kwargs, evaluation=evaluation)
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    return RolloutFnEvalOutput(data=output) if evaluation else RolloutFnTrainOutput(samples=output)


def iter_leaves(value: Any) -> Iterator[Sample]:
    """Yields the samples of an arbitrarily nested list, in order."""
    if isinstance(value, list):
        for item in value:
            yield from iter_leaves(item)
    else:
        yield value
