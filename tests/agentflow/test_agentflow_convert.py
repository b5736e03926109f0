"""Conversion: facts 1 to 9 through the hook, with hand-made trajectories."""

from __future__ import annotations

import asyncio
import random
from argparse import Namespace

import pytest
from helpers_agentflow import Play, command, stage
from helpers_agentic import Reply

from agentic.agentflow.convert import custom_convert
from agentic.agentflow.reward import reward_func
from agentic.common.errors import ConfigError, TooManyFailures
from agentic.common.turns import TurnRecord
from slime.utils.types import Sample

FIELDS = ("sample_indices", "rewards", "rollout_mask_sums")
KEYS = "tokens response_lengths loss_masks rewards raw_reward truncated sample_indices rollout_log_probs".split()


def arguments(**settings: object) -> Namespace:
    given = {"agentflow_roles": "roles.yaml"} | {f"agentflow_{name}": value for name, value in settings.items()}
    return Namespace(rewards_normalization=True, grpo_std_normalization=True, n_samples_per_prompt=4, **given)


def turn(length: int = 2, trained: bool = True) -> dict:
    record = TurnRecord.from_engine(
        [5, 6], list(range(10, 10 + length)), [-0.5] * length, trained=trained, role="next_step", finish_reason="stop"
    )
    return record.to_dict()


def sample(index: int, reward: float, lengths: tuple[int, ...] = (2,), group: int = 0, **fields: object) -> Sample:
    made = Sample(index=index, group_index=group, reward=reward, status=Sample.Status.COMPLETED)
    made.train_metadata = {"turns": [turn(length) for length in lengths]}
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def failed(index: int, group: int = 0) -> Sample:
    metadata = {"failure_reason": "role_timeout:executor"}
    return sample(index, 0.0, group=group, remove_sample=True, status=Sample.Status.FAILED, metadata=metadata)


def by_index(data: dict, key: str = "rewards") -> dict[int, float]:
    return dict(zip(data["sample_indices"], data[key], strict=True))


@pytest.mark.parametrize(
    ("rewards", "std", "expected"),
    [
        ([1, 0, 0, 0], True, [1.5, -0.5, -0.5, -0.5]),
        ([1, 0, 0, 0], False, [0.75, -0.25, -0.25, -0.25]),
        ([1, 1, 0, 0, 0, 0, 0, 0], True, [1.6202] * 2 + [-0.5401] * 6),
    ],
)
def test_group_advantages(rewards, std, expected):
    args = arguments()
    args.grpo_std_normalization = std
    data = custom_convert(args, [sample(i, float(reward)) for i, reward in enumerate(rewards)])
    assert data["rewards"] == pytest.approx(expected, abs=1e-4)
    assert data["raw_reward"] == rewards


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_rewards_give_exactly_zero(value):
    data = custom_convert(arguments(), [sample(i, value) for i in range(4)])
    assert data["rewards"] == [0.0] * 4


def test_statistics_are_of_trajectories_not_of_turns():
    data = custom_convert(arguments(), [sample(0, 1.0, (2,)), sample(1, 0.0, (2, 2, 2))])
    assert data["rewards"] == pytest.approx([0.7071] + [-0.7071] * 3, abs=1e-4)


@pytest.mark.parametrize(
    ("weighting", "expected"), [("paper", [0.125, 0.0625, 0.1]), ("token_mean", [1 / 12, 1 / 12, 0.1])]
)
def test_token_weights(weighting, expected):
    data = custom_convert(arguments(turn_weighting=weighting), [sample(0, 1.0, (2, 4)), sample(1, 0.0, (5,))])
    weights = [1 / (2 * denominator) for denominator in data["rollout_mask_sums"]]
    assert weights == pytest.approx(expected)
    masks = [sum(mask) for mask in data["loss_masks"]]
    assert sum(w * m for w, m in zip(weights, masks, strict=True)) == pytest.approx(1.0)


def test_failed_rollout_leaves_its_group_only():
    samples = [sample(4 * group + i, float(i == 0), group=group) for group in range(3) for i in range(4)]
    samples[5] = failed(5, group=1)
    data = custom_convert(arguments(), samples)
    advantages = by_index(data)
    assert [advantages[i] for i in range(4)] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-4)
    assert [advantages[i] for i in (4, 6, 7)] == pytest.approx([1.1547, -0.5774, -0.5774], abs=1e-4)
    assert by_index(data, "loss_masks")[5] == [0] and advantages[5] == 0.0
    assert len(set(data["rollout_ids"])) == 12


