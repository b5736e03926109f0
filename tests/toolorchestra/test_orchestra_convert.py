"""From finished rollouts to rows: facts 7 and 10, both layouts, filters, failures, and independence of order."""

from __future__ import annotations

import json
import logging
import random
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from helpers_orchestra_rows import GROUP, OUTCOME_ONLY, THRIFTY, episode, finished

from agentic.common.errors import ConfigError, TooManyFailures
from agentic.toolorchestra.convert import custom_convert
from slime.rollout.conversion import (
    convert_samples_to_train_data,
    pad_to_global_batch,
    split_train_data_by_dp,
)
from slime.utils.loss_reducers import get_sum_of_sample_mean
from slime.utils.types import Sample

HOOK = "agentic.toolorchestra.convert.custom_convert"
STATUS = Sample.Status
Turn = tuple[int, bool]


def arguments(size: int = 4, **settings: object) -> Namespace:
    given = {f"orchestra_{name}": value for name, value in settings.items()}
    flags = {"rewards_normalization": True, "grpo_std_normalization": True, "global_batch_size": size}
    steps = {"use_dynamic_batch_size": True, "micro_batch_size": 1, "max_tokens_per_gpu": 4096, "balance_data": False}
    return Namespace(orchestra_roles="roles.yaml", **flags, **steps, **given)


def stream(index: int, record: dict, turns: tuple[Turn, ...] = ((3, True), (2, True)), group: int = 0) -> Sample:
    """One sample: turns of so many tokens with two masked ids between them."""
    mask: list[int] = []
    spans = []
    for number, (length, format_ok) in enumerate(turns):
        mask += [0, 0] if number else []
        spans.append([len(mask), len(mask) + length, format_ok])
        mask += [1] * length
    sample = finished(index, record, group)
    sample.tokens = [7, 8, 9] + list(range(100, 100 + len(mask)))
    sample.response_length, sample.loss_mask = len(mask), mask
    sample.rollout_log_probs = [-0.25 * bit for bit in mask]
    sample.metadata |= {"turn_spans": spans, "turn": 0}
    return sample


def rows_of(index: int, record: dict, turns: tuple[Turn, ...], group: int = 0) -> list[Sample]:
    """One sample for each turn."""
    made = []
    for number, turn in enumerate(turns):
        sample = stream(index, record, (turn,), group)
        sample.tokens[0] = 1000 * index + number
        sample.metadata["turn"] = number
        made.append(sample)
    return made


def failed(index: int, group: int = 0, reason: str = "role_unavailable:big") -> Sample:
    sample = finished(index, episode(outcome=0, dollars=99.0, seconds=9999), group, status=STATUS.FAILED)
    sample.metadata |= {"failure_reason": reason, "turn_spans": []}
    sample.remove_sample, sample.tokens, sample.response_length = True, [0, 0], 1
    sample.loss_mask, sample.rollout_log_probs = [0], [0.0]
    return sample


def worked(pref_vec: dict = OUTCOME_ONLY) -> list[dict]:
    return [episode(*columns, pref_vec=pref_vec) for columns in GROUP.values()]


def by_index(data: dict) -> dict[int, list[dict]]:
    found: dict[int, list[dict]] = {}
    for position, index in enumerate(data["sample_indices"]):
        found.setdefault(index, []).append({key: column[position] for key, column in data.items()})
    return found


def shares(data: dict, size: int) -> dict[int, float]:
    """Share of each trained rollout in the loss of a step: slime's reducer over ones, divided by the step's rollouts."""
    found = {}
    for index, rows in by_index(data).items():
        masks = [torch.as_tensor(row["loss_masks"]) for row in rows]
        lengths = [row["response_lengths"] for row in rows]
        totals, weights = [len(row["tokens"]) for row in rows], [row["rollout_mask_sums"] for row in rows]
        reduce = get_sum_of_sample_mean(totals, lengths, masks, weights)
        found[index] = float(reduce(torch.ones(sum(lengths)))) / size
    return {index: share for index, share in found.items() if share}


# --------------------------------------------------------------------------------------------------------------------
# Golden numbers.


