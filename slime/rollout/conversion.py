"""From finished samples to train data: reward normalisation, rows, padding to whole optimiser steps, one share per rank.

Input: the samples a rollout function returned. Output: plain lists and CPU tensors, ready to be sent to the trainer.

Invariants:
* nothing real is dropped: padding only adds fully masked one-token rows;
* group statistics are taken over rollouts of one `group_index`, never over rows or positions;
* a failure is not a reward of zero: failed, aborted and unscored samples leave the statistics, and their mask is 0;
* input order is kept, and all per-row lists have the same length.

`raw_reward` is None for rows that have no reward (failures and padding). Left out: expert routing and nucleus data of the
engine, and everything that knows a training backend.
"""

from __future__ import annotations

import itertools
import logging
import math
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from slime.observability.rollout_data_utils import tensorize_rollout_data_for_training
from slime.utils.dp_schedule import build_dp_schedule, split_into_steps
from slime.utils.misc import load_function
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

TrainData = dict[str, list[Any]]

_GROUP_ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_STD_ESTIMATORS = ("grpo", "gspo", "cispo")
_STD_EPS = 1e-6

# The shortest row a trainer can handle: one prompt token, one masked response token.
_STUB_ROW: dict[str, Any] = {
    "tokens": [0, 0],
    "response_lengths": 1,
    "loss_masks": [0],
    "rewards": 0.0,
    "raw_reward": None,
    "truncated": 0,
    "sample_indices": -1,
    "rollout_log_probs": [0.0],
    "teacher_log_probs": [0.0],
}
_REQUIRED_KEYS = ("tokens", "response_lengths", "rewards", "loss_masks")
_WHOLE_BATCH_KEYS = ("raw_reward", "total_lengths")


def flatten_samples(groups: Iterable[Any]) -> list[Sample]:
    """All samples of arbitrarily nested lists, in order. Raises TypeError when a leaf is not a `Sample`."""
    flat: list[Sample] = []
    for item in groups:
        if isinstance(item, Sample):
            flat.append(item)
        elif isinstance(item, (list, tuple)):
            flat.extend(flatten_samples(item))
        else:
            raise TypeError(f"a rollout function must return (nested) lists of Sample, found {type(item).__name__}")
    return flat


def unused_ids(taken: Iterable[Any]) -> Iterator[int]:
    used = set(taken)
    return (i for i in itertools.count() if i not in used)


def assign_rollout_ids(samples: Sequence[Sample]) -> None:
    """Gives samples without `rollout_id`, in place, the smallest unused non-negative integers: each is its own rollout."""
    fresh = unused_ids(sample.rollout_id for sample in samples)
    for sample in samples:
        if sample.rollout_id is None:
            sample.rollout_id = next(fresh)


# --- rewards -----------------------------------------------------------------------------------------------------------


def _has_failed(sample: Sample) -> bool:
    return sample.status in (Sample.Status.FAILED, Sample.Status.ABORTED)


def _is_excluded(args: Namespace, sample: Sample) -> bool:
    """Whether the sample neither counts in statistics nor is trained. A custom reward hook may not need `reward`."""
    unscored = sample.reward is None and not getattr(args, "custom_reward_post_process_path", None)
    return _has_failed(sample) or unscored


def _reward_value(args: Namespace, sample: Sample) -> float | None:
    """The sample's reward as a finite float, None when excluded. Raises ValueError naming the sample otherwise."""
    if _is_excluded(args, sample):
        return None
    if isinstance(sample.reward, dict) and args.reward_key not in sample.reward:
        keys = ", ".join(map(str, sample.reward))
        raise ValueError(f"sample {sample.index}: the reward is a dict; set --reward-key to one of its keys ({keys})")
    try:
        value = float(sample.get_reward_value(args))
    except (TypeError, ValueError) as error:
        raise ValueError(f"sample {sample.index}: the reward {sample.reward!r} is not a number: {error}") from error
    if not math.isfinite(value):
        raise ValueError(f"sample {sample.index}: the reward is {value}; return None for a sample without a score")
    return value