def test_expansion_keeps_lists_equal():
    data = custom_convert(arguments(), [sample(3, 1.0, (2, 3, 4), status=Sample.Status.TRUNCATED), sample(4, 0.0)])
    assert {len(data[key]) for key in [*KEYS, "rollout_ids", "rollout_mask_sums"]} == {4}
    assert data["sample_indices"] == [3, 3, 3, 4]
    assert data["raw_reward"] == [1.0] * 3 + [0.0] and data["truncated"] == [1, 1, 1, 0]
    for tokens, length, mask, log_probs in zip(
        data["tokens"], data["response_lengths"], data["loss_masks"], data["rollout_log_probs"], strict=True
    ):
        assert len(mask) == len(log_probs) == length < len(tokens)


def test_untrained_turns_become_no_rows():
    one = sample(0, 1.0, (2,))
    one.train_metadata["turns"].append(turn(trained=False))
    assert custom_convert(arguments(), [one, sample(1, 0.0)])["sample_indices"] == [0, 1]


def test_padding_to_the_global_batch_keeps_every_turn():
    conversion = pytest.importorskip("slime.rollout.conversion")
    samples = [sample(i, float(i % 2), (2,) * turns) for i, turns in enumerate((3, 4, 3, 2, 1))]
    data = custom_convert(arguments(), samples)
    args = arguments()
    args.global_batch_size, args.micro_batch_size, args.use_dynamic_batch_size = 4, 1, True
    padded = conversion.pad_to_global_batch(args, {key: list(rows) for key, rows in data.items()}, dp_size=1)
    assert len(data["tokens"]) == 13
    assert padded["tokens"][:13] == data["tokens"] and padded["loss_masks"][:13] == data["loss_masks"]
    assert len(padded["tokens"]) > 13 and not any(any(mask) for mask in padded["loss_masks"][13:])
    assert len(set(padded["rollout_ids"])) % 4 == 0


def test_order_of_samples_does_not_matter():
    samples = [
        sample(4 * g + i, float((g + i) % 3 == 0), (2,) * (1 + i % 3), group=g) for g in range(3) for i in range(4)
    ]
    straight = custom_convert(arguments(), samples)
    random.Random(0).shuffle(samples)
    assert custom_convert(arguments(), samples) == straight


@pytest.mark.parametrize("broken", [{"rollout_log_probs": []}, {"loss_mask": [1]}, {"response_length": 0}])
def test_broken_turn_is_an_error(broken):
    bad = sample(0, 1.0)
    bad.train_metadata["turns"][0] |= broken
    with pytest.raises(ValueError, match="turn record"):
        custom_convert(arguments(), [bad, sample(1, 0.0)])


def test_too_many_failures_stop_the_run():
    samples = [failed(0), failed(1), failed(2), sample(3, 1.0)]
    with pytest.raises(TooManyFailures, match="role_timeout:executor x3"):
        custom_convert(arguments(), samples)
    assert custom_convert(arguments(max_failure_rate=0.75), samples)["sample_indices"] == [0, 1, 2, 3]


def test_wrong_set_up_is_named():
    with pytest.raises(ConfigError, match="custom-generate-function-path"):
        custom_convert(arguments(), [Sample(index=0, group_index=0, reward=1.0)])
    with pytest.raises(ConfigError, match="the reward None.*--custom-rm-path"):
        custom_convert(arguments(), [Sample(index=0, group_index=0, train_metadata={"turns": []})])
    args = arguments()
    args.rewards_normalization = False
    with pytest.raises(ConfigError, match="--disable-rewards-normalization"):
        custom_convert(args, [sample(0, 1.0)])


async def test_from_question_to_rows(tmp_path, monkeypatch):
    play = Play(verify="Conclusion: CONTINUE", final=[r"\boxed{7}", r"\boxed{8}"])
    with stage(tmp_path, monkeypatch, play, max_steps=2) as s:
        samples = [await s.run(s.sample(index=i)) for i in range(2)]
        for each in samples:
            each.reward = await reward_func(s.args, each)
        data = custom_convert(s.args, samples)
        sent = [request.body["input_ids"] for request in s.policy.requests]
    assert data["sample_indices"] == [0, 0, 0, 1, 1, 1]
    assert data["raw_reward"] == [1.0] * 3 + [0.0] * 3
    for tokens, length, prompt in zip(data["tokens"], data["response_lengths"], sent, strict=True):
        assert tokens[: len(tokens) - length] == prompt


