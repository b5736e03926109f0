"""Hooks `generate` (`--custom-generate-function-path`) and `eval_log` (`--custom-eval-rollout-log-function-path`).

`validate_args` is called with them where the framework checks its flags; elsewhere the first `generate` checks the same.

Inputs: slime's arguments and one `Sample` with a question, `metadata["context"]` (the document's text) and references.
Invariants: `sample.prompt` is never changed; training and evaluation take the same path with other limits; the sample
that was given comes back with the answer conversation, the memory conversations are siblings of it (same index, group and
`rollout_id`) or stand in `train_metadata["turns"]`; a failure is a status with `failure_reason`, removed from training,
never a reward of zero. Leaves out: scoring (`reward`), credit (`convert`).
"""

from __future__ import annotations

import copy
import logging
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from agentic.common.convert import STUB_TOKENS
from agentic.common.errors import (
    AgenticError,
    BadRecord,
    ConfigError,
    InfrastructureError,
    PromptTooLong,
    RoleTimeout,
)
from agentic.common.eval_log import UNUSABLE, append_evaluation, eval_log_path, reward_figures
from agentic.common.failures import mark_failed
from agentic.common.turns import TurnRecord
from agentic.memagent.agent import MemAgent, chat_options, get_agent
from agentic.memagent.config import MemAgentConfig
from agentic.memagent.prompts import PromptSet
from agentic.memagent.reader import Reader, Reading
from agentic.memagent.reward import MULTI_VALUE_KIND, references_of
from agentic.memagent.scoring import all_scores, is_held
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

# The router's address is only known once it runs.
_ANY_POLICY_URL = "http://policy"
HEADLINE = "sub_em"
CUTS = ("context_tokens_left_out", "question_tokens_cut", "empty_memories", "memories_at_limit", "memory_ids_dropped")


