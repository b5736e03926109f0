"""Settings: defaults, the paper's objective, and one error for every wrong value or contradicting flag."""

from __future__ import annotations

from argparse import Namespace

import pytest

from agentic.common.errors import ConfigError
from agentic.memagent.agent import check_window
from agentic.memagent.config import MemAgentConfig


def from_settings(**settings: object) -> MemAgentConfig:
    return MemAgentConfig.from_args(Namespace(lr=1.0, **{f"memagent_{name}": v for name, v in settings.items()}))


def test_defaults():
    config = from_settings()
    assert (config.chunk_tokens, config.memory_tokens, config.question_tokens, config.answer_tokens) == (
        5000,
        *[1024] * 3,
    )
    assert (config.window_tokens, config.max_chunks, config.eval_max_chunks) == (8192, 8, 0)
    assert (config.turn_credit, config.loss_norm, config.train_answer) == ("amortized", "token", False)
    assert config.divides_by_std(True) and not config.divides_by_std(False)
    assert hash(config) == hash(from_settings(timeout_s=120))


def test_paper_is_one_setting():
    config = from_settings(objective="paper")
    assert (config.turn_credit, config.loss_norm, config.train_answer) == ("broadcast", "token", True)
    assert not config.divides_by_std(True)
    assert from_settings(objective="paper", loss_norm="token") == config
    with pytest.raises(
        ConfigError, match="memagent_turn_credit is 'amortized': objective: paper sets it to 'broadcast'"
    ):
        from_settings(objective="paper", turn_credit="amortized")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_token": 3}, "memagent_chunk_token.*did you mean 'chunk_tokens'"),
        ({"chunk_tokens": 0}, "memagent_chunk_tokens is 0: must be positive"),
        ({"max_chunks": -1}, "memagent_max_chunks is -1: must not be negative"),
        ({"chunk_tokens": "5000"}, "expected a int such as 5000"),
        ({"train_answer": 1}, "memagent_train_answer is 1"),
        ({"truncation": "tail"}, "choose from center, error"),
        ({"on_empty": "drop"}, "choose from placeholder, keep"),
        ({"layout": "rows"}, "choose from siblings, metadata"),
        ({"turn_credit": "shared"}, "choose from broadcast, amortized"),
        ({"loss_norm": "mean"}, "choose from token, conv, traj"),
        ({"reward": "exact"}, "choose from em, em_norm, f1, sub_em, sub_em_one_way, multi_value"),
        ({"objective": "ref"}, "choose from default, paper"),
        ({"max_failure_rate": 1.5}, "must be at most 1"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        from_settings(**settings)


@pytest.mark.parametrize(
    ("settings", "flags", "message"),
    [
        ({}, {"rewards_normalization": False}, "--disable-rewards-normalization"),
        ({}, {"calculate_per_token_loss": True}, "memagent_turn_credit is 'amortized': --calculate-per-token-loss"),
        (
            {"loss_norm": "conv", "turn_credit": "broadcast"},
            {"calculate_per_token_loss": True},
            "memagent_loss_norm is 'conv': --calculate-per-token-loss ignores it",
        ),
        ({}, {"sglang_context_length": 4096}, "memagent_window_tokens is 8192: --sglang-context-length 4096"),
        ({}, {"rollout_max_response_len": 256}, "memagent_memory_tokens is 1024: --rollout-max-response-len 256"),
    ],
)
def test_contradicting_flags(settings, flags, message):
    with pytest.raises(ConfigError, match=message):
        from_settings(**settings).check_flags(Namespace(**flags))


def test_fitting_flags():
    flags = Namespace(rollout_max_response_len=1024, sglang_context_length=8192, calculate_per_token_loss=True)
    from_settings(objective="paper").check_flags(flags)
    from_settings().check_flags(Namespace())


def test_window_is_checked_by_parts():
    check_window(MemAgentConfig(), {"memory": 120, "answer": 60}, 5)
    with pytest.raises(ConfigError, match=r"memory turn may need 121 \+ 1024 \+ 1024 \+ 5000 \+ 1024 = 8193 .* by 1,"):
        check_window(MemAgentConfig(), {"memory": 121, "answer": 60}, 5)
    with pytest.raises(ConfigError, match="the answer turn"):
        check_window(MemAgentConfig(answer_tokens=6200), {"memory": 120, "answer": 60}, 5)
    with pytest.raises(ConfigError, match="no_memory.txt has 2000 tokens"):
        check_window(MemAgentConfig(), {"memory": 120, "answer": 60}, 2000)
