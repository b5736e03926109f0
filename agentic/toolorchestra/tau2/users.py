"""Who plays the customer: a model behind a role endpoint, or a script.

Inputs: the task's scenario, the user's tools (telecom), what the user hears. Invariants: a message holds either text or
calls of the user's own tools and is never empty; no thought of the model is recorded or read for markers; the model
gets the package's own guidelines and is chosen by its role, never by its name. Calls are written as text in the Hermes
convention, so that any endpoint will do and none needs a parser.
Leaves out: carrying out the calls, ending the episode (`episode`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from tau2.data_model.message import AssistantMessage, Message, ToolCall, ToolMessage, UserMessage
from tau2.data_model.tasks import StructuredUserInstructions, Task
from tau2.utils.utils import DATA_DIR

from agentic.common.clients import FrozenClient
from agentic.common.errors import RoleBadResponse
from agentic.common.roles import Role
from agentic.toolorchestra.parsing import parse_turn, without_thought

STOP, TRANSFER, OUT_OF_SCOPE_MARK = "###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"
"""Markers with which a user ends the conversation, anywhere in a text."""
MOST_ASKS = 3
"""How often the model is asked for one message before the episode fails."""
_CALL_BLOCK = re.compile(r"(?s)<tool_call>.*?(?:</tool_call>|\Z)")

TOOLS_TEXT = """

# Your tools
These are the functions you can call, one a line:
<tools>
{tools}
</tools>
To call one, write nothing but one block of this form, with the function's name and an object of its arguments:
<tool_call>
{{"name": "...", "arguments": {{}}}}
</tool_call>"""
REMINDER = "(Your last message could not be used: {problem}. Write one message now.)"


class User(Protocol):
    """The customer of one episode."""

    def begin(self, tools: Sequence[dict[str, Any]], history: Sequence[Message]) -> None:
        """Called once: the user's own tools (schemas; empty without), and what was said before the episode."""
        ...

    async def reply(self, heard: Sequence[AssistantMessage | ToolMessage]) -> UserMessage:
        """The next message after the agent's text, or after the results of the user's own calls.

        Raises InfrastructureError when the user cannot answer.
        """
        ...


def has_marker(text: str) -> bool:
    """Whether a user's text ends the conversation."""
    return any(mark in text for mark in (STOP, TRANSFER, OUT_OF_SCOPE_MARK))


def user_call(name: str, arguments: dict[str, Any], number: int) -> ToolCall:
    """A call of one of the user's own tools."""
    return ToolCall(id=f"user_{number}", name=name, arguments=arguments, requestor="user")


# --------------------------------------------------------------------------------------------------------------------
# Script.


class ScriptedUser:
    """Says given lines in order, then stops; needs no model. For tests and offline runs."""

    def __init__(self, lines: Iterable[str | tuple[str, dict[str, Any]]]) -> None:
        """A line is a text, or (name, arguments) of a call of the user's own tools."""
        self._lines = list(lines)
        self._said = 0

    @classmethod
    def for_task(cls, task: Task, confirmations: int = 3) -> ScriptedUser:
        """Tells the request and all it knows at once, says yes to the next `confirmations` messages, then stops.

        It neither answers questions nor uses tools, so its scores compare only with each other.
        """
        instructions = task.user_scenario.instructions
        if isinstance(instructions, StructuredUserInstructions):
            parts = (instructions.reason_for_call, instructions.known_info, instructions.task_instructions)
            opening = "\n".join(part.strip() for part in parts if part and part.strip())
        else:
            opening = instructions
        return cls([opening, *["Yes, please go ahead."] * confirmations])

    def begin(self, tools: Sequence[dict[str, Any]], history: Sequence[Message]) -> None:
        """Nothing to prepare."""

    async def reply(self, heard: Sequence[AssistantMessage | ToolMessage]) -> UserMessage:
        """The next line."""
        line = self._lines[self._said] if self._said < len(self._lines) else STOP
        self._said += 1
        if isinstance(line, str):
            return UserMessage(role="user", content=line, cost=0.0)
        return UserMessage(role="user", tool_calls=[user_call(line[0], line[1], self._said)], cost=0.0)


