"""tau2 episodes without models: a scripted desk of experts, and runs that follow the reference solution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tau2.data_model.tasks import Task

from agentic.toolorchestra.config import OrchestraConfig
from agentic.toolorchestra.environment import Observation, ToolCall
from agentic.toolorchestra.experts import ExpertReply
from agentic.toolorchestra.tau2.episode import Tau2Episode
from agentic.toolorchestra.tau2.users import STOP, ScriptedUser

CONFIG = OrchestraConfig(roles="unused.yaml", user="scripted", tau2_max_steps=500)


def expert_reply(text: str = "", *calls: ToolCall) -> ExpertReply:
    return ExpertReply(text, calls, 10, 5, 0.1)


class FakeDesk:
    """Offers the aliases and answers with the replies in order; records what it was asked."""

    def __init__(self, aliases: Sequence[str] = (), replies: Sequence[ExpertReply] = ()) -> None:
        self.names = tuple(aliases)
        self.replies = list(replies)
        self.asked: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = []

    def aliases(self, prefix: str = "") -> tuple[str, ...]:
        return tuple(name for name in self.names if name.startswith(prefix))

    def describe(self, prefix: str) -> str:
        return "\n".join(f"{name}: a model" for name in self.aliases(prefix))

    async def ask(
        self, alias: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> ExpertReply:
        self.asked.append((alias, [dict(m) for m in messages], [dict(t) for t in tools or ()]))
        return self.replies.pop(0)


def make(
    domain: str,
    task: Task,
    lines: Sequence[str | tuple[str, dict[str, Any]]] = ("I need help.",),
    desk: FakeDesk | None = None,
    config: OrchestraConfig = CONFIG,
    evaluation: bool = False,
) -> Tau2Episode:
    return Tau2Episode(task, domain, ScriptedUser(lines), desk or FakeDesk(), config, evaluation)  # type: ignore


def tool_names(episode: Tau2Episode) -> list[str]:
    return [tool["function"]["name"] for tool in episode.tools]


async def gold_run(domain: str, task: Task, drop_last: int = 0, **options: Any) -> Tau2Episode:
    """Follow the reference actions one by one (the user's as well), say what must be said, let the user stop."""
    criteria = task.evaluation_criteria
    assert criteria is not None
    actions = list(criteria.actions or [])
    actions = actions[: len(actions) - drop_last]
    lines: list[str | tuple[str, dict[str, Any]]] = ["I need help."]
    for action, after in zip(actions, [*actions[1:], None], strict=False):
        if action.requestor == "user":
            lines.append((action.name, action.arguments))
            # The user's calls end with its next text, unless the next reference action is the user's again.
            if after is not None and after.requestor == "assistant":
                lines.append("Done, what next?")
    if actions and actions[-1].requestor == "user":
        lines.append("Done, what next?")
    episode = make(domain, task, lines, **options)
    await episode.start()
    agents_turn = True
    for action in actions:
        if action.requestor == "assistant":
            await episode.act([ToolCall(action.name, action.arguments)])
            agents_turn = True
        elif agents_turn:
            await episode.say("Please do the next step on your device.")
            agents_turn = False
    said = " ".join(["Done.", *(criteria.communicate_info or [])])
    last: Observation = await episode.say(said)
    assert last.kind == "end" and episode.messages[-1].content == STOP, episode.termination
    return episode
