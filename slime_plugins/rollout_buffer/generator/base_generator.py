"""Generator of the rollout buffer for single-turn tasks: asks an OpenAI-compatible endpoint and scores each answer.

A generator module has `TASK_TYPE`, `run_rollout(data)`, and optionally `transform_group`, `is_valid_group` and
`get_group_data_meta_info`; this one serves `math`. Input of `run_rollout`: the body of `/start_rollout`. Output: items posted
to `{remote_buffer_url}/buffer/write`. Invariants: an answer that was cut by an abort goes on from what it has; a request is
tried six times; every process it starts has ended when `run` returns. Left out: several turns, tools.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import queue
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from slime.rollout.rm_hub.math_utils import grade_answer_verl

logger = logging.getLogger(__name__)

TASK_TYPE = "math"
MAX_TRIES = 6
RETRY_DELAY_S = 1.0
REQUEST_TIMEOUT_S = 3600.0
_END = None


def get_rule_based_math_reward(item: dict[str, Any]) -> float:
    """1.0 when the last message's boxed answer equals `item["label"]`, else 0.0."""
    messages = item["messages"]
    if not messages or messages[-1]["role"] != "assistant" or item.get("label") is None:
        return 0.0
    return float(grade_answer_verl(messages[-1]["content"], str(item["label"])))


def query_single_turn(
    client: Any, messages: list[dict[str, Any]], sampling_params: dict[str, Any], tools: Any = None
) -> list[dict[str, Any]]:
    """The messages with the assistant's answer appended. `client` is an OpenAI client.

    Raises the last error after six tries.
    """
    from openai import OpenAIError

    answer = ""
    for attempt in range(MAX_TRIES):
        asked = messages + ([{"role": "assistant", "content": answer}] if answer else [])
        # An answer that was cut is continued, not begun again.
        extra = {"continue_final_message": True, "add_generation_prompt": False} if answer else {}
        try:
            reply = client.chat.completions.create(
                model="custom",
                messages=asked,
                stream=False,
                tools=tools,
                extra_body={**sampling_params.get("extra_body", {}), **extra},
                **{key: value for key, value in sampling_params.items() if key != "extra_body"},
            )
        except OpenAIError as error:
            if attempt + 1 == MAX_TRIES:
                raise
            logger.warning("query failed, try %d of %d: %r", attempt + 1, MAX_TRIES, error)
            time.sleep(RETRY_DELAY_S)
            continue
        choice = reply.choices[0]
        answer += choice.message.content or ""
        if choice.finish_reason != "abort":
            break
    return [*messages, {"role": "assistant", "content": answer}]


def worker_process(
    task_queue: Any,
    done_queue: Any,
    rollout_func: Callable[..., Any],
    reward_func: Callable[[dict[str, Any]], float],
    client: Any,
    sampling_params: dict[str, Any],
) -> None:
    """Takes tasks until the end mark, generates, scores, and puts the items; then passes the end mark on."""
    for task in iter(task_queue.get, _END):
        messages = rollout_func(client, task["prompt"], sampling_params)
        item = {
            "uid": uuid.uuid4().hex,
            "instance_id": task["instance_id"],
            "messages": messages,
            "label": task.get("label"),
            "extra_info": dict(task.get("extra_info") or {}),
        }
        item["reward"] = reward_func(item)
        done_queue.put(item)
    done_queue.put(_END)


