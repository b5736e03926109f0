"""Generate function over the engine's event stream, so that tokens survive a connection that is cut.

    --custom-generate-function-path slime.rollout.sglang_streaming_rollout.generate_streaming

Invariants: as of the default `generate` (ids are sent, ids and log-probs come back, the budget is what is left); after a
cut the tokens that had arrived stay in the sample and generation goes on behind them; a task that is cancelled keeps
them too, so a partial rollout can go on later. Left out: prompts with media; the engine's `--stream-output` (deltas):
every event must hold all output so far, which is SGLang's default.
"""

from __future__ import annotations

import asyncio
import json
import logging
from argparse import Namespace
from typing import Any

import httpx

from slime.rollout.sglang_rollout import (
    GenerateState,
    generation_payload,
    get_model_url,
    merge_output,
    prompt_ids,
    response_budget,
)
from slime.utils.http_utils import stream_lines
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

MAX_CUTS = 60  # in a row, without a token in between
RETRY_DELAY_S = 1.0
_EVENT = "data:"
_DONE = "[DONE]"


async def generate_streaming(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One response for the sample, over as many connections as it takes.

    Raises the last `httpx.TransportError` after `MAX_CUTS` cuts in a row without a new token.
    """
    assert sample.status in (Sample.Status.PENDING, Sample.Status.ABORTED), f"cannot generate for {sample.status}"
    state = GenerateState(args)
    total = int(sampling_params["max_new_tokens"])
    cuts = 0
    while True:
        input_ids = sample.tokens or prompt_ids(state, sample)
        params = {**sampling_params, "max_new_tokens": total}
        params["max_new_tokens"] = sampling_params["max_new_tokens"] = response_budget(args, sample, input_ids, params)
        if params["max_new_tokens"] == 0:
            sample.tokens, sample.status = list(input_ids), Sample.Status.TRUNCATED
            return sample
        before = sample.response_length
        async with state.semaphore:
            if state.aborted:
                sample.status = Sample.Status.ABORTED
                return sample
            error = await _one_stream(args, sample, input_ids, params)
        if error is None:
            return sample
        cuts = cuts + 1 if sample.response_length == before else 0
        if cuts >= MAX_CUTS:
            raise error
        logger.warning("sample %s: stream cut after %d tokens: %r", sample.index, sample.response_length, error)
        await asyncio.sleep(RETRY_DELAY_S)


async def _one_stream(
    args: Namespace, sample: Sample, input_ids: list[int], params: dict[str, Any]
) -> httpx.TransportError | None:
    """Reads one stream into the sample; returns the error that cut it, or None when the engine ended it."""
    payload, headers = generation_payload(args, sample, input_ids, params)
    latest: dict[str, Any] | None = None
    finished = False
    cut: httpx.TransportError | None = None
    try:
        async for line in stream_lines(get_model_url(args, "default"), {**payload, "stream": True}, headers):
            event = _parse_event(line)
            if event is not None:
                latest = event
                finished = event["meta_info"].get("finish_reason") is not None
        if not finished:
            cut = httpx.RemoteProtocolError("the stream ended before the engine said so")
    except httpx.TransportError as error:
        cut = None if finished else error
    finally:
        # Also on cancellation: what was generated is kept.
        if latest is not None:
            merge_output(args, sample, input_ids, latest)
    return cut


def _parse_event(line: str) -> dict[str, Any] | None:
    """The JSON of one `data:` line, None for anything else. Raises RuntimeError for an error of the engine."""
    text = line[len(_EVENT) :].strip() if line.startswith(_EVENT) else ""
    if not text or text == _DONE:
        return None
    event = json.loads(text)
    if "error" in event:
        raise RuntimeError(f"the engine refused the request: {event['error']}")
    return dict(event)