@pytest.mark.parametrize(
    ("pref_vec", "advantages"),
    [(OUTCOME_ONLY, [0.5, 0.5, -1.5, 0.5]), (THRIFTY, [0.5517, 0.9550, -1.3228, -0.1839])],
)
def test_worked_group(pref_vec, advantages):
    data = custom_convert(arguments(), [stream(i, record) for i, record in enumerate(worked(pref_vec))])
    assert data["rewards"] == pytest.approx(advantages, abs=1e-3)
    assert data["raw_reward"] == [1, 1, 0, 1], "what is reported is the success rate"
    assert data["loss_masks"][0] == [1, 1, 1, 0, 0, 1, 1]


def test_outcome_reward_needs_no_vector():
    records = [{**record, "pref_vec": None} for record in worked()]
    data = custom_convert(arguments(reward="outcome"), [stream(i, record) for i, record in enumerate(records)])
    assert data["rewards"] == pytest.approx([0.5, 0.5, -1.5, 0.5], abs=1e-3)
    with pytest.raises(ConfigError, match="orchestra_reward: outcome"):
        custom_convert(arguments(), [stream(i, record) for i, record in enumerate(records)])


def test_failed_rollout_is_outside_the_statistics():
    rollouts = [stream(i, record) for i, record in enumerate(worked(THRIFTY))]
    data = custom_convert(arguments(5), [*rollouts, failed(4)])
    assert data["rewards"][:4] == pytest.approx([0.5517, 0.9550, -1.3228, -0.1839], abs=1e-3)
    row = by_index(data)[4][0]
    assert (row["rewards"], sum(row["loss_masks"]), row["raw_reward"]) == (0.0, 0, None)


def test_two_rollouts_of_which_one_failed():
    data = custom_convert(arguments(2, max_failure_rate=1.0), [stream(0, episode()), failed(1)])
    assert data["rewards"] == [0.0, 0.0]
    assert [sum(mask) for mask in data["loss_masks"]] == [0, 0]
    with pytest.raises(TooManyFailures, match="2 of 2 rollouts failed .*role_unavailable:big x2"):
        custom_convert(arguments(2), [failed(0), failed(1)])


SEGMENTS = (3, 1, 5, 2, 4, 1, 2, 6)
OUTCOMES = (1, 0, 1, 1, 0, 0, 1, 0)


def segmented() -> list[Sample]:
    """Eight rollouts with so many turns each."""
    rollouts = []
    for index, (count, outcome) in enumerate(zip(SEGMENTS, OUTCOMES, strict=True)):
        turns = tuple((number % 3 + 1, True) for number in range(count))
        rollouts += rows_of(index, episode(outcome=outcome, pref_vec=OUTCOME_ONLY), turns)
    return rollouts


def test_segments_carry_the_advantage_of_their_rollout():
    data = by_index(custom_convert(arguments(8), segmented()))
    scale = (8 * 0.25 / 7) ** 0.5  # of eight values, four of each kind
    for index, (count, outcome) in enumerate(zip(SEGMENTS, OUTCOMES, strict=True)):
        assert len(data[index]) == count
        assert [row["rewards"] for row in data[index]] == pytest.approx([(outcome - 0.5) / scale] * count, abs=1e-4)
        assert len({row["rollout_mask_sums"] for row in data[index]}) == 1


def test_order_and_nesting_of_samples_do_not_matter():
    expected = custom_convert(arguments(8), segmented())
    for seed in range(3):
        shuffled = segmented()
        random.Random(seed).shuffle(shuffled)
        assert custom_convert(arguments(8), shuffled) == expected
    samples = segmented()
    groups = [[sample for sample in samples if sample.index == index] for index in range(8)]
    assert custom_convert(arguments(8), [groups[:3], groups[3:]]) == expected


def test_groups_are_those_of_the_index_not_of_the_position():
    first = [stream(i, record, group=7) for i, record in enumerate(worked())]
    second = [stream(10 + i, episode(outcome=i == 0, pref_vec=OUTCOME_ONLY), group=2) for i in range(3)]
    mixed = [sample for pair in zip(first[:3], second, strict=True) for sample in pair] + first[3:]
    data = custom_convert(arguments(7), mixed)
    assert data["rewards"][:4] == pytest.approx([0.5, 0.5, -1.5, 0.5], abs=1e-3)
    assert data["rewards"][4:] == pytest.approx([1.1547, -0.5774, -0.5774], abs=1e-3)


