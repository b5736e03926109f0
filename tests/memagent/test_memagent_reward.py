"""Rewards and metrics: facts 14 to 20."""

from __future__ import annotations

from argparse import Namespace

import pytest
from helpers_memagent import Play, stage
from hypothesis import given
from hypothesis import strategies as st

from agentic.common.errors import ConfigError
from agentic.memagent.reward import reward_func
from agentic.memagent.scoring import (
    METRICS,
    REWARDS,
    all_scores,
    boxed_answer,
    em_norm,
    f1,
    multi_value,
    reward_of,
    sub_em,
    sub_em_one_way,
)
from slime.utils.types import Sample


@pytest.mark.parametrize(
    ("reply", "reference", "reward"),
    [
        (r"\boxed{Chief of Protocol}", "chief of protocol", 1.0),
        (r"\boxed{the Chief of Protocol}", "Chief of Protocol", 0.0),
        (r"\boxed{New  York}", "new york", 1.0),
        (r"\boxed{New" + "\n" + r"York}", "new york", 1.0),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{30^\circ}", "30", 1.0),
        (r"\boxed{5\%}", "5", 1.0),
        (r"\boxed{a .5}", "a 0.5", 1.0),
        (r"\boxed{wrong} no: \boxed{right}", "right", 1.0),
        (r"\boxed{right} no: \boxed{wrong}", "right", 0.0),
        ("right", "right", 0.0),
        (r"\boxed{right", "right", 0.0),
        (r"\boxed{}", "", 0.0),
        ("", "", 0.0),
        (r"\fbox{right}", "right", 0.0),
        (r"so $\boxed right$ it is", "right", 1.0),
        (r"\boxed wrong$ then \boxed{right}", "right", 1.0),
        (r"\boxed{wrong} then \boxed right$", "right", 1.0),
        (r"\boxed {right}", "right", 1.0),
    ],
)
def test_training_reward(reply, reference, reward):
    assert reward_of("em", reply, [reference], 300) == reward


@pytest.mark.parametrize(
    ("reply", "content"),
    [(r"\boxed{f\{x\}}", r"f\{x\}"), (r"\boxed{a{b}c}", "a{b}c"), ("none", None), (r"\boxed{x", None)],
)
def test_boxed_answer(reply, content):
    assert boxed_answer(reply) == content


@pytest.mark.parametrize(("window", "reward"), [(300, 0.0), (0, 1.0)])
def test_window_of_300_characters(window, reward):
    reply = r"\boxed{blue}".ljust(400, ".")
    assert reward_of("em", reply, ["blue"], window) == reward
    assert reward_of("em_norm", reply, ["blue"], window) == 1.0, "only the paper's reward has the window"


def test_any_reference_counts():
    assert reward_of("em", r"\boxed{new york city}", ["NYC", "New York City"], 300) == 1.0
    scores = all_scores(r"\boxed{new york city}", ["NYC", "New York City"])
    assert scores["em_norm"] == 1.0 and scores["em_norm_first"] == 0.0


def test_articles_count_in_training_only():
    scores = all_scores(r"\boxed{the Chief of Protocol}", ["Chief of Protocol"])
    assert (scores["em_norm"], scores["sub_em"], scores["f1"]) == (1.0, 1.0, 1.0)


def test_f1():
    assert f1("Robert Smith", "Robert E. Smith") == pytest.approx(0.8)
    long = "the Chief of Protocol of the United States"
    assert f1(long, "Chief of Protocol") == pytest.approx(2 / 3)
    assert em_norm(long, "Chief of Protocol") == 0.0 and sub_em(long, "Chief of Protocol") == 1.0
    assert f1("yes they are", "yes") == 0.0 and sub_em("yes they are", "yes") == 1.0
    assert f1("Yes.", "yes") == 1.0 and f1("no", "yes") == 0.0


def test_substrings_one_way_and_two_way():
    assert sub_em("States", "United States") == 1.0 and sub_em_one_way("States", "United States") == 0.0
    assert sub_em_one_way("the United States", "United States") == 1.0


@pytest.mark.parametrize("prediction", ["", "the", ".", " a  ", "\n"])
@pytest.mark.parametrize("reference", ["blue", "the", "", "yes"])
def test_empty_prediction_is_never_right(prediction, reference):
    assert [metric(prediction, reference) for metric in METRICS.values()] == [0.0] * 4
    boxed = r"\boxed{" + prediction + "}"
    scores = all_scores(boxed, [reference])
    assert {value for name, value in scores.items() if name != "multi_value"} == {0.0}
    assert reward_of("em", boxed, ["blue"]) == 0.0


def test_multi_value():
    reply = "They are 1234567, 7654321 and ABC."
    assert multi_value(reply, ["1234567", "7654321", "1111111", "abc"]) == 0.75
    assert multi_value("", ["1", ""]) == multi_value(reply, [""]) == multi_value(reply, []) == 0.0
    assert reward_of("multi_value", reply, ["abc"]) == 1.0


@given(st.text(max_size=40), st.lists(st.text(max_size=12), min_size=1, max_size=3))
def test_scores_are_shares(reply, references):
    boxed = r"\boxed{" + reply + "}"
    assert all(0.0 <= reward_of(name, boxed, references, 300) <= 1.0 for name in REWARDS)
    scores = all_scores(boxed, references)
    assert scores["sub_em"] >= scores["sub_em_one_way"] >= scores["em_norm"] >= 0.0
    assert all(scores[name] >= scores[f"{name}_first"] for name in METRICS)


def make(answer: str | None, **fields) -> Sample:
    metadata = {"answer": answer, "ground_truth": ["blue", "navy"]} | fields.pop("metadata", {})
    return Sample(index=4, label="blue", metadata=metadata, status=Sample.Status.COMPLETED, **fields)


async def test_all_siblings_get_the_score_of_the_final_answer(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play(r"\boxed{blue}", answer=r"\boxed{green}")) as s:
        members = await s.run()
        assert await reward_func(s.args, members) == [0.0] * 4, "a right box in a memory does not count"
        members[-1].metadata["answer"] = members[0].metadata["answer"] = r"\boxed{navy}"
        assert [await reward_func(s.args, m) for m in (members[0], members[-1])] == [1.0, 1.0]


async def test_reward_setting_and_kind():
    sample = make(r"It is \boxed{the blue}")
    assert await reward_func(Namespace(), sample) == 0.0
    assert await reward_func(Namespace(memagent_reward="em_norm"), sample) == 1.0
    assert await reward_func(Namespace(memagent_reward="sub_em_one_way"), sample) == 1.0
    assert await reward_func(Namespace(), make("navy blue", metadata={"kind": "ruler"})) == 1.0
    label_only = make(r"\boxed{blue}")
    del label_only.metadata["ground_truth"]
    assert await reward_func(Namespace(), label_only) == 1.0


@pytest.mark.parametrize("references", [[], "blue", [1], None])
async def test_missing_references(references):
    sample = make(r"\boxed{blue}", metadata={"ground_truth": references})
    sample.label = None
    with pytest.raises(ConfigError, match="sample 4: metadata\\['ground_truth'\\] is .*--metadata-key"):
        await reward_func(Namespace(), sample)


async def test_sample_that_was_not_generated():
    with pytest.raises(ConfigError, match="sample 4 has no answer; set --custom-generate-function-path"):
        await reward_func(Namespace(), make(None))