def _standardise(values: list[float], divide_by_std: bool) -> list[float]:
    """Centred values, divided by Bessel std + 1e-6 on request; exactly 0 for one value or all-equal values."""
    if len(values) < 2 or max(values) == min(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    centred = [value - mean for value in values]
    if not divide_by_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(values) - 1))
    return [c / (std + _STD_EPS) for c in centred]


def _statistics_key(args: Namespace, sample: Sample, position: int) -> tuple[Any, Any]:
    """(group, rollout) of a sample; a sample without `rollout_id` is its own rollout."""
    rollout = ("row", position) if sample.rollout_id is None else sample.rollout_id
    if sample.group_index is not None:
        return sample.group_index, rollout
    if args.n_samples_per_prompt == 1:
        return ("single", rollout), rollout
    raise ValueError(
        f"sample {sample.index} has no group_index, so its reward cannot be normalised within its prompt's group; "
        "set Sample.group_index in the rollout function or pass --disable-rewards-normalization"
    )


def _rollout_rewards(keys: list[tuple[Any, Any]], raw: list[float | None]) -> dict[Any, dict[Any, float]]:
    """Group -> rollout -> reward, each rollout once. Raises ValueError when its samples disagree."""
    groups: dict[Any, dict[Any, float]] = {}
    group_of: dict[Any, Any] = {}
    for (group, rollout), reward in zip(keys, raw, strict=True):
        if group_of.setdefault(rollout, group) != group:
            raise ValueError(
                f"rollout_id {rollout} appears in groups {group_of[rollout]} and {group}; ids must be unique"
            )
        if reward is None:
            continue
        known = groups.setdefault(group, {}).setdefault(rollout, reward)
        if known != reward:
            raise ValueError(
                f"samples of rollout_id {rollout} have different rewards ({known} and {reward}); "
                "samples cut from one trajectory must share its reward"
            )
    return groups


def _normalise_by_group(args: Namespace, samples: Sequence[Sample], raw: list[float | None]) -> list[float]:
    divide = args.advantage_estimator in _STD_ESTIMATORS and args.grpo_std_normalization
    keys = [_statistics_key(args, sample, i) for i, sample in enumerate(samples)]
    normalised: dict[tuple[Any, Any], float] = {}
    for group, rewards in _rollout_rewards(keys, raw).items():
        values = _standardise(list(rewards.values()), divide)
        normalised.update(zip(((group, rollout) for rollout in rewards), values, strict=True))
    return [0.0 if reward is None else normalised[key] for key, reward in zip(keys, raw, strict=True)]


def post_process_rewards(args: Namespace, samples: Sequence[Sample]) -> tuple[list[Any], list[float]]:
    """`(raw, rewards)`, one entry per sample in the given order; `raw` is None and `rewards` 0.0 for excluded samples.

    With `rewards_normalization` and a group estimator the rewards are centred within `group_index` over distinct rollouts
    and, for grpo/gspo/cispo with `grpo_std_normalization`, divided by the unbiased standard deviation + 1e-6.
    `custom_reward_post_process_path` replaces all of this.

    Raises ValueError for a missing group, samples of one rollout with different rewards, or a reward that is no number.
    """
    if getattr(args, "custom_reward_post_process_path", None):
        return _custom_rewards(args, samples)
    raw = [_reward_value(args, sample) for sample in samples]
    if args.rewards_normalization and args.advantage_estimator in _GROUP_ESTIMATORS:
        return raw, _normalise_by_group(args, samples, raw)
    return raw, [0.0 if reward is None else reward for reward in raw]


def _custom_rewards(args: Namespace, samples: Sequence[Sample]) -> tuple[list[Any], list[float]]:
    path = args.custom_reward_post_process_path
    raw, rewards = load_function(path)(args, samples)
    if len(raw) != len(samples) or len(rewards) != len(samples):
        raise ValueError(
            f"--custom-reward-post-process-path {path} returned {len(raw)} raw and {len(rewards)} rewards "
            f"for {len(samples)} samples"
        )
    return list(raw), [float(reward) for reward in rewards]


