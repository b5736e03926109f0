"""Default rollout function against a fake engine: what is sent, what is kept, budgets, abort, fan-out, evaluation."""

from __future__ import annotations

import asyncio
import threading
import time
from argparse import Namespace

import pytest
from helpers_rollout import fake_engine, rollout_args, save_tiny_tokenizer, write_jsonl

from slime.rollout import sglang_rollout as sr
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils import engine_abort
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.http_utils import init_http_client
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample

HERE = __name__


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    return save_tiny_tokenizer(tmp_path_factory.mktemp("tok"))


@pytest.fixture
def engine():
    with fake_engine() as running:
        yield running


@pytest.fixture
def make_args(tokenizer_dir, engine, tmp_path, monkeypatch):
    SingletonMeta.clear_instances()
    sr.EVAL_PROMPT_DATASET.clear()
    monkeypatch.setattr(sr, "ABORT_INTERVAL_S", 0.05)
    monkeypatch.setattr(engine_abort, "ABORT_INTERVAL_S", 0.05)
    data = write_jsonl(tmp_path / "data.jsonl", [{"prompt": f"p{i}", "label": str(i)} for i in range(20)])

    def make(**overrides):
        values = {"sglang_router_port": engine.port, "prompt_data": data, "custom_rm_path": f"{HERE}.reward_one"}
        args = rollout_args(tokenizer_dir, **{**values, **overrides})
        init_http_client(args)
        return args

    yield make
    SingletonMeta.clear_instances()


def params(args, **overrides):
    return {**sr.GenerateState(args).sampling_params, **overrides}


def text_ids(args, text):
    return sr.GenerateState(args).tokenizer.encode(text, add_special_tokens=False)


async def reward_one(args, sample, **kwargs):
    return [1.0] * len(sample) if isinstance(sample, list) else 1.0


# --- one sample -----------------------------------------------------------------------------------------------------


async def test_generate_sends_ids_and_keeps_what_comes_back(make_args, engine):
    args = make_args()
    sample = await sr.generate(args, Sample(prompt="hey", index=0), params(args))
    request = engine.requests[0]
    assert request["input_ids"] == text_ids(args, "hey") and request["return_logprob"] is True
    assert "text" not in request and request["sampling_params"]["max_new_tokens"] == 8
    assert request["sampling_params"]["no_stop_trim"] is True
    assert sample.tokens == request["input_ids"] + [65, 66]
    assert (sample.rollout_log_probs, sample.loss_mask, sample.response_length) == ([-0.5, -0.5], [1, 1], 2)
    assert (sample.status, sample.weight_versions) == (Sample.Status.COMPLETED, ["7"])
    assert sample.response == "text of 2"


async def test_a_request_without_an_answer_ends_at_the_deadline(make_args, engine):
    args = make_args(sglang_router_request_timeout_secs=0.2)
    engine.hold = lambda payload: True
    with pytest.raises(TimeoutError, match="--sglang-router-request-timeout-secs 0.2"):
        await asyncio.wait_for(sr.generate(args, Sample(prompt="hey"), params(args)), 30)


