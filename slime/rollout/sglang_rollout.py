"""Default rollout function: samples groups of answers from SGLang behind the router, scores them, keeps a full batch.

Input: `args`, a rollout id and a data source. Output: `RolloutFnTrainOutput` with `rollout_batch_size` groups (a member
is a `Sample`, or a list of them after fan-out), or `RolloutFnEvalOutput` for evaluation.
Invariants: the policy is asked with `input_ids`, and what is trained are the ids and log-probs it returns; the
semaphore is held around the model call only, and belongs to one event loop; FAILED and ABORTED samples are never
scored; an exception in a hook stops the rollout with its traceback, after everything in flight was cancelled.
Left out: prompts with media; conversion to train data (`conversion.py`); unbounded staleness (fully async rollout).
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
import uuid
import weakref
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, iter_leaves
from slime.rollout.eval_inputs import EVAL_PROMPT_DATASET, eval_reward, eval_samples, eval_sampling_params
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sample_hooks import accepted_keywords, apply_rollout_sample_hooks, set_current_rollout_id
from slime.utils.async_utils import run
from slime.utils.engine_abort import ABORT_INTERVAL_S, abort_requests, abort_servers_until_idle, worker_urls
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.http_utils import _wrap_ipv6, get_rollout_num_engines, post
from slime.utils.misc import SingletonMeta, load_function
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample

__all__ = [
    "EVAL_PROMPT_DATASET",
    "GenerateState",
    "abort",
    "eval_rollout",
    "eval_rollout_single_dataset",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_model_url",
]

logger = logging.getLogger(__name__)

ABORT_GRACE_S = 60.0  # partial rollout: how long a sample may take to stop before its task is cancelled
CANCEL_GRACE_S = 10.0  # how long a cancelled task may take to clean up
PROGRESS_INTERVAL_S = 2.0

_FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED)
_SCORABLE = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.PENDING)


def get_model_url(args: Namespace, model_name: str, endpoint: str = "/generate") -> str:
    """URL of a model's router: its entry in `args.sglang_model_routers`, else the default router."""
    routers = getattr(args, "sglang_model_routers", None) or {}
    host, port = routers.get(model_name, (args.sglang_router_ip, args.sglang_router_port))
    return f"http://{_wrap_ipv6(host)}:{port}{endpoint}"


class GenerateState(metaclass=SingletonMeta):
    """What all samples of a process share: tokenizer, sampling parameters, concurrency limit, tasks in flight."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        self.processor = load_processor(args.hf_checkpoint, trust_remote_code=True)
        self.sampling_params = _train_sampling_params(args)
        self.group_sampling_seeds: list[int] | None = None
        if getattr(args, "sglang_enable_deterministic_inference", False):
            self.group_sampling_seeds = [args.rollout_seed + i for i in range(args.n_samples_per_prompt)]
        self.dp_counts = [0] * (getattr(args, "sglang_dp_size", None) or 1)
        self.dp_rank = 0
        self._semaphores: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self.reset()

    @property
    def semaphore(self) -> asyncio.Semaphore:
        """Limit of concurrent model calls (`sglang_server_concurrency` per engine) for the running event loop."""
        limit = max(self.args.sglang_server_concurrency * get_rollout_num_engines(self.args), 1)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.Semaphore(limit)  # only to be looked at: nothing can wait for it outside of a loop
        return self._semaphores.setdefault(loop, asyncio.Semaphore(limit))

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Chooses a least-loaded data-parallel rank for the duration of an episode."""
        rank = min(range(len(self.dp_counts)), key=self.dp_counts.__getitem__)
        self.dp_counts[rank] += 1
        self.dp_rank = rank
        try:
            yield rank
        finally:
            self.dp_counts[rank] -= 1

    def reset(self) -> None:
        """Forgets the rollout: no tasks, nothing aborted."""
        self.remaining_batch_size = 0  # groups that are kept or in flight
        self.pendings: set[asyncio.Task[Any]] = set()
        self.submitted_groups: dict[asyncio.Task[Any], list[Any]] = {}
        self.aborted = False

    def submit_generate_tasks(self, samples: list[list[Sample]]) -> None:
        """Starts one task per group."""
        for group in samples:
            task = asyncio.create_task(
                generate_and_rm_group(self.args, group, sampling_params=self.sampling_params.copy(), evaluation=False)
            )
            self.pendings.add(task)
            self.submitted_groups[task] = group
        self.remaining_batch_size += len(samples)


