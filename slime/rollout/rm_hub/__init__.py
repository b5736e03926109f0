"""Reward hub: scores samples with a custom function, a remote server or a built-in rule.

Input: finished samples. Order of choice: the sample's own `custom_rm_path`, `--custom-rm-path`, then the rule named by
`metadata["rm_type"]` or `--rm-type`; the prefix `boxed_` passes only the last boxed content to the rule.
Invariant: a reward is returned, never stored; whether a sample may be scored (failed, aborted) is the caller's choice.
Left out: judges by language model (method packages bring their own).
"""

from __future__ import annotations

import asyncio
import logging
import random
import weakref
from collections.abc import Callable
from typing import Any

import httpx

from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.ifbench import TIME_LIMIT_S, compute_ifbench_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.rm_hub.math_utils import extract_boxed_answer, grade_answer_verl
from slime.utils.misc import load_function
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_REMOTE_CONNECTIONS = 64
_REMOTE_TIMEOUT_S = 120.0
_REMOTE_MAX_BACKOFF_S = 30
_BOXED_PREFIX = "boxed_"

_RULES: dict[str, Callable[[str, Any], Any]] = {
    "deepscaler": get_deepscaler_rule_based_reward,
    "dapo": compute_score,
    "math": lambda response, label: int(grade_answer_verl(response, label)),
    "f1": lambda response, label: f1_score(response, label)[0],
    "random": lambda response, label: random.randint(0, 1),
}
_METADATA_RULES: dict[str, Callable[[str, Any, dict[str, Any]], float]] = {
    "gpqa": compute_gpqa_reward,
    "ifbench": compute_ifbench_reward,
}
_BOX_READERS = ("deepscaler", "math")  # they look for the box themselves

# A client belongs to the event loop that opened its connections.
_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = weakref.WeakKeyDictionary()


def _remote_client() -> httpx.AsyncClient:
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        limits = httpx.Limits(max_connections=_REMOTE_CONNECTIONS)
        _clients[loop] = httpx.AsyncClient(limits=limits, timeout=_REMOTE_TIMEOUT_S, trust_env=False)
    return _clients[loop]


async def remote_rm(args: Any, sample: Sample, max_retries: int = 10) -> Any:
    """POSTs `{prompt, response, label}` to `--rm-url` and returns the decoded JSON.

    Tries `max_retries` times with exponential back-off (at most 30 s plus jitter); raises the last error.
    """
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    return await post_with_retries(args.rm_url, payload, max_retries)


async def post_with_retries(url: str, payload: dict[str, Any], max_retries: int = 10) -> Any:
    """POSTs JSON and returns the decoded answer; each try has 120 s, see `remote_rm` for the back-off."""
    for attempt in range(max_retries):
        try:
            return await asyncio.wait_for(_post_json(url, payload), _REMOTE_TIMEOUT_S)
        except (httpx.HTTPError, asyncio.TimeoutError, ValueError):
            if attempt + 1 == max_retries:
                raise
            await asyncio.sleep(min(2**attempt, _REMOTE_MAX_BACKOFF_S) + random.random())
    raise ValueError(f"max_retries must be at least 1, got {max_retries}")


async def _post_json(url: str, payload: dict[str, Any]) -> Any:
    response = await _remote_client().post(url, json=payload)
    response.raise_for_status()
    return response.json()


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """Reward of one sample: a number, or whatever the custom function, the server or `dapo` returns (a dict).

    Raises NotImplementedError for an unknown or missing rule name.
    """
    custom_path = sample.custom_rm_path or args.custom_rm_path
    if custom_path is not None:
        return await load_function(custom_path)(args, sample, **kwargs)
    rm_type = (_metadata(sample).get("rm_type") or args.rm_type or "").strip()
    response: str = sample.response
    if rm_type.startswith(_BOXED_PREFIX):
        rm_type = rm_type[len(_BOXED_PREFIX) :]
        response = response if rm_type in _BOX_READERS else extract_boxed_answer(response) or ""
    if rm_type == "remote_rm":
        return await remote_rm(args, sample)
    if rm_type not in _RULES and rm_type not in _METADATA_RULES:
        known = ", ".join(sorted([*_RULES, *_METADATA_RULES, "remote_rm"]))
        raise NotImplementedError(f"--rm-type {rm_type!r} is not a built-in reward; use one of {known}")
    if rm_type in _METADATA_RULES:
        return await _time_limited(rm_type, response, sample)
    return _RULES[rm_type](response, sample.label)


async def _time_limited(rm_type: str, response: str, sample: Sample) -> float:
    """A rule that runs code of another package or long patterns, beside the event loop; too long is 0.0."""
    call = asyncio.to_thread(_METADATA_RULES[rm_type], response, sample.label, _metadata(sample))
    try:
        return await asyncio.wait_for(call, TIME_LIMIT_S)
    except asyncio.TimeoutError:
        logger.warning("--rm-type %s took more than %.0f s on sample %s: 0.0", rm_type, TIME_LIMIT_S, sample.index)
        return 0.0


def _metadata(sample: Sample) -> dict[str, Any]:
    return sample.metadata if isinstance(sample.metadata, dict) else {}


async def batched_async_rm(args: Any, samples: list[Sample], **kwargs: Any) -> list[Any]:
    """Rewards of several samples, in order. `--custom-rm-path` is called once with the whole list.

    Raises ValueError when the custom function does not return one reward per sample.
    """
    if args.custom_rm_path is None:
        return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))
    rewards = await load_function(args.custom_rm_path)(args, samples, **kwargs)
    if not isinstance(rewards, list) or len(rewards) != len(samples):
        raise ValueError(
            f"--custom-rm-path {args.custom_rm_path} was called with {len(samples)} samples and must return a list "
            f"of as many rewards, got {rewards!r}"
        )
    return rewards
