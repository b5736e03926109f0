"""Several models and groups (`--sglang-config`), external engines, options of the installed SGLang, placement checks."""

from __future__ import annotations

import argparse
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from aiohttp import web
from helpers_rollout import serve_in_thread

from slime.backends.sglang_utils import arguments, external
from slime.backends.sglang_utils.sglang_config import (
    ModelConfig,
    ServerGroupConfig,
    SglangConfig,
    resolve_sglang_config,
)
from slime.backends.sglang_utils.sglang_engine import SGLangEngine, get_base_gpu_id
from slime.ray.engines import RolloutServer, ServerGroup
from slime.ray.rollout_validation import validate_server_group_gpu_indices
from slime.rollout.sglang_rollout import get_model_url
from slime.utils.health_monitor import RolloutHealthMonitor

TWO_MODELS = [
    {
        "name": "actor",
        "num_gpus_per_engine": 2,
        "server_groups": [
            {"worker_type": "regular", "num_gpus": 4, "overrides": {"mem-fraction-static": 0.5}},
            {"worker_type": "placeholder", "num_gpus": 2},
        ],
    },
    {"name": "judge", "model_path": "other", "engine_groups": [{"worker_type": "regular", "num_gpus": 1}]},
]


def run_args(**changes: Any) -> Namespace:
    values = {
        "hf_checkpoint": "model",
        "rollout_num_gpus": 7,
        "rollout_num_gpus_per_engine": 1,
        "num_gpus_per_node": 8,
    }
    return Namespace(**{**values, **changes})


def write(path: Path, models: Any) -> str:
    file = path / "engines.yaml"
    file.write_text(yaml.safe_dump({"sglang": models}))
    return str(file)


def test_models_take_what_they_leave_out_from_the_flags(tmp_path: Path) -> None:
    actor, judge = resolve_sglang_config(run_args(sglang_config=write(tmp_path, TWO_MODELS))).models
    assert (actor.model_path, actor.update_weights, actor.total_num_gpus) == ("model", True, 6)
    assert actor.server_groups[0].overrides == {"mem_fraction_static": 0.5, "model_path": "model"}
    assert [g.num_gpus_per_engine for g in actor.server_groups] == [2, 2]
    assert (judge.model_path, judge.update_weights, judge.server_groups[0].num_gpus_per_engine) == ("other", False, 1)
    assert not actor.has_pd_disaggregation and not actor.has_encoder_disaggregation


def test_without_a_file_there_is_one_model() -> None:
    (model,) = resolve_sglang_config(run_args()).models
    assert (model.name, model.total_num_gpus, model.update_weights) == ("default", 7, True)
    assert resolve_sglang_config(run_args(rollout_num_gpus=0)).models[0].server_groups == []


def test_prefill_and_decode() -> None:
    args = run_args(prefill_num_servers=2, rollout_num_gpus=6, rollout_num_gpus_per_engine=2)
    config = SglangConfig.from_prefill_num_servers(args)
    assert config.has_pd_disaggregation and config.total_num_gpus == 6
    assert [(g.worker_type, g.num_gpus) for g in config.models[0].server_groups] == [("prefill", 4), ("decode", 2)]
    for bad in (0, 3):
        with pytest.raises(AssertionError, match="--prefill-num-servers"):
            SglangConfig.from_prefill_num_servers(run_args(**{**vars(args), "prefill_num_servers": bad}))


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([{"name": "a", "server_groups": [{"worker_type": "fast", "num_gpus": 7}]}], "worker_type 'fast'"),
        ([{"name": "a", "server_groups": [{"worker_type": "regular", "num_gpus": 0}]}], "must be greater than 0"),
        ([{"name": "a", "server_groups": [{"worker_type": "regular", "num_gpus": 3}]}], "--rollout-num-gpus is 7"),
        ([{"name": "a"}], "needs 'server_groups'"),
        ([{"name": "a", "gpus": 3, "server_groups": []}], "unknown key 'gpus'"),
        ([], "lists no model"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, models: Any, message: str) -> None:
    with pytest.raises((AssertionError, ValueError), match=message):
        resolve_sglang_config(run_args(sglang_config=write(tmp_path, models)))


