"""Objective and conversion: facts 9 to 14 and 26, layouts, credits, norms, and independence of order and ranks."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Sequence

import pytest
import torch
from helpers_memagent import stage
from hypothesis import given
from hypothesis import strategies as st

from agentic.common.errors import ConfigError, TooManyFailures
from agentic.common.turns import TurnRecord
from agentic.common.weighting import LOSS_NORMS, TURN_CREDITS, step_denominators
from agentic.memagent.convert import custom_convert
from agentic.memagent.reward import reward_func
from slime.observability.rollout_data_utils import validate_rollout_id_annotated
from slime.rollout.conversion import (
    convert_samples_to_train_data,
    flatten_samples,
    pad_to_global_batch,
    split_train_data_by_dp,
)
from slime.utils.loss_reducers import get_sum_of_sample_mean
from slime.utils.ppo_utils import compute_approx_kl, compute_policy_loss
from slime.utils.types import Sample

STATUS = Sample.Status
# Fact 10: A is right with conversations of 3 and 2 tokens, B is wrong with 4, 1 and 2.
FACT_10 = [(1.0, (3, 2)), (0.0, (4, 1, 2))]


def arguments(size: int = 2, std: bool = True, **settings: object) -> Namespace:
    given = {f"memagent_{name}": value for name, value in settings.items()}
    flags = {"rewards_normalization": True, "grpo_std_normalization": std, "calculate_per_token_loss": False}
    return Namespace(global_batch_size=size, micro_batch_size=1, use_dynamic_batch_size=True, **flags, **given)


def rollout(
    index: int, reward: float, lengths: Sequence[int], group: int = 0, siblings: bool = True, train_answer: bool = True
) -> list[Sample]:
    """Conversations with so many response tokens; the last is the answer."""
    turns = [
        TurnRecord.from_engine(
            [5, 6, 10 * index + number],
            list(range(100, 100 + length)),
            [-0.5] * length,
            trained=train_answer or number < len(lengths) - 1,
            role="memory" if number < len(lengths) - 1 else "answer",
            finish_reason="stop",
        )
        for number, length in enumerate(lengths)
    ]
    made = []
    for number, turn in enumerate(turns if siblings else turns[-1:], start=0 if siblings else len(turns) - 1):
        metadata = {"conversation": number, "conversations": len(turns), "role": turn.role, "finish_reason": "stop"}
        sample = Sample(index=index, group_index=group, rollout_id=index, reward=reward, metadata=metadata)
        sample.status, sample.tokens, sample.response_length = STATUS.COMPLETED, turn.tokens, turn.response_length
        sample.loss_mask, sample.rollout_log_probs = turn.loss_mask, turn.rollout_log_probs
        sample.train_metadata = None if siblings else {"turns": [t.to_dict() for t in turns]}
        made.append(sample)
    return made


def failed(index: int, group: int = 0) -> list[Sample]:
    metadata = {"conversation": 0, "conversations": 1, "failure_reason": "role_timeout:memory"}
    sample = Sample(index=index, group_index=group, rollout_id=index, reward=0.0, metadata=metadata)
    sample.status, sample.remove_sample, sample.tokens = STATUS.FAILED, True, [0, 0]
    sample.response_length, sample.loss_mask = 1, [0]
    return [sample]


def flat(rollouts: list[list[Sample]]) -> list[Sample]:
    return [sample for members in rollouts for sample in members]


def objective(data: dict, size: int, per_token: bool = False) -> float:
    """J at ratio 1 without KL: the mean of slime's reducer over the advantages of all tokens."""
    masks = [torch.as_tensor(mask) for mask in data["loss_masks"]]
    lengths, totals = data["response_lengths"], [len(tokens) for tokens in data["tokens"]]
    values = torch.cat([torch.full((n,), a) for n, a in zip(lengths, data["rewards"], strict=True)]).double()
    reduce = get_sum_of_sample_mean(totals, lengths, masks, data["rollout_mask_sums"], per_token)
    return float(reduce(values)) / (sum(int(mask.sum()) for mask in masks) if per_token else size)


def fact_10(std: bool = False, siblings: bool = True, size: int = 2, **settings: object) -> dict:
    rollouts = [rollout(i, reward, lengths, siblings=siblings) for i, (reward, lengths) in enumerate(FACT_10)]
    return custom_convert(arguments(size, std, train_answer=True, **settings), flat(rollouts))