# --- rows --------------------------------------------------------------------------------------------------------------


def _is_stub(sample: Sample) -> bool:
    """No response token: nothing to train, and a row the trainer cannot index."""
    return not sample.tokens or sample.response_length == 0


def _loss_mask(args: Namespace, sample: Sample) -> list[int]:
    length = sample.response_length
    if _is_stub(sample):
        return list(_STUB_ROW["loss_masks"])
    if _is_excluded(args, sample):
        return [0] * length
    mask = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
    assert (
        len(mask) == length
    ), f"sample {sample.index}: loss_mask has {len(mask)} entries but response_length is {length}"
    return [0] * length if sample.remove_sample else mask


def _log_prob_column(samples: Sequence[Sample], field: str, masks: list[list[int]]) -> list[Any] | None:
    """Per-token values of all samples, or None when no sample has any.

    A row without a trained token gets zeros. Raises ValueError when a trained row lacks them: a list
    shorter than the batch would pair values with the wrong rows. Wrong lengths are found by `_check_rows`.
    """
    trains = [any(mask) for mask in masks]
    if any(trains) and all(getattr(sample, field) is None for sample in samples):
        return None
    if not any(trains) and field != "rollout_log_probs":
        return None
    column = []
    for sample, mask, trained in zip(samples, masks, trains, strict=True):
        values = getattr(sample, field)
        if values is None and trained:
            raise ValueError(f"sample {sample.index} has no {field} while others have; all trained samples need them")
        column.append(values if trained else [0.0] * len(mask))
    return column


def _optional_columns(samples: Sequence[Sample], masks: list[list[int]]) -> TrainData:
    """Columns that exist only when at least one sample brings a value; the others get None."""
    columns = {
        "rollout_log_probs": _log_prob_column(samples, "rollout_log_probs", masks),
        "teacher_log_probs": _log_prob_column(samples, "teacher_log_probs", masks),
    }
    candidates = {
        "round_number": [sample.metadata.get("round_number") for sample in samples],
        "source_names": [sample.metadata.get("source_name") for sample in samples],
        "metadata": [sample.train_metadata for sample in samples],
        "multimodal_train_inputs": [sample.multimodal_train_inputs for sample in samples],
    }
    columns |= {key: values for key, values in candidates.items() if any(value is not None for value in values)}
    return {key: values for key, values in columns.items() if values is not None}


def _mask_sums(rollout_ids: Sequence[Any], masks: Sequence[Any]) -> list[int]:
    """For each row the trained tokens of its whole rollout."""
    own = [int(mask.sum() if isinstance(mask, torch.Tensor) else sum(mask)) for mask in masks]
    totals: dict[Any, int] = {}
    for rollout, count in zip(rollout_ids, own, strict=True):
        totals[rollout] = totals.get(rollout, 0) + count
    return [totals[rollout] for rollout in rollout_ids]


def _display_rewards(samples: Sequence[Sample], raw: list[Any]) -> list[Any]:
    """`metadata["raw_reward"]`, where a hook left one, is what is reported."""
    shown = zip(samples, raw, strict=True)
    return [value if _has_failed(sample) else sample.metadata.get("raw_reward", value) for sample, value in shown]


def convert_samples_to_train_data(args: Namespace, samples: Sequence[Sample]) -> TrainData:
    """One row per sample, or whatever `custom_convert_samples_to_train_data_path` makes of them.

    Gives missing rollout ids to the samples. A sample without response tokens becomes a masked one-token row.

    Raises ValueError for an empty batch or rows that do not fit together; AssertionError when a sample's loss mask has
    not its response length.
    """
    if not samples:
        raise ValueError("the rollout returned no samples; check the rollout function and its filters")
    assign_rollout_ids(samples)
    path = getattr(args, "custom_convert_samples_to_train_data_path", None)
    data = load_function(path)(args, samples) if path else _default_rows(args, samples)
    _check_rows(data, path or "conversion")
    return data


