"""Rollout function that takes its samples from a rollout buffer service.

    --rollout-function-path slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout
    --rollout-buffer-url http://127.0.0.1:8889 --rollout-task-type math --disable-rollout-global-dataset

Input: groups of conversations with rewards. Output: `rollout_batch_size` groups of `n_samples_per_prompt` samples.
Invariants: tokens and masks come from the mask generator (`--loss-mask-type`); a group stays whole; when more arrived than
are needed, the newest are taken and the others stay in the data source's buffer. The engine's token ids and log-probs are not
part of the protocol, so a trained row has none. Left out: evaluation.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.utils.async_utils import run
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.misc import group_by
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

POLL_S = 1.0
REQUEST_TIMEOUT_S = 600.0

_started: set[str] = set()  # services that were told to generate


def select_rollout_data(args: Any, results: list[Any], need_length: int) -> list[Any]:
    """The newest groups of `results` that make up `need_length` items, whole groups only, in order of arrival.

    Items of a group share `instance_id`.
    """
    groups = list(group_by(results, key=lambda item: item["instance_id"]).values())
    selected: list[list[Any]] = []
    count = 0
    for group in reversed(groups):
        if count >= need_length:
            break
        selected.append(group)
        count += len(group)
    return [item for group in reversed(selected) for item in group]


def log_raw_info(args: Any, all_meta_info: list[dict[str, Any]], rollout_id: int) -> dict[str, float]:
    """Counts and mean reward of everything that was written meanwhile, as metrics of the rollout."""
    total = sum(info["total_samples"] for info in all_meta_info)
    if not total:
        return {}
    reward = sum(info["avg_reward"] * info["total_samples"] for info in all_meta_info) / total
    metrics = {
        "rollout/buffer/total_samples": float(total),
        "rollout/buffer/num_groups": float(sum(info["num_groups"] for info in all_meta_info)),
        "rollout/buffer/avg_reward": reward,
    }
    logger.info("rollout %d: %s", rollout_id, metrics)
    return metrics


async def get_rollout_data(api_base_url: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(items of complete groups, meta info) that the service has now; no items when there are none."""
    async with httpx.AsyncClient(trust_env=False, timeout=REQUEST_TIMEOUT_S) as client:
        answer = await client.post(f"{api_base_url}/get_rollout_data", json={})
        answer.raise_for_status()
    body = answer.json()
    data = body.get("data") or {}
    return (list(data["data"]), dict(data["meta_info"])) if body["success"] else ([], {})


def start_rollout(api_base_url: str, args: Any, metadata: dict[str, Any]) -> None:
    """Tells the service to generate; `metadata["finished_groups"]` are not generated again. Raises `httpx.HTTPError`."""
    payload = {
        "num_process": str(getattr(args, "rollout_num_process", 10)),
        "num_epoch": str(args.num_epoch or 1),
        "remote_engine_url": f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
        "remote_buffer_url": api_base_url,
        "task_type": args.rollout_task_type,
        "input_file": args.prompt_data,
        "num_repeat_per_sample": str(args.n_samples_per_prompt),
        "max_tokens": str(args.rollout_max_response_len),
        "sampling_params": {"temperature": args.rollout_temperature, "top_p": args.rollout_top_p},
        "tokenizer_path": args.hf_checkpoint,
        "skip_instance_ids": metadata.get("finished_groups"),
    }
    answer = httpx.post(f"{api_base_url}/start_rollout", json=payload, timeout=REQUEST_TIMEOUT_S, trust_env=False)
    answer.raise_for_status()
    logger.info("rollout buffer: %s", answer.json()["message"])


