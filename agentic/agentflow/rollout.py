"""Hooks `generate` (`--custom-generate-function-path`) and `eval_log` (`--custom-eval-rollout-log-function-path`).

`validate_args` is called with them where the framework checks its flags; elsewhere the first `generate` checks the same.

Inputs: slime's arguments and one `Sample` with a question and a label. Invariants: `sample.prompt` is never changed;
training and evaluation take the same path with other limits; the sample's own token fields are those of the last
trained turn, all turns are in `train_metadata["turns"]`; a failure of the infrastructure is a status with
`failure_reason`, removed from training, never a reward of zero. Leaves out: scoring (`reward`), credit (`convert`).
"""

from __future__ import annotations

import logging
import re
from argparse import Namespace
from collections import Counter
from dataclasses import asdict
from typing import Any

from agentic.agentflow.config import AgentFlowConfig
from agentic.agentflow.crew import ROLES, Crew, get_crew, load_roles
from agentic.agentflow.prompts import PromptSet
from agentic.agentflow.solver import Solver, Trajectory
from agentic.common.errors import AgenticError, ConfigError, InfrastructureError, PromptTooLong, RoleTimeout
from agentic.common.eval_log import append_evaluation, eval_log_path, reward_figures
from agentic.common.failures import mark_failed
from agentic.common.roles import RoleTable
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

ABORT_REASONS = ("engine_aborted", "trajectory_timeout")
# The instruction that DAPO-Math-17k puts around every problem; it contradicts the output formats of our roles.
_WRAPPER_HEAD = re.compile(r"(?s)\A\s*Solve the following math problem step by step\..{0,200}?to the problem\.\s*")
_WRAPPER_TAIL = re.compile(r"\s*Remember to put your answer on its own line after \"Answer:\"\.?\s*\Z")
# The router's address is only known once it runs.
_ANY_POLICY_URL = "http://policy"


def validate_args(args: Namespace) -> None:
    """Check settings, role file and prompt set before anything is started.

    Raises:
        FileNotFoundError, ConfigError: what is wrong, where, and the remedy.
    """
    config = AgentFlowConfig.from_args(args)
    RoleTable.load(config.roles, _ANY_POLICY_URL, known_roles=ROLES, required=config.required_roles)
    PromptSet.load(config.prompt_set)


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """Run AgentFlow on one question and store the trajectory in the sample.

    Status: COMPLETED; TRUNCATED if a trained turn or the final answer hit its length limit; ABORTED if the engine
    aborted or time ran out; FAILED for any other failure of the infrastructure. The last two have `remove_sample`.

    Raises:
        ConfigError: settings, role file or prompt set are wrong, or the sample has no question.
    """
    crew = get_crew(args)
    question = question_of(sample.prompt, crew.config.strip_wrapper)
    max_steps = crew.config.eval_max_steps if evaluation else crew.config.max_steps
    solver = Solver(crew, question, sampling_params, max_steps)
    failure: AgenticError | None = None
    try:
        await solver.solve()
    except (InfrastructureError, PromptTooLong) as error:
        logger.warning("trajectory of sample %s failed: %s", sample.index, error)
        failure = error
    _store(sample, solver.trajectory, failure, crew)
    return sample


def question_of(prompt: str | list[dict[str, Any]], strip_wrapper: bool = True) -> str:
    """The question: the prompt's text, or its last user message, without the known data set wrapper.

    Raises:
        ConfigError: the prompt has no text.
    """
    if isinstance(prompt, str):
        text: Any = prompt
    else:
        text = next((message["content"] for message in reversed(prompt) if message["role"] == "user"), "")
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"sample has no question text in its prompt: {str(prompt)[:200]!r}; check --input-key")
    if strip_wrapper:
        text = _WRAPPER_TAIL.sub("", _WRAPPER_HEAD.sub("", text))
    return text.strip()


def _store(sample: Sample, trajectory: Trajectory, failure: AgenticError | None, crew: Crew) -> None:
    # A placeholder that keeps reward model and judge away; conversion excludes the sample from all statistics.
    sample.reward = None if failure is None else 0.0
    sample.metadata = {
        **sample.metadata,
        "question": trajectory.question,
        "final_output": trajectory.final_output,
        "trace": trajectory.trace,
        "stop_reason": trajectory.stop_reason if failure is None else "failure",
        "counters": dict(trajectory.counters),
        "failure_reason": None,
    }
    sample.remove_sample = False
    if failure is not None:
        mark_failed(sample, failure)
    sample.status = _status(trajectory, failure)
    sample.train_metadata = {"turns": [turn.to_dict() for turn in trajectory.turns]}
    sample.weight_versions += [turn.weight_version for turn in trajectory.turns if turn.weight_version is not None]
    sample.non_generation_time += trajectory.tool_seconds
    _store_tokens(sample, trajectory, crew)


def _store_tokens(sample: Sample, trajectory: Trajectory, crew: Crew) -> None:
    """Token fields from the last trained turn, else the last turn; without any turn one masked token."""
    turns = [turn for turn in trajectory.turns if turn.trained] or trajectory.turns
    if turns:
        last = turns[-1]
        sample.tokens, sample.response = list(last.tokens), last.text
        sample.response_length = last.response_length
        sample.loss_mask, sample.rollout_log_probs = list(last.loss_mask), list(last.rollout_log_probs)
    else:
        stub = crew.tokenizer.encode("\n", add_special_tokens=False)[:1] or [0]
        sample.tokens, sample.response, sample.response_length = stub, "", 1
        sample.loss_mask, sample.rollout_log_probs = [0], [0.0]


def _status(trajectory: Trajectory, failure: AgenticError | None) -> Sample.Status:
    if failure is None:
        return Sample.Status.TRUNCATED if trajectory.truncated else Sample.Status.COMPLETED
    timed_out = isinstance(failure, RoleTimeout) or failure.reason in ABORT_REASONS
    return Sample.Status.ABORTED if timed_out else Sample.Status.FAILED


def eval_log(
    rollout_id: int, args: Namespace, data: dict[str, dict[str, Any]], extra_metrics: dict[str, Any] | None = None
) -> bool:
    """Append one JSON line per data set to `args.save/eval_log.jsonl`; False, so that slime logs as well.

    Failed trajectories are counted, not averaged. Every line carries the settings and the role table.
    """
    path = eval_log_path(args, rollout_id)
    if path is None:
        return False
    config = AgentFlowConfig.from_args(args)
    settings = {"config": asdict(config), "roles": [asdict(role) for role in load_roles(args, config)]}
    for name, result in data.items():
        reasons = Counter(str(sample.metadata.get("stop_reason")) for sample in result.get("samples") or [])
        figures = {**reward_figures(result), "stop_reasons": dict(reasons)}
        append_evaluation(path, rollout_id, name, {**figures, **settings, "extra_metrics": extra_metrics or {}})
    return False
