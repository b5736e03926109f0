"""Turns the samples of a rollout or an evaluation into metrics, and logs them.

Inputs: flat lists of `Sample` (fan-out already flattened). Invariants: a reward counts once per rollout, not per
sample; a sample without a score (None) is left out of reward metrics, never taken as zero; a dict reward is read
through `--reward-key` or left out. Evaluation differs on purpose: a rollout without a score is a miss and counts 0.
Left out: training metrics (the trainer's).
"""

from __future__ import annotations

import logging
import numbers
from argparse import Namespace
from collections import Counter
from typing import Any

from slime.observability import logging_utils
from slime.observability.metric_utils import (
    compute_pass_rate,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
    has_repetition,
)
from slime.utils.misc import group_by, load_function
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_STD_EPS = 1e-6


def log_rollout_data(
    rollout_id: int,
    args: Namespace,
    samples: list[Sample],
    rollout_extra_metrics: dict[str, Any] | None,
    rollout_time: float,
) -> dict[str, Any] | None:
    """Logs one rollout under `rollout/step`; `--custom-rollout-log-function-path` may take over (truthy result).

    Returns the metrics, or None when nothing was logged here. `rollout_time` in seconds.
    """
    if getattr(args, "custom_rollout_log_function_path", None):
        custom_log = load_function(args.custom_rollout_log_function_path)
        if custom_log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
            return None
    if getattr(args, "load_debug_rollout_data", None):
        return None
    metrics = dict(rollout_extra_metrics or {})
    metrics |= dict_add_prefix(compute_metrics_from_samples(args, samples), "rollout/")
    metrics |= dict_add_prefix(compute_perf_metrics_from_samples(args, samples, rollout_time), "perf/")
    metrics["rollout/step"] = compute_rollout_step(args, rollout_id)
    logger.info("rollout %d: %s", rollout_id, metrics)
    logging_utils.log(args, metrics, step_key="rollout/step")
    return metrics