def _train_sampling_params(args: Namespace) -> dict[str, Any]:
    params = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if args.rollout_top_p != 1:
        # The trainer needs the nucleus of every position to compute the same probabilities.
        params["custom_params"] = {"return_top_p_token_ids": True}
    return params


def prompt_ids(state: GenerateState, sample: Sample) -> list[int]:
    """Ids of the prompt; a list of messages is rendered with the chat template first."""
    if sample.multimodal_inputs:
        raise NotImplementedError(
            f"sample {sample.index} has media ({sorted(sample.multimodal_inputs)}); the default generate function "
            "takes text only, use --custom-generate-function-path"
        )
    text = sample.prompt
    if not isinstance(text, str):
        text = state.tokenizer.apply_chat_template(
            text,
            tools=sample.metadata.get("tools"),
            tokenize=False,
            add_generation_prompt=True,
            **(sample.apply_chat_template_kwargs or {}),
        )
    return list(state.tokenizer.encode(text, add_special_tokens=False))


def response_budget(
    args: Namespace, sample: Sample, input_ids: list[int], params: dict[str, Any], evaluation: bool = False
) -> int:
    """Tokens that may still be generated: the response limit less what exists, within the context limit."""
    budget = int(params["max_new_tokens"]) - sample.response_length
    assert (
        budget >= 0
    ), f"sample {sample.index}: response of {sample.response_length} exceeds {params['max_new_tokens']}"
    context = getattr(args, "rollout_max_context_len", None)
    if evaluation and getattr(args, "eval_max_context_len", None) is not None:
        context = args.eval_max_context_len
    return budget if context is None else max(0, min(budget, context - len(input_ids)))


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """One model call for the sample: a fresh prompt, or the rest of an aborted response.

    `sampling_params["max_new_tokens"]` is lowered in place to what may still be generated; with nothing left the
    sample is TRUNCATED without a request.
    """
    assert sample.status in (Sample.Status.PENDING, Sample.Status.ABORTED), f"cannot generate for {sample.status}"
    state = GenerateState(args)
    input_ids = sample.tokens or prompt_ids(state, sample)
    sampling_params["max_new_tokens"] = response_budget(args, sample, input_ids, sampling_params, evaluation)
    if sampling_params["max_new_tokens"] == 0:
        sample.tokens = list(input_ids)
        sample.status = Sample.Status.TRUNCATED
        return sample
    payload, headers = generation_payload(args, sample, input_ids, sampling_params)
    async with state.semaphore:
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        output = await _ask_engine(args, payload, headers)
    merge_output(args, sample, input_ids, output)
    return sample


