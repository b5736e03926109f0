"""What the policy reads in a tau2 episode: instructions, the policy text with experts in place of transfers, schemas.

Inputs: the domain's official policy text and the experts of the sample. Invariants: the substitution is checked, it
must change something and leave no sentence that tells the agent to transfer; with no experts nothing is substituted.
Leaves out: rendering to tokens (the loop).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agentic.common.errors import ConfigError
from agentic.toolorchestra.parsing import EXPERT_CALL, MESSAGE_CLOSE, MESSAGE_OPEN

TRANSFER_TOOL = "transfer_to_human_agents"
GREETING = "Hi! How can I help you today?"
"""tau2's fixed first message of the agent."""

CONSULT = (
    f"Whenever you are unsure what to do, or a request seems to be beyond you, consult an expert with {EXPERT_CALL}: "
    "the expert sees the conversation and takes the next step in your place."
)
# (what the policies of the package and of ToolScale say, what stands there instead), tried in order.
SUBSTITUTIONS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"You should transfer the user to a human agent if and only if [^.\n]*\. To transfer, first make a tool call"
            r" to transfer_to_human_agents, and then send the message '[^'\n]*' to the user\."
        ),
        CONSULT,
    ),
    (re.compile(r"You should transfer (?:the user to )?(?:the )?an? human agent\."), "Consult an expert instead."),
    (re.compile(r"before transferring (?:the user )?to (?:a|an|the) human agent"), "before consulting an expert"),
    (re.compile(r"(?:the agent cannot help and )?transfer is needed"), "an expert is to be consulted"),
    (re.compile(r"transfer (?:the user )?to (?:technical support|an? human agent)"), "consult an expert"),
)
LEFT_OVER = re.compile(
    rf"(?i){TRANSFER_TOOL}|\btransfer(?:s|red|ring)?\b[^.\n]*\b(?:human|agents?|support)\b|\btransfer is needed"
    r"|\b(?:human|agents?)\b[^.\n]*\btransfer(?:s|red|ring)?\b"
)

INSTRUCTIONS = f"""You are a customer service agent and help the user within the <policy> below.
In each turn either call tools or write to the user, never both. Think first; the user does not see your thoughts.
Put what the user is to read between {MESSAGE_OPEN} and {MESSAGE_CLOSE}."""

EXPERT_INSTRUCTIONS = """You are a customer service agent and help the user within the <policy> below.
In each turn either call tools or write to the user, never both."""

CALL_EXPERT_TEXT = """Let an expert model take this turn: it sees the whole conversation and, in your place, either \
uses the domain's tools or answers the user; you are told what it did. Experts:
{experts}"""


def system_text(instructions: str, policy: str) -> str:
    """The system message of an agent."""
    return f"<instructions>\n{instructions}\n</instructions>\n<policy>\n{policy}\n</policy>"


def with_experts(policy: str, domain: str) -> str:
    """The policy text with experts where it speaks of human agents.

    Raises:
        ConfigError: nothing was substituted, or a sentence about transfers is left (the policy text has changed).
    """
    changed = 0
    for pattern, replacement in SUBSTITUTIONS:
        policy, count = pattern.subn(replacement, policy)
        changed += count
    left = LEFT_OVER.search(policy)
    if changed == 0 or left is not None:
        found = f"'{left.group(0)[:120]}' is left" if left else "it mentions no transfer to a human agent"
        raise ConfigError(f"policy of domain '{domain}': cannot put experts in place of transfers: {found}")
    # Where only a side remark was replaced, the rule itself would be missing.
    return policy if CONSULT in policy else f"{policy.rstrip()}\n\n{CONSULT}\n"


def call_expert_schema(aliases: Sequence[str], description: str) -> dict[str, Any]:
    """Function schema of `call_expert` for the experts of one sample; `description` is one paragraph per alias."""
    expert = {"type": "string", "enum": list(aliases), "description": "Which expert takes the turn."}
    parameters = {"type": "object", "properties": {"expert": expert}, "required": ["expert"]}
    text = CALL_EXPERT_TEXT.format(experts=description)
    return {"type": "function", "function": {"name": EXPERT_CALL, "description": text, "parameters": parameters}}
