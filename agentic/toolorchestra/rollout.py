"""Hooks `generate` (`--custom-generate-function-path`) and `eval_log` (`--custom-eval-rollout-log-function-path`).

`validate_args` is called with them where the framework checks its flags; elsewhere the first `generate` checks the same.

Inputs: slime's arguments and one `Sample` with `metadata["category"]` (`qa`: prompt and label; `func_call`: a tau2 task).
Invariants: `sample.prompt` is never changed; training and evaluation take the same path with other limits; what happened
is in `metadata["orch"]`, in every sample of the rollout alike; a failure of the world is a status with `failure_reason`,
removed from training, never a reward of zero. Leaves out: scoring (`reward`), credit (`convert`).
"""

from __future__ import annotations

import copy
import logging
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from agentic.common.convert import STUB_TOKENS
from agentic.common.errors import AgenticError, BadRecord, ConfigError, InfrastructureError, PromptTooLong, Unscored
from agentic.common.failures import mark_failed
from agentic.common.ledger import CostLedger
from agentic.toolorchestra.chat_format import ChatFormat
from agentic.toolorchestra.config import OrchestraConfig
from agentic.toolorchestra.crew import Crew, get_crew, load_roles
from agentic.toolorchestra.environment import TaskEnvironment
from agentic.toolorchestra.eval_log import write_eval_log
from agentic.toolorchestra.experts import ORCHESTRATOR, ExpertDesk, Experts
from agentic.toolorchestra.layouts import Row
from agentic.toolorchestra.loop import Episode
from agentic.toolorchestra.preferences import check_vector
from agentic.toolorchestra.prompts import PromptSet
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

# The router's address is only known once it runs.
_ANY_POLICY_URL = "http://policy"
FAILURES = (InfrastructureError, PromptTooLong, BadRecord, Unscored)


def validate_args(args: Namespace) -> None:
    """Check settings, role file, aliases and prompts, and a local model's chat template, before anything is started.

    Raises:
        FileNotFoundError, ConfigError: what is wrong, where, and the remedy.
    """
    config = OrchestraConfig.from_args(args)
    prompts = PromptSet.load(config.prompt_set)
    Experts.build(config.aliases, load_roles(config, _ANY_POLICY_URL))
    model = getattr(args, "hf_checkpoint", None)
    if model and config.layout == "stream" and (Path(model) / "tokenizer_config.json").is_file():
        options = dict(getattr(args, "apply_chat_template_kwargs", None) or {})
        ChatFormat(load_tokenizer(model, trust_remote_code=True), options, prompts.describe_tools)


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """One rollout; in training under layout `turns` a list of samples, one per turn, else one sample.

    Status: COMPLETED; TRUNCATED if a generation, context or turn limit ended it; ABORTED if the engine aborted; FAILED for
    any other failure of the world or a record that cannot be used. The last two have `remove_sample` and a masked stub.

    Raises:
        ConfigError: settings, role file, aliases or prompts are wrong.
    """
    crew = get_crew(args)
    as_list = crew.config.layout == "turns" and not evaluation
    # slime 0.2.2 has no such field, and `convert` must be able to tell.
    if not evaluation and hasattr(sample, "rollout_id") and sample.rollout_id is None:
        sample.rollout_id = sample.index
    pinned = sample.session_id if getattr(args, "router_policy", None) == "consistent_hashing" else None
    played = await play(crew, sample, sampling_params, evaluation, pinned)
    if played.failure is not None:
        _store_failure(sample, played.failure, played.record)
        return [sample] if as_list else sample
    assert played.episode is not None
    return _store(sample, played.episode, played.record, as_list)


class Played(NamedTuple):
    """A rollout that is over."""

    episode: Episode | None
    """None when the record was so bad that none began."""
    record: dict[str, Any]
    """`metadata["orch"]`."""
    failure: AgenticError | None


async def play(
    crew: Crew, sample: Sample, sampling_params: Mapping[str, Any], evaluation: bool, session_id: str | None = None
) -> Played:
    """One rollout of the sample, which is not changed. Raises ConfigError."""
    ledger, deadline = CostLedger(), time.monotonic() + crew.config.episode_timeout_s
    environment: TaskEnvironment | None = None
    episode: Episode | None = None
    failure: AgenticError | None = None
    try:
        if crew.config.reward == "preference" and not evaluation:
            _check_preference(sample)
        desk = crew.experts.desk(sample.metadata or {}, ledger, deadline)
        environment = make_environment(crew, sample, desk, evaluation)
        episode = Episode(crew, environment, desk, sampling_params, deadline, session_id)
        await episode.run()
    except FAILURES as error:
        logger.warning("rollout of sample %s failed: %s", sample.index, error)
        failure = error
    finally:
        if environment is not None:
            environment.close()
    return Played(episode, _record(sample, episode, ledger), failure)


def _check_preference(sample: Sample) -> None:
    """Before anything is spent. Raises BadRecord for a missing vector or one that equation 2 cannot use."""
    try:
        check_vector((sample.metadata or {}).get("pref_vec"), f"sample {sample.index}")
    except ConfigError as error:
        raise BadRecord("bad_preference", f"{error}; or set orchestra_reward: outcome") from error


# --------------------------------------------------------------------------------------------------------------------
# Environments.


def make_environment(crew: Crew, sample: Sample, desk: ExpertDesk, evaluation: bool) -> TaskEnvironment:
    """The task of a sample, by `metadata["category"]`.

    Raises:
        BadRecord: no such category, or the record lacks what its category needs.
        ConfigError: the role file lacks a role that the category needs.
    """
    category = (sample.metadata or {}).get("category")
    makers = {"qa": _make_qa, "func_call": _make_tau2}
    if category not in makers:
        raise BadRecord("bad_category", f"metadata['category'] is {category!r}; one of {', '.join(makers)}")
    return makers[category](crew, sample, desk, evaluation)