def test_both_layouts_give_the_same_loss():
    turns = [((3, True), (2, False), (4, True)), ((1, True),), ((2, True), (2, True)), ((5, True), (1, True))]
    one = custom_convert(arguments(), [stream(i, r, turns[i]) for i, r in enumerate(worked(THRIFTY))])
    many = [sample for i, r in enumerate(worked(THRIFTY)) for sample in rows_of(i, r, turns[i])]
    split = custom_convert(arguments(), many)
    assert len(one["tokens"]) == 4
    assert len(split["tokens"]) == 7, "the malformed turn has no row"
    assert shares(one, 4) == pytest.approx(dict.fromkeys(range(4), 0.25))
    assert shares(split, 4) == pytest.approx(shares(one, 4))
    for index, rows in by_index(split).items():
        whole = by_index(one)[index][0]
        assert {row["rollout_mask_sums"] for row in rows} == {
            whole["rollout_mask_sums"]
        }, "every token weighs the same"
        assert {row["rewards"] for row in rows} == {whole["rewards"]}


# --------------------------------------------------------------------------------------------------------------------
# Filters.


def test_homogeneous_group_is_masked_and_does_not_thin_the_step():
    good = [stream(i, record) for i, record in enumerate(worked())]
    alike = [stream(10 + i, episode(pref_vec=OUTCOME_ONLY), group=1) for i in range(4)]
    data = custom_convert(arguments(8), [*good, *alike])
    rows = by_index(data)
    for index in range(10, 14):
        assert len(rows[index]) == 1
        assert rows[index][0]["loss_masks"] == [0]
        assert len(rows[index][0]["tokens"]) == 2
    assert shares(data, 8) == pytest.approx(
        dict.fromkeys(range(4), 0.25)
    ), "the mean over the rollouts that are trained"


