"""Parsers for what the roles write: next step, tool command, verdict, program.

Inputs: text of a model. Invariants: nothing is executed or evaluated, a command is read from its syntax tree; the last
complete statement of a model wins over earlier ones; a text that cannot be read gives `Malformed` with the reason in
words that the planner can act on, never a guess. Leaves out: which tools exist (`tools`), and final answers and the
judge's output (`agentic.common`).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentic.common.escape import well_formed

_THINK = re.compile(r"(?is)<think>.*?(?:</think>|\Z)")
_END_OF_TURN = re.compile(r"<\|(?:im_end|endoftext|eot_id|end|end_of_text)\|>|</s>|<end_of_turn>")
_FENCE_LINE = re.compile(r"(?m)^[ \t]*```[\w+-]*[ \t]*$")
_FENCED = re.compile(r"(?s)```[ \t]*([\w+-]*)[ \t]*\n(.*?)(?:```|\Z)")
_LABEL = re.compile(
    r"(?im)^[ \t#>*_`\-]*(?:\d+[.)][ \t*_`]*)?(?P<label>justification|context|sub[-_ ]?goal|tool[-_ ]?name)[*_` \t]*:"
    r"[*_`]*[ \t]*"
)
_CONCLUSION = re.compile(r"(?i)\b(?:conclusion|verdict|decision)\b[\s*_`:=\"']*\b(stop|continue)\b")
_LOOSE_QUERY = re.compile(r"(?s)\btool\.execute\(\s*query\s*=\s*(\"\"\"|'''|\"|')(.*)\1\s*\)")
_MAX_COMMAND_CHARS = 65536


@dataclass(frozen=True)
class Malformed:
    """A model's text that could not be read; `reason` is shown to the planner as the result of the step."""

    reason: str


@dataclass(frozen=True)
class NextStep:
    """The planner's choice. `tool_name` is as written, quotes and decoration removed, not yet resolved."""

    context: str
    sub_goal: str
    tool_name: str
    justification: str = ""


@dataclass(frozen=True)
class Command:
    """One `tool.execute(...)` call: its keyword arguments (plain literals) and the text it was read from."""

    kwargs: Mapping[str, Any]
    source: str


def strip_reasoning(text: str) -> str:
    """Remove think blocks (closed, cut off, or opened by the chat template) and end-of-turn markers."""
    text = _THINK.sub("", text)
    text = text.rpartition("</think>")[2]
    return _END_OF_TURN.sub("", text).strip()


def normalize_tool_name(name: str) -> str:
    """A key for comparing tool names: case, spaces, underscores, hyphens and a final "tool" do not count."""
    key = re.sub(r"[\s_\-]+", "", name).lower()
    return key.removesuffix("tool") or key


def parse_next_step(text: str) -> NextStep | Malformed:
    """The last complete (Context, Sub-Goal, Tool Name) triple of a planner reply; a JSON object is accepted too."""
    text = strip_reasoning(text)
    return _json_step(text) or _labelled_step(_FENCE_LINE.sub("", text))


def _labelled_step(text: str) -> NextStep | Malformed:
    last: NextStep | None = None
    fields: dict[str, str] = {}
    for label, value in _labelled_fields(text):
        if label == "context":
            fields.pop("subgoal", None)
        fields[label] = value
        if label == "toolname":
            complete = fields.get("context") and fields.get("subgoal") and value
            last = _step_of(fields) if complete else last
            fields = {} if complete else fields
    if last is not None:
        return last
    names = {"context": "Context", "subgoal": "Sub-Goal", "toolname": "Tool Name"}
    missing = [name for key, name in names.items() if not fields.get(key)]
    problem = f"missing or empty: {', '.join(missing)}" if missing else "fields out of order"
    return Malformed(f"the next step could not be read ({problem}); end with Context:, Sub-Goal:, Tool Name:")


def _labelled_fields(text: str) -> Iterator[tuple[str, str]]:
    matches = list(_LABEL.finditer(text))
    for i, match in enumerate(matches):
        end = matches[i + 1].start() if i + 1 < len(matches) else len(text)
        label = re.sub(r"[-_ ]", "", match["label"]).lower()
        value = text[match.end() : end]
        if label == "toolname":
            value = _clean_tool_name(value.partition("\n")[0])
        yield label, value.strip().removesuffix("**").strip()


def _step_of(fields: Mapping[str, str]) -> NextStep:
    return NextStep(fields["context"], fields["subgoal"], fields["toolname"], fields.get("justification", ""))


def _clean_tool_name(line: str) -> str:
    return line.strip(" \t\r\"'`*_[](){}<>.,;:")


def _json_step(text: str) -> NextStep | None:
    last: NextStep | None = None
    position = text.find("{")
    while position >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, position)
        except (ValueError, RecursionError):
            end = position + 1
        else:
            last = _step_from_object(value) or last
        position = text.find("{", end)
    return last