async def generate_rollout_async(
    args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> dict[str, Any]:
    """Fetches until enough complete groups are there; returns `{"samples": groups, "metrics": ...}`.

    Raises RuntimeError after `--fetch-trajectory-retry-times` empty answers in a row, ValueError for evaluation.
    """
    if evaluation:
        raise ValueError("the rollout buffer has no evaluation; set --eval-function-path or leave --eval-interval out")
    if not args.rollout_buffer_url:
        raise ValueError("--rollout-buffer-url: needed, the address of the rollout buffer service")
    url = args.rollout_buffer_url.rstrip("/")
    if url not in _started:
        start_rollout(url, args, data_buffer.get_metadata())
        _started.add(url)
    needed = args.rollout_batch_size * args.n_samples_per_prompt
    waiting = data_buffer.get_buffer_length() * args.n_samples_per_prompt
    wanted = max(0, int(needed * args.min_batch_collection_ratio) - waiting)
    items, infos = await _fetch(args, url, wanted)
    _remember_finished(data_buffer, infos)
    metrics = log_raw_info(args, infos, rollout_id)
    kept = select_rollout_data(args, items, needed)
    data_buffer.add_samples(to_groups(args, kept))
    available = min(args.rollout_batch_size, data_buffer.get_buffer_length())
    return {"samples": data_buffer.get_samples(available), "metrics": metrics}


async def _fetch(args: Any, url: str, wanted: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    items: list[dict[str, Any]] = []
    infos: list[dict[str, Any]] = []
    empty = 0
    while len(items) < wanted:
        new, info = await get_rollout_data(url)
        if new:
            items, empty = items + new, 0
            infos.append(info)
            continue
        empty += 1
        if 0 <= args.fetch_trajectory_retry_times < empty:
            raise RuntimeError(
                f"{url} had no complete group {empty} times in a row (--fetch-trajectory-retry-times "
                f"{args.fetch_trajectory_retry_times}); is its generator running?"
            )
        await asyncio.sleep(POLL_S)
    return items, infos


def _remember_finished(data_buffer: Any, infos: list[dict[str, Any]]) -> None:
    finished = list(data_buffer.get_metadata().get("finished_groups") or [])
    finished += [name for info in infos for name in info.get("finished_groups", [])]
    data_buffer.update_metadata({"finished_groups": finished})


def to_groups(args: Any, items: list[dict[str, Any]]) -> list[list[Sample]]:
    """Samples of the items, by instance. A group that has not `n_samples_per_prompt` members is left out, with a warning."""
    generator = MultiTurnLossMaskGenerator(
        load_tokenizer(args.hf_checkpoint, trust_remote_code=True),
        tokenizer_type=args.loss_mask_type,
        train_boundary_token=getattr(args, "train_boundary_token", False),
    )
    groups = []
    for name, members in group_by(items, key=lambda item: item["instance_id"]).items():
        if len(members) < args.n_samples_per_prompt:
            logger.warning("group %s has %d members: left out", name, len(members))
            continue
        groups.append([_sample(generator, item) for item in members[: args.n_samples_per_prompt]])
    _number(groups)
    return groups


_next_group = 0


def _number(groups: list[list[Sample]]) -> None:
    global _next_group
    for group in groups:
        for position, sample in enumerate(group):
            sample.group_index = _next_group
            sample.index = _next_group * len(group) + position
        _next_group += 1


def _sample(generator: MultiTurnLossMaskGenerator, item: dict[str, Any]) -> Sample:
    tokens, mask = generator.get_loss_mask(item["messages"])
    length = generator.get_response_lengths([mask])[0]
    truncated = bool((item.get("extra_info") or {}).get("truncated"))
    metadata = {**(item.get("extra_info") or {}), "instance_id": item["instance_id"]}
    if "raw_reward" in item:
        metadata["raw_reward"] = item["raw_reward"]
    return Sample(
        prompt=item["messages"][:-1],
        tokens=tokens,
        response=item["messages"][-1]["content"],
        response_length=length,
        loss_mask=mask[len(mask) - length :],
        label=item.get("label"),
        reward=item["reward"],
        status=Sample.Status.TRUNCATED if truncated else Sample.Status.COMPLETED,
        metadata=metadata,
    )


def generate_rollout(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """Synchronous entry (`--rollout-function-path`); see `generate_rollout_async`."""
    return RolloutFnTrainOutput(**run(generate_rollout_async(args, rollout_id, data_buffer, evaluation)))