@pytest.mark.parametrize(
    ("norm", "credit", "std", "expected"),
    [
        ("token", "broadcast", False, -1 / 12),
        ("conv", "broadcast", False, -0.1),
        ("traj", "broadcast", False, 0.0),
        ("conv", "amortized", True, 0.0),  # the reference port
        ("conv", "amortized", False, 0.0),
        ("token", "amortized", False, (5 * 0.5 / 2 - 7 * 0.5 / 3) / 12),
        ("traj", "amortized", False, (0.5 / 2 - 0.5 / 3) / 2),
        ("token", "broadcast", True, -(2**0.5) / 12),
    ],
)
@pytest.mark.parametrize("siblings", [True, False])
def test_golden_numbers(norm, credit, std, expected, siblings):
    data = fact_10(std, siblings, loss_norm=norm, turn_credit=credit)
    assert objective(data, 2) == pytest.approx(expected, abs=1e-6)


def test_paper_objective_by_one_setting():
    rollouts = [rollout(i, reward, lengths) for i, (reward, lengths) in enumerate(FACT_10)]
    data = custom_convert(arguments(std=True, objective="paper"), flat(rollouts))
    assert objective(data, 2) == pytest.approx(-1 / 12)
    assert objective(data, 2, per_token=True) == pytest.approx(-1 / 12), "slime's per-token loss is the same mean"
    assert data["rewards"] == [0.5] * 2 + [-0.5] * 3


def test_every_token_weighs_one_twelfth():
    data = fact_10(loss_norm="token", turn_credit="broadcast")
    assert [1 / (2 * denominator) for denominator in data["rollout_mask_sums"]] == pytest.approx([1 / 12] * 5)


@pytest.mark.parametrize("norm", LOSS_NORMS)
@pytest.mark.parametrize("credit", TURN_CREDITS)
def test_order_and_ranks_do_not_matter(norm, credit):
    rng = random.Random(0)
    rollouts = [
        rollout(4 * g + i, float(rng.random() < 0.5), [rng.randint(1, 9) for _ in range(rng.randint(2, 6))], g)
        for g in range(3)
        for i in range(4)
    ]
    args = arguments(4, loss_norm=norm, turn_credit=credit, train_answer=True)
    straight = custom_convert(args, flat(rollouts))
    shuffled = flat(rollouts)
    rng.shuffle(shuffled)
    assert custom_convert(args, shuffled) == straight
    args.max_tokens_per_gpu, args.balance_data = 20, False
    whole = [split_train_data_by_dp(args, pad_to_global_batch(args, straight, n), n) for n in (1, 2)]
    one, two = (sum(objective(share, 4) for share in shares) for shares in whole)
    assert one == pytest.approx(objective(straight, 4), abs=1e-6) and two == pytest.approx(one, abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "expected"), [([1, 0, 0, 0], [0.75] + [-0.25] * 3), ([1, 1, 1, 1], [0.0] * 4), ([0] * 4, [0.0] * 4)]
)
def test_paper_advantages(rewards, expected):
    rollouts = [rollout(i, float(reward), (2,)) for i, reward in enumerate(rewards)]
    assert custom_convert(arguments(4, objective="paper"), flat(rollouts))["rewards"] == expected
    if sum(rewards) == 1:
        data = custom_convert(arguments(4, train_answer=True), flat(rollouts))
        assert data["rewards"] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-4), "slime's flag decides otherwise"


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=2, max_size=8), st.sampled_from(TURN_CREDITS))
def test_right_answer_never_has_a_negative_advantage(outcomes, credit):
    """However long the document was: statistics come before the split."""
    rollouts = [rollout(i, float(right), (3,) * turns + (1,)) for i, (right, turns) in enumerate(outcomes)]
    data = custom_convert(arguments(len(outcomes), turn_credit=credit, train_answer=True), flat(rollouts))
    for advantage, reward in zip(data["rewards"], data["raw_reward"], strict=True):
        assert advantage >= 0 if reward == 1 else advantage <= 0