def validate_args(args: Namespace) -> None:
    """Check settings, flags and prompts, and with a local model's tokenizer the window, before anything is started.

    Raises:
        ConfigError: what is wrong, where, and the remedy.
    """
    config = MemAgentConfig.from_args(args)
    config.check_flags(args)
    PromptSet.load(config.prompt_set)
    model = getattr(args, "hf_checkpoint", None)
    if model and (Path(model) / "tokenizer_config.json").is_file():
        tokenizer = load_tokenizer(model, trust_remote_code=True)
        MemAgent.build(config, tokenizer, _ANY_POLICY_URL, chat_options(args))


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Read the document and answer; in training a list of all conversations (layout `siblings`), else one sample.

    Status: COMPLETED; TRUNCATED if the conversation reached its limit (one sample: any of them); ABORTED if the engine
    aborted or did not answer in time; FAILED for any other failure or a record without a document. The last two have
    `remove_sample` and one masked token.

    Raises:
        ConfigError: settings or prompts are wrong, the sample has no question, or something is too long and is not to
            be cut.
    """
    agent = get_agent(args)
    as_list = agent.config.layout == "siblings" and not evaluation
    if sample.rollout_id is None and not evaluation:
        sample.rollout_id = sample.index
    pinned = sample.session_id if getattr(args, "router_policy", None) == "consistent_hashing" else None
    # A long evaluation would keep every prompt; only the report page asks for them.
    keep_turns = not evaluation or agent.config.layout == "metadata"
    try:
        texts = question_of(sample), context_of(sample)
        reader = Reader(agent, *texts, sampling_params, evaluation, keep_turns, pinned)
        reading = await reader.read()
    except (InfrastructureError, PromptTooLong, BadRecord) as error:
        logger.warning("sample %s failed: %s", sample.index, error)
        _store_failure(sample, error)
        return [sample] if as_list else sample
    if as_list:
        return _siblings(sample, reading)
    return _store_answer(sample, reading, keep_turns)


def question_of(sample: Sample) -> str:
    """The question: the prompt's text, or its last user message.

    Raises:
        ConfigError: the prompt has no text.
    """
    text: Any = sample.prompt
    if not isinstance(text, str):
        text = next((message["content"] for message in reversed(text) if message["role"] == "user"), "")
    if not isinstance(text, str) or not text.strip():
        shown = str(sample.prompt)[:200]
        raise ConfigError(f"sample {sample.index} has no question text in its prompt: {shown!r}; check --input-key")
    return text.strip()


def context_of(sample: Sample) -> str:
    """The document's text.

    Raises:
        BadRecord: there is none, or it cannot be encoded.
    """
    text = (sample.metadata or {}).get("context")
    if not isinstance(text, str) or not text.strip():
        found = type(text).__name__ if text else repr(text)
        detail = f"sample {sample.index}: metadata['context'] must be a text, got {found}; check --metadata-key"
        raise BadRecord("no_context", detail)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRecord("context_not_text", f"sample {sample.index}: {error}") from error
    return text


def _siblings(sample: Sample, reading: Reading) -> list[Sample]:
    """One sample for each conversation; the last is the one that was given."""
    last = len(reading.turns) - 1
    members = [copy.copy(sample) for _ in range(last)] + [sample]
    for number, (member, turn) in enumerate(zip(members, reading.turns, strict=True)):
        member.prefix_cache_info = copy.copy(sample.prefix_cache_info)
        _store_turn(member, turn, reading.trace[number : number + 1])
        _describe(member, reading, number, last + 1)
        member.train_metadata = None
        member.status = _status(turn.finish_reason == "length")
    return members


def _store_answer(sample: Sample, reading: Reading, keep_turns: bool) -> Sample:
    _store_turn(sample, reading.turns[-1], reading.trace)
    _describe(sample, reading, len(reading.trace) - 1, len(reading.trace))
    sample.train_metadata = {"turns": [turn.to_dict() for turn in reading.turns]} if keep_turns else None
    sample.status = _status(reading.truncated)
    return sample


def _store_turn(sample: Sample, turn: TurnRecord, entries: Sequence[Mapping[str, Any]]) -> None:
    """Token fields from the turn; versions and cache counts from the trace of all calls the sample stands for."""
    sample.tokens, sample.response, sample.response_length = list(turn.tokens), turn.text, turn.response_length
    sample.loss_mask, sample.rollout_log_probs = list(turn.loss_mask), list(turn.rollout_log_probs)
    sample.weight_versions = [entry["weight_version"] for entry in entries if entry["weight_version"] is not None]
    for entry in entries:
        sample.prefix_cache_info.add({name: entry[name] for name in ("cached_tokens", "prompt_tokens")})
    sample.reward = None
    sample.remove_sample = False


def _describe(sample: Sample, reading: Reading, number: int, total: int) -> None:
    """Metadata of conversation `number` of `total`; what belongs to the whole reading stands in the last one."""
    entry = reading.trace[number]
    described = {
        "conversation": number,
        "conversations": total,
        "final": number == total - 1,
        "role": entry["role"],
        "finish_reason": entry["finish_reason"],
        "answer": reading.answer,
        "failure_reason": None,
    }
    if described["final"]:
        described |= {"memory": reading.memory, "counters": dict(reading.counters), "trace": reading.trace}
    sample.metadata = {**(sample.metadata or {}), **described}


def _status(truncated: bool) -> Sample.Status:
    return Sample.Status.TRUNCATED if truncated else Sample.Status.COMPLETED


def _store_failure(sample: Sample, error: AgenticError) -> None:
    sample.metadata = {**(sample.metadata or {}), "conversation": 0, "conversations": 1, "final": True, "answer": ""}
    # A placeholder that keeps the reward hook away; conversion excludes the sample from all statistics.
    sample.reward = 0.0
    mark_failed(sample, error)
    timed_out = isinstance(error, RoleTimeout) or error.reason == "engine_aborted"
    sample.status = Sample.Status.ABORTED if timed_out else Sample.Status.FAILED
    sample.tokens, sample.response, sample.response_length = list(STUB_TOKENS), "", 1
    sample.loss_mask, sample.rollout_log_probs, sample.train_metadata = [0], [0.0], None


def eval_log(
    rollout_id: int, args: Namespace, data: dict[str, dict[str, Any]], extra_metrics: dict[str, Any] | None = None
) -> bool:
    """Append one JSON line per data set to `args.save/eval_log.jsonl`; False, so that slime logs as well.

    A failed rollout counts as 0 in every score. `score` is 100 times the mean of `sub_em` (items of kind `ruler`:
    `multi_value`). Sizes and counts are means and sums over the rollouts that did not fail; `held` is the share of them
    whose last memory holds a reference (`scoring.is_held`) and `reward_if_held` their mean reward: a masked answer turn
    may unlearn to use the memory, which the reward alone does not tell from losing facts.
    """
    path = eval_log_path(args, rollout_id)
    if path is None:
        return False
    settings = {"config": asdict(MemAgentConfig.from_args(args)), "extra_metrics": extra_metrics or {}}
    for name, result in data.items():
        figures = {**reward_figures(result, failures_as_zero=True), **_figures(result.get("samples") or [])}
        append_evaluation(path, rollout_id, name, {**figures, **settings})
    return False


def _figures(samples: Sequence[Sample]) -> dict[str, Any]:
    usable = [sample for sample in samples if sample.status not in UNUSABLE]
    scored = [_scores(sample) for sample in usable]
    means = {name: sum(scores[name] for scores in scored) / len(samples) for name in scored[0]} if scored else {}
    return {"score": 0.0, **means, **_held(usable), **_sizes([sample.metadata["counters"] for sample in usable])}


def _held(usable: Sequence[Sample]) -> dict[str, float | None]:
    holding = [sample for sample in usable if _holds(sample)]
    rewards = [cast(float, sample.reward) for sample in holding]
    share = len(holding) / len(usable) if usable else None
    return {"held": share, "reward_if_held": sum(rewards) / len(rewards) if rewards else None}


def _holds(sample: Sample) -> bool:
    every = sample.metadata.get("kind") == MULTI_VALUE_KIND
    return is_held(sample.metadata.get("memory", ""), references_of(sample), every)


def _scores(sample: Sample) -> dict[str, float]:
    scores = all_scores(sample.metadata["answer"], references_of(sample))
    headline = "multi_value" if sample.metadata.get("kind") == MULTI_VALUE_KIND else HEADLINE
    return {"score": 100 * scores[headline], **scores}


def _sizes(counters: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    totals: Counter[str] = sum((Counter(counts) for counts in counters), Counter())
    updates = max(totals["chunks"], 1)
    return {
        "mean_turns": (totals["chunks"] + len(counters)) / len(counters) if counters else None,
        "mean_memory_tokens": totals["memory_tokens"] / updates,
        "contexts_truncated": sum(counts.get("context_tokens_left_out", 0) > 0 for counts in counters),
        **{name: totals[name] for name in CUTS},
    }
