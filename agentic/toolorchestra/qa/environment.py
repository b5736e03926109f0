"""One question as an episode: which calls of a turn are carried out, and what the policy is shown.

Inputs: question, reference, the record's metadata, the experts of the rollout, retriever and judge. Invariants: in a turn
each tool is called at most once and nothing is called after `answer`; the episode ends with `answer`; the score is asked
for once, at the end; a turn without a valid call changes nothing. Leaves out: tokens and limits of turns (the loop).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from agentic.common.errors import BadRecord, ConfigError
from agentic.common.judge import JudgeClient
from agentic.toolorchestra.config import OrchestraConfig
from agentic.toolorchestra.environment import Observation, Outcome, ToolCall
from agentic.toolorchestra.experts import ExpertDesk
from agentic.toolorchestra.prompts import PromptSet
from agentic.toolorchestra.qa.grading import grade
from agentic.toolorchestra.qa.state import POLICY_BUDGETS, QAState, Tokenizer
from agentic.toolorchestra.qa.tools import QATools, build_schemas, offered_names, sandbox_limits
from agentic.toolorchestra.retrieval.client import RetrievalClient


class QAEpisode:
    """The `TaskEnvironment` of category `qa`."""

    category: Literal["qa", "func_call"] = "qa"

    def __init__(
        self,
        question: str,
        label: str,
        metadata: Mapping[str, Any],
        experts: ExpertDesk,
        retriever: RetrievalClient | None,
        judge: JudgeClient | None,
        config: OrchestraConfig,
        *,
        prompts: PromptSet,
        tokenizer: Tokenizer,
    ) -> None:
        """`tokenizer`: the policy's, it measures the budgets.

        Raises:
            BadRecord: the sample offers no `answer`, or its state cannot be read.
            ConfigError: it offers `search`, and there is no retriever.
        """
        self.question, self.label = question, label
        self._judge, self._prompts, self._tokenizer = judge, prompts, tokenizer
        self._budgets = POLICY_BUDGETS.within(config.max_context_len - config.max_new_tokens)
        self.tools = build_schemas(experts, offered_names(metadata.get("tools")))
        names = [tool["function"]["name"] for tool in self.tools]
        if retriever is None and "search" in names:
            raise ConfigError(
                f"{config.roles}: `search` needs the role `retrieval`; add its url with `api: service`, or offer no "
                "alias search-..."
            )
        if "answer" not in names:
            raise BadRecord("no_answer_tool", "the sample offers no `answer` tier; add one to tools and model_mapping")
        limits = sandbox_limits(config.sandbox_timeout_s, config.sandbox_memory_mb)
        eid, state = str(metadata.get("eid") or ""), QAState.from_metadata(metadata)
        self.toolkit = QATools(
            question, state, experts, retriever, prompts, tokenizer, config.retrieval_topk, limits, eid
        )

    async def start(self) -> list[dict[str, str]]:
        """The first prompt: the problem, what the record brings along, the request to choose a tool."""
        return self.state_prompt()

    def state_prompt(self) -> list[dict[str, str]]:
        """The prompt of the next turn from the state alone (layout `turns`)."""
        state = self.toolkit.state.render(self._budgets, self._tokenizer)
        return self._prompts.render("qa_turn", question=self.question, state=state)

    async def act(self, calls: Sequence[ToolCall]) -> Observation:
        """Run the first call of each tool, in order, up to and with `answer`. Raises InfrastructureError."""
        texts: list[str] = []
        done: set[str] = set()
        for call in calls:
            if self.toolkit.prediction is not None:
                break
            if call.name not in done:
                done.add(call.name)
                texts.append(await self.toolkit.run(call))
        return Observation("tool" if self.toolkit.prediction is None else "end", tuple(texts))

    async def say(self, text: str) -> Observation:
        raise RuntimeError("a question has no user to talk to")

    async def outcome(self, termination: str | None = None) -> Outcome:
        """Score of the prediction; 0 without one. Raises Unscored when the judge fails."""
        prediction = self.toolkit.prediction
        if prediction is None:
            return Outcome(0.0, False, termination or "unanswered", {})
        render = partial(self._prompts.render, "judge")
        score, judged_by = await grade(self.question, prediction, self.label, self._judge, render)
        return Outcome(score, True, "answer", {f"judged_by_{judged_by}": 1.0})

    def close(self) -> None:
        """Nothing is held open: the clients belong to the process."""