def test_all_rows_are_there_and_padding_is_masked():
    """Fact 12."""
    lengths = [(2, 2, 2), (2,) * 4, (2, 2, 2), (2,) * 4]
    rollouts = [rollout(i, float(i % 2), n, group=i // 2) for i, n in enumerate(lengths)]
    args = arguments(4, objective="paper")
    data = custom_convert(args, flat(rollouts))
    assert len(data["tokens"]) == 14 and {len(column) for column in data.values()} == {14}
    padded = pad_to_global_batch(args, data, dp_size=4)
    assert len(padded["tokens"]) == 16 and padded["tokens"][:14] == data["tokens"]
    assert not any(any(mask) for mask in padded["loss_masks"][14:])


def test_masked_answer_turn_is_no_row():
    rollouts = [rollout(i, float(i), (3, 2, 9), train_answer=False) for i in range(2)]
    data = custom_convert(arguments(), flat(rollouts))
    assert data["response_lengths"] == [3, 2, 3, 2] and all(all(mask) for mask in data["loss_masks"])
    weights = [1 / (2 * denominator) for denominator in data["rollout_mask_sums"]]
    assert weights == pytest.approx([1 / (2 * 10)] * 4), "shared by two update turns, mean over ten tokens"


def test_failed_rollout_leaves_its_group_only():
    """Fact 13."""
    rollouts = [rollout(16 * g + i, float(i % 3 == 0), (2, 1), group=g) for g in range(2) for i in range(16)]
    before = custom_convert(arguments(32, objective="paper"), flat(rollouts))
    rollouts[3] = failed(3)
    data = custom_convert(arguments(32, objective="paper"), flat(rollouts))
    advantages = dict(zip(data["sample_indices"], data["rewards"], strict=True))
    assert advantages[0] == pytest.approx(1 - 5 / 15) and advantages[1] == pytest.approx(-5 / 15)
    assert advantages[3] == 0.0 and data["loss_masks"][data["sample_indices"].index(3)] == [0]
    assert data["raw_reward"][data["sample_indices"].index(3)] is None
    other = [reward for index, reward in zip(before["sample_indices"], before["rewards"], strict=True) if index >= 16]
    assert data["rewards"][-len(other) :] == pytest.approx(other, abs=1e-6)
    assert len(set(data["rollout_ids"])) == 32


def test_sibling_rows_agree():
    rollouts = [rollout(i, float(i == 1), (2, 3, 1)) for i in range(4)]
    rollouts[1][0].status = STATUS.TRUNCATED
    data = custom_convert(arguments(4, train_answer=True), flat(rollouts))
    for row in range(0, 12, 3):
        for key in ("rewards", "raw_reward", "sample_indices", "rollout_ids", "truncated"):
            assert len(set(data[key][row : row + 3])) == 1
    assert data["truncated"] == [0] * 3 + [1] * 3 + [0] * 6
    assert data["loss_masks"][0] == [1, 1], "a turn at its limit is trained like any other"


@pytest.mark.parametrize("objective_", ["default", "paper"])
async def test_both_layouts_give_the_same_train_data(tmp_path, monkeypatch, objective_):
    async def play_all(layout: str) -> dict:
        names = iter(range(1000))
        answers = iter([r"\boxed{blue}", "no", r"\boxed{navy}", "none at all"])

        def play(prompt: str) -> str:
            return f"memory {next(names)}" if "<section>" in prompt else next(answers)

        with stage(tmp_path, monkeypatch, play, layout=layout, objective=objective_) as s:
            done = [await s.run(s.sample(index=i, group=i // 2)) for i in range(4)]
            samples = flatten_samples([done])
            validate_rollout_id_annotated([done])
            for sample, reward in zip(samples, await reward_func(s.args, samples), strict=True):
                sample.reward = reward
            s.args.custom_convert_samples_to_train_data_path = "agentic.memagent.convert.custom_convert"
            return convert_samples_to_train_data(s.args, samples)

    siblings, metadata = await play_all("siblings"), await play_all("metadata")
    assert siblings == metadata
    assert len(siblings["tokens"]) == (16 if objective_ == "paper" else 12)
    assert set(siblings["raw_reward"]) == {0.0, 1.0}


def test_incomplete_or_contradicting_siblings():
    rollouts = [rollout(i, float(i), (2, 2, 2)) for i in range(2)]
    with pytest.raises(ConfigError, match=r"rollout 0 has the conversations \[0, 2\] of 3"):
        custom_convert(arguments(), [s for s in flat(rollouts) if s is not rollouts[0][1]])
    with pytest.raises(ConfigError, match="rollout 0 came without its memory conversations"):
        custom_convert(arguments(), [rollouts[0][2], *rollouts[1]])
    rollouts[1][1].reward = 0.5
    with pytest.raises(ConfigError, match=r"rollout 1 differ in reward: \['0.5', '1.0'\]"):
        custom_convert(arguments(), flat(rollouts))


def test_wrong_set_up_is_named():
    good = flat([rollout(i, float(i), (2, 2)) for i in range(2)])
    with pytest.raises(ConfigError, match="--custom-generate-function-path agentic.memagent.rollout.generate"):
        custom_convert(arguments(), [Sample(index=0, group_index=0, reward=1.0)])
    with pytest.raises(ConfigError, match="--global-batch-size"):
        custom_convert(arguments(0), good)
    args = arguments()
    args.rewards_normalization = False
    with pytest.raises(ConfigError, match="--disable-rewards-normalization"):
        custom_convert(args, good)
    args = arguments()
    args.calculate_per_token_loss = True
    with pytest.raises(ConfigError, match="--calculate-per-token-loss ignores it"):
        custom_convert(args, good)
    good[0].reward = good[1].reward = None
    with pytest.raises(ConfigError, match="the reward None.*agentic.memagent.reward.reward_func"):
        custom_convert(arguments(), good)


def test_missing_log_probs_are_an_error():
    members = rollout(0, 1.0, (2, 2))
    members[1].rollout_log_probs = None
    with pytest.raises(ValueError, match="turn record of role 'answer'"):
        custom_convert(arguments(train_answer=True), [*members, *rollout(1, 0.0, (2,))])


def test_failures_are_counted_by_rollout():
    rollouts = [failed(0), failed(1), failed(2), rollout(3, 1.0, (2,) * 30)]
    with pytest.raises(TooManyFailures, match="3 of 4 rollouts failed"):
        custom_convert(arguments(4), flat(rollouts))


def test_step_with_hardly_any_rollout_is_reported(caplog):
    custom_convert(arguments(64, objective="paper"), rollout(0, 1.0, (2, 2)))
    assert "2 rows weigh less than they should" in caplog.text


SUMS = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6), min_size=1, max_size=12)


@given(SUMS, st.integers(1, 5), st.sampled_from(LOSS_NORMS), st.sampled_from(TURN_CREDITS))
def test_total_weight_of_a_step(sums, size, norm, credit):
    """Weights 1 / (G d): over a full step they sum to 1 with broadcast, and T_i turns share one share when amortised."""
    denominators = step_denominators(sums, size, norm, credit)
    assert [len(row) for row in denominators] == [len(row) for row in sums]
    for start in range(0, len(sums), size):
        rows = list(zip(sums[start : start + size], denominators[start : start + size], strict=True))
        parts = [sum(n > 0 for n in turns) if credit == "amortized" else 1 for turns, _ in rows]
        shares = [
            parts[i] * sum(n / (size * d) for n, d in zip(turns, row, strict=True))
            for i, (turns, row) in enumerate(rows)
        ]
        expected = (
            sum(any(turns) for turns, _ in rows) / size
            if norm == "traj"
            else float(any(map(any, sums[start : start + size])))
        )
        assert sum(shares) == pytest.approx(expected)


def test_step_denominators_refuse_nonsense():
    for arguments_ in (([[1]], 1, "mean", "broadcast"), ([[1]], 1, "token", "shared")):
        with pytest.raises(ConfigError, match="is none of"):
            step_denominators(*arguments_)
    with pytest.raises(ValueError, match="negative"):
        step_denominators([[-1]], 1, "token", "broadcast")
    with pytest.raises(ValueError, match="0 rollouts"):
        step_denominators([[1]], 0, "token", "broadcast")


def test_clipping_and_kl_of_the_paper():
    """Fact 26."""
    log_ratio = torch.log(torch.tensor([1.5, 1.5]))
    losses, _ = compute_policy_loss(-log_ratio, torch.tensor([1.0, -1.0]), 0.2, 0.2)
    assert losses.tolist() == pytest.approx([-1.2, 1.5])
    current = torch.tensor([-1.0, -1.0])
    kl = compute_approx_kl(current, current + torch.tensor([0.0, 0.1]), "low_var_kl")
    assert kl.tolist() == pytest.approx([0.0, 0.00517], abs=1e-5)