def generation_payload(
    args: Namespace, sample: Sample, input_ids: list[int], sampling_params: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Body and headers of a `/generate` request; the header keeps a session's requests on one engine."""
    payload: dict[str, Any] = {"sampling_params": sampling_params, "return_logprob": True, "input_ids": input_ids}
    if getattr(args, "use_rollout_routing_replay", False):
        payload["return_routed_experts"] = True
    if getattr(args, "router_policy", None) == "consistent_hashing" and sample.session_id:
        return payload, {"X-SMG-Routing-Key": sample.session_id}
    return payload, None


async def _ask_engine(args: Namespace, payload: dict[str, Any], headers: dict[str, str] | None) -> dict[str, Any]:
    """The engine's answer. Raises TimeoutError after `--sglang-router-request-timeout-secs`, retries included.

    The router has the same limit for one request, but it cannot help when its own machine is gone.
    """
    limit_s = getattr(args, "sglang_router_request_timeout_secs", None)
    url = get_model_url(args, "default")
    try:
        return await asyncio.wait_for(post(url, payload, headers=headers), limit_s)
    except asyncio.TimeoutError as error:
        raise TimeoutError(
            f"{url} did not answer within --sglang-router-request-timeout-secs {limit_s}; see the engines' logs"
        ) from error


def merge_output(args: Namespace, sample: Sample, input_ids: list[int], output: dict[str, Any]) -> None:
    """Appends what the engine returned for `input_ids` to the sample. Raises ValueError when it read other ids."""
    meta = output["meta_info"]
    if meta.get("prompt_tokens", len(input_ids)) != len(input_ids):
        raise ValueError(f"sent {len(input_ids)} prompt tokens, the engine read {meta['prompt_tokens']}")
    generated = meta.get("output_token_logprobs") or []  # empty when aborted while queued
    sample.tokens = list(input_ids)
    sample.append_response_tokens(
        args,
        tokens=[item[1] for item in generated],
        log_probs=[item[0] for item in generated],
        meta_info=meta,
        text=output["text"],
    )


async def generate_and_rm(
    args: Namespace,
    sample: Sample | list[Sample],
    sampling_params: dict[str, Any],
    evaluation: bool = False,
) -> Sample | list[Sample]:
    """Generates one sample with its hook and scores it; finished samples of an earlier rollout pass unchanged.

    A list comes back when the hook cut its episode into several samples (fan-out).
    """
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout:
        for earlier in iter_leaves(sample):
            if earlier.response_length > 0:
                earlier.loss_mask = [0] * earlier.response_length
    if isinstance(sample, list):  # a fan-out episode that an earlier rollout finished
        await _score(args, sample)
        return sample
    state = GenerateState(args)
    if sample.status in _FINISHED:
        await _score(args, sample)
        return sample
    if state.aborted:
        sample.status = Sample.Status.ABORTED
        return sample
    # An aborted fan-out cannot be resumed from its pieces; its episode starts again from here.
    start = copy.deepcopy(sample) if args.partial_rollout else None
    with state.dp_rank_context():
        result = await _call_generate(args, sample, sampling_params, evaluation)
    result = await apply_rollout_sample_hooks(args, result, evaluation=evaluation)
    if isinstance(result, list) and _has_status(result, Sample.Status.ABORTED):
        return result if start is None else start
    await _score(args, result)
    return result


async def _call_generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Any:
    path = sample.generate_function_path or args.custom_generate_function_path
    function: Callable[..., Any] = load_function(path) if path else generate
    return await function(args, sample, sampling_params, **accepted_keywords(function, {"evaluation": evaluation}))


def _has_status(value: Any, status: Sample.Status) -> bool:
    return any(sample.status is status for sample in iter_leaves(value))


async def _score(args: Namespace, result: Sample | list[Sample]) -> None:
    """Fills missing rewards; a group reward comes later, failed and aborted samples have none."""
    if args.group_rm:
        return
    if isinstance(result, Sample):
        if result.reward is None and result.status in _SCORABLE:
            result.reward = await async_rm(args, result)
        return
    await _score_batch(args, [s for s in iter_leaves(result) if s.reward is None and s.status in _SCORABLE])


async def _score_batch(args: Namespace, samples: list[Sample]) -> None:
    if not samples:
        return
    rewards = await batched_async_rm(args, samples)
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward


async def generate_and_rm_group(
    args: Namespace, group: list[Any], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Any]:
    """Generates and scores all members of a group at once; the result has one member per input member."""
    state = GenerateState(args)
    if state.aborted:
        return group
    for sample in iter_leaves(group):
        sample.session_id = sample.session_id or uuid.uuid4().hex
    calls = []
    for i, sample in enumerate(group):
        params = sampling_params.copy()
        if state.group_sampling_seeds is not None:
            params["sampling_seed"] = state.group_sampling_seeds[i]
        calls.append(generate_and_rm(args, sample, params, evaluation=evaluation))
    result = await _gather_or_cancel(calls)
    if args.group_rm and not state.aborted and not _has_status(result, Sample.Status.ABORTED):
        await _score_batch(args, [s for s in iter_leaves(result) if s.status in _SCORABLE])
    return result


async def _gather_or_cancel(calls: list[Coroutine[Any, Any, Any]], bar: tqdm | None = None) -> list[Any]:
    """As `asyncio.gather`, but a failing call cancels the others instead of leaving them behind."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    if bar is not None:
        for task in tasks:
            task.add_done_callback(lambda _: bar.update(1))
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await _cancel(tasks)
        raise


async def _cancel(tasks: Any) -> None:
    """Cancels tasks and waits, within a bound, until they have ended."""
    unfinished = [task for task in tasks if not task.done()]
    for task in unfinished:
        task.cancel()
    if not unfinished:
        return
    done, stubborn = await asyncio.wait(unfinished, timeout=CANCEL_GRACE_S)
    for task in done:
        if not task.cancelled() and task.exception() is not None:
            logger.warning("a cancelled rollout task failed: %r", task.exception())
    if stubborn:
        logger.warning("%d rollout tasks ignore their cancellation for %.0f s", len(stubborn), CANCEL_GRACE_S)


async def abort(args: Namespace, rollout_id: int) -> list[list[Sample]]:
    """Ends everything in flight; with `--partial-rollout` returns the groups that were not collected.

    Without it the samples are not needed: their tasks are cancelled first, so that they send no further request while
    the servers drain. With it samples may end by themselves; those that take too long are cancelled.
    """
    state = GenerateState(args)
    state.aborted = True
    if not state.pendings:
        return []
    urls = await worker_urls(get_model_url(args, "default", "/workers"))
    if args.partial_rollout:
        deadline = time.monotonic() + ABORT_GRACE_S
        while (waiting := [t for t in state.pendings if not t.done()]) and time.monotonic() < deadline:
            await abort_requests(urls)
            await asyncio.wait(waiting, timeout=ABORT_INTERVAL_S)
    await _cancel(state.pendings)
    await abort_servers_until_idle(urls)
    return _returned_groups(state, rollout_id) if args.partial_rollout else []


def _returned_groups(state: GenerateState, rollout_id: int) -> list[list[Sample]]:
    groups = []
    for task in state.pendings:
        group = state.submitted_groups[task] if task.cancelled() or not task.done() else task.result()
        for sample in iter_leaves(group):
            if sample.response_length > 0:
                sample.metadata.setdefault("start_rollout_id", rollout_id)
            if sample.status is Sample.Status.PENDING:
                sample.status = Sample.Status.ABORTED
        groups.append(group)
    return sorted(groups, key=_first_index)


def _first_index(group: list[Any]) -> int:
    return next((s.index for s in iter_leaves(group) if s.index is not None), -1)


async def generate_rollout_async(
    args: Namespace, rollout_id: int, data_source: Callable[[int], list[list[Sample]]]
) -> tuple[RolloutFnTrainOutput, list[list[Sample]]]:
    """Collects `rollout_batch_size` groups that pass the dynamic filter; the second value are aborted groups.

    The first fetch takes `over_sampling_batch_size` groups, later ones only as many as dropped groups left missing.
    """
    if not args.rollout_global_dataset:
        raise ValueError("the default rollout function needs the global dataset: --disable-rollout-global-dataset")
    state = GenerateState(args)
    state.reset()
    gatherer = MetricGatherer()
    try:
        kept, finished = await _collect(args, rollout_id, data_source, state, gatherer)
        aborted = await abort(args, rollout_id)
    finally:
        await _cancel(state.pendings)
        state.reset()
    kept.sort(key=_first_index)
    apply_group_hooks(args, kept, finished, data_source)
    return RolloutFnTrainOutput(samples=kept, metrics=gatherer.collect()), aborted


def apply_group_hooks(args: Namespace, kept: list[Any], finished: list[Any], data_source: Any) -> None:
    """Runs the hooks on whole rollouts: the filter on the groups that are kept, then the one that sees all groups."""
    if args.rollout_sample_filter_path is not None:
        load_function(args.rollout_sample_filter_path)(args, kept)
    if args.rollout_all_samples_process_path is not None:
        finished.sort(key=_first_index)
        load_function(args.rollout_all_samples_process_path)(args, finished, data_source)


async def _collect(
    args: Namespace,
    rollout_id: int,
    data_source: Callable[[int], list[list[Sample]]],
    state: GenerateState,
    gatherer: MetricGatherer,
) -> tuple[list[list[Any]], list[list[Any]]]:
    """(kept groups, all finished groups), in order of completion."""
    target = args.rollout_batch_size
    dynamic_filter = load_function(args.dynamic_sampling_filter_path) if args.dynamic_sampling_filter_path else None
    kept: list[list[Any]] = []
    finished: list[list[Any]] = []
    first_wave = args.over_sampling_batch_size
    with tqdm(total=target, desc=f"rollout {rollout_id}", unit="group", mininterval=PROGRESS_INTERVAL_S) as bar:
        while len(kept) < target:
            while state.remaining_batch_size < target:
                missing = target - state.remaining_batch_size
                state.submit_generate_tasks(_fetch(data_source, max(missing, first_wave)))
                first_wave = 0
            done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                del state.submitted_groups[task]
                group = task.result()
                assert len(group) == args.n_samples_per_prompt, f"{len(group)} members, {args.n_samples_per_prompt=}"
                _log_first(rollout_id, group, not finished)
                finished.append(group)
                output = call_dynamic_filter(dynamic_filter, args, group)
                if should_drop_dynamic_filter_output(
                    output, remaining_batch_size=state.remaining_batch_size, target_data_size=target
                ):
                    gatherer.on_dynamic_filter_drop(output.reason)
                    state.remaining_batch_size -= 1
                elif len(kept) < target:
                    kept.append(group)
                    bar.update(1)
    return kept, finished


def _fetch(data_source: Callable[[int], list[list[Sample]]], count: int) -> list[list[Sample]]:
    groups = data_source(count)
    if not groups:
        raise RuntimeError(f"the data source returned no group when {count} were asked for; is its data used up?")
    return groups


def _log_first(rollout_id: int, group: list[Any], first: bool) -> None:
    if first and (sample := next(iter_leaves(group), None)) is not None:
        logger.info(
            "rollout %d, first sample: prompt %.200r response %.200r label %.80r reward %r",
            rollout_id,
            sample.prompt,
            sample.response,
            sample.label,
            sample.reward,
        )


async def eval_rollout(args: Namespace, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[list[Sample]]]:
    """Evaluates all datasets of `args.eval_datasets`; the second value is always empty.

    Raises ValueError with `--group-rm`: an evaluation sample is scored by itself.
    """
    if args.group_rm:
        raise ValueError("--group-rm cannot be used for evaluation; use a separate run, or leave --eval-interval out")
    datasets = args.eval_datasets or []
    results = await _gather_or_cancel([eval_rollout_single_dataset(args, rollout_id, cfg) for cfg in datasets])
    return RolloutFnEvalOutput(data={name: data for result in results for name, data in result.items()}), []


async def eval_rollout_single_dataset(
    args: Namespace, rollout_id: int, dataset_cfg: EvalDatasetConfig
) -> dict[str, dict[str, Any]]:
    """`{name: {"rewards", "truncated", "samples", "failed"}}`, one reward and flag per rollout, in dataset order.

    A rollout without a score counts 0.0; it keeps `reward=None` in `samples`, and FAILED ones are counted in `failed`.
    """
    state = GenerateState(args)
    samples = eval_samples(args, dataset_cfg, state.tokenizer, state.processor)
    params = eval_sampling_params(dataset_cfg)
    repeats = dataset_cfg.n_samples_per_eval_prompt or 1
    deterministic = getattr(args, "sglang_enable_deterministic_inference", False)
    calls = []
    for position, sample in enumerate(samples):
        seed = {"sampling_seed": args.rollout_seed + position % repeats} if deterministic else {}
        calls.append(generate_and_rm(args, sample, {**params, **seed}, evaluation=True))
    with tqdm(total=len(calls), desc=f"eval {dataset_cfg.name}", mininterval=PROGRESS_INTERVAL_S) as bar:
        results = await _gather_or_cancel(calls, bar)
    reward_key = getattr(args, "eval_reward_key", None) or getattr(args, "reward_key", None)
    return {
        dataset_cfg.name: {
            "rewards": [eval_reward(result, reward_key) for result in results],
            "truncated": [_has_status(result, Sample.Status.TRUNCATED) for result in results],
            "samples": list(iter_leaves(results)),
            "failed": sum(_has_status(result, Sample.Status.FAILED) for result in results),
        }
    }


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Synchronous entry (`--rollout-function-path`): runs on the process-wide event loop.

    Groups that were aborted go back to the data source.
    """
    set_current_rollout_id(rollout_id)
    if evaluation:
        return run(eval_rollout(args, rollout_id))[0]
    output, aborted = run(generate_rollout_async(args, rollout_id, data_source.get_samples))
    if aborted:
        data_source.add_samples(aborted)
    return output