def _default_rows(args: Namespace, samples: Sequence[Sample]) -> TrainData:
    raw, rewards = post_process_rewards(args, samples)
    masks = [_loss_mask(args, sample) for sample in samples]
    rollout_ids = [sample.rollout_id for sample in samples]
    stubs = [_is_stub(sample) for sample in samples]
    rows = list(zip(samples, stubs, strict=True))
    return {
        "tokens": [list(_STUB_ROW["tokens"]) if stub else sample.tokens for sample, stub in rows],
        "response_lengths": [1 if stub else sample.response_length for sample, stub in rows],
        "rewards": rewards,
        "raw_reward": _display_rewards(samples, raw),
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [-1 if sample.index is None else sample.index for sample in samples],
        "rollout_ids": rollout_ids,
        "loss_masks": masks,
        "rollout_mask_sums": _mask_sums(rollout_ids, masks),
        **_optional_columns(samples, masks),
    }


def _check_rows(data: TrainData, source: str) -> None:
    """Raises ValueError naming the key or row that does not fit."""
    if not isinstance(data, dict):
        raise ValueError(f"{source}: expected a dict of lists, got {type(data).__name__}")
    missing = [key for key in _REQUIRED_KEYS if key not in data]
    if missing:
        raise ValueError(f"{source}: train data lack {', '.join(missing)}")
    count = len(data["tokens"])
    if count == 0:
        raise ValueError(f"{source}: train data have no rows; return fully masked rows instead of dropping all")
    for key, column in data.items():
        if not isinstance(column, (list, tuple)) or len(column) != count:
            size = f"{len(column)} entries" if hasattr(column, "__len__") else type(column).__name__
            raise ValueError(f"{source}: '{key}' must be a list of {count} entries (as 'tokens'), got {size}")
    _check_row_lengths(data, source)


def _check_row_lengths(data: TrainData, source: str) -> None:
    per_token = [key for key in ("loss_masks", "rollout_log_probs", "teacher_log_probs") if key in data]
    for i, (tokens, length) in enumerate(zip(data["tokens"], data["response_lengths"], strict=True)):
        if not 1 <= length < len(tokens):
            raise ValueError(
                f"{source}, row {i}: response_length {length} with {len(tokens)} tokens; a row needs at least one prompt "
                "and one response token"
            )
        for key in per_token:
            if len(data[key][i]) != length:
                raise ValueError(f"{source}, row {i}: {len(data[key][i])} {key} but response_length is {length}")


# --- padding and distribution ------------------------------------------------------------------------------------------


def _stub_value(key: str, column: Sequence[Any], lengths: Sequence[int]) -> Any:
    """What a padding row holds under `key`: zeros where a custom column is numeric or per-token, else None."""
    if key in _STUB_ROW:
        return _STUB_ROW[key]
    if all(isinstance(value, (int, float)) for value in column):
        return type(column[0])(0)
    sized = (list, torch.Tensor)
    if all(isinstance(v, sized) and len(v) == n for v, n in zip(column, lengths, strict=True)):
        return [0.0]
    return None


def _append_stubs(data: TrainData, rollout_ids: list[Any]) -> None:
    """Adds, in place, one fully masked row per given rollout id."""
    if not rollout_ids:
        return
    known = dict(zip(data["rollout_ids"], data["rollout_mask_sums"], strict=True))
    lengths = list(data["response_lengths"])
    for key, column in data.items():
        value = _stub_value(key, column, lengths)
        column.extend(list(value) if isinstance(value, list) else value for _ in rollout_ids)
    data["rollout_ids"][-len(rollout_ids) :] = rollout_ids
    # A row that joins a rollout carries that rollout's denominator, so that all its rows agree.
    data["rollout_mask_sums"][-len(rollout_ids) :] = [known.get(rollout, 0) for rollout in rollout_ids]


