"""Sample hooks and rollout return types."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn, iter_leaves
from slime.rollout.sample_hooks import apply_rollout_sample_hooks, set_current_rollout_id
from slime.utils.types import Sample


def mark(args, sample, *, rollout_id=None, evaluation=False):
    sample.metadata["seen"] = (rollout_id, evaluation)


async def replace(args, sample):
    return Sample(index=sample.index, response=sample.response + "!")


def any_keyword(args, sample, **kwargs):
    sample.metadata["kwargs"] = sorted(kwargs)


def wrong(args, sample):
    return "text"


def hooks(*names):
    return Namespace(rollout_sample_hook_path=[f"{__name__}.{name}" for name in names])


async def test_hooks_see_every_leaf_and_keep_the_shape():
    set_current_rollout_id(5)
    value = [Sample(index=0), [Sample(index=1), [Sample(index=2)]]]
    result = await apply_rollout_sample_hooks(hooks("mark"), value, evaluation=True)
    assert [s.metadata["seen"] for s in iter_leaves(result)] == [(5, True)] * 3
    assert isinstance(result[1][1], list) and result[1][1][0].index == 2


async def test_hooks_run_in_order_and_may_replace():
    sample = Sample(index=0, response="a")
    result = await apply_rollout_sample_hooks(hooks("replace", "replace", "any_keyword"), sample, evaluation=False)
    assert result is not sample and result.response == "a!!"
    assert result.metadata["kwargs"] == ["evaluation", "rollout_id"]


async def test_other_return_types_are_refused():
    with pytest.raises(TypeError, match="wrong returned str"):
        await apply_rollout_sample_hooks(hooks("wrong"), Sample(), evaluation=False)


async def test_without_hooks_the_value_passes():
    sample = Sample()
    assert await apply_rollout_sample_hooks(Namespace(rollout_sample_hook_path=[]), sample) is sample


def test_bare_returns_of_rollout_functions_are_wrapped():
    train = call_rollout_fn(lambda *a, evaluation: [["s"]], 1, evaluation=False)
    assert train == RolloutFnTrainOutput(samples=[["s"]], metrics=None)
    evaluated = call_rollout_fn(lambda *a, evaluation: {"d": {}}, 1, evaluation=True)
    assert evaluated == RolloutFnEvalOutput(data={"d": {}}, metrics=None)
    done = RolloutFnTrainOutput(samples=[], metrics={"a": 1})
    assert call_rollout_fn(lambda a, b, evaluation: done, 1, b=2, evaluation=False) is done
