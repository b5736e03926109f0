"""What all readings of a process share, built once: compiled prompts, client of the policy, documents in use.

Inputs: settings, the policy's tokenizer and address. Invariants: the budgets of the settings and the compiled prompts fit
the window, which is checked here before the first call; a text is one `Document` for all readings that are under way
with it, so the samples of a group share its ids; there is no state of a question and none of an event loop.
Leaves out: the loop over the chunks (`reader`).
"""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from agentic.common.clients import PolicyClient
from agentic.common.errors import BadRecord, ConfigError
from agentic.common.roles import Role
from agentic.memagent.config import PREFIX, MemAgentConfig
from agentic.memagent.prompts import SLOTS, PromptSet, TokenTemplate
from agentic.memagent.tokens import Chunks, Document, TextEncoder, clean_ids, control_ids, open_chunks
from slime.rollout.sglang_rollout import GenerateState, get_model_url

logger = logging.getLogger(__name__)

ROLE = "memagent"


@dataclass(frozen=True)
class MemAgent:
    """Everything that readings share."""

    config: MemAgentConfig
    templates: Mapping[str, TokenTemplate]
    """By role: `memory`, `answer`."""
    placeholder: tuple[int, ...]
    """The memory before the first turn."""
    prefill: str
    """Text with which the answer begins; it is part of the answer prompt."""
    policy: PolicyClient
    tokenizer: Any
    encoder: TextEncoder
    control: frozenset[int]
    documents: WeakValueDictionary[str, Document] = field(default_factory=WeakValueDictionary)

    @classmethod
    def build(
        cls, config: MemAgentConfig, tokenizer: Any, url: str, chat_options: Mapping[str, Any] | None = None
    ) -> MemAgent:
        """For a policy behind `url` (without `/generate`); `chat_options` go to the chat template.

        Raises:
            ConfigError: the prompt set is incomplete, or the budgets do not fit the window.
        """
        prompts = PromptSet.load(config.prompt_set)
        options = dict(chat_options or {})
        templates = {role: prompts.compile(role, tokenizer, config.system_prompt, **options) for role in SLOTS}
        encoder = TextEncoder(tokenizer)
        placeholder = tuple(encoder(prompts.no_memory).tolist())
        check_window(config, {role: template.overhead for role, template in templates.items()}, len(placeholder))
        role = Role(
            ROLE,
            url,
            trained=True,
            timeout_s=config.timeout_s,
            retries=config.retries,
            max_concurrency=config.max_concurrency,
        )
        policy = PolicyClient(role, tokenizer, config.window_tokens)
        control = control_ids(tokenizer)
        return cls(config, templates, placeholder, prompts.answer_prefill, policy, tokenizer, encoder, control)

    def document(self, text: str) -> Document:
        """The document of this text: the one in use, or a new one. Not for several threads at a time."""
        document = self.documents.get(text)
        if document is None:
            self.documents[text] = document = Document(text, self.encoder)
        return document

    def open(self, document: Document, evaluation: bool) -> Chunks:
        """The chunks of a document under the limits of training or evaluation.

        Raises:
            ConfigError: there are more than allowed, and the policy for that is `error`.
        """
        limit = self.config.eval_max_chunks if evaluation else self.config.max_chunks
        chunks = open_chunks(document, self.config.chunk_tokens, limit)
        if chunks.skip and self.config.truncation == "error":
            name = "eval_max_chunks" if evaluation else "max_chunks"
            raise ConfigError(
                f"a document of {document.count()} tokens has more than {PREFIX}{name} {limit} chunks of "
                f"{chunks.size}; raise it, or set {PREFIX}truncation: center"
            )
        return chunks

    def encode_question(self, text: str) -> tuple[list[int], int]:
        """(ids within the budget, number of ids cut off).

        Raises:
            BadRecord: it is no valid Unicode, which no tokenizer takes.
            ConfigError: the question is longer, and the policy for that is `error`.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRecord("question_not_text", f"question {text[:80]!r}: {error}") from error
        ids, budget = self.encoder(text).tolist(), self.config.question_tokens
        if len(ids) > budget and self.config.on_long_question == "error":
            raise ConfigError(
                f"the question {text[:80]!r} has {len(ids)} tokens, {PREFIX}question_tokens is {budget}; "
                f"raise it, or set {PREFIX}on_long_question: cut"
            )
        return ids[:budget], max(len(ids) - budget, 0)

    def clean(self, ids: Sequence[int], stop_ids: Sequence[int] = ()) -> tuple[list[int], int]:
        """Generated ids as they may stand in the next prompt, and how many were left out; see `clean_ids`."""
        return clean_ids(ids, stop_ids, self.control, len(self.tokenizer))


def check_window(config: MemAgentConfig, overheads: Mapping[str, int], placeholder: int) -> None:
    """Whether every call fits `window_tokens`; `overheads` are the ids of the prompt texts by role.

    Raises:
        ConfigError: with the sum of the parts, and by how much it is too large.
    """
    parts = {
        "memory": (config.question_tokens, config.memory_tokens, config.chunk_tokens, config.memory_tokens),
        "answer": (config.question_tokens, config.memory_tokens, config.answer_tokens),
    }
    for role, budgets in parts.items():
        total = overheads[role] + sum(budgets)
        if total > config.window_tokens:
            terms = " + ".join(map(str, (overheads[role], *budgets)))
            raise ConfigError(
                f"{PREFIX}window_tokens is {config.window_tokens}: the {role} turn may need {terms} = {total} tokens "
                f"(prompt text, question, memory{', chunk' if role == 'memory' else ''}, response); lower one of the "
                f"{PREFIX}..._tokens by {total - config.window_tokens}, or raise the window"
            )
    if placeholder > config.memory_tokens:
        raise ConfigError(f"no_memory.txt has {placeholder} tokens, {PREFIX}memory_tokens is {config.memory_tokens}")


_AGENTS: dict[tuple[MemAgentConfig, str, str], MemAgent] = {}


def get_agent(args: Namespace) -> MemAgent:
    """The process's agent for these arguments. Built without awaiting, so two tasks cannot build it twice."""
    config = MemAgentConfig.from_args(args)
    options = chat_options(args)
    key = (config, get_model_url(args, "default", endpoint=""), json.dumps(options, sort_keys=True))
    if key not in _AGENTS:
        config.check_flags(args)
        _AGENTS[key] = agent = MemAgent.build(config, GenerateState(args).tokenizer, key[1], options)
        overheads = {role: template.overhead for role, template in agent.templates.items()}
        logger.info(
            "MemAgent settings: %s\npolicy (trained): %s; tokens of the prompts: %s", config, key[1], overheads
        )
    return _AGENTS[key]


def chat_options(args: Namespace) -> dict[str, Any]:
    """Options of the chat template (`--apply-chat-template-kwargs`)."""
    return dict(getattr(args, "apply_chat_template_kwargs", None) or {})