def _step_from_object(value: Any) -> NextStep | None:
    if not isinstance(value, dict):
        return None
    fields = {re.sub(r"[-_ ]", "", key).lower(): str(item).strip() for key, item in value.items()}
    if not all(fields.get(key) for key in ("context", "subgoal", "toolname")):
        return None
    return _step_of(fields | {"toolname": _clean_tool_name(fields["toolname"])})


def parse_command(text: str, max_calls: int = 1) -> list[Command] | Malformed:
    """The `tool.execute(...)` calls of an executor reply, in order.

    Only assignments of literals to names, and calls whose keyword values are literals or such names, are accepted.
    """
    source = _command_source(strip_reasoning(text))
    if len(source) > _MAX_COMMAND_CHARS:
        return Malformed(f"the command is longer than {_MAX_COMMAND_CHARS} characters")
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _loose_command(source)
    commands = _read_statements(statements, source)
    if isinstance(commands, Malformed):
        return commands
    if not commands:
        return Malformed("the command has no call tool.execute(...)")
    if len(commands) > max_calls:
        return Malformed(f"the command has {len(commands)} calls; at most {max_calls} per step")
    return commands


def _command_source(text: str) -> str:
    blocks = [body for _, body in _FENCED.findall(text) if "tool.execute" in body]
    return (blocks[-1] if blocks else _FENCE_LINE.sub("", text)).strip()


def _read_statements(statements: list[ast.stmt], source: str) -> list[Command] | Malformed:
    names: dict[str, Any] = {}
    commands: list[Command] = []
    for statement in statements:
        try:
            if isinstance(statement, (ast.Assign, ast.Expr)) and _is_execute(statement.value):
                segment = ast.get_source_segment(source, statement) or source
                commands.append(Command(_keyword_values(statement.value, names), segment))
            else:
                names |= _literal_assignment(statement, names)
        except (_NotLiteral, RecursionError) as error:
            return Malformed(f"the command is not allowed in line {statement.lineno}: {error}")
    return commands


class _NotLiteral(ValueError):
    """A node that is more than a literal."""


def _is_execute(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr == "execute" and isinstance(node.func.value, ast.Name) and node.func.value.id == "tool"


def _keyword_values(call: ast.expr, names: Mapping[str, Any]) -> dict[str, Any]:
    assert isinstance(call, ast.Call)
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise _NotLiteral('name every argument, e.g. tool.execute(query="...")')
    return {str(keyword.arg): _literal(keyword.value, names) for keyword in call.keywords}


def _literal_assignment(statement: ast.stmt, names: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        if isinstance(target, ast.Name):
            return {target.id: _literal(statement.value, names)}
    raise _NotLiteral("only literal assignments and execution = tool.execute(...) are allowed")


def _literal(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.JoinedStr) and all(isinstance(part, ast.Constant) for part in node.values):
        return "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
    try:
        return _well_formed(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError) as error:
        raise _NotLiteral(f"{ast.unparse(node)[:80]!r} is not a literal value") from error


def _well_formed(value: Any) -> Any:
    """The literal with `well_formed` texts: it goes to servers, which take nothing else."""
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, dict):
        return {_well_formed(key): _well_formed(item) for key, item in value.items()}
    return type(value)(map(_well_formed, value)) if isinstance(value, (list, tuple)) else value


def _loose_command(source: str) -> list[Command] | Malformed:
    """Last resort for text that is not Python, mostly unescaped quotes: one call with one query literal."""
    match = _LOOSE_QUERY.search(source) if source.count("tool.execute") == 1 else None
    if match is None:
        return Malformed('the command is not Python; write execution = tool.execute(query="...")')
    return [Command({"query": match[2]}, match.group())]


def parse_stop(text: str) -> bool | None:
    """The verifier's last verdict: True for STOP, False for CONTINUE, None when there is none.

    Without a labelled verdict the last three lines are searched for the capitalised words, or for a line that is
    nothing but the word; running text ("we should not stop") is no verdict.
    """
    text = strip_reasoning(text)
    labelled = _CONCLUSION.findall(text)
    if labelled:
        return bool(labelled[-1].lower() == "stop")
    tail = "\n".join(text.splitlines()[-3:])
    words = re.findall(r"\b(STOP|CONTINUE)\b|(?im:^\W*(stop|continue)\W*$)", tail)
    return None if not words else "".join(words[-1]).lower() == "stop"


def extract_program(text: str) -> str:
    """The first fenced Python block; without one the first untagged block; without any fence the whole text."""
    blocks = _FENCED.findall(text := strip_reasoning(text))
    python = [body for tag, body in blocks if tag.lower() in ("python", "py", "python3")]
    untagged = [body for tag, body in blocks if not tag]
    return (python + untagged + [text])[0].strip()
