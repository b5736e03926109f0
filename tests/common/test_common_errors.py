"""The exception tree: reasons for counting, survival of pickling, config errors as ValueError."""

from __future__ import annotations

import pickle

import pytest

from agentic.common.errors import (
    AgenticError,
    BadRecord,
    ConfigError,
    InfrastructureError,
    PromptTooLong,
    RoleBadResponse,
    RoleTimeout,
    RoleUnavailable,
    TooManyFailures,
    Unscored,
)

ERRORS = [
    (ConfigError("bad"), "config_error", "bad"),
    (InfrastructureError("trajectory_timeout"), "trajectory_timeout", "trajectory_timeout"),
    (RoleTimeout("judge", "60 s"), "role_timeout:judge", "role_timeout:judge: 60 s"),
    (RoleUnavailable("judge"), "role_unavailable:judge", "role_unavailable:judge"),
    (RoleBadResponse("judge", "HTTP 400"), "role_bad_response:judge", "role_bad_response:judge: HTTP 400"),
    (BadRecord("no_context", "sample 3"), "no_context", "no_context: sample 3"),
    (PromptTooLong("9 tokens"), "prompt_too_long", "9 tokens"),
    (Unscored("no verdict"), "unscored", "no verdict"),
    (TooManyFailures("7 of 8"), "too_many_failures", "7 of 8"),
]


@pytest.mark.parametrize("error, reason, text", ERRORS)
def test_reason_and_text_survive_pickling(error: AgenticError, reason: str, text: str) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (copy.reason, str(copy)) == (error.reason, str(error)) == (reason, text)
    assert " " not in reason


def test_the_tree() -> None:
    assert issubclass(ConfigError, ValueError)
    for kind in (RoleTimeout, RoleUnavailable, RoleBadResponse):
        assert issubclass(kind, InfrastructureError)
    assert not issubclass(Unscored, InfrastructureError) and not issubclass(PromptTooLong, InfrastructureError)
