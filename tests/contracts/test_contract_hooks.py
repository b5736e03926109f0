"""Every customisation hook of the rollout side: when it is called, with which arguments, and what its result means.

Hooks of the training side (advantages, losses, postprocess, weight files): test_contract_training_hooks.py.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from helpers_ray import manager_args
from helpers_rollout import FakeEngine, fake_engine, rollout_args, save_tiny_tokenizer, write_jsonl
from helpers_source import ROOT

from slime.observability.rollout_metrics import log_eval_rollout_data, log_rollout_data
from slime.ray.rollout import RolloutManager
from slime.rollout import conversion, rm_hub
from slime.rollout import sglang_rollout as sr
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.arguments import get_slime_extra_args_provider
from slime.utils.arguments.parser import SlimeArgumentParser
from slime.utils.arguments.unavailable import UNAVAILABLE
from slime.utils.http_utils import init_http_client
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample

HERE = __name__
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []


def note(name: str, *args: Any, **kwargs: Any) -> None:
    CALLS.append((name, args, kwargs))


def calls(name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [(args, kwargs) for called, args, kwargs in CALLS if called == name]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    CALLS.clear()
    SingletonMeta.clear_instances()
    yield
    SingletonMeta.clear_instances()


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_tokenizer(tmp_path_factory.mktemp("tok"))


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with fake_engine() as running:
        yield running


@pytest.fixture
def make_args(tokenizer_dir: str, engine: FakeEngine, tmp_path: Path) -> Any:
    data = write_jsonl(tmp_path / "data.jsonl", [{"prompt": f"p{i}", "label": str(i)} for i in range(8)])

    def make(**changes: Any) -> Any:
        values = {"sglang_router_port": engine.port, "prompt_data": data, "custom_rm_path": f"{HERE}.single_rm"}
        args = rollout_args(tokenizer_dir, **{**values, **changes})
        init_http_client(args)
        return args

    return make


# --- hooks ------------------------------------------------------------------------------------------------------------


async def single_rm(args: Any, sample: Any, **kwargs: Any) -> Any:
    note("rm", args, sample, **kwargs)
    return [float(s.index) for s in sample] if isinstance(sample, list) else 1.0


async def other_rm(args: Any, sample: Sample, **kwargs: Any) -> float:
    return 7.0


async def generate_hook(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    note("generate", args, sample, dict(sampling_params), evaluation=evaluation)
    sampling_params["temperature"] = 99.0  # a private copy
    return finish(sample)


async def generate_without_evaluation(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    note("generate", args, sample, sampling_params)
    return finish(sample, reward=3.0)


async def fan_out(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    parts = [finish(Sample(index=sample.index, group_index=sample.group_index)) for _ in range(2)]
    for part in parts:
        part.rollout_id = sample.index
    return parts


def finish(sample: Sample, reward: float | None = None) -> Sample:
    sample.tokens, sample.response_length, sample.response = [1, 2, 3], 2, "ok"
    sample.rollout_log_probs, sample.reward, sample.status = [-0.5, -0.5], reward, Sample.Status.COMPLETED
    return sample


def sample_hook(args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    note("sample_hook", args, sample, rollout_id=rollout_id, evaluation=evaluation)
    assert sample.reward is None, "the reward comes after the hook"


async def replacing_hook(args: Any, sample: Sample) -> Sample:
    return Sample(**{**vars(sample), "label": "replaced"})


def keep_all(args: Any, group: list[Any], **kwargs: Any) -> DynamicFilterOutput:
    note("dynamic", args, group, **kwargs)
    return DynamicFilterOutput(keep=True)


def drop_first_group(args: Any, group: list[Any], **kwargs: Any) -> bool:
    return group[0].index != 0


def take_last(args: Any, rollout_id: None, buffer: list[Any], num_samples: int) -> list[Any]:
    note("buffer", args, rollout_id, buffer, num_samples)
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def remove_odd(args: Any, data: list[list[Sample]]) -> None:
    note("sample_filter", args, data)
    for group in data:
        group[1].remove_sample = True


def all_samples(args: Any, samples: list[Any], data_source: Any) -> None:
    note("all_samples", args, samples, data_source)


def rewards_hook(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    note("post_process", args, samples)
    return [5.0] * len(samples), [float(i) for i in range(len(samples))]


def convert_hook(args: Any, samples: list[Sample]) -> dict[str, list[Any]]:
    note("convert", args, samples)
    n = len(samples)
    masks = [[1]] * n
    lengths = {"response_lengths": [1] * n, "rollout_mask_sums": [1] * n}
    return {
        "tokens": [[1, 2]] * n,
        "loss_masks": masks,
        "rewards": [0.5] * n,
        "rollout_ids": list(range(n)),
        **lengths,
    }


def log_hook(rollout_id: int, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: float) -> bool:
    note("log", rollout_id, args, samples, rollout_extra_metrics, rollout_time)
    return True


def eval_log_hook(rollout_id: int, args: Any, data: Any, extra_metrics: Any) -> bool:
    note("eval_log", rollout_id, args, data, extra_metrics)
    return True


def rollout_function(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    note("rollout", args, rollout_id, data_source, evaluation=evaluation)
    if evaluation:
        return {"toy": {"rewards": [1.0, 0.0]}}
    return [[finish(Sample(index=2 * g + i, group_index=g), float(i)) for i in range(2)] for g in range(2)]


def eval_function(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnEvalOutput:
    note("eval", args, rollout_id, data_source, evaluation=evaluation)
    return RolloutFnEvalOutput(data={"toy": {"rewards": [1.0]}})


class OwnSource:
    """The least a data source is."""

    def __init__(self, args: Any) -> None:
        note("source", args)

    def __len__(self) -> int:
        return 6


# --- rollout function, evaluation, data source ------------------------------------------------------------------------


def make_manager(**changes: Any) -> RolloutManager:
    paths = {"rollout_function_path": f"{HERE}.rollout_function", "data_source_path": f"{HERE}.OwnSource"}
    manager = RolloutManager(manager_args(**{**paths, **changes}), None)
    manager.load_inputs()
    return manager


def test_rollout_function_and_data_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda value: value)
    manager = make_manager()
    assert [args for args, _ in calls("source")] == [(manager.args,)]
    assert manager.generate(3) is not None
    manager.eval(4)
    assert calls("rollout") == [
        ((manager.args, 3, manager.data_source), {"evaluation": False}),
        ((manager.args, 4, manager.data_source), {"evaluation": True}),
    ]
    assert manager.get_num_rollout_per_epoch() == 3


def test_eval_function_replaces_the_rollout_function() -> None:
    manager = make_manager(eval_function_path=f"{HERE}.eval_function")
    manager.eval(1)
    assert calls("eval") == [((manager.args, 1, manager.data_source), {"evaluation": True})] and not calls("rollout")


# --- around one sample ------------------------------------------------------------------------------------------------


def params() -> dict[str, Any]:
    return {"temperature": 1.0, "max_new_tokens": 4}


@pytest.mark.parametrize("evaluation", [False, True])
async def test_generate_hook(make_args: Any, evaluation: bool) -> None:
    args = make_args(custom_generate_function_path=f"{HERE}.generate_hook")
    group = [Sample(index=0), Sample(index=1)]
    await sr.generate_and_rm_group(args, group, params(), evaluation=evaluation)
    seen = calls("generate")
    assert [kwargs for _, kwargs in seen] == [{"evaluation": evaluation}] * 2
    assert all(positional == (args, sample, params()) for (positional, _), sample in zip(seen, group, strict=True))
    assert [s.reward for s in group] == [1.0, 1.0]


async def test_generate_hook_without_evaluation_that_rewards_itself(make_args: Any) -> None:
    args = make_args(custom_generate_function_path=f"{HERE}.generate_without_evaluation")
    sample = await sr.generate_and_rm(args, Sample(index=0), params(), evaluation=True)
    assert sample.reward == 3.0 and calls("generate")[0][1] == {} and not calls("rm")


async def test_generate_hook_of_a_sample_beats_the_flag(make_args: Any) -> None:
    args = make_args(custom_generate_function_path=f"{HERE}.generate_hook")
    own = Sample(index=0, generate_function_path=f"{HERE}.generate_without_evaluation")
    assert (await sr.generate_and_rm(args, own, params())).reward == 3.0


async def test_fan_out_is_rewarded_as_one_batch(make_args: Any) -> None:
    args = make_args(custom_generate_function_path=f"{HERE}.fan_out")
    result = await sr.generate_and_rm(args, Sample(index=4), params())
    assert [s.rollout_id for s in result] == [4, 4] and [s.reward for s in result] == [4.0, 4.0]
    assert [len(args[1]) for args, _ in calls("rm")] == [2]


async def test_sample_hooks_come_before_the_reward(make_args: Any) -> None:
    hooks = [f"{HERE}.sample_hook", f"{HERE}.replacing_hook"]
    args = make_args(rollout_sample_hook_path=hooks, custom_generate_function_path=f"{HERE}.generate_hook")
    sr.set_current_rollout_id(9)
    result = await sr.generate_and_rm(args, Sample(index=0), params(), evaluation=True)
    assert calls("sample_hook")[0][1] == {"rollout_id": 9, "evaluation": True}
    assert result.label == "replaced" and result.reward == 1.0


async def test_reward_hooks_and_their_order(make_args: Any) -> None:
    args = make_args(rm_type="random")
    assert await rm_hub.async_rm(args, Sample(custom_rm_path=f"{HERE}.other_rm")) == 7.0
    assert await rm_hub.async_rm(args, Sample(index=1)) == 1.0
    # The batched call goes to the flag's function, once, with the list.
    batch = [Sample(index=2, custom_rm_path=f"{HERE}.other_rm"), Sample(index=3)]
    assert await rm_hub.batched_async_rm(args, batch) == [2.0, 3.0]
    assert calls("rm")[-1][0] == (args, batch)
    with pytest.raises(NotImplementedError):
        await rm_hub.async_rm(make_args(custom_rm_path=None, rm_type="none"), Sample())


async def test_group_reward_is_one_call_and_not_for_evaluation(make_args: Any) -> None:
    args = make_args(group_rm=True)
    group = await sr.generate_and_rm_group(args, [Sample(index=5, prompt="a"), Sample(index=6, prompt="b")], params())
    assert [s.reward for s in group] == [5.0, 6.0] and len(calls("rm")) == 1
    with pytest.raises(ValueError, match="--group-rm"):
        await sr.eval_rollout(args, 0)


# --- around a rollout -------------------------------------------------------------------------------------------------


def test_hooks_on_groups(make_args: Any) -> None:
    args = make_args(
        custom_generate_function_path=f"{HERE}.generate_hook",
        dynamic_sampling_filter_path=f"{HERE}.keep_all",
        rollout_sample_filter_path=f"{HERE}.remove_odd",
        rollout_all_samples_process_path=f"{HERE}.all_samples",
    )
    source = RolloutDataSourceWithBuffer(args)
    output = sr.generate_rollout(args, 0, source)
    assert isinstance(output, RolloutFnTrainOutput) and len(output.samples) == 2
    assert len(calls("dynamic")) == 2 and all(a[0] is args and len(a[1]) == 2 for a, _ in calls("dynamic"))
    assert calls("sample_filter") == [((args, output.samples), {})]
    assert [[s.remove_sample for s in group] for group in output.samples] == [[False, True]] * 2
    positional, _ = calls("all_samples")[0]
    assert positional[0] is args and positional[1] == output.samples and positional[2] == source.get_samples
    assert [name for name, *_ in CALLS][-2:] == ["sample_filter", "all_samples"]


def test_a_bool_is_enough_for_the_dynamic_filter(make_args: Any) -> None:
    args = make_args(
        custom_generate_function_path=f"{HERE}.generate_hook", dynamic_sampling_filter_path=f"{HERE}.drop_first_group"
    )
    output = sr.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [group[0].index for group in output.samples] == [2, 4]


def test_buffer_filter(make_args: Any) -> None:
    args = make_args(buffer_filter_path=f"{HERE}.take_last")
    source = RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(3)
    assert not calls("buffer"), "an empty buffer is not filtered"
    source.add_samples(groups)
    assert source.get_samples(1) == [groups[2]]
    assert calls("buffer") == [((args, None, source.buffer, 1), {})] and source.get_buffer_length() == 2


# --- conversion and logging -------------------------------------------------------------------------------------------


def finished_groups() -> list[Sample]:
    return [finish(Sample(index=i, group_index=i // 2), float(i)) for i in range(4)]


def test_reward_post_process_hook() -> None:
    manager = make_manager(custom_reward_post_process_path=f"{HERE}.rewards_hook")
    samples = finished_groups()
    data = manager._convert_samples_to_train_data(samples)
    assert calls("post_process") == [((manager.args, samples), {})]
    assert data["rewards"] == [0.0, 1.0, 2.0, 3.0] and data["raw_reward"] == [5.0] * 4


def test_convert_hook_replaces_everything() -> None:
    manager = make_manager(
        custom_convert_samples_to_train_data_path=f"{HERE}.convert_hook",
        custom_reward_post_process_path=f"{HERE}.rewards_hook",
    )
    samples = finished_groups()
    data = manager._convert_samples_to_train_data(samples)
    assert calls("convert") == [((manager.args, samples), {})] and not calls("post_process")
    assert data["rewards"] == [0.5] * 4


def test_removed_samples_count_in_the_statistics_but_are_not_trained() -> None:
    samples = finished_groups()
    samples[0].remove_sample = True
    data = conversion.convert_samples_to_train_data(manager_args(grpo_std_normalization=False), samples)
    assert data["rewards"] == [-0.5, 0.5, -0.5, 0.5] and data["loss_masks"][0] == [0, 0]


@pytest.mark.parametrize("takes_over", [True, False])
def test_log_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_over: bool) -> None:
    log_path = tmp_path / "m.jsonl"
    args = manager_args(
        metrics_jsonl=str(log_path),
        custom_rollout_log_function_path=f"{HERE}.log_hook",
        custom_eval_rollout_log_function_path=f"{HERE}.eval_log_hook",
    )
    monkeypatch.setattr(f"{HERE}.note", lambda *a, **k: CALLS.append((a[0], a[1:], k)))
    samples, data = finished_groups(), {"toy": {"rewards": [1.0]}}
    if not takes_over:
        args.custom_rollout_log_function_path = args.custom_eval_rollout_log_function_path = None
    log_rollout_data(1, args, samples, {"x": 1}, 2.5)
    log_eval_rollout_data(1, args, data, {"y": 2})
    if takes_over:
        assert calls("log") == [((1, args, samples, {"x": 1}, 2.5), {})]
        assert calls("eval_log") == [((1, args, data, {"y": 2}), {})] and not log_path.exists()
    else:
        assert [json.loads(line)["step_key"] for line in log_path.read_text().splitlines()] == [
            "rollout/step",
            "eval/step",
        ]


# --- the methods' hooks -----------------------------------------------------------------------------------------------

# Flags of that form that name a file, not a function.
NO_HOOKS = ("custom-config-path", "megatron-config-path")
METHODS = sorted(path.parent.name for path in (ROOT / "agentic").glob("*/rollout.py"))
CALL_SHAPES: dict[str, tuple[tuple[Any, ...], dict[str, Any], bool]] = {
    "rollout.generate": ((None, Sample(), {}), {"evaluation": True}, True),
    "rollout.eval_log": ((0, None, {}, None), {}, False),
    "reward.reward_func": ((None, Sample()), {}, True),
    "convert.custom_convert": ((None, [Sample()]), {}, False),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("hook", sorted(CALL_SHAPES))
def test_hooks_of_the_methods_take_slimes_calls(method: str, hook: str) -> None:
    from slime.utils.misc import load_function

    function = load_function(f"agentic.{method}.{hook}")
    args, kwargs, is_async = CALL_SHAPES[hook]
    inspect.signature(function).bind(*args, **kwargs)
    assert inspect.iscoroutinefunction(function) == is_async


def test_every_row_of_the_hook_table_is_tested_here() -> None:
    """`customization.md` lists every hook, and each is called by a test of this folder."""
    table = (ROOT / "docs/en/get_started/customization.md").read_text().partition("## Rollout function")[0]
    documented = set(re.findall(r"^\| \[`--([\w-]+)`\]", table, re.MULTILINE))
    parser = SlimeArgumentParser()
    get_slime_extra_args_provider()(parser)
    ours = {action.option_strings[0].removeprefix("--") for action in parser._actions if action.option_strings}
    hooks = {name for name in ours if name.endswith(("-path", "-hook")) and name not in NO_HOOKS}
    available = {name for name in hooks if name.replace("-", "_") not in UNAVAILABLE}
    assert documented == available
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    names = [name.replace("-", "_") for name in sorted(documented)]
    assert not [name for name in names if not re.search(rf'{name}(": |=)', tests)]