def test_malformed_turns_are_masked_and_the_rest_is_trained():
    rollouts = [stream(i, r, ((3, True), (2, False), (4, True))) for i, r in enumerate(worked())]
    data = custom_convert(arguments(), rollouts)
    assert data["loss_masks"][0] == [1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert rollouts[0].loss_mask == [1, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1], "the sample keeps its own mask"


def test_rollouts_without_a_valid_turn_or_answer_are_masked_but_counted(caplog):
    records = worked()
    records[1] |= {"valid_answer": False}
    rollouts = [stream(i, r) for i, r in enumerate(records[:3])] + [stream(3, records[3], ((2, False), (1, False)))]
    with caplog.at_level(logging.INFO, logger="agentic.toolorchestra.convert"):
        data = custom_convert(arguments(), rollouts)
    assert data["rewards"] == pytest.approx([0.5, 0.5, -1.5, 0.5], abs=1e-3), "advantages are those of the full group"
    assert [bool(sum(mask)) for mask in data["loss_masks"]] == [True, False, True, False]
    report = json.loads(caplog.messages[-1].removeprefix("filters: "))
    expected = {"trained": 2, "failed": 0, "homogeneous": 0, "invalid_output": 1, "malformed": 1, "malformed_turns": 2}
    assert expected.items() <= report.items()


def test_rollout_out_of_the_users_scope_leaves_the_statistics(caplog):
    strange = stream(4, episode(outcome=0, dollars=50.0, termination="out_of_scope"))
    rollouts = [stream(i, record) for i, record in enumerate(worked(THRIFTY))]
    with caplog.at_level(logging.INFO, logger="agentic.toolorchestra.convert"):
        data = custom_convert(arguments(5), [*rollouts, strange])
    assert data["rewards"] == pytest.approx([0.5517, 0.9550, -1.3228, -0.1839, 0], abs=1e-3)
    assert sum(data["loss_masks"][4]) == 0
    assert '"out_of_scope": 1' in caplog.messages[-1]


def test_advantages_are_clipped():
    records = [episode(outcome=i == 0, pref_vec=OUTCOME_ONLY) for i in range(16)]
    data = custom_convert(arguments(16), [stream(i, record) for i, record in enumerate(records)])
    assert data["rewards"][0] == 3.0
    tighter = custom_convert(arguments(16, advantage_clip=0.2), [stream(i, r) for i, r in enumerate(records)])
    assert set(tighter["rewards"]) == {0.2, -0.2}


def test_threshold_of_the_homogeneity_filter_is_a_setting():
    records = [episode(dollars=d, pref_vec={"outcome": 1, "cost": 0.1}) for d in (1.0, 2.0, 3.0, 4.0)]
    samples = [stream(i, record) for i, record in enumerate(records)]
    assert not any(sum(mask) for mask in custom_convert(arguments(), samples)["loss_masks"])
    assert all(sum(mask) for mask in custom_convert(arguments(min_group_std=0.01), samples)["loss_masks"])


def test_batch_in_which_nothing_is_trained():
    data = custom_convert(arguments(2), [stream(i, episode(pref_vec=OUTCOME_ONLY)) for i in range(2)])
    assert data["loss_masks"] == [[0], [0]]
    assert data["rollout_mask_sums"] == [1.0, 1.0]


# --------------------------------------------------------------------------------------------------------------------
# slime.


def test_rows_pass_slimes_checks_padding_and_split():
    args = arguments(8)
    args.custom_convert_samples_to_train_data_path = HOOK
    data = convert_samples_to_train_data(args, [*segmented(), failed(8, group=1)])
    padded = pad_to_global_batch(args, data, dp_size=2)
    assert len(set(padded["rollout_ids"])) == 16
    parts = split_train_data_by_dp(args, padded, 2)
    assert sum(len(part["tokens"]) for part in parts) == len(padded["tokens"])
    assert len(padded["tokens"]) >= sum(SEGMENTS) + 1, "nothing is trimmed"


def test_samples_of_a_slime_without_rollout_ids():
    def old(sample: Sample) -> SimpleNamespace:
        return SimpleNamespace(**{k: v for k, v in vars(sample).items() if k != "rollout_id"})

    rollouts = [old(stream(i, record)) for i, record in enumerate(worked())] + [old(failed(4))]
    data = custom_convert(arguments(5), rollouts)
    assert data["rollout_ids"] == [0, 1, 2, 3, 4]
    assert data["raw_reward"] == [1, 1, 0, 1, 0.75], "its metrics know no None"
    split = [old(sample) for sample in rows_of(0, worked()[0], ((1, True), (2, True)))]
    with pytest.raises(ConfigError, match="set orchestra_layout: stream"):
        custom_convert(arguments(1), split)


# --------------------------------------------------------------------------------------------------------------------
# Errors.


def test_flags_that_contradict_are_named():
    args = arguments()
    args.rewards_normalization = False
    with pytest.raises(ConfigError, match="--disable-rewards-normalization"):
        custom_convert(args, [stream(0, episode())])
    args = arguments()
    args.global_batch_size = None
    with pytest.raises(ConfigError, match="--global-batch-size"):
        custom_convert(args, [stream(0, episode())])


def test_samples_of_another_hook_are_named():
    other = Sample(index=0, group_index=0, rollout_id=0, tokens=[1, 2], response_length=1, status=STATUS.COMPLETED)
    with pytest.raises(ConfigError, match="--custom-generate-function-path agentic.toolorchestra.rollout.generate"):
        custom_convert(arguments(1), [other])
    unspanned = stream(0, episode())
    del unspanned.metadata["turn_spans"]
    with pytest.raises(ConfigError, match=r"turn_spans'\] is None; the format filter needs"):
        custom_convert(arguments(1), [unspanned])
    with pytest.raises(ConfigError, match="no index or no group"):
        custom_convert(arguments(1), [Sample(index=None)])


def test_samples_that_do_not_belong_together_are_named():
    first, second = rows_of(0, episode(), ((1, True), (1, True)))
    second.metadata["orch"] = episode(dollars=1.0)
    with pytest.raises(ConfigError, match="rollout 0 differ in group or episode"):
        custom_convert(arguments(1), [first, second])
    first, second = rows_of(0, episode(), ((1, True), (1, True)))
    second.metadata["turn"] = 0
    with pytest.raises(ConfigError, match=r"rollout 0 have the turns \[0, 0\]"):
        custom_convert(arguments(1), [first, second])


def test_row_without_log_probs_is_an_error():
    sample = stream(0, worked()[0])
    sample.rollout_log_probs = None
    others = [stream(i, record) for i, record in enumerate(worked())][1:]
    with pytest.raises(ValueError, match="rollout_log_probs and response_length differ"):
        custom_convert(arguments(), [sample, *others])


def test_failure_of_one_row_takes_the_whole_rollout():
    siblings = rows_of(0, worked()[0], ((2, True), (2, True)))
    siblings[1].status = STATUS.ABORTED
    others = [stream(i, record) for i, record in enumerate(worked())][1:]
    data = by_index(custom_convert(arguments(), [*siblings, *others]))
    assert [row["loss_masks"] for row in data[0]] == [[0]]
    assert data[0][0]["raw_reward"] is None