class BaseGenerator:
    """Spreads the rows of a file over processes and sends what they make to the buffer.

    `remote_engine_url`: address whose `/v1` speaks OpenAI; `num_repeat_per_sample`: answers per row;
    `num_repeats`: passes over the file at most, see `entry`.
    """

    def __init__(
        self,
        remote_engine_url: str,
        remote_buffer_url: str,
        num_repeat_per_sample: int = 1,
        queue_size: int = 1000000,
        num_process: int = 10,
        task_type: str = "math",
        max_tokens: int = 4096,
        num_repeats: int = 10,
        skip_instance_ids: list[str] | None = None,
    ) -> None:
        self.remote_engine_url = remote_engine_url.rstrip("/")
        self.remote_buffer_url = remote_buffer_url.rstrip("/")
        self.num_repeat_per_sample, self.num_process = num_repeat_per_sample, num_process
        self.queue_size, self.task_type, self.max_tokens = queue_size, task_type, max_tokens
        self.num_repeats = num_repeats
        self.skip_instance_ids = set(skip_instance_ids or [])
        self.sampling_params: dict[str, Any] = {"max_tokens": max_tokens}

    def send_data_to_buffer(self, data: dict[str, Any]) -> None:
        """Posts one item, up to six times. Raises `httpx.HTTPError` of the last try."""
        for attempt in range(MAX_TRIES):
            try:
                answer = httpx.post(f"{self.remote_buffer_url}/buffer/write", json=data, timeout=60.0, trust_env=False)
                answer.raise_for_status()
                return
            except httpx.HTTPError as error:
                if attempt + 1 == MAX_TRIES:
                    raise
                logger.warning("buffer write failed, try %d of %d: %r", attempt + 1, MAX_TRIES, error)
                time.sleep(RETRY_DELAY_S)

    def run(self, input_file: str, rollout_func: Callable[..., Any], reward_func: Callable[..., float]) -> None:
        """One pass over the file."""
        context = multiprocessing.get_context("spawn")
        tasks: Any = context.Queue(maxsize=self.queue_size)
        done: Any = context.Queue(maxsize=self.queue_size)
        client = _Client(f"{self.remote_engine_url}/v1")
        arguments = (tasks, done, rollout_func, reward_func, client, self.sampling_params)
        workers = [
            context.Process(target=worker_process, args=arguments, daemon=True) for _ in range(self.num_process)
        ]
        for worker in workers:
            worker.start()
        try:
            for task in self._tasks(input_file):
                tasks.put(task)
            for _ in workers:
                tasks.put(_END)
            self._forward(done, workers)
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.terminate()
                worker.join()

    def _forward(self, done: Any, workers: list[Any]) -> None:
        running = len(workers)
        while running:
            try:
                item = done.get(timeout=1.0)
            except queue.Empty:
                if any(worker.exitcode not in (None, 0) for worker in workers):
                    raise RuntimeError("a generator process failed, see its output") from None
                continue
            if item is _END:
                running -= 1
            else:
                self.send_data_to_buffer(item)

    def _tasks(self, input_file: str) -> Iterator[dict[str, Any]]:
        with Path(input_file).open(encoding="utf-8") as file:
            for number, line in enumerate(file):
                if not line.strip():
                    continue
                row = json.loads(line)
                row.setdefault("instance_id", str(number))
                if isinstance(row.get("prompt"), str):
                    row["prompt"] = [{"role": "user", "content": row["prompt"]}]
                if row["instance_id"] not in self.skip_instance_ids:
                    yield from (dict(row) for _ in range(self.num_repeat_per_sample))

    def entry(
        self, input_file: str, rollout_func: Callable[..., Any], reward_func: Callable[..., float], num_epoch: int = 1
    ) -> None:
        """`num_epoch` passes over the file, at most `num_repeats`."""
        for epoch in range(min(num_epoch, self.num_repeats)):
            logger.info("pass %d over %s", epoch + 1, input_file)
            self.run(input_file, rollout_func, reward_func)


class _Client:
    """An OpenAI client that can be sent to another process: it connects there, on first use."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        from openai import OpenAI

        self.chat: Any
        client = OpenAI(
            base_url=self.base_url,
            api_key="none",
            timeout=REQUEST_TIMEOUT_S,
            max_retries=0,
            http_client=httpx.Client(trust_env=False, timeout=REQUEST_TIMEOUT_S),
        )
        self.__dict__["chat"] = client.chat
        return getattr(client, name)


def run_rollout(data: dict[str, Any]) -> None:
    """Generates for the body of `/start_rollout`; returns when everything is in the buffer."""
    maker = BaseGenerator(
        data["remote_engine_url"],
        data["remote_buffer_url"],
        num_repeat_per_sample=int(data["num_repeat_per_sample"]),
        num_process=int(data.get("num_process", 10)),
        task_type=data["task_type"],
        max_tokens=int(data["max_tokens"]),
        skip_instance_ids=data.get("skip_instance_ids"),
    )
    maker.sampling_params.update(data.get("sampling_params") or {})
    maker.entry(data["input_file"], query_single_turn, get_rule_based_math_reward, int(data.get("num_epoch", 1)))


def normalize_group_data(group: Any, epsilon: float = 1e-8, algo: str = "grpo") -> Any:
    """The group with rewards centred and divided by their standard deviation; the old ones are kept as `raw_reward`."""
    if algo != "grpo":
        raise ValueError(f"algo {algo!r}: only grpo is known")
    name, items = group
    rewards = [float(item["reward"]) for item in items]
    mean = statistics.fmean(rewards)
    spread = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    scale = 1.0 / (spread + epsilon) if spread else 0.0
    return name, [
        {**item, "raw_reward": r, "reward": (r - mean) * scale} for item, r in zip(items, rewards, strict=True)
    ]


def is_valid_group(group: Any, min_valid_group_size: int, task_type: str = "math") -> bool:
    """Whether the group has all its answers."""
    return len(group[1]) >= min_valid_group_size
