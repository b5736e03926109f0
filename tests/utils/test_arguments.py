"""The command line: defaults, validation messages, derived values, one-line errors, and that every flag is read."""

from __future__ import annotations

import argparse
import json
import re
import socket
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.utils.arguments import get_slime_extra_args_provider, parse_args, reset_arg
from slime.utils.arguments.parser import SlimeArgumentParser
from slime.utils.arguments.unavailable import UNAVAILABLE

ROOT = Path(__file__).parents[2]


class Cli:
    """Builds a complete command line around the flags of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = self.write("model/config.json", "{}").parent
        self.data = self.write("data.jsonl", '{"input": "a"}\n{"input": "b"}\n')

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def argv(self, *flags: Any, without: tuple[str, ...] = ()) -> list[str]:
        base = {
            "--train-backend": "fsdp",
            "--hf-checkpoint": self.model,
            "--prompt-data": self.data,
            "--rollout-batch-size": 4,
            "--rollout-max-response-len": 8,
            "--rollout-num-gpus": 1,
            "--actor-num-gpus-per-node": 1,
            "--num-rollout": 2,
        }
        kept = [str(part) for flag, value in base.items() if flag not in without for part in (flag, value)]
        return kept + [str(flag) for flag in flags]

    def parse(self, *flags: Any, without: tuple[str, ...] = ()) -> Namespace:
        return parse_args(argv=self.argv(*flags, without=without))


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def error_of(capsys: pytest.CaptureFixture[str], cli: Cli, *flags: Any, without: tuple[str, ...] = ()) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.parse(*flags, without=without)
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0].removeprefix("error: ")


def test_defaults_of_the_contract(cli: Cli) -> None:
    args = cli.parse(without=("--rollout-num-gpus", "--actor-num-gpus-per-node")[1:])
    expected = {
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 8,
        "rollout_num_gpus_per_engine": 1,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_seed": 42,
        "seed": 1234,
        "n_samples_per_prompt": 1,
        "micro_batch_size": 1,
        "input_key": "input",
        "metadata_key": "metadata",
        "tool_key": "tools",
        "rollout_global_dataset": True,
        "compute_advantages_and_returns": True,
        "rewards_normalization": True,
        "advantage_estimator": "grpo",
        "loss_type": "policy_loss",
        "kl_loss_type": "k1",
        "eps_clip": 0.2,
        "lr": 1e-6,
        "clip_grad": 1.0,
        "update_weight_buffer_size": 536870912,
        "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
        "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
        "rollout_sample_hook_path": [],
        "start_rollout_id": None,
        "sglang_server_concurrency": 512,
    }
    assert {name: getattr(args, name) for name in expected} == expected


def test_derived_values(cli: Cli) -> None:
    args = cli.parse("--n-samples-per-prompt", 3, "--eps-clip", 0.1, "--reward-key", "acc", "--num-rollout", 0)
    assert (args.global_batch_size, args.over_sampling_batch_size) == (12, 4)
    assert (args.eps_clip_high, args.eval_reward_key) == (0.1, "acc")
    assert args.eval_function_path == args.rollout_function_path and args.eval_datasets == []
    assert args.grpo_std_normalization is True and args.log_probs_chunk_size == 1024
    assert isinstance(args.use_gpu, bool)
    assert cli.parse().grpo_std_normalization is False
    assert cli.parse("--num-steps-per-rollout", 2).global_batch_size == 2
    limits = cli.parse("--rollout-max-context-len", 20)
    assert (limits.rollout_max_prompt_len, limits.eval_max_context_len) == (19, 20)


def test_placement(cli: Cli) -> None:
    shared = cli.parse("--colocate", "--actor-num-gpus-per-node", 2, without=("--rollout-num-gpus",))
    assert shared.rollout_num_gpus == 2 and shared.offload_rollout is shared.use_gpu
    assert cli.parse("--offload-rollout").offload_rollout is True
    alone = cli.parse("--debug-train-only", "--colocate", without=("--rollout-num-gpus",))
    assert (alone.rollout_num_gpus, alone.colocate, alone.offload_rollout) == (0, False, False)


def test_save_without_an_interval_says_that_nothing_is_written(
    cli: Cli, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cli.parse("--save", tmp_path, "--save-interval", 1)
    assert "no checkpoint" not in caplog.text
    cli.parse("--save", tmp_path)
    assert f"--save {tmp_path}: no checkpoint will be written without --save-interval" in caplog.text


def test_recorded_rollouts_need_no_engines(cli: Cli) -> None:
    args = cli.parse("--load-debug-rollout-data", "x_{rollout_id}.pt", without=("--rollout-num-gpus",))
    assert args.debug_train_only is True


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--n-samples-per-prompt 0", "--n-samples-per-prompt 0: must be at least 1"),
        ("--rollout-batch-size -1", "--rollout-batch-size -1: must be at least 1"),
        ("--global-batch-size 0", "--global-batch-size 0: must be at least 1"),
        ("--micro-batch-size 0", "--micro-batch-size 0: must be at least 1"),
        ("--rollout-max-response-len 0", "--rollout-max-response-len 0: must be at least 1"),
        ("--rollout-temperature 0", "--rollout-temperature 0.0: must be greater than 0"),
        ("--eval-top-p 1.5", "--eval-top-p 1.5: must be greater than 0 and at most 1"),
        ("--eps-clip-c 1", "--eps-clip-c 1.0: must be greater than 1"),
        ("--xyzzy", "unknown flag --xyzzy; see --help for all flags"),
        ("--rollout-batch-sise 3", "unknown flag --rollout-batch-sise; did you mean --rollout-batch-size?"),
        ("--rollout_seed=3", "unknown flag --rollout_seed; did you mean --rollout-seed?"),
        ("--rollout-num 3", "unknown flag --rollout-num; did you mean --rollout-num-gpus?"),
        ("--lr fast", "argument --lr: invalid float value: 'fast'"),
        ("--train-env-vars [1]", "argument --train-env-vars: expected a JSON object"),
        ("--train-env-vars {", "argument --train-env-vars: not valid JSON"),
        ("--num-layers 4", "--num-layers=4 is not available with --train-backend fsdp"),
        ("--sequence-parallel", "--sequence-parallel=True is not available with --train-backend fsdp"),
        ("--hf-checkpoint no/such", "--hf-checkpoint no/such: no such directory"),
        ("--prompt-data no.jsonl", "--prompt-data: no.jsonl: no such data file"),
        ("--use-kl-loss", "--ref-load: needed for the KL"),
        ("--use-kl-loss --ref-load no/such", "--ref-load no/such: no such directory"),
        ("--kl-loss-coef 0.1", "--kl-loss-coef 0.1: has no effect without --use-kl-loss"),
        ("--eval-interval 1", "--eval-interval 1: needs --eval-prompt-data or --eval-config"),
        ("--eval-prompt-data a b c", "--eval-prompt-data a b c: give pairs NAME FILE"),
        ("--save-interval 1", "--save-interval 1: needs --save"),
        ("--use-dynamic-batch-size", "--use-dynamic-batch-size: needs --max-tokens-per-gpu"),
        ("--balance-by-flops", "--balance-by-flops: needs --use-dynamic-batch-size"),
        ("--num-steps-per-rollout 3", "--num-steps-per-rollout 3: must divide"),
        (
            "--num-steps-per-rollout 2 --global-batch-size 4",
            "--global-batch-size 4: --num-steps-per-rollout 2 makes it 2",
        ),
        ("--global-batch-size 5", "--global-batch-size 5: a rollout has only"),
        ("--over-sampling-batch-size 3", "--over-sampling-batch-size 3: must be at least --rollout-batch-size 4"),
        ("--debug-rollout-only --debug-train-only", "--debug-rollout-only and --debug-train-only"),
        ("--save-debug-rollout-data x.pt", "--save-debug-rollout-data x.pt: must contain {rollout_id}"),
        ("--load-debug-rollout-data-subsample 0.5", "--load-debug-rollout-data-subsample: needs"),
        ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "--rollout-num-gpus 3: must be a multiple of"),
        ("--rollout-max-context-len 9 --rollout-max-prompt-len 9", "--rollout-max-prompt-len 9: must be at most"),
        ("--disable-compute-advantages-and-returns", "--loss-type policy_loss needs advantages"),
        ("--loss-type custom_loss", "--loss-type custom_loss: needs --custom-loss-function-path"),
        ("--custom-loss-function-path a.b", "--custom-loss-function-path: has no effect with --loss-type policy_loss"),
        ("--update-weight-transport disk", "--update-weight-transport disk: needs --update-weight-disk-dir"),
        ("--update-weight-mode delta", "--update-weight-mode delta: needs --update-weight-transport disk"),
        (
            "--update-weight-mode delta --update-weight-transport disk --update-weight-disk-dir d",
            "--update-weight-mode delta: needs --update-weight-local-checkpoint-dir",
        ),
        ("--only-train-params-name-list a --freeze-params-name-list b", "exclude each other"),
        ('--multimodal-keys {"image":"i"}', "--multimodal-keys: not available in this version"),
        ("--custom-config-path no.yaml", "--custom-config-path no.yaml: no such file"),
    ],
)
def test_errors(cli: Cli, capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    assert message in error_of(capsys, cli, *flags.split())


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("--rollout-batch-size", "the following arguments are required: --rollout-batch-size"),
        ("--hf-checkpoint", "--hf-checkpoint: needed"),
        ("--rollout-num-gpus", "--rollout-num-gpus: needed"),
        ("--rollout-max-response-len", "--rollout-max-response-len: needed"),
        ("--num-rollout", "--num-rollout: needed (or --num-epoch)"),
    ],
)
def test_missing_flags(cli: Cli, capsys: pytest.CaptureFixture[str], missing: str, message: str) -> None:
    assert message in error_of(capsys, cli, without=(missing,))


def test_data_errors_name_file_and_line(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    broken = cli.write("broken.jsonl", '{"input": "a"}\n' * 16 + '{"input":\n')
    message = error_of(capsys, cli, "--prompt-data", broken)
    assert message.startswith("--prompt-data: ") and "broken.jsonl:17: not valid JSON" in message
    no_prompt = cli.write("keys.jsonl", '{"question": "a"}\n')
    message = error_of(capsys, cli, "--eval-prompt-data", "dev", no_prompt)
    assert "eval dataset 'dev': " in message and "keys.jsonl:1: record has no key 'input'" in message
    assert message.endswith("its keys: question")


def test_own_data_sources_may_have_any_format(cli: Cli) -> None:
    assert cli.parse("--prompt-data", "s3://x", "--data-source-path", "mine.Source").prompt_data == "s3://x"


def test_model_directory_without_config(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    (cli.model / "config.json").unlink()
    assert "holds no config.json" in error_of(capsys, cli)


def test_epochs_need_a_dataset(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.parse("--num-epoch", 2, without=("--num-rollout",)).num_rollout is None
    message = error_of(capsys, cli, "--num-epoch", 2, without=("--num-rollout", "--prompt-data"))
    assert message.startswith("--num-epoch 2: needs the data set")


def test_eval_prompt_data(cli: Cli) -> None:
    single = cli.parse("--eval-prompt-data", cli.data, "--eval-interval", 1)
    assert [d.name for d in single.eval_datasets] == ["aime"]
    pairs = cli.parse("--eval-prompt-data", "a", cli.data, "b", f"{cli.data}@[:1]", "--eval-temperature", 0)
    assert [(d.name, d.temperature) for d in pairs.eval_datasets] == [("a", 0.0), ("b", 0.0)]
    assert pairs.eval_prompt_data == ["a", str(cli.data), "b", f"{cli.data}@[:1]"]


def test_eval_config_beats_the_flag(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"name": "m", "path": str(cli.data), "rm_type": "math"}
    config = cli.write("eval.yaml", json.dumps({"eval": {"defaults": {"temperature": 0.5}, "datasets": [entry]}}))
    args = cli.parse("--eval-config", config, "--eval-prompt-data", "x", "no.jsonl")
    assert [(d.name, d.temperature, d.rm_type) for d in args.eval_datasets] == [("m", 0.5, "math")]
    typo = cli.write("typo.yaml", json.dumps({"eval": {"defaults": {"temprature": 0.5}, "datasets": [entry]}}))
    assert "did you mean 'temperature'" in error_of(capsys, cli, "--eval-config", typo)
    empty = cli.write("empty.yaml", "eval: {datasets: []}")
    assert "eval.datasets is empty" in error_of(capsys, cli, "--eval-config", empty)


def test_group_reward_and_evaluation_exclude_each_other(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--group-rm" in error_of(capsys, cli, "--group-rm", "--eval-prompt-data", "a", cli.data)


def test_custom_config_sets_and_overrides(
    cli: Cli, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = cli.write("c.yaml", "agentflow_max_steps: 3\nlr: 1e-5\nn-samples-per-prompt: 2\n")
    with caplog.at_level("INFO"):
        args = cli.parse("--custom-config-path", config)
    assert (args.agentflow_max_steps, args.lr, args.n_samples_per_prompt) == (3, 1e-5, 2)
    assert "sets lr: 1e-06 -> 1e-05" in caplog.text and "max_steps" not in caplog.text
    for text, message in (
        ("- a", "must hold a mapping"),
        ("a: [", "not valid YAML"),
        ("eps_clip_high: 1e-1", "--eps-clip-high '1e-1': must be a number"),
        ("lr: fast", "lr 'fast': must be a number"),
        ("n_samples_per_prompt: 0", "--n-samples-per-prompt 0: must be at least 1"),
        ("a b: 1", "key 'a b' cannot be an attribute"),
    ):
        bad = cli.write("bad.yaml", text)
        assert message in error_of(capsys, cli, "--custom-config-path", bad)


def test_custom_arguments_come_first_and_keep_their_type(cli: Cli) -> None:
    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--my-option", type=int, default=3)
        parser.add_argument("--seed", type=float, default=9.0)
        return parser

    args = parse_args(add, argv=cli.argv("--my-option", 4))
    assert args.my_option == 4 and args.seed == 1234
    assert parse_args(add, argv=cli.argv("--seed", 5)).seed == 5.0
    with pytest.raises(argparse.ArgumentError, match="conflicting option"):
        get_slime_extra_args_provider(lambda p: p.add_argument("--colocate") and p)(SlimeArgumentParser())


def test_reset_arg_adds_or_changes_the_default() -> None:
    parser = argparse.ArgumentParser()
    reset_arg(parser, "--a", type=int, default=1)
    reset_arg(parser, "--a", type=str, default=2)
    assert parser.parse_args([]).a == 2 and parser.parse_args(["--a", "7"]).a == 7


def test_router_port_must_be_free(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = error_of(capsys, cli, "--sglang-router-port", port)
        assert message.startswith(f"--sglang-router-port {port}: port {port} on 127.0.0.1 cannot be used")
        assert cli.parse("--sglang-router-port", port, "--sglang-router-ip", "127.0.0.1").sglang_router_port == port


def test_help_works(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(argv=["--help"])
    assert caught.value.code == 0 and "--rollout-batch-size" in capsys.readouterr().out


# Flags whose only effect is on other attributes, during validation.
RESOLVED = {
    "dump_details",
    "offload",
    "custom_config_path",
    "num_steps_per_rollout",
    "eval_prompt_data",
    "eval_config",
    "multimodal_keys",
}
# Flags that nothing reads yet; must be empty.
PENDING: set[str] = set()


def test_every_flag_is_read_somewhere() -> None:
    parser = SlimeArgumentParser(add_help=False)
    get_slime_extra_args_provider()(parser)
    registered = {action.dest for action in parser._actions}
    definitions = ROOT / "slime" / "utils" / "arguments"
    readers = [ROOT / "train.py", ROOT / "train_async.py"]
    readers += [
        p for room in ("slime", "slime_plugins") for p in (ROOT / room).rglob("*.py") if p.parent != definitions
    ]
    text = "\n".join(path.read_text() for path in readers)
    # The quoted form covers getattr and the tables of names in `eval_config`.
    unread = {dest for dest in registered if not re.search(rf"""args\.{dest}\b|["']{dest}["']""", text)}
    assert unread - RESOLVED - UNAVAILABLE == PENDING
