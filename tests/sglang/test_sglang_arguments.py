"""Flags of the SGLang backend and the options that follow from them."""

from __future__ import annotations

import argparse

import pytest

from slime.backends.sglang_utils.arguments import (
    add_sglang_arguments,
    router_options,
    server_options,
    validate_args,
    validate_sglang_args,
)
from slime.backends.sglang_utils.server import default_cpu_options


def parse(*argv: str, use_gpu: bool = False, gpus_per_engine: int = 1) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_sglang_arguments(parser)
    args = parser.parse_args(list(argv))
    args.use_gpu, args.rollout_num_gpus_per_engine = use_gpu, gpus_per_engine
    validate_sglang_args(args)
    return args


def test_defaults_of_the_contract() -> None:
    args = parse()
    assert (args.sglang_router_ip, args.sglang_router_port) == (None, None)
    assert args.sglang_router_request_timeout_secs == 14400
    assert args.sglang_server_concurrency == 512
    assert args.sglang_enable_deterministic_inference is None
    assert router_options(args) == {
        "policy": "cache_aware",
        "log-level": "warn",
        "balance-abs-threshold": 10,
        "balance-rel-threshold": 1.2,
        "request-timeout-secs": 14400,
    }


def test_cpu_options_and_flags_that_replace_them() -> None:
    args = parse("--sglang-max-total-tokens", "1000", "--sglang-dtype", "bfloat16", "--sglang-disable-radix-cache")
    expected = default_cpu_options() | {"max-total-tokens": 1000, "dtype": "bfloat16", "disable-radix-cache": True}
    options = server_options(args)
    assert {name: options[name] for name in expected} == expected
    assert options["tp-size"] == 1 and options["skip-server-warmup"] is True


def test_gpu_options_hold_nothing_of_the_cpu() -> None:
    args = parse("--sglang-pp-size", "2", use_gpu=True, gpus_per_engine=8)
    options = server_options(args)
    assert not {"device", "attention-backend", "dtype", "max-total-tokens"} & set(options)
    assert (options["tp-size"], options["pp-size"]) == (4, 2)


@pytest.mark.parametrize(
    ("argv", "kwargs", "message"),
    [
        (["--sglang-server-concurrency", "0"], {}, "--sglang-server-concurrency is 0"),
        (["--sglang-router-ip", "10.0.0.1"], {}, "needs --sglang-router-port"),
        ([], {"gpus_per_engine": 2}, "without a GPU an engine is one process"),
    ],
)
def test_bad_values_name_flag_and_remedy(argv: list[str], kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(*argv, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argv", "gpus", "message"),
    [
        (["--sglang-pp-size", "2"], 3, "not divisible by --sglang-pp-size 2"),
        (["--sglang-dp-size", "2"], 1, "--sglang-enable-dp-attention"),
    ],
)
def test_parallel_sizes_that_do_not_fit(argv: list[str], gpus: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        parse(*argv, use_gpu=True, gpus_per_engine=gpus)


def test_both_spellings_of_a_size_agree_and_missing_ones_stay_missing() -> None:
    args = argparse.Namespace(rollout_num_gpus_per_engine=4, sglang_pp_size=2, sglang_data_parallel_size=1)
    validate_args(args)
    assert (args.sglang_pipeline_parallel_size, args.sglang_dp_size, args.sglang_tp_size) == (2, 1, 2)
    assert not hasattr(args, "sglang_moe_dp_size")


def test_ipv6_router_gets_brackets() -> None:
    assert parse("--sglang-router-ip", "::1", "--sglang-router-port", "3000").sglang_router_ip == "[::1]"


def test_the_rules_of_the_interface_look_at_no_file_and_no_port() -> None:
    args = argparse.Namespace(rollout_num_gpus_per_engine=1, sglang_router_ip="fe80::1")
    validate_args(args)
    assert args.sglang_router_ip == "[fe80::1]" and args.sglang_tp_size == 1
    both = {"sglang_config": "/nowhere.yaml", "prefill_num_servers": 1, "rollout_num_gpus_per_engine": 1}
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match="exclude each other"):
            validate_args(argparse.Namespace(**both))
    external = {"rollout_external": True, "prefill_num_servers": 1, "rollout_num_gpus_per_engine": 1}
    with pytest.raises(ValueError, match="the engines exist"):
        validate_args(argparse.Namespace(**external))