def _make_qa(crew: Crew, sample: Sample, desk: ExpertDesk, evaluation: bool) -> TaskEnvironment:
    from agentic.toolorchestra.qa.environment import QAEpisode
    from agentic.toolorchestra.retrieval.client import RetrievalClient

    role = crew.role("retrieval")
    if sample.label is None:
        raise BadRecord("no_label", f"sample {sample.index} has no reference answer; check --label-key")
    return QAEpisode(
        question_of(sample),
        str(sample.label),
        sample.metadata,
        desk,
        None if role is None else RetrievalClient(role),
        crew.judge,
        crew.config,
        prompts=crew.prompts,
        tokenizer=crew.tokenizer,
    )


def _make_tau2(crew: Crew, sample: Sample, desk: ExpertDesk, evaluation: bool) -> TaskEnvironment:
    # The package takes seconds to import, and questions do without it.
    from agentic.toolorchestra.tau2.episode import make_episode

    return make_episode(sample.metadata, crew.role("user"), desk, crew.config, evaluation)


def question_of(sample: Sample) -> str:
    """The question: the prompt's text, or its last user message. Raises BadRecord when there is none."""
    text: Any = sample.prompt
    if not isinstance(text, str):
        text = next((message["content"] for message in reversed(text) if message["role"] == "user"), "")
    if not isinstance(text, str) or not text.strip():
        raise BadRecord("no_question", f"sample {sample.index}: {str(sample.prompt)[:200]!r}; check --input-key")
    return text.strip()


# --------------------------------------------------------------------------------------------------------------------
# Samples.


def _record(sample: Sample, episode: Episode | None, ledger: CostLedger) -> dict[str, Any]:
    """`metadata["orch"]`: the features of equation 2 and what is logged; plain JSON types."""
    outcome = episode.outcome if episode is not None else None
    turns, valid = (len(episode.turns), episode.valid_turns) if episode is not None else (0, 0)
    malformed = episode.malformed_turns if episode is not None else 0
    return {
        "counts": {name: count for name, count in ledger.counts.items() if name != ORCHESTRATOR},
        "outcome": outcome.reward if outcome is not None else 0.0,
        "dollars": ledger.dollars,
        "seconds": ledger.seconds,
        "pref_vec": (sample.metadata or {}).get("pref_vec"),
        "turns": turns,
        "format_ok": valid > 0,
        "format_errors": malformed,
        "valid_answer": outcome is not None and outcome.valid_answer,
        "termination": outcome.termination if outcome is not None else "failure",
        "breakdown": dict(outcome.breakdown) if outcome is not None else {},
        "ledger": ledger.to_dict(),
    }


def _store(sample: Sample, episode: Episode, record: dict[str, Any], as_list: bool) -> Sample | list[Sample]:
    """Fill the sample; with `as_list` one sample per row, the one that was given being the last."""
    rows = episode.layout.rows()
    status = Sample.Status.TRUNCATED if episode.truncated else Sample.Status.COMPLETED
    sample.metadata = {**(sample.metadata or {}), "orch": record, "failure_reason": None}
    sample.reward, sample.remove_sample, sample.train_metadata = None, False, None
    members = [copy.copy(sample) for _ in rows[:-1]] + [sample] if as_list else [sample]
    for number, member in enumerate(members):
        member.prefix_cache_info = copy.copy(sample.prefix_cache_info)
        last = number == len(members) - 1
        _store_row(
            member, rows[number if as_list else -1], episode.turns[number : number + 1] if as_list else episode.turns
        )
        member.metadata = {**member.metadata, "turn": number if as_list else 0}
        member.status = status if last else Sample.Status.COMPLETED
    sample.non_generation_time += episode.tool_seconds
    return members if as_list else sample


def _store_row(sample: Sample, row: Row, turns: list[Any]) -> None:
    """Token fields from the row, versions and cache counts from the turns it stands for."""
    sample.tokens, sample.response_length = list(row.tokens), len(row.loss_mask)
    sample.loss_mask, sample.rollout_log_probs = list(row.loss_mask), list(row.log_probs)
    sample.response = row.text
    sample.weight_versions = [turn.weight_version for turn in turns if turn.weight_version is not None]
    for turn in turns:
        sample.prefix_cache_info.add({"cached_tokens": turn.cached_tokens, "prompt_tokens": turn.prompt_length})
    sample.metadata = {**sample.metadata, "turn_spans": row.turn_spans}


def _store_failure(sample: Sample, error: AgenticError, record: dict[str, Any]) -> None:
    sample.metadata = {**(sample.metadata or {}), "orch": record, "turn": 0, "turn_spans": []}
    mark_failed(sample, error)
    sample.status = Sample.Status.ABORTED if error.reason == "engine_aborted" else Sample.Status.FAILED
    sample.reward, sample.train_metadata = None, None
    sample.tokens, sample.response, sample.response_length = list(STUB_TOKENS), "", 1
    sample.loss_mask, sample.rollout_log_probs, sample.weight_versions = [0], [0.0], []


def eval_log(
    rollout_id: int, args: Namespace, data: dict[str, dict[str, Any]], extra_metrics: dict[str, Any] | None = None
) -> bool:
    """Append one JSON line per data set to `args.save/eval_log.jsonl`; False, so that slime logs as well.

    See `eval_log.write_eval_log` for the figures.
    """
    write_eval_log(rollout_id, args, data, extra_metrics or {})
    return False