# --------------------------------------------------------------------------------------------------------------------
# Model.


@cache
def guidelines(with_tools: bool) -> str:
    """The package's instructions for user simulators."""
    name = "simulation_guidelines_tools.md" if with_tools else "simulation_guidelines.md"
    return (Path(DATA_DIR) / "tau2" / "user_simulator" / name).read_text(encoding="utf-8")


class ModelUser:
    """A language model that plays the task's scenario."""

    def __init__(self, task: Task, role: Role) -> None:
        self._role = role
        self._client = FrozenClient(role)
        self._scenario = str(task.user_scenario)
        self._tools: Sequence[dict[str, Any]] = ()
        self._messages: list[dict[str, Any]] = []
        self._calls = 0

    def begin(self, tools: Sequence[dict[str, Any]], history: Sequence[Message]) -> None:
        """Write the system message; history without the messages that the user does not see."""
        self._tools = tools
        shown = TOOLS_TEXT.format(tools="\n".join(json.dumps(tool) for tool in tools)) if tools else ""
        system = f"{guidelines(bool(tools))}{shown}\n\n<scenario>\n{self._scenario}\n</scenario>"
        self._messages = [{"role": "system", "content": system}]
        self._messages += [entry for message in history if (entry := _as_seen_by_user(message)) is not None]

    async def reply(self, heard: Sequence[AssistantMessage | ToolMessage]) -> UserMessage:
        """Ask the model, again when its message is empty or its call is malformed.

        Raises:
            InfrastructureError: the endpoint failed, or no usable message came in `MOST_ASKS` attempts.
        """
        self._messages += [entry for message in heard if (entry := _as_seen_by_user(message)) is not None]
        problem = ""
        extra: list[dict[str, Any]] = []
        for _ in range(MOST_ASKS):
            completion = await self._client.complete([*self._messages, *extra])
            message, problem = self._read(completion.text)
            if message is not None:
                self._messages.append({"role": "assistant", "content": _as_text(message)})
                return message
            # Not recorded: with temperature 0 the same question would get the same answer.
            extra = [{"role": "user", "content": REMINDER.format(problem=problem)}]
        raise RoleBadResponse(self._role.name, f"no usable user message in {MOST_ASKS} attempts: {problem}")

    def _read(self, text: str) -> tuple[UserMessage | None, str]:
        """The message, or None and what is wrong with it."""
        body = without_thought(text)
        turn = parse_turn(text, self._tools, "func_call", max_calls=1)
        if body is None or not turn.format_ok:
            return None, "; ".join(turn.errors) or "it is empty"
        if not turn.calls:
            return UserMessage(role="user", content=turn.message_text, cost=0.0), ""
        self._calls += 1
        call = user_call(turn.calls[0].name, turn.calls[0].arguments, self._calls)
        spoken = _CALL_BLOCK.sub("", body).strip()
        return UserMessage(role="user", content=spoken or None, tool_calls=[call], cost=0.0), ""


def _as_seen_by_user(message: Message) -> dict[str, Any] | None:
    """Chat message with the roles exchanged; None for what the user does not see (the agent's calls and results)."""
    if isinstance(message, UserMessage):
        return {"role": "assistant", "content": _as_text(message)}
    if isinstance(message, AssistantMessage) and not message.is_tool_call():
        return {"role": "user", "content": message.content or ""}
    if isinstance(message, ToolMessage) and message.requestor == "user":
        return {"role": "user", "content": f"<tool_response>\n{message.content}\n</tool_response>"}
    return None


def _as_text(message: UserMessage) -> str:
    calls = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in message.tool_calls or []]
    blocks = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return "\n".join([message.content, *blocks] if message.content else blocks)
