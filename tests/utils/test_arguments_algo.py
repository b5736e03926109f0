"""Flags of the algorithm: what excludes what, what would change nothing, and the arguments of the two training roles."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from slime.utils.arguments import get_slime_extra_args_provider, parse_megatron_role_args
from slime.utils.arguments.model_shape import set_model_shape
from slime.utils.arguments.parser import SlimeArgumentParser
from slime.utils.arguments.validate_algo import resolve_algorithm
from slime.utils.flops_utils import calculate_fwd_flops

BASE = "--rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 8"


def parse(flags: str) -> Namespace:
    parser = SlimeArgumentParser()
    get_slime_extra_args_provider()(parser)
    return parser.parse_args(f"{BASE} {flags}".split())


def resolve(flags: str) -> Namespace:
    args = parse(flags)
    resolve_algorithm(args)
    return args


def test_defaults_of_the_contract() -> None:
    expected = {
        "kl_coef": 0.0, "gamma": 1.0, "lambd": 1.0, "value_clip": 0.2, "num_critic_only_steps": 0, "tis_clip": 2.0,
        "tis_clip_low": 0.0, "opsm_delta": 1e-4, "opd_kl_coef": 1.0, "opd_type": None, "normalize_advantages": False,
        "use_tis": False, "use_opsm": False, "use_opd": False, "get_mismatch_metrics": False, "use_rollout_entropy": False,
        "custom_tis_function_path": None, "megatron_config_path": None, "use_critic": False, "eps_clip_high": 0.2,
        "grpo_std_normalization": True,
    }  # fmt: skip
    args = resolve("")
    assert {name: getattr(args, name) for name in expected} == expected
    assert resolve("--advantage-estimator ppo").use_critic is True


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kl-coef 0.1", "--kl-coef 0.1: has no effect with --advantage-estimator grpo"),
        ("--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1", "exclude each other"),
        ("--kl-loss-coef 0.1", "--kl-loss-coef 0.1: has no effect without --use-kl-loss"),
        ("--use-unbiased-kl", "--use-unbiased-kl: has no effect without --use-kl-loss"),
        ("--ref-update-interval 2", "--ref-update-interval 2: there is no reference model"),
        ("--advantage-estimator reinforce_plus_plus", "needs --normalize-advantages"),
        ("--advantage-estimator reinforce_plus_plus_baseline", "needs --normalize-advantages"),
        ("--advantage-estimator ppo --loss-type sft_loss", "ppo: needs --loss-type policy_loss"),
        ("--advantage-estimator cispo --eps-clip-c 3", "--eps-clip-c 3.0: has no effect"),
        ("--num-critic-only-steps -1", "must be at least 0"),
        ("--use-rollout-logprobs --use-tis", "exclude each other"),
        ("--get-mismatch-metrics", "needs --custom-tis-function-path"),
        ("--custom-tis-function-path a.b", "has no effect without --use-tis"),
        ("--use-tis --tis-clip-low 3", "--tis-clip-low 3.0: must be at most --tis-clip 2.0"),
        ("--use-opsm --loss-type sft_loss", "--use-opsm: has no effect with --loss-type sft_loss"),
        ("--use-rollout-entropy --loss-type sft_loss", "--use-rollout-entropy: has no effect"),
        ("--keep-old-actor --use-rollout-logprobs", "--keep-old-actor: has no effect with --use-rollout-logprobs"),
        ("--keep-old-actor --debug-train-only", "--keep-old-actor: has no effect with --debug-train-only"),
        ("--keep-old-actor --loss-type sft_loss", "--keep-old-actor: has no effect with --loss-type sft_loss"),
        ("--use-opd", "--use-opd: needs --opd-type"),
        ("--opd-type sglang", "--opd-type: has no effect without --use-opd"),
        ("--opd-teacher-load x", "--opd-teacher-load: has no effect without --use-opd"),
        ("--use-opd --opd-type sglang --opd-teacher-load x", "no effect with --opd-type sglang"),
        ("--megatron-config-path x.yaml", "has no effect without a critic"),
    ],
)
def test_combinations_that_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(flags)


def test_a_teacher_checkpoint_must_exist() -> None:
    with pytest.raises(FileNotFoundError, match="--opd-teacher-load no/such"):
        resolve("--use-opd --opd-type megatron --opd-teacher-load no/such")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--n-samples-per-prompt 1", "every advantage is 0 and nothing is learned"),
        ("--gamma 0.9", "--gamma 0.9 has no effect without --advantage-estimator reinforce_plus_plus or ppo"),
        ("--lambd 0.9", "--lambd 0.9 has no effect"),
        ("--value-clip 0.1", "--value-clip 0.1 has no effect"),
        ("--num-critic-only-steps 2", "--num-critic-only-steps 2 has no effect"),
        ("--tis-clip 3", "--tis-clip 3.0 has no effect without --use-tis"),
        ("--opsm-delta 0.1", "--opsm-delta 0.1 has no effect without --use-opsm"),
        ("--opd-kl-coef 2", "--opd-kl-coef 2.0 has no effect without --use-opd"),
        ("--kl-loss-type k3", "--kl-loss-type k3 has no effect"),
        ("--advantage-estimator cispo", "cispo also bounds weights from below"),
        ("--advantage-estimator gspo --calculate-per-token-loss", "GSPO's own mean is per sequence"),
        ("--use-opsm", "--use-opsm: with one optimiser step per rollout"),
        ("--use-opd --opd-type sglang --rollout-temperature 0.7", "teacher log-probs at temperature 1"),
    ],
)
def test_what_changes_nothing_is_said(flags: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    resolve(flags)
    assert message in caplog.text


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--advantage-estimator ppo --gamma 0.9 --lambd 0.9 --value-clip 0.1 --num-critic-only-steps 2 --kl-coef 0.1",
        "--advantage-estimator reinforce_plus_plus --normalize-advantages --gamma 0.9 --kl-coef 0.1 --kl-loss-type k2",
        "--use-tis --tis-clip 3 --tis-clip-low 0.5",
        "--use-opsm --global-batch-size 4 --opsm-delta 0.1",
        "--use-kl-loss --kl-loss-coef 0.1 --use-unbiased-kl --ref-update-interval 2 --kl-loss-type k3",
        "--n-samples-per-prompt 1 --disable-rewards-normalization",
        "--n-samples-per-prompt 1 --loss-type sft_loss",
        "--kl-coef 0.1 --custom-advantage-function-path a.b",
    ],
)
def test_combinations_that_work_are_silent(flags: str, caplog: pytest.LogCaptureFixture) -> None:
    resolve(flags)
    assert caplog.text == ""


def test_model_sizes_come_from_the_configuration(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 16,
        "vocab_size": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {**sizes, "num_key_value_heads": 2}}))
    args = Namespace(hf_checkpoint=str(tmp_path))
    set_model_shape(args)
    assert (args.num_layers, args.ffn_hidden_size, args.num_query_groups, args.num_experts) == (3, 16, 2, None)
    assert calculate_fwd_flops([10], args) > calculate_fwd_flops([5], args) > 0
    for name in ("num_experts", "num_local_experts"):
        (tmp_path / "config.json").write_text(json.dumps({**sizes, name: 4}))
        set_model_shape(args)
        assert args.num_experts == 4
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "vocab_size": None}))
    with pytest.raises(ValueError, match="--balance-by-flops .*config.json does not say vocab_size"):
        set_model_shape(args)


def write(folder: Path, text: str) -> str:
    (folder / "roles.yaml").write_text(text)
    return str(folder / "roles.yaml")


def test_roles_inherit_override_and_cast(tmp_path: Path) -> None:
    args = resolve("--advantage-estimator ppo --kl-coef 0.1 --save run --load run --save-hf hf")
    path = write(tmp_path, "megatron: [{name: default, role: critic, overrides: {lr: 1e-5, num_nodes: 4, seed: '7'}}]")
    critic = parse_megatron_role_args(args, path, "critic")
    assert (critic.lr, critic.seed, critic.kl_coef, critic.save_hf) == (1e-5, 7, 0.0, None)
    assert (critic.save, critic.load) == ("run/critic", "run/critic") and not hasattr(critic, "num_nodes")
    actor = parse_megatron_role_args(args, path, "actor")
    assert vars(actor) == vars(args) and actor is not args
    resumed = Namespace(**{**vars(args), "load": "run/iter_0000003"})
    assert parse_megatron_role_args(resumed, None, "critic").load == "run/critic/iter_0000003"
    path = write(tmp_path, "megatron: [{name: default, role: critic, args: {load: elsewhere}}]")
    assert parse_megatron_role_args(args, path, "critic").load == "elsewhere"


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("[", ValueError, "not valid YAML"),
        ("megatron: {}", ValueError, "needs a list 'megatron'"),
        ("megatron: [{role: judge}]", ValueError, "unknown role 'judge'"),
        ("megatron: [{role: critic, overrides: {lr: fast}}]", ValueError, "lr: 'fast' is not a number"),
        ("megatron: [{role: critic}, {role: critic}]", AssertionError, "2 entries for the role critic"),
    ],
)
def test_broken_role_files(tmp_path: Path, text: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        parse_megatron_role_args(parse(""), write(tmp_path, text), "critic")
    with pytest.raises(FileNotFoundError, match="no such file"):
        parse_megatron_role_args(parse(""), str(tmp_path / "absent.yaml"), "actor")