def test_the_file_needs_its_top_key(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("models: []")
    with pytest.raises(AssertionError, match="top key 'sglang'"):
        SglangConfig.from_yaml(str(file))
    with pytest.raises(FileNotFoundError, match="--sglang-config"):
        SglangConfig.from_yaml("no/such.yaml")


def test_groups_of_a_model_share_its_path() -> None:
    groups = [ServerGroupConfig("regular", 1, overrides={"model_path": "b"})]
    with pytest.raises(AssertionError, match="share one model_path"):
        ModelConfig("m", model_path="a", server_groups=groups).resolve(run_args())


def test_a_models_url() -> None:
    args = run_args(sglang_router_ip="10.0.0.1", sglang_router_port=1, sglang_model_routers={"judge": ("::1", 2)})
    assert get_model_url(args, "judge") == "http://[::1]:2/generate"
    assert get_model_url(args, "unknown", "/x") == "http://10.0.0.1:1/x"


# --- groups as the manager sees them ----------------------------------------------------------------------------------


def group(**changes: Any) -> ServerGroup:
    values = {"all_engines": ["a", "b"], "num_gpus_per_engine": 2, "num_new_engines": 2, "gpu_offset": 4}
    return ServerGroup(args=run_args(sglang_pp_size=2), pg=(None, [], []), **{**values, **changes})


def test_servers_list_the_engines_of_their_groups() -> None:
    server = RolloutServer([group(), group(all_engines=["c"], gpu_offset=8, num_new_engines=1)], "h", 1)
    assert server.engines == ["a", "b", "c"] and server.num_new_engines == 3
    assert server.engine_gpu_counts == [2, 2, 2] and server.engine_gpu_offsets == [4, 6, 8]
    assert server.engine_parallel_configs[0] == {"tp_size": 1, "pp_size": 2, "dp_size": 1, "ep_size": 1}
    server.num_new_engines = 0
    assert server.num_new_engines == 0 and server.nodes_per_engine == 1


def test_groups_that_do_not_fit_are_refused() -> None:
    fits = dict(
        worker_type="regular", gpu_offset=2, num_gpus_per_engine=2, num_gpus_per_engine_on_node=2, num_engines=2
    )
    run = dict(rollout_num_gpus=6, rollout_num_gpus_per_engine=2)
    validate_server_group_gpu_indices(**fits, num_available_gpus=6, **run)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--rollout-num-gpus 6"):
        validate_server_group_gpu_indices(**fits, num_available_gpus=5, **run)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="several nodes"):
        group(num_gpus_per_engine=16)._check_placement()


def test_first_gpu_of_an_engine() -> None:
    args = run_args(colocate=False, debug_rollout_only=False, actor_num_nodes=1, actor_num_gpus_per_node=4)
    assert [get_base_gpu_id(args, rank) for rank in range(5)] == [4, 5, 6, 7, 0]
    args.colocate = True
    assert get_base_gpu_id(args, 3) == 3


# --- dead engines -----------------------------------------------------------------------------------------------------


class FakeRemote:
    def __init__(self, answer: Any) -> None:
        self.health_generate = SimpleNamespace(remote=lambda timeout: answer)


def test_a_dead_engine_is_dropped_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    killed: list[Any] = []
    monkeypatch.setattr(ray, "get", lambda ref, timeout: ref)
    monkeypatch.setattr(ray, "kill", killed.append)
    good, bad = FakeRemote(True), FakeRemote(False)
    slots = SimpleNamespace(all_engines=[good, bad, None], nodes_per_engine=1)
    flags = {f"rollout_health_check_{n}": v for n, v in (("interval", 0.01), ("timeout", 1.0), ("first_wait", 0.0))}
    monitor = RolloutHealthMonitor(slots, Namespace(**flags))
    assert not monitor.is_checking_enabled() and monitor.start() and not monitor.start()
    monitor._check_all()
    assert slots.all_engines == [good, bad, None], "paused from the start"
    monitor.resume()
    assert monitor.is_checking_enabled()
    for _ in range(500):
        if killed:
            break
        monitor._stopped.wait(0.01)
    assert slots.all_engines == [good, None, None] and killed == [bad]
    monitor.pause()
    assert not monitor.is_checking_enabled()
    monitor.stop()
    assert monitor._thread is None
    assert not RolloutHealthMonitor(SimpleNamespace(all_engines=[]), Namespace(**flags)).start()


