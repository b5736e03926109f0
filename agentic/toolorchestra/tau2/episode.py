"""One tau2 episode: policy, experts, user and environment take turns under tau2's protocol.

Inputs: a task, the user, the experts of the sample, limits. Invariants: tau2's conversation rules (a message is either
text or calls, every call is answered in order, no message is empty); steps and limits count as in tau2's orchestrator,
except that a stop of the user beats a limit that is reached in the same step; what is recorded can be replayed by the
official evaluator; the transfer tool is offered to experts only. Without experts the episode is plain tau2.
Leaves out: parsing and tokens (the loop), judging (`scoring`), money (the expert desk).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tau2.data_model.message import AssistantMessage, Message
from tau2.data_model.message import ToolCall as RecordedCall
from tau2.data_model.message import ToolMessage, UserMessage
from tau2.data_model.tasks import Task
from tau2.environment.environment import Environment

from agentic.common.errors import ConfigError
from agentic.common.roles import Role
from agentic.toolorchestra.config import OrchestraConfig
from agentic.toolorchestra.environment import Observation, Outcome, ToolCall
from agentic.toolorchestra.experts import ExpertDesk
from agentic.toolorchestra.parsing import EXPERT_CALL, without_thought
from agentic.toolorchestra.tau2 import texts
from agentic.toolorchestra.tau2.environments import domain_facts, initial_history, task_environment
from agentic.toolorchestra.tau2.pool import score_in_pool
from agentic.toolorchestra.tau2.scoring import OUT_OF_SCOPE, TaskScore, live_score
from agentic.toolorchestra.tau2.tasks import task_of
from agentic.toolorchestra.tau2.users import OUT_OF_SCOPE_MARK, ModelUser, ScriptedUser, User, has_marker

EXPERT_PREFIX = "expert-"
CALCULATOR = "calculate"
END = Observation("end")


def make_episode(
    metadata: Mapping[str, Any],
    user_role: Role | None,
    experts: ExpertDesk,
    config: OrchestraConfig,
    evaluation: bool = False,
) -> Tau2Episode:
    """The episode of a sample; `user_role` is needed unless the configuration asks for the scripted user.

    Raises:
        BadRecord: the metadata names no usable task.
        ConfigError: no role for the user, or a policy text in which experts cannot replace transfers.
    """
    domain, task = task_of(metadata)
    if config.user == "scripted":
        user: User = ScriptedUser.for_task(task)
    elif user_role is None:
        raise ConfigError("tau2 needs the role `user` in the role file, or orchestra_user: scripted")
    else:
        user = ModelUser(task, user_role)
    preference = str(metadata.get("preference") or "")
    return Tau2Episode(task, domain, user, experts, config, evaluation, preference)


class Tau2Episode:
    """A task environment of category `func_call`; `start` first, `outcome` last, one call at a time."""

    category: Literal["qa", "func_call"] = "func_call"

    def __init__(
        self,
        task: Task,
        domain: str,
        user: User,
        experts: ExpertDesk,
        config: OrchestraConfig,
        evaluation: bool = False,
        preference: str = "",
    ) -> None:
        """`preference`: what the sample's preference vector says, in words; the policy reads it, experts do not."""
        self.task, self.domain = task, domain
        self._user, self._desk, self._config = user, experts, config
        self._official = evaluation
        self._max_steps = config.tau2_eval_max_steps if evaluation else config.tau2_max_steps
        self._facts = domain_facts(domain)
        self._experts = experts.aliases(EXPERT_PREFIX)
        self.tools = self._offered_tools()
        self._policy = texts.with_experts(self._facts.policy, domain) if self._experts else self._facts.policy
        if preference:
            self._policy += f"\n\n# What the customer prefers about tools\n\n{preference}"
        self._environment: Environment | None = None
        self._calls = 0
        self.messages: list[Message] = []
        """The conversation as tau2 records it."""
        self.steps = 0
        """Messages handed over; several results of one message count once."""
        self.errors = 0
        """Tool calls that failed, of agent and user."""
        self.termination: str | None = None
        """Why tau2 ended the episode; None while it goes on."""
        self.score: TaskScore | None = None
        """Set by `outcome`."""

    def _offered_tools(self) -> list[dict[str, Any]]:
        if not self._experts:
            return list(self._facts.tools)
        kept = [tool for tool in self._facts.tools if tool["function"]["name"] != texts.TRANSFER_TOOL]
        return [*kept, texts.call_expert_schema(self._experts, self._desk.describe(EXPERT_PREFIX))]

    # ----------------------------------------------------------------------------------------------------------------
    # The policy's side.

    async def start(self) -> list[dict[str, Any]]:
        """Build the environment, let the user speak; chat messages of the first prompt."""
        self._environment = await asyncio.to_thread(task_environment, self.domain, self.task)
        self.messages = initial_history(self.task)
        if not self.messages:
            self.messages = [AssistantMessage(role="assistant", content=texts.GREETING, cost=0.0)]
        last = self.messages[-1]
        heard_later = 1 if not isinstance(last, UserMessage) else 0
        self._user.begin(self._facts.user_tools, self.messages[: len(self.messages) - heard_later])
        await self._resume(last)
        return self._conversation(texts.INSTRUCTIONS, self._policy)

    async def act(self, calls: Sequence[ToolCall]) -> Observation:
        """Carry out the calls of one turn; beside a `call_expert` nothing else runs.

        Raises:
            InfrastructureError: an expert or the user failed.
        """
        if not calls:
            raise ValueError("act() without calls: tau2 counts an empty list as a call")
        if self.termination is not None:
            return END
        expert = next((call for call in calls if call.name == EXPERT_CALL), None) if self._experts else None
        hidden = (texts.TRANSFER_TOOL,) if self._experts else ()
        results = (await self._consult(expert),) if expert is not None else self._agent_calls(calls, hidden)
        return END if self.termination is not None else Observation("tool", results)

    async def say(self, text: str) -> Observation:
        """Hand a message to the user. Raises InfrastructureError when the user fails."""
        if not text.strip():
            raise ValueError("say() without text: tau2 knows no empty message")
        if self.termination is not None:
            return END
        answer = await self._tell(text)
        return END if self.termination is not None else Observation("user", (answer,))

    async def outcome(self, termination: str | None = None) -> Outcome:
        """Judge the episode: by the official evaluator in evaluation, by the live state in training.

        Raises:
            ValueError: the episode goes on and no termination is given, or it is not between `start` and `close`.
            InfrastructureError: the pool of the official evaluators failed.
        """
        ended = self.termination or termination
        if ended is None or self._environment is None:
            raise ValueError("outcome() needs a started, unclosed episode that has ended, or the termination")
        if self._official:
            workers = self._config.tau2_workers
            self.score = await score_in_pool(self.domain, self.task, self.messages, ended, workers)
        else:
            arguments = self.domain, self.task, self._environment, self.messages, ended
            self.score = await asyncio.to_thread(live_score, *arguments)
        return Outcome(self.score.reward, self.score.evaluated, ended, dict(self.score.breakdown))

    def close(self) -> None:
        """Let go of the database."""
        self._environment = None

    # ----------------------------------------------------------------------------------------------------------------
    # Turns.

    async def _resume(self, last: Message) -> None:
        """Continue where the history ends until it is the agent's turn."""
        if isinstance(last, AssistantMessage) and last.tool_calls:
            self._execute(last.tool_calls)
        elif isinstance(last, UserMessage) and last.tool_calls:
            await self._user_turns(self._execute(last.tool_calls))
        elif isinstance(last, UserMessage):
            self._stop_if_marked(last)
        elif isinstance(last, AssistantMessage) or (isinstance(last, ToolMessage) and last.requestor == "user"):
            await self._user_turns([last])

    def _agent_calls(self, calls: Sequence[ToolCall], hidden: Sequence[str] = ()) -> tuple[str, ...]:
        """One result per call, of the policy or an expert; what is refused is not recorded."""
        refusals = [_refusal(call, hidden) for call in calls]
        results = iter(
            self._recorded_calls([c for c, refusal in zip(calls, refusals, strict=True) if refusal is None])
        )
        return tuple(next(results) if refusal is None else self._refuse(refusal) for refusal in refusals)

    def _recorded_calls(self, calls: Sequence[ToolCall]) -> list[str]:
        """Record and execute calls of the agent; their results."""
        if not calls:
            return []
        recorded = [self._recorded(call) for call in calls]
        self._record(AssistantMessage(role="assistant", tool_calls=recorded, cost=0.0))
        return [message.content or "" for message in self._execute(recorded)]

    async def _consult(self, call: ToolCall) -> str:
        """Let the expert take the turn; what it did, for the policy."""
        alias = call.arguments.get("expert")
        if alias not in self._experts:
            return self._refuse(f"There is no expert {alias!r}; experts: {', '.join(self._experts)}")
        conversation = self._conversation(texts.EXPERT_INSTRUCTIONS, self._facts.policy)
        reply = await self._desk.ask(str(alias), conversation, tools=self._facts.tools)
        if reply.tool_calls:
            calls = reply.tool_calls[: self._config.max_calls_per_turn]
            results = self._agent_calls(calls)
            done = [f"{c.name}({_shown(c)}) returned:\n{result}" for c, result in zip(calls, results, strict=True)]
            return "\n".join([f"{alias} called tools.", *done])
        text = (without_thought(reply.text) or "").strip()
        if not text:
            return self._refuse(f"{alias} neither called a tool nor wrote to the user.")
        answer = await self._tell(text)
        return f"{alias} wrote to the user:\n{text}\nThe user answered:\n{answer}"

    async def _tell(self, text: str) -> str:
        """The agent's text goes to the user; the user's answer, empty when the episode ends first."""
        message = AssistantMessage(role="assistant", content=text, cost=0.0)
        self._record(message)
        self._check_limits()
        await self._user_turns([message])
        last = self.messages[-1]
        return (last.content or "") if isinstance(last, UserMessage) else ""

    async def _user_turns(self, heard: Sequence[AssistantMessage | ToolMessage]) -> None:
        """The user speaks, after calls of its own tools if it makes any (telecom)."""
        while self.termination is None:
            message = await self._user.reply(heard)
            self._record(message)
            if not message.tool_calls:
                self._stop_if_marked(message)
                self._check_limits()
                return
            heard = self._execute(message.tool_calls)

    def _execute(self, calls: Sequence[RecordedCall]) -> list[ToolMessage]:
        assert self._environment is not None
        # A copy: a tool may change or keep a list that it is given.
        results = [self._environment.get_response(call.model_copy(deep=True)) for call in calls]
        self.errors += sum(result.error for result in results)
        self.messages += results
        self.steps += 1
        self._check_limits()
        return results

    def _refuse(self, reason: str) -> str:
        """An error for the policy that the recorded conversation does not show; it counts like a failed call."""
        self.errors += 1
        self.steps += 2
        self._check_limits()
        return f"Error: {reason}"

    # ----------------------------------------------------------------------------------------------------------------
    # Book-keeping.

    def _record(self, message: AssistantMessage | UserMessage) -> None:
        self.messages.append(message)
        self.steps += 1

    def _recorded(self, call: ToolCall) -> RecordedCall:
        self._calls += 1
        arguments = json.loads(json.dumps(call.arguments))
        return RecordedCall(id=f"agent_{self._calls}", name=call.name, arguments=arguments)

    def _stop_if_marked(self, message: UserMessage) -> None:
        text = message.content or ""
        if has_marker(text):
            self.termination = OUT_OF_SCOPE if OUT_OF_SCOPE_MARK in text else "user_stop"

    def _check_limits(self) -> None:
        if self.termination is not None:
            return
        if self.errors >= self._config.tau2_max_errors:
            self.termination = "too_many_errors"
        elif self.steps >= self._max_steps:
            self.termination = "max_steps"

    def _conversation(self, instructions: str, policy: str) -> list[dict[str, Any]]:
        """Chat messages as the agent sees them; the user's own calls are hidden from it."""
        system = {"role": "system", "content": texts.system_text(instructions, policy)}
        entries = [_as_seen_by_agent(message) for message in self.messages]
        return [system, *(entry for entry in entries if entry is not None)]


def _as_seen_by_agent(message: Message) -> dict[str, Any] | None:
    if isinstance(message, AssistantMessage):
        if not message.tool_calls:
            return {"role": "assistant", "content": message.content or ""}
        return {"role": "assistant", "content": "", "tool_calls": [_openai_call(call) for call in message.tool_calls]}
    if isinstance(message, UserMessage) and not message.tool_calls:
        return {"role": "user", "content": message.content or ""}
    if isinstance(message, ToolMessage) and message.requestor == "assistant":
        return {"role": "tool", "tool_call_id": message.id, "content": message.content or ""}
    return None


def _openai_call(call: RecordedCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _refusal(call: ToolCall, hidden: Sequence[str]) -> str | None:
    """Why a call is not carried out at all, or None."""
    if call.name in hidden:
        return f"Tool '{call.name}' not found."
    # tau2 evaluates the expression in this process: 9**9**9 would never end, here and in the official replay.
    if call.name == CALCULATOR and "**" in str(call.arguments.get("expression", "")):
        return "Invalid characters in expression"
    return None


def _shown(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)
