"""Settings: every wrong value is one error that names the setting."""

from __future__ import annotations

from argparse import Namespace

import pytest

from agentic.agentflow.config import AgentFlowConfig
from agentic.common.errors import ConfigError


def from_settings(**settings: object) -> AgentFlowConfig:
    given = {"agentflow_roles": "roles.yaml"} | {f"agentflow_{name}": value for name, value in settings.items()}
    return AgentFlowConfig.from_args(Namespace(lr=1.0, **given))


def test_defaults_and_yaml_types():
    config = from_settings(train_roles=["next_step"], tools="python_coder, base_generator", trajectory_timeout_s=30)
    assert config.train_roles == ("next_step",)
    assert config.tools == ("python_coder", "base_generator")
    assert config.trajectory_timeout_s == 30.0
    assert (config.max_steps, config.eval_max_steps, config.turn_weighting) == (3, 10, "paper")
    assert hash(config) == hash(
        from_settings(train_roles=["next_step"], tools=list(config.tools), trajectory_timeout_s=30.0)
    )


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        ({}, {"planner", "executor", "verifier", "base_generator", "python_coder", "generator", "judge"}),
        (
            {"judge": "rule_only", "tools": ["python_coder"]},
            {"planner", "executor", "verifier", "python_coder", "generator"},
        ),
        (
            {"train_roles": ["next_step", "final"], "tools": "base_generator", "judge": "rule_only"},
            {"planner", "executor", "verifier", "base_generator"},
        ),
    ],
)
def test_required_roles(settings, roles):
    assert set(from_settings(**settings).required_roles) == roles


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_step": 3}, "agentflow_max_step.*did you mean 'max_steps'"),
        ({"roles": ""}, "agentflow_roles is not set"),
        ({"max_steps": 0}, "agentflow_max_steps is 0: must be positive"),
        ({"max_steps": "3"}, "agentflow_max_steps is '3'; expected a int"),
        ({"max_steps": True}, "agentflow_max_steps is True"),
        ({"strip_wrapper": 1}, "agentflow_strip_wrapper is 1"),
        ({"turn_weighting": "mean"}, "choose from paper, token_mean, uniform_turn"),
        ({"train_roles": ["planner"]}, "'planner': choose from analysis, next_step, final"),
        ({"train_roles": []}, "at least one role"),
        ({"tools": ["calculator"]}, "choose from base_generator, python_coder"),
        ({"tools": ["python_coder", "python_coder"]}, "each tool once"),
        ({"tools": [1]}, "agentflow_tools"),
        ({"judge": "llm"}, "rule_first, rule_only"),
        ({"max_failure_rate": 1.5}, "between 0 and 1"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        from_settings(**settings)
