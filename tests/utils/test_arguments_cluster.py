"""Debug modes, dumps, placement, asynchronous rollouts and flags that are refused."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from slime.utils.arguments import get_slime_extra_args_provider
from slime.utils.arguments.parser import SlimeArgumentParser
from slime.utils.arguments.unavailable import UNAVAILABLE, refuse_unavailable
from slime.utils.arguments.validate_cluster import check_profiler, resolve_debug_modes, resolve_placement

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"


def parse(*argv: Any) -> Namespace:
    parser = SlimeArgumentParser()
    get_slime_extra_args_provider()(parser)
    args = parser.parse_args(["--rollout-batch-size", "2", *map(str, argv)])
    args.use_gpu = True
    return args


def placed(*argv: Any) -> Namespace:
    args = parse(*argv)
    resolve_debug_modes(args)
    resolve_placement(args)
    return args


def test_dumps_below_one_directory() -> None:
    args = placed("--dump-details", "d", "--rollout-num-gpus", 1)
    assert args.save_debug_rollout_data == "d/rollout_data/{rollout_id}.pt"
    assert args.save_debug_train_data == "d/train_data/{rollout_id}.pt"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--save-debug-train-data", "x.pt"], "must contain {rollout_id}"),
        (["--save-debug-train-data", "{rollout_id}", "--save-debug-rollout-data", "{rollout_id}"], "same path"),
        (["--rollout-max-staleness", 1, "--rollout-num-gpus", 1], "needs --rollout-function-path"),
        (["--load-forge-rollout-data", "x", "--rollout-num-gpus", 1], "forge_load"),
        (
            ["--rollout-function-path", FULLY_ASYNC, "--eval-prompt-data", "a", "b", "--rollout-num-gpus", 1],
            "it cannot evaluate",
        ),
        (["--rollout-external-engine-addrs", "h:1", "--colocate"], "cannot be used with --colocate"),
        ([], "--rollout-num-gpus: needed"),
    ],
)
def test_mistakes(argv: list[Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        placed(*argv)
    assert message in str(caught.value)


PROFILED = ["--use-pytorch-profiler", "--profile-step-start"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--profile-target", "train_actor"], "needs --use-pytorch-profiler"),
        (["--use-pytorch-profiler", "--profile-target", "train_overall", "train_actor"], "give it alone"),
        ([*PROFILED, 5, "--profile-step-end", 5], "must be at least 0 and less than --profile-step-end 5"),
        (["--memory-snapshot-num-steps", 2], "needs --record-memory-history"),
        (["--record-memory-history"], "needs --memory-snapshot-num-steps"),
        (["--record-memory-history", "--memory-snapshot-num-steps", 2], "there is no GPU"),
    ],
)
def test_profiler_flags_that_would_do_nothing(argv: list[Any], message: str) -> None:
    args = parse(*argv)
    args.use_gpu = False
    with pytest.raises(ValueError, match=message):
        check_profiler(args)


def test_weights_are_compared_on_a_gpu_only() -> None:
    assert placed("--check-weight-update-equal", "--rollout-num-gpus", 1).check_weight_update_equal
    args = parse("--check-weight-update-equal", "--rollout-num-gpus", 1)
    args.use_gpu = False
    with pytest.raises(ValueError, match="--check-weight-update-equal: the engine compares weights on a GPU only"):
        resolve_placement(args)


def test_both_debug_modes_exclude_each_other() -> None:
    with pytest.raises(AssertionError, match="--debug-rollout-only and --debug-train-only"):
        placed("--debug-rollout-only", "--load-debug-rollout-data", "{rollout_id}", "--rollout-num-gpus", 1)


def test_without_training_the_engines_get_all_gpus() -> None:
    args = placed("--debug-rollout-only", "--rollout-num-gpus", 16, "--colocate", "--offload-rollout")
    assert (args.actor_num_nodes, args.actor_num_gpus_per_node, args.rollout_num_gpus) == (2, 8, 16)
    assert not (args.colocate or args.offload_rollout or args.offload_train)
    none = placed("--debug-rollout-only", "--rollout-num-gpus", 0)
    assert (none.actor_num_nodes, none.actor_num_gpus_per_node) == (0, 0)
    shared = placed("--debug-rollout-only", "--colocate", "--actor-num-gpus-per-node", 4)
    assert shared.rollout_num_gpus == 4


def test_offload_is_short_for_both() -> None:
    args = placed("--offload", "--rollout-num-gpus", 1)
    assert args.offload_rollout and args.offload_train and not hasattr(args, "offload")
    plain = placed("--rollout-num-gpus", 1)
    assert plain.offload_rollout is False and plain.offload_train is False
    assert placed("--colocate").offload_rollout is True


def test_external_engines_tell_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.backends.sglang_utils import external

    def found(args: Namespace) -> None:
        args.rollout_num_gpus, args.rollout_num_engines = 3, 2

    monkeypatch.setattr(external, "apply_external_engine_info_to_args", found)
    args = placed("--rollout-external-engine-addrs", "h:1", "h:2", "--rollout-num-gpus-per-engine", 2)
    assert args.rollout_external and (args.rollout_num_gpus, args.rollout_num_engines) == (3, 2)
    assert placed("--rollout-num-gpus", 1).rollout_external is False


def test_flags_without_a_feature_have_their_default_or_are_errors() -> None:
    args = parse()
    refuse_unavailable(args)
    assert {"qwen_gdn_backend", "mtp_num_layers"} <= UNAVAILABLE <= set(vars(args))
    for argv, message in ((["--enable-mtp-training"], "--train-backend megatron"),):
        with pytest.raises(ValueError, match=message):
            refuse_unavailable(parse(*argv))