async def test_list_prompts_are_rendered_with_the_template(make_args, engine):
    args = make_args()
    await sr.generate(args, Sample(prompt=[{"role": "user", "content": "hi"}]), params(args))
    expected = text_ids(args, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert engine.requests[0]["input_ids"] == expected


async def test_a_resumed_sample_asks_for_the_rest_only(make_args, engine):
    args = make_args()
    sample = Sample(prompt="hey", status=Sample.Status.ABORTED)
    sample.tokens = text_ids(args, "hey")
    sample.append_response_tokens(tokens=[70, 71, 72], log_probs=[-1.0] * 3, text="old")
    sampling = params(args)
    await sr.generate(args, sample, sampling)
    assert sampling["max_new_tokens"] == 5 == engine.requests[0]["sampling_params"]["max_new_tokens"]
    assert engine.requests[0]["input_ids"] == text_ids(args, "hey") + [70, 71, 72]
    assert sample.tokens[-5:] == [70, 71, 72, 65, 66] and sample.response == "oldtext of 2"
    assert sample.rollout_log_probs == [-1.0] * 3 + [-0.5] * 2 and sample.response_length == 5


@pytest.mark.parametrize("limits", [{"rollout_max_response_len": 3}, {"rollout_max_context_len": 6}])
async def test_no_budget_left_is_truncated_without_a_request_and_still_scored(make_args, engine, limits):
    args = make_args(**limits)
    sample = Sample(prompt="hey", status=Sample.Status.ABORTED, tokens=text_ids(args, "hey"))
    sample.append_response_tokens(tokens=[70, 71, 72], log_probs=[-1.0] * 3)
    result = await sr.generate_and_rm(args, sample, params(args))
    assert result.status is Sample.Status.TRUNCATED and result.reward == 1.0 and engine.requests == []


async def test_the_context_limit_of_evaluation_is_its_own(make_args, engine):
    args = make_args(rollout_max_context_len=100, eval_max_context_len=5)
    await sr.generate_and_rm(args, Sample(prompt="hey"), params(args), evaluation=True)
    assert engine.requests[0]["sampling_params"]["max_new_tokens"] == 2


async def test_a_negative_budget_is_an_assertion(make_args):
    args = make_args()
    sample = Sample(prompt="a", tokens=[1, 2, 3, 4], response_length=3)
    with pytest.raises(AssertionError, match="exceeds 2"):
        await sr.generate(args, sample, params(args, max_new_tokens=2))


async def test_a_different_prompt_length_in_the_answer_is_an_error(make_args, engine):
    args = make_args()
    engine.respond = lambda payload, number: payload["input_ids"].append(1) or [65]
    with pytest.raises(ValueError, match="sent 3 prompt tokens, the engine read 4"):
        await sr.generate(args, Sample(prompt="hey"), params(args))


async def test_media_prompts_are_refused(make_args):
    args = make_args()
    with pytest.raises(NotImplementedError, match="image"):
        await sr.generate(args, Sample(prompt="x", multimodal_inputs={"images": [1]}), params(args))


async def test_routing_key_only_with_consistent_hashing(make_args, engine):
    args = make_args()
    await sr.generate(args, Sample(prompt="a", session_id="s1"), params(args))
    args.router_policy = "consistent_hashing"
    await sr.generate(args, Sample(prompt="a", session_id="s1"), params(args))
    assert [h.get("X-SMG-Routing-Key") for h in engine.headers] == [None, "s1"]


def test_model_urls():
    args = Namespace(sglang_router_ip="::1", sglang_router_port=3, sglang_model_routers={"judge": ("10.0.0.1", 4)})
    assert sr.get_model_url(args, "judge", "/x") == "http://10.0.0.1:4/x"
    assert sr.get_model_url(args, "default") == "http://[::1]:3/generate"


def test_state_is_a_singleton_with_sampling_parameters(make_args):
    args = make_args(rollout_top_p=0.9, sglang_enable_deterministic_inference=True, rollout_stop=["END"])
    state = sr.GenerateState(args)
    assert sr.GenerateState(None) is state
    assert state.sampling_params["custom_params"] == {"return_top_p_token_ids": True}
    assert state.sampling_params["stop"] == ["END"] and state.group_sampling_seeds == [42, 43]
    with state.dp_rank_context() as rank:
        assert (rank, state.dp_counts) == (0, [1])
    assert state.dp_counts == [0]


# --- hooks and rewards ----------------------------------------------------------------------------------------------


async def failing_hook(args, sample, sampling_params):
    sample.status = Sample.Status.FAILED
    return sample


async def eval_aware(args, sample, sampling_params, evaluation=False):
    sample.metadata["evaluation"] = evaluation
    sample.status = Sample.Status.COMPLETED
    return sample


async def scored_hook(args, sample, sampling_params):
    sample.reward, sample.status = 0.25, Sample.Status.COMPLETED
    return sample


async def broken_hook(args, sample, sampling_params):
    if sample.index == 1:
        raise KeyError("bug in the hook")
    await asyncio.sleep(30)


async def fan_out(args, sample, sampling_params):
    """Two samples per episode; the status of the second follows from the prompt."""
    first = Sample(index=sample.index, group_index=sample.group_index, rollout_id=sample.index, prompt=sample.prompt)
    second = Sample(index=sample.index, group_index=sample.group_index, rollout_id=sample.index, prompt=sample.prompt)
    first.status = second.status = Sample.Status.COMPLETED
    if sr.GenerateState(args).aborted or sample.prompt == "stop":
        second.status = Sample.Status.ABORTED
    if sample.prompt == "fail":
        second.status = Sample.Status.FAILED
    return [first, second]


async def test_the_sample_own_generate_function_wins(make_args):
    args = make_args(custom_generate_function_path=f"{HERE}.failing_hook")
    sample = Sample(prompt="a", generate_function_path=f"{HERE}.eval_aware")
    result = await sr.generate_and_rm(args, sample, params(args), evaluation=True)
    assert result.metadata["evaluation"] is True and result.reward == 1.0


async def test_failed_samples_are_not_scored(make_args):
    args = make_args(custom_generate_function_path=f"{HERE}.failing_hook")
    assert (await sr.generate_and_rm(args, Sample(prompt="a"), params(args))).reward is None


async def test_a_reward_from_the_hook_is_kept(make_args):
    args = make_args(custom_generate_function_path=f"{HERE}.scored_hook")
    assert (await sr.generate_and_rm(args, Sample(prompt="a"), params(args))).reward == 0.25


async def test_fan_out_scores_all_but_failed_and_aborted_ones(make_args):
    args = make_args(custom_generate_function_path=f"{HERE}.fan_out")
    result = await sr.generate_and_rm(args, Sample(prompt="fail"), params(args))
    assert [s.reward for s in result] == [1.0, None]
    stopped = await sr.generate_and_rm(args, Sample(prompt="stop"), params(args))
    assert [s.reward for s in stopped] == [None, None]


async def test_an_aborted_fan_out_starts_again_in_a_partial_rollout(make_args):
    args = make_args(custom_generate_function_path=f"{HERE}.fan_out", partial_rollout=True)
    result = await sr.generate_and_rm(args, Sample(prompt="stop", index=4), params(args))
    assert isinstance(result, Sample) and (result.index, result.prompt) == (4, "stop")


async def test_finished_samples_pass_unchanged(make_args, engine):
    args = make_args()
    done = Sample(status=Sample.Status.COMPLETED, reward=0.5)
    unscored = Sample(status=Sample.Status.TRUNCATED)
    failed = Sample(status=Sample.Status.FAILED)
    results = [await sr.generate_and_rm(args, s, params(args)) for s in (done, unscored, failed)]
    assert [r.reward for r in results] == [0.5, 1.0, None] and engine.requests == []


async def test_old_tokens_are_masked_off_policy_and_new_ones_are_not(make_args):
    args = make_args(partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    sample = Sample(prompt="a", status=Sample.Status.ABORTED, tokens=[1])
    sample.append_response_tokens(tokens=[70, 71], log_probs=[-1.0, -1.0])
    result = await sr.generate_and_rm(args, sample, params(args))
    assert result.loss_mask == [0, 0, 1, 1]


async def test_a_finished_fan_out_of_an_earlier_rollout_is_masked_as_well(make_args):
    args = make_args(partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    episode = [Sample(tokens=[1, 2], response_length=1, status=Sample.Status.COMPLETED) for _ in range(2)]
    result = await sr.generate_and_rm(args, episode, params(args))
    assert [s.loss_mask for s in result] == [[0], [0]] and [s.reward for s in result] == [1.0, 1.0]


async def test_group_members_get_sessions_seeds_and_own_parameters(make_args, engine):
    args = make_args(sglang_enable_deterministic_inference=True)
    group = await sr.generate_and_rm_group(args, [Sample(prompt="a"), Sample(prompt="a")], params(args))
    assert sorted(r["sampling_params"]["sampling_seed"] for r in engine.requests) == [42, 43]
    assert len({s.session_id for s in group}) == 2 and [s.reward for s in group] == [1.0, 1.0]


async def indexed_reward(args, samples, **kwargs):
    return [float(i) for i in range(len(samples))]


async def test_group_reward_is_called_once(make_args):
    args = make_args(group_rm=True, custom_rm_path=f"{HERE}.indexed_reward")
    group = await sr.generate_and_rm_group(args, [Sample(prompt="a"), Sample(prompt="b")], params(args))
    assert [s.reward for s in group] == [0.0, 1.0]


async def test_an_error_in_a_hook_cancels_its_siblings(make_args):
    args = make_args(custom_generate_function_path=f"{HERE}.broken_hook")
    start = time.monotonic()
    with pytest.raises(KeyError, match="bug in the hook"):
        await sr.generate_and_rm_group(args, [Sample(index=0), Sample(index=1)], params(args))
    assert time.monotonic() - start < 20 and len(asyncio.all_tasks()) == 1


async def test_the_semaphore_limits_model_calls(make_args, engine):
    args = make_args(sglang_server_concurrency=2)
    engine.delay_s = 0.3  # long enough that two requests meet on a loaded machine
    await asyncio.gather(*(sr.generate(args, Sample(prompt="a"), params(args)) for _ in range(6)))
    assert engine.max_running == 2 and len(engine.requests) == 6


def test_two_event_loops_can_generate_at_the_same_time(make_args, engine):
    args = make_args(sglang_server_concurrency=1)
    engine.delay_s = 0.05
    done: list[Sample] = []

    async def several():
        for result in await asyncio.gather(
            *(sr.generate_and_rm(args, Sample(prompt="a"), params(args)) for _ in "12")
        ):
            done.append(result)

    threads = [threading.Thread(target=lambda: asyncio.run(several())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [s.status for s in done] == [Sample.Status.COMPLETED] * 4


# --- a whole rollout ------------------------------------------------------------------------------------------------


def indices(output):
    return [[s.index for s in sr.iter_leaves(group)] for group in output.samples]


def test_a_rollout_returns_sorted_full_groups(make_args, engine):
    args = make_args(rollout_batch_size=3, over_sampling_batch_size=3)
    engine.respond = lambda payload, number: [65] * (1 + number % 3)
    source = RolloutDataSourceWithBuffer(args)
    first, second = (sr.generate_rollout(args, i, source) for i in range(2))
    assert indices(first) == [[0, 1], [2, 3], [4, 5]] and indices(second) == [[6, 7], [8, 9], [10, 11]]
    assert first.metrics == {} and len(engine.requests) == 12 and engine.aborts == 0
    state = sr.GenerateState(args)
    assert (state.remaining_batch_size, state.pendings, state.aborted) == (0, set(), False)


def drop_first_two(args, group, **kwargs):
    return DynamicFilterOutput(keep=group[0].group_index >= 2, reason="too_early")


def test_dropped_groups_are_replaced_one_by_one(make_args, engine):
    args = make_args(rollout_batch_size=4, over_sampling_batch_size=4)
    args.dynamic_sampling_filter_path = f"{HERE}.drop_first_two"
    source = RolloutDataSourceWithBuffer(args)
    output = sr.generate_rollout(args, 0, source)
    assert [i for i, _ in indices(output)] == [4, 6, 8, 10]
    assert output.metrics == {"rollout/dynamic_filter/drop_too_early": 2}
    assert source.sample_group_index == 6 and len(engine.requests) == 12


SEEN: dict = {}


def remember_kept(args, data):
    SEEN["kept"] = len(data)
    data[0][0].remove_sample = True


def remember_all(args, all_samples, data_source):
    SEEN["all"] = [group[0].group_index for group in all_samples]


def test_filters_after_the_rollout(make_args):
    args = make_args(rollout_sample_filter_path=f"{HERE}.remember_kept")
    args.rollout_all_samples_process_path = f"{HERE}.remember_all"
    args.dynamic_sampling_filter_path = f"{HERE}.drop_first_two"
    output = sr.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert SEEN == {"kept": 2, "all": [0, 1, 2, 3]} and output.samples[0][0].remove_sample


def test_an_exhausted_source_is_an_error(make_args):
    args = make_args()
    with pytest.raises(RuntimeError, match="no group when 2"):
        sr.generate_rollout(args, 0, Namespace(get_samples=lambda n: []))


def test_an_error_stops_the_rollout_and_leaves_a_clean_state(make_args):
    args = make_args(custom_generate_function_path=f"{HERE}.broken_hook")
    with pytest.raises(KeyError, match="bug in the hook"):
        sr.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    args.custom_generate_function_path = None
    assert len(sr.generate_rollout(args, 1, RolloutDataSourceWithBuffer(args)).samples) == 2


def hold_late_groups(args, engine):
    """Requests of the prompts p2 and later wait for an abort and then return one token."""
    early = [text_ids(args, f"p{i}") for i in range(2)]
    engine.hold = lambda payload: payload["input_ids"] not in early
    engine.respond = lambda payload, number: [65, 66] if payload["input_ids"] in early else [65]


def test_without_partial_rollout_surplus_is_cancelled(make_args, engine):
    args = make_args(over_sampling_batch_size=4, sglang_server_concurrency=16)
    hold_late_groups(args, engine)
    source = RolloutDataSourceWithBuffer(args)
    start = time.monotonic()
    output = sr.generate_rollout(args, 0, source)
    assert indices(output) == [[0, 1], [2, 3]] and time.monotonic() - start < 45
    assert engine.aborts >= 1 and source.get_buffer_length() == 0 and engine.running == 0


def test_partial_rollout_returns_and_resumes_aborted_groups(make_args, engine):
    args = make_args(over_sampling_batch_size=4, partial_rollout=True, sglang_server_concurrency=16)
    hold_late_groups(args, engine)
    source = RolloutDataSourceWithBuffer(args)
    sr.generate_rollout(args, 0, source)
    assert source.get_buffer_length() == 2
    for sample in sr.iter_leaves(source.buffer):
        assert sample.status is Sample.Status.ABORTED and sample.reward is None
        assert sample.response_length == 1 and sample.metadata["start_rollout_id"] == 0
    engine.hold = lambda payload: False
    args.over_sampling_batch_size = 2  # the resumed groups alone: of more, the first to finish would be kept
    output = sr.generate_rollout(args, 1, source)
    assert indices(output) == [[4, 5], [6, 7]]
    assert all(s.response_length == 2 and s.reward == 1.0 for s in sr.iter_leaves(output.samples))


async def slow_reward(args, sample, **kwargs):
    if sample.group_index >= 2:
        await asyncio.sleep(60)
    return 1.0


@pytest.mark.parametrize("partial", [False, True])
def test_abort_does_not_wait_for_slow_rewards(make_args, monkeypatch, partial):
    monkeypatch.setattr(sr, "ABORT_GRACE_S", 0.3)
    args = make_args(over_sampling_batch_size=3, partial_rollout=partial, custom_rm_path=f"{HERE}.slow_reward")
    source = RolloutDataSourceWithBuffer(args)
    start = time.monotonic()
    output = sr.generate_rollout(args, 0, source)
    assert time.monotonic() - start < 45 and len(output.samples) == 2
    assert source.get_buffer_length() == int(partial)
    if partial:  # generated, not scored yet: the next rollout scores it without generating again
        args.custom_rm_path = f"{HERE}.reward_one"
        again = sr.generate_rollout(args, 1, source)
        assert again.samples[0][0].reward == 1.0 and again.samples[0][0].response_length == 2


@pytest.mark.parametrize("failure", ["abort_500", "no_router"])
def test_abort_tolerates_failing_servers(make_args, engine, failure, monkeypatch):
    args = make_args(over_sampling_batch_size=3, custom_generate_function_path=f"{HERE}.late_hook")
    if failure == "abort_500":
        engine.abort_status = 500
    else:
        args.sglang_router_port = 9  # nothing listens there
    assert len(sr.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples) == 2


async def test_draining_is_bounded(make_args, engine, monkeypatch, caplog):
    make_args()
    monkeypatch.setattr(engine_abort, "DRAIN_TIMEOUT_S", 0.1)
    engine.running = 3
    await engine_abort.abort_server_until_idle(engine.url)
    assert "3 requests of" in caplog.text and engine.aborts >= 1


async def late_hook(args, sample, sampling_params):
    await asyncio.sleep(60 if sample.group_index >= 2 else 0)
    sample.status = Sample.Status.COMPLETED
    return sample


async def test_abort_with_nothing_pending(make_args, engine):
    args = make_args()
    assert await sr.abort(args, 0) == [] and engine.aborts == 0


def test_fan_out_groups_go_through_filter_and_sorting(make_args):
    args = make_args(custom_generate_function_path=f"{HERE}.fan_out")
    args.dynamic_sampling_filter_path = (
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback"
    )
    output = sr.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [[[s.rollout_id for s in member] for member in group] for group in output.samples] == [
        [[0, 0], [1, 1]],
        [[2, 2], [3, 3]],
    ]


# --- evaluation -----------------------------------------------------------------------------------------------------


def eval_cfg(tmp_path, **overrides):
    path = write_jsonl(tmp_path / "eval.jsonl", [{"prompt": f"q{i}", "label": str(i)} for i in range(3)])
    values = {"name": "test", "path": path, "input_key": "prompt", "label_key": "label", "metadata_key": "metadata"}
    values |= {"n_samples_per_eval_prompt": 2, "temperature": 0.0, "top_p": 1.0, "max_response_len": 4}
    return EvalDatasetConfig(**{**values, **overrides})


async def reward_by_label(args, sample, **kwargs):
    return float(sample.label == "1")


async def fail_first(args, sample, sampling_params, evaluation=False):
    if sample.label == "0":
        sample.status = Sample.Status.FAILED
        sample.metadata["failure_reason"] = "timeout"
        return sample
    return await sr.generate(args, sample, sampling_params, evaluation=evaluation)


def test_evaluation(make_args, engine, tmp_path):
    args = make_args()
    cfg = eval_cfg(
        tmp_path, custom_rm_path=f"{HERE}.reward_by_label", custom_generate_function_path=f"{HERE}.fail_first"
    )
    args.eval_datasets = [cfg]
    output = sr.generate_rollout(args, 0, None, evaluation=True)
    result = output.data["test"]
    assert result["rewards"] == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0] and result["truncated"] == [False] * 6
    assert result["failed"] == 2 and [s.index for s in result["samples"]] == list(range(6))
    assert [s.reward for s in result["samples"][:2]] == [None, None]
    assert [s.group_index for s in result["samples"]] == [0, 0, 1, 1, 2, 2]
    sent = engine.requests[0]["sampling_params"]
    assert (sent["temperature"], sent["max_new_tokens"]) == (0.0, 4) and "stop" not in sent
    sr.generate_rollout(args, 1, None, evaluation=True)
    assert len(sr.EVAL_PROMPT_DATASET) == 1


def test_evaluation_seeds_and_reward_key(make_args, engine, tmp_path):
    args = make_args(sglang_enable_deterministic_inference=True, eval_reward_key="acc", custom_rm_path=None)
    args.eval_datasets = [eval_cfg(tmp_path, rm_type="dapo")]
    result = sr.generate_rollout(args, 0, None, evaluation=True).data["test"]
    assert sorted(r["sampling_params"]["sampling_seed"] for r in engine.requests) == [42] * 3 + [43] * 3
    assert result["rewards"] == [0.0] * 6 and result["samples"][0].metadata["rm_type"] == "dapo"


def test_group_rewards_are_refused_in_evaluation(make_args, tmp_path):
    args = make_args(group_rm=True, eval_datasets=[eval_cfg(tmp_path)])
    with pytest.raises(ValueError, match="--group-rm"):
        sr.generate_rollout(args, 0, None, evaluation=True)
