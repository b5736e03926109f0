"""Runs the `--rollout-sample-hook-path` functions on every sample after generation and before its reward.

Invariants: the nesting of the input is kept; a hook sees each leaf once, in order; hooks run in the order of the flags.
Left out: any error handling - an exception in a hook stops the run with its traceback.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from slime.utils.misc import load_function
from slime.utils.types import Sample

_current_rollout_id: int | None = None


def set_current_rollout_id(rollout_id: int | None) -> None:
    """Records the rollout that is running; hooks receive it as `rollout_id`."""
    global _current_rollout_id
    _current_rollout_id = rollout_id


async def apply_rollout_sample_hooks(args: Any, value: Any, **kwargs: Any) -> Any:
    """Applies all hooks to the `Sample` leaves of `value` (a sample or nested lists) and returns the same shape.

    Raises TypeError when a hook returns something other than None or a Sample.
    """
    keywords = {"rollout_id": _current_rollout_id, **kwargs}
    for path in getattr(args, "rollout_sample_hook_path", None) or []:
        value = await _walk(load_function(path), path, args, value, keywords)
    return value


async def _walk(hook: Callable[..., Any], path: str, args: Any, value: Any, keywords: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [await _walk(hook, path, args, item, keywords) for item in value]
    result = hook(args, value, **accepted_keywords(hook, keywords))
    if inspect.isawaitable(result):
        result = await result
    if result is None:
        return value
    if not isinstance(result, Sample):
        raise TypeError(f"rollout sample hook {path} returned {type(result).__name__}; return None or a Sample")
    return result


def accepted_keywords(fn: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """The part of `keywords` that the signature of `fn` accepts."""
    parameters = inspect.signature(fn).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return keywords
    return {name: value for name, value in keywords.items() if name in parameters}
