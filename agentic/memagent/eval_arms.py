"""How the arms of an evaluation answer an item, and what the answer scores.

Arms: `memagent` and `untrained` read the document with the loop of training (`reader`), `direct` gets as much of it as fits
one prompt, the middle left out. Inputs: jobs of the generic loop (`agentic.common.evaluation`) whose questions are items.
Invariants: all arms are scored by the same rules; the question and the instruction are always whole, in the direct prompt
behind the document; a failure of the infrastructure is an outcome without a score; every cut is counted.
Leaves out: settings and files (`eval`), statistics (`eval_summary`).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentic.common.clients import PolicyClient
from agentic.common.errors import AgenticError, ConfigError, InfrastructureError, PromptTooLong
from agentic.common.evaluation import Job, Outcome, sampling_seed
from agentic.common.roles import Role
from agentic.memagent.agent import MemAgent
from agentic.memagent.data_items import RULER, Item
from agentic.memagent.prompts import TokenTemplate
from agentic.memagent.reader import Reader
from agentic.memagent.scoring import METRICS, best, boxed_answer, match, multi_value
from agentic.memagent.tokens import Document, TextEncoder, control_ids

DIRECT = "direct"
ARMS = (DIRECT, "untrained", "memagent")
"""In the order in which differences are taken: later minus earlier."""
FORMS = {"boxed": "Give the final answer in \\boxed{}.", "answer_is": "End with: the answer is (your final answer)."}
DIRECT_TEXT = "Answer the problem from the article.\n\n<article>\n{document}\n</article>\n\n<problem>\n{question}\n</problem>\n\n{form}"
HEADLINE = {RULER: "multi_value"}
MIN_SPAN = 3
_ANSWER_PHRASE = "the answer is"


class Reply(NamedTuple):
    """What an arm gave: final text, calls in order, further facts, why it failed."""

    text: str
    trace: list[dict[str, Any]]
    facts: dict[str, Any]
    failure: AgenticError | None = None


# --------------------------------------------------------------------------------------------------------------------
# Arms.


@dataclass(frozen=True)
class AgentArm:
    """The memory agent, trained or not."""

    agent: MemAgent

    async def reply(self, item: Item, params: Mapping[str, Any]) -> Reply:
        text, depth = await asyncio.to_thread(open_item, item)
        reader = Reader(self.agent, item.question, text, params, evaluation=True, keep_turns=False)
        failure: AgenticError | None = None
        try:
            await reader.read()
        except (InfrastructureError, PromptTooLong) as error:
            failure = error
        reading, counters = reader.reading, reader.reading.counters
        left_out = counters["context_tokens_left_out"]
        facts = {
            "turns": len(reading.trace),
            "memory_tokens": counters["memory_tokens"] / max(counters["chunks"], 1),
            "context_tokens": counters["context_tokens_read"] + left_out,
            "context_truncated": int(left_out > 0),
            "empty_memory": counters["empty_memories"],
            "memory": reading.memory,
            "counters": dict(counters),
            "depth": depth,
        }
        return Reply(reading.answer, reading.trace, facts, failure)


@dataclass(frozen=True)
class DirectArm:
    """One prompt with the document, or with its first and last part when it is too long."""

    template: TokenTemplate
    policy: PolicyClient
    encoder: TextEncoder
    control: frozenset[int]
    tokenizer: Any
    context_tokens: int
    """Prompt and answer."""
    max_new_tokens: int

    @classmethod
    def build(cls, role: Role, tokenizer: Any, form: str, context_tokens: int, max_new_tokens: int) -> DirectArm:
        """Raises ConfigError when the answer leaves no room for the prompt."""
        template = compile_direct(tokenizer, form)
        if template.overhead + max_new_tokens >= context_tokens:
            raise ConfigError(
                f"--direct-context {context_tokens}: no room for a document beside --direct-max-new-tokens "
                f"{max_new_tokens} and a prompt text of {template.overhead} tokens"
            )
        policy, encoder = PolicyClient(role, tokenizer, context_tokens), TextEncoder(tokenizer)
        return cls(template, policy, encoder, control_ids(tokenizer), tokenizer, context_tokens, max_new_tokens)

    def prompt(self, question: str, text: str) -> tuple[list[int], int, int]:
        """(ids of the prompt, tokens of the document, how many of those were left out in the middle).

        Raises PromptTooLong when the question alone does not fit.
        """
        question_ids = self.encoder(question).tolist()
        room = self.context_tokens - self.max_new_tokens - self.template.overhead - len(question_ids)
        if room < 1:
            raise PromptTooLong(f"a question of {len(question_ids)} tokens in a context of {self.context_tokens}")
        document = Document(text, self.encoder)
        total = document.count()
        head = min((room + 1) // 2, total)
        tail = min(room - head, total - head)
        ids = document.take(0, head) + document.take(total - tail, total)
        return self.template.render(document=ids, question=question_ids), total, total - head - tail

    async def reply(self, item: Item, params: Mapping[str, Any]) -> Reply:
        text, depth = await asyncio.to_thread(open_item, item)
        facts: dict[str, Any] = {"turns": 1, "depth": depth}
        try:
            prompt, total, left_out = await asyncio.to_thread(self.prompt, item.question, text)
            facts |= {"context_tokens": total, "context_tokens_left_out": left_out}
            facts["context_truncated"] = int(left_out > 0)
            turn = await self.policy.generate_ids(
                prompt, {**params, "max_new_tokens": self.max_new_tokens}, role_name=DIRECT, trained=False
            )
        except (InfrastructureError, PromptTooLong) as error:
            return Reply("", [], facts, error)
        entry = {"role": DIRECT, "finish_reason": turn.finish_reason, "cached_tokens": turn.cached_tokens}
        entry |= {"prompt_tokens": turn.prompt_length, "completion_tokens": turn.response_length}
        failure = InfrastructureError("engine_aborted") if turn.finish_reason == "abort" else None
        kept = [token for token in turn.response_ids if token not in self.control and token < len(self.tokenizer)]
        return Reply(self.tokenizer.decode(kept), [entry], facts, failure)


def compile_direct(tokenizer: Any, form: str) -> TokenTemplate:
    """The direct prompt with the slots `document` and `question`, in this order."""
    marks = {"document": "\ue000", "question": "\ue001"}
    messages = [{"role": "user", "content": DIRECT_TEXT.format(form=FORMS[form], **marks)}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    parts = re.split("[\ue000\ue001]", text)
    if len(parts) != 3:
        raise ConfigError("direct prompt: the chat template repeats or drops the message's text")
    literals = tuple(tuple(map(int, tokenizer.encode(part, add_special_tokens=False))) for part in parts)
    return TokenTemplate(literals, tuple(marks))


def open_item(item: Item) -> tuple[str, float | None]:
    """The document's text, and `depth_of` it; takes a while for long ones."""
    text = item.context.text
    return text, depth_of(item, text)