@pytest.mark.parametrize("weighting", ["paper", "token_mean", "uniform_turn"])
async def test_two_of_eight_failed_rollouts_leave_the_other_groups_alone(tmp_path, monkeypatch, weighting):
    """The same rollouts twice; the second time the executor is down for the first two questions of group 1."""

    def executor(prompt: str) -> str | Reply:
        return Reply(status=503) if any(mark in prompt for mark in down) else command()

    play = Play(command=executor, final=lambda prompt: rf"\boxed{{{prompt.split('#')[1].split()[0]}}}")
    runs: list[dict] = []
    down: list[str] = []
    with stage(tmp_path, monkeypatch, play, turn_weighting=weighting, max_steps=1) as s:
        for marks in ([], ["#8 ", "#9 "]):
            down[:] = marks
            samples = [s.sample(f"#{i} is what?", label=str(i if i % 3 else -1), index=i) for i in range(24)]
            for index, each in enumerate(samples):
                each.group_index = index // 8
            samples = await asyncio.gather(*map(s.run, samples))
            for each in samples:
                each.reward = each.reward if each.remove_sample else await reward_func(s.args, each)
            runs.append(custom_convert(s.args, samples))
    assert {i for i, mask in zip(runs[1]["sample_indices"], runs[1]["loss_masks"], strict=True) if not any(mask)} == {
        8,
        9,
    }
    for index in (*range(8), *range(16, 24)):
        healthy, beside_failures = (
            [(reward, total) for i, reward, total in zip(*map(run.get, FIELDS), strict=True) if i == index]
            for run in runs
        )
        assert len(healthy) == 2 and healthy == [pytest.approx(row, abs=1e-6) for row in beside_failures]
    assert len(set(by_index(runs[0]).values())) > 2, "the groups differ, so that a mix-up would show"


def padded(samples: list[Sample], batch: int, **settings: object) -> dict:
    args = arguments(batch_layout="padded_turns", **settings)
    args.global_batch_size = batch
    return custom_convert(args, samples)


@pytest.mark.parametrize("weighting", ["paper", "token_mean", "uniform_turn"])
def test_padded_turns_weigh_what_rollouts_weigh(weighting):
    samples = [sample(0, 1.0, (2, 4)), sample(1, 0.0, (5,)), failed(2), sample(3, 0.0, (1, 2, 3, 4))]
    plain = custom_convert(arguments(turn_weighting=weighting), samples)
    data = padded(samples, 16, turn_weighting=weighting)
    rows = len(plain["tokens"])
    token_means = [
        advantage / (16 * max(sum(mask), 1))
        for advantage, mask in zip(data["rewards"], data["loss_masks"], strict=True)
    ]
    by_rollout = [
        advantage / (4 * d) for advantage, d in zip(plain["rewards"], plain["rollout_mask_sums"], strict=True)
    ]
    assert token_means[:rows] == pytest.approx(by_rollout) and token_means[rows:] == [0.0] * (16 - rows)
    for key in ("tokens", "loss_masks", "response_lengths", "truncated", "sample_indices", "rollout_log_probs"):
        assert data[key][:rows] == plain[key]


def test_padded_turns_in_numbers():
    """B = 2 trajectories x (1 + 3) turns; A B / (n T) = 0.7071 * 8 / (2 * 2) and -0.7071 * 8 / (2 * 1)."""
    data = padded([sample(0, 1.0, (2, 4)), sample(1, 0.0, (5,))], 8)
    assert data["rewards"] == pytest.approx([1.41421, 1.41421, -2.82843] + [0.0] * 5, abs=1e-4)
    assert data["loss_masks"][3:] == [[0]] * 5 and data["raw_reward"] == pytest.approx([1, 1, 0] + [2 / 3] * 5)
    assert {len(data[key]) for key in [*KEYS, "rollout_ids", "rollout_mask_sums"]} == {8}
    assert data["rollout_ids"] == list(range(8)) and data["rollout_mask_sums"] == [2, 4, 5, 1, 1, 1, 1, 1]
    data["loss_masks"][7].append(1)
    assert data["loss_masks"][6] == [0]


def test_padded_turns_need_their_batch_size_and_no_more_turns():
    with pytest.raises(ConfigError, match="2 trajectories x 4 turns; set --global-batch-size 8"):
        padded([sample(0, 1.0), sample(1, 0.0)], 2)
    with pytest.raises(ValueError, match="7 trained turns in a batch of 6"):
        padded([sample(0, 1.0, (1,) * 6), sample(1, 0.0)], 6, train_roles=["next_step"])


def test_samples_of_slime_0_2_2_have_no_rollout_id():
    old = [Namespace(**{k: v for k, v in vars(sample(i, 1.0 - i)).items() if k != "rollout_id"}) for i in range(2)]
    assert padded(old, 8)["sample_indices"] == [0, 1] + [-1] * 6