# --- external engines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("addr", "expected"),
    [("h:1", "http://h:1"), ("http://h:1/", "http://h:1"), ("[::1]:30000", "http://[::1]:30000")],
)
def test_addresses(addr: str, expected: str) -> None:
    assert external.normalize_external_engine_addr(addr) == expected


@pytest.mark.parametrize("addr", ["https://h:1", "h", "http://h", "h:port"])
def test_bad_addresses(addr: str) -> None:
    with pytest.raises(ValueError, match="--rollout-external-engine-addrs"):
        external.normalize_external_engine_addr(addr)


def test_engines_tell_who_they_are() -> None:
    async def info(request: web.Request) -> web.Response:
        return web.json_response({"tp_size": 4, "pp_size": 2, "disaggregation_mode": "null", "dp_size": None})

    app = web.Application()
    app.router.add_get("/get_server_info", info)  # an older engine
    with serve_in_thread(app) as port:
        args = Namespace(rollout_external_engine_addrs=[f"127.0.0.1:{port}"])
        external.apply_external_engine_info_to_args(args)
    assert (args.rollout_num_engines, args.rollout_num_gpus) == (1, 8)
    (engine,) = external.external_engine_infos_from_args(args)
    assert (engine.worker_type, engine.num_gpus, engine.port, engine.is_pd_worker) == ("regular", 8, port, False)
    assert engine.parallel_config == {"tp_size": 4, "pp_size": 2, "dp_size": 1, "ep_size": 1}
    assert external.external_engine_init_kwargs(engine)["host"] == "127.0.0.1"
    servers, references = external.start_external_rollout_servers(
        args,
        start_router=lambda args, has_pd_disaggregation: ("r", 5),
        create_engine=lambda args, number, info, host, port: (f"engine{number}", f"ref{number}"),
    )
    server = servers["default"]
    assert server.engines == ["engine0"] and references == ["ref0"] and server.engine_gpu_counts == [8]
    assert args.sglang_model_routers == {"default": ("r", 5)} and server.num_new_engines == 1
    server.stop()


def test_an_engine_that_does_not_answer_is_named() -> None:
    with pytest.raises(ValueError, match="--rollout-external-engine-addrs: .*127.0.0.1:1"):
        external.apply_external_engine_info_to_args(Namespace(rollout_external_engine_addrs=["127.0.0.1:1"]))


def test_worker_types_of_an_engine() -> None:
    with pytest.raises(ValueError, match="encoder"):
        SGLangEngine(run_args(), 0, worker_type="encoder")
    with pytest.raises(ValueError, match="prefill"):
        SGLangEngine(run_args(), 0).init(None, 1, None, disaggregation_bootstrap_port=7)


# --- flags ------------------------------------------------------------------------------------------------------------


def test_rare_server_flags_come_from_sglang_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = argparse.ArgumentParser(add_help=False)
    scratch.add_argument("--rare-size", type=int, default=5)
    scratch.add_argument("--rare-switch", action="store_true")
    scratch.add_argument("--model-path", type=str)
    monkeypatch.setattr(arguments, "_server_actions", lambda: scratch._actions)
    assert not arguments.needs_all_flags(["--sglang-dtype", "float32", "--lr", "1"])
    assert arguments.needs_all_flags(["--sglang-rare-size=3"])
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_sglang_arguments(parser, all_flags=True)
    args = parser.parse_args(["--sglang-rare-size", "7", "--sglang-rare-switch", "--router-max-idle-secs", "9"])
    args.use_gpu, args.sglang_tp_size = True, 1
    options = arguments.server_options(args)
    assert (options["rare-size"], options["rare-switch"]) == (7, True)
    assert arguments.router_options(args)["max-idle-secs"] == 9
    with pytest.raises(SystemExit):
        parser.parse_args(["--sglang-model-path", "x"])


def test_other_arguments_are_ignored_by_the_backends_own_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "1", "--sglang-server-concurrency", "4"])
    args = arguments.sglang_parse_args()
    assert args.sglang_server_concurrency == 4 and args.router_policy == "cache_aware" and not hasattr(args, "lr")