def log_eval_rollout_data(
    rollout_id: int, args: Namespace, data: dict[str, dict[str, Any]], extra_metrics: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Logs one evaluation under `eval/step`; `--custom-eval-rollout-log-function-path` may take over.

    Returns the metrics, or None when nothing was logged here.
    """
    if getattr(args, "custom_eval_rollout_log_function_path", None):
        custom_log = load_function(args.custom_eval_rollout_log_function_path)
        if custom_log(rollout_id, args, data, extra_metrics):
            return None
    metrics = dict(extra_metrics or {})
    for name, result in data.items():
        metrics |= _eval_metrics(args, name, result)
    metrics["eval/step"] = compute_rollout_step(args, rollout_id)
    logger.info("eval %d: %s", rollout_id, metrics)
    logging_utils.log(args, metrics, step_key="eval/step")
    return metrics


def _eval_metrics(args: Namespace, name: str, result: dict[str, Any]) -> dict[str, Any]:
    rewards = [0.0 if reward is None else float(reward) for reward in result["rewards"]]
    metrics: dict[str, Any] = {f"eval/{name}/n": len(rewards)}
    if rewards:
        metrics[f"eval/{name}"] = sum(rewards) / len(rewards)
    if result.get("truncated"):
        metrics[f"eval/{name}/truncated_ratio"] = sum(map(bool, result["truncated"])) / len(result["truncated"])
    if "failed" in result:
        metrics[f"eval/{name}/failed"] = result["failed"]
    samples = result.get("samples") or []
    lengths = compute_statistics([sample.effective_response_length for sample in samples])
    metrics |= dict_add_prefix(lengths, f"eval/{name}/response_len/")
    metrics |= dict_add_prefix(_failure_reasons(samples), f"eval/{name}/")
    if getattr(args, "log_passrate", False):
        repeats = Counter(sample.group_index for sample in samples).most_common(1)
        group_size = repeats[0][1] if repeats and len(samples) == len(rewards) else 1
        metrics |= dict_add_prefix(compute_pass_rate(rewards, group_size), f"eval/{name}-")
    return metrics


def compute_metrics_from_samples(args: Namespace, samples: list[Sample]) -> dict[str, Any]:
    """Reward, lengths, ratios of truncated, failed and constant groups; without prefix."""
    if not samples:
        return {}
    rewards = _rollout_rewards(args, samples)
    known = [reward for reward in rewards.values() if reward is not None]
    metrics = dict_add_prefix(compute_statistics([s.effective_response_length for s in samples]), "response_len/")
    metrics |= {
        "num_samples": len(samples),
        "num_rollouts": len(rewards),
        "truncated_ratio": _ratio(samples, Sample.Status.TRUNCATED),
        "aborted_ratio": _ratio(samples, Sample.Status.ABORTED),
        "failed_ratio": _ratio(samples, Sample.Status.FAILED),
        "repetition_ratio": sum(has_repetition(sample.response) for sample in samples) / len(samples),
    }
    if known:
        metrics["raw_reward"] = sum(known) / len(known)
    metrics |= _zero_std_metrics(rewards)
    metrics |= _failure_reasons(samples)
    metrics |= _reward_categories(args, samples)
    if getattr(args, "log_multi_turn", False):
        metrics |= _multi_turn(samples)
    if getattr(args, "log_correct_samples", False):
        correct = [s.effective_response_length for s in samples if _reward_number(args, s) == 1]
        metrics |= {
            "correct_samples": len(correct),
            **dict_add_prefix(compute_statistics(correct), "correct_response_len/"),
        }
    return metrics


def _multi_turn(samples: list[Sample]) -> dict[str, float]:
    """Turns per sample (`metadata["round_number"]`), generated tokens, and tokens that came from tools."""
    rounds = [int(s.metadata["round_number"]) for s in samples if s.metadata.get("round_number") is not None]
    generated = [sample.effective_response_length for sample in samples]
    observed = [sample.response_length - own for sample, own in zip(samples, generated, strict=True)]
    return {
        **dict_add_prefix(compute_statistics(rounds), "multi_turn/round_number/"),
        **dict_add_prefix(compute_statistics(generated), "multi_turn/generated_tokens/"),
        **dict_add_prefix(compute_statistics(observed), "multi_turn/observed_tokens/"),
    }


def _ratio(samples: list[Sample], status: Sample.Status) -> float:
    return sum(sample.status is status for sample in samples) / len(samples)


def _reward_number(args: Namespace, sample: Sample) -> float | None:
    reward: Any = sample.reward
    if isinstance(reward, dict):
        reward = reward.get(getattr(args, "reward_key", None))
    return float(reward) if isinstance(reward, numbers.Real) else None


def _rollout_rewards(args: Namespace, samples: list[Sample]) -> dict[tuple[Any, Any], float | None]:
    """Reward by (group, rollout); samples without a rollout id are rollouts of their own."""
    rewards: dict[tuple[Any, Any], float | None] = {}
    for position, sample in enumerate(samples):
        rollout = ("sample", position) if sample.rollout_id is None else ("rollout", sample.rollout_id)
        key = (sample.group_index, rollout)
        if rewards.get(key) is None:
            rewards[key] = _reward_number(args, sample)
    return rewards


def _zero_std_metrics(rewards: dict[tuple[Any, Any], float | None]) -> dict[str, float]:
    """Share of groups whose rewards are all equal, among groups with two or more scored rollouts."""
    scored = [(group, reward) for (group, _), reward in rewards.items() if group is not None and reward is not None]
    groups = [[r for _, r in members] for members in group_by(scored, lambda item: item[0]).values()]
    groups = [members for members in groups if len(members) >= 2]
    if not groups:
        return {}
    constant = sum(max(members) - min(members) <= _STD_EPS for members in groups)
    return {"zero_std_ratio": constant / len(groups)}


def _failure_reasons(samples: list[Sample]) -> dict[str, int]:
    reasons = Counter(
        sample.metadata["failure_reason"]
        for sample in samples
        if isinstance(sample.metadata, dict) and sample.metadata.get("failure_reason")
    )
    return {f"failure_reason/{reason}": count for reason, count in sorted(reasons.items())}


def _reward_categories(args: Namespace, samples: list[Sample]) -> dict[str, float]:
    """Distribution of `reward[--log-reward-category]`."""
    key = getattr(args, "log_reward_category", None)
    if not key:
        return {}
    categories = Counter(s.reward[key] for s in samples if isinstance(s.reward, dict) and key in s.reward)
    total = sum(categories.values())
    return {f"reward_category/{name}": count / total for name, count in categories.items()}


def compute_perf_metrics_from_samples(args: Namespace, samples: list[Sample], rollout_time: float) -> dict[str, float]:
    """Rollout time in seconds, tokens per second, tool time, speculative decoding and prefix cache rates."""
    metrics: dict[str, float] = {"rollout_time": rollout_time}
    if not samples or rollout_time <= 0:
        return metrics
    tool_times = [sample.non_generation_time for sample in samples]
    lengths = [sample.response_length for sample in samples]
    trained = sum(sample.effective_response_length for sample in samples)
    metrics["tokens_per_second"] = sum(lengths) / rollout_time
    metrics["effective_tokens_per_second"] = trained / rollout_time
    metrics["longest_sample_tokens_per_second"] = max(lengths) / rollout_time
    if num_gpus := getattr(args, "rollout_num_gpus", None):
        metrics["tokens_per_gpu_per_second"] = sum(lengths) / rollout_time / num_gpus
    if any(tool_times):
        metrics |= dict_add_prefix(compute_statistics(tool_times), "non_generation_time/")
    return metrics | _engine_metrics(args, samples)


def _engine_metrics(args: Namespace, samples: list[Sample]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    prompt_tokens = sum(sample.prefix_cache_info.total_prompt_tokens for sample in samples)
    if prompt_tokens:
        cached = sum(sample.prefix_cache_info.cached_tokens for sample in samples)
        metrics["prefix_cache_hit_rate"] = cached / prompt_tokens
    if getattr(args, "sglang_speculative_algorithm", None):
        infos = [sample.spec_info for sample in samples]
        metrics["spec_accept_rate"] = sum(i.spec_accept_token_num for i in infos) / max(
            sum(i.spec_draft_token_num for i in infos), 1
        )
        metrics["spec_accept_length"] = sum(i.completion_token_num for i in infos) / max(
            sum(i.spec_verify_ct for i in infos), 1
        )
    return metrics