def depth_of(item: Item, text: str) -> float | None:
    """Where the earliest evidence lies, 0 (start) to 1 (end).

    Files that do not say so: where the first reference occurs first in the document; None for short ones and yes or no.
    """
    if item.evidence:
        return item.evidence[0]
    reference = item.references[0].casefold()
    if len(reference) < MIN_SPAN or reference in ("yes", "no"):
        return None
    place = text.casefold().find(reference)
    return None if place < 0 else place / len(text)


# --------------------------------------------------------------------------------------------------------------------
# Scores.


def predicted(reply: str, form: str) -> str | None:
    """The final answer in a reply: the last box, or what follows the last "the answer is" on its line."""
    if form == "boxed":
        return boxed_answer(reply)
    _, phrase, rest = reply.rpartition(_ANSWER_PHRASE)
    if not phrase:
        return None
    answer = rest.lstrip(" :").partition("\n")[0].strip()
    inner = re.fullmatch(r"\((.*)\)[.!]?", answer)
    return (inner.group(1) if inner else answer.rstrip(".")).strip()


def measures_of(reply: str, references: Sequence[str], form: str) -> dict[str, float]:
    """Every metric; `<metric>_first` with the first reference only, `em` is the training reward's equality."""
    prediction = predicted(reply, form)
    scores = {name: best(metric, prediction, references) for name, metric in METRICS.items()}
    first = {f"{name}_first": best(metric, prediction, references[:1]) for name, metric in METRICS.items()}
    return {
        **scores,
        **first,
        "em": best(match, prediction, references),
        "multi_value": multi_value(reply, references),
    }


class Evaluator:
    """Answers and scores jobs; the `answer` function of the generic loop."""

    def __init__(
        self, arms: Mapping[str, Any], sampling: Mapping[str, Any], form: str, seed: int, seeded: Mapping[str, bool]
    ) -> None:
        self.arms, self.sampling, self.form, self.seed, self.seeded = arms, dict(sampling), form, seed, seeded

    async def answer(self, job: Job) -> Outcome:
        """One item in one run of one arm."""
        item: Item = job.question
        start = time.monotonic()
        seed = sampling_seed(self.seed, job) if self.seeded[job.arm] else None
        params = self.sampling | ({} if seed is None else {"sampling_seed": seed})
        reply = await self.arms[job.arm].reply(item, params)
        cut = sum(entry["finish_reason"] == "length" for entry in reply.trace)
        details = {**reply.facts, "turn_truncated": cut, "seed": seed, "references": list(item.references)}
        seconds, tokens = time.monotonic() - start, _tokens_by_role(reply.trace)
        if reply.failure is not None:
            details["failure_detail"] = str(reply.failure)
            # A prompt that does not fit is a limit of the protocol and fails every time: a wrong answer, not a mishap.
            over = isinstance(reply.failure, PromptTooLong)
            score, by, reason = 0.0 if over else None, "budget" if over else "none", reply.failure.reason
            return Outcome(reply.text, score, by, None, tokens, seconds, reason, details)
        prediction = predicted(reply.text, self.form)
        measures = measures_of(reply.text, item.references, self.form)
        details |= {"prediction": prediction, "measures": measures, "no_answer_form": int(prediction is None)}
        score = measures[HEADLINE.get(item.kind, "sub_em")]
        return Outcome(reply.text, score, "rule", prediction, tokens, seconds, None, details)


def _tokens_by_role(trace: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    tokens: dict[str, Counter[str]] = {}
    for entry in trace:
        counts = tokens.setdefault(entry["role"], Counter(prompt=0, completion=0, cached=0, calls=0))
        counts.update(prompt=entry["prompt_tokens"], completion=entry["completion_tokens"], calls=1)
        counts["cached"] += entry["cached_tokens"]
    return {role: dict(counts) for role, counts in tokens.items()}