def _row_multiple(args: Namespace, dp_size: int) -> int:
    """A step's row count must be a multiple of this: every rank gets equally many (whole) micro-batches."""
    return dp_size if args.use_dynamic_batch_size else dp_size * args.micro_batch_size


def with_rollouts(data: TrainData) -> TrainData:
    """A copy (columns copied, rows shared). Without `rollout_ids` each row is its own rollout; mask sums are completed."""
    copied: TrainData = {key: list(column) for key, column in data.items()}
    copied.setdefault("rollout_ids", list(range(len(copied["tokens"]))))
    copied.setdefault("rollout_mask_sums", _mask_sums(copied["rollout_ids"], copied["loss_masks"]))
    return copied


def pad_to_global_batch(args: Namespace, data: TrainData, dp_size: int) -> TrainData:
    """A copy of `data` whose rollouts fill whole optimiser steps and whose steps fill all ranks. Drops nothing.

    First fully masked one-token rollouts are added until the number of rollouts is a multiple of
    `args.global_batch_size`; then masked rows join the last rollout of each step until the step's row count is a multiple
    of the ranks (times `micro_batch_size` in static mode). Data without `rollout_ids` get one id per row; missing
    `rollout_mask_sums` are computed. Raises ValueError when `global_batch_size` is not set.
    """
    size = args.global_batch_size
    if not size:
        raise ValueError("--global-batch-size (or --num-steps-per-rollout) is not set; training needs one of them")
    padded = with_rollouts(data)
    missing = -len(set(padded["rollout_ids"])) % size
    _append_stubs(padded, list(itertools.islice(unused_ids(padded["rollout_ids"]), missing)))
    multiple = _row_multiple(args, dp_size)
    fillers = []
    for rows in split_into_steps(padded["rollout_ids"], size):
        fillers += [padded["rollout_ids"][rows[-1]]] * (-len(rows) % multiple)
    _append_stubs(padded, fillers)
    if missing or fillers:
        logger.info("padding: %d masked rollouts, %d masked rows for %d ranks", missing, len(fillers), dp_size)
    return padded


def split_train_data_by_dp(args: Namespace, data: TrainData, dp_size: int) -> list[dict[str, Any]]:
    """One dict per data-parallel rank, from data padded by `pad_to_global_batch`.

    Per-row lists are restricted to the rank: tokens int64, masks int32, log-probs float32 CPU tensors, the rest as is.
    `raw_reward` and `total_lengths` stay whole. Added: `partition` (global row numbers), `micro_batch_indices`,
    `num_microbatches`, `global_batch_sizes` as in `build_dp_schedule`. Raises ValueError when a row would be left out.
    """
    total_lengths = [len(tokens) for tokens in data["tokens"]]
    partitions, micro_batch_indices, num_microbatches, global_batch_sizes = build_dp_schedule(
        args,
        {"dp_size": dp_size},
        total_lengths,
        global_batch_size=args.global_batch_size,
        rollout_indices=data["rollout_ids"],
    )
    if sum(map(len, partitions)) != len(total_lengths):
        raise ValueError("the rollouts do not fill whole optimiser steps; call pad_to_global_batch first")
    whole = {key: data[key] for key in _WHOLE_BATCH_KEYS if key in data} | {"total_lengths": total_lengths}
    shares = []
    for partition, micro_batches in zip(partitions, micro_batch_indices, strict=True):
        rows = {key: [column[i] for i in partition] for key, column in data.items() if key not in _WHOLE_BATCH_KEYS}
        tensorize_rollout_data_for_training(rows)
        schedule = {
            "partition": partition,
            "micro_batch_indices": micro_batches,
            "num_microbatches": num_microbatches,
            "global_batch_sizes": global_batch_sizes,
        }
        shares.append(rows | whole | schedule)
    return shares
