"""What OpenAI's two endpoints have in common: assistant turns as the trajectory keeps them, tools, errors.

Leaves out: everything on which the endpoints differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.agent.adapters.common import AdapterError, invalid, tool_call_dict


def assistant_message(text: str, tool_uses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """An assistant turn: its text, or its first tool call with empty content."""
    if not tool_uses:
        return {"role": "assistant", "content": text}
    first = tool_uses[0]
    return {"role": "assistant", "content": "", "tool_calls": [tool_call_dict(first["name"], first["input"])]}


def function_tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Function tools of a request in the form chat templates take; others are not offered to the policy."""
    if body.get("tool_choice") == "none" or not body.get("tools"):
        return []
    tools = [tool for tool in list_of_objects(body, "tools") if tool.get("type", "function") == "function"]
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema as the agent wrote it: under `function` in Chat Completions, beside the type in Responses."""
    if isinstance(tool.get("function"), dict):
        return tool["function"]
    return {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}


def list_of_objects(body: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """`body[key]`. Raises AdapterError 400 unless it is a list of JSON objects."""
    value = body.get(key)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise invalid(f"{key} must be a list of objects")
    return value


def error_body(error: AdapterError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": str(error), "type": error.kind, "param": None, "code": error.kind}}
