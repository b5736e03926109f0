"""The one exception tree of `agentic`.

    AgenticError
     +-- ConfigError            bad flag, role file or prompt set: also a ValueError, one line, names the remedy
     +-- InfrastructureError    the world failed, not the model: the rollout is excluded, never scored 0
     |    +-- RoleTimeout       a role did not answer before its deadline, all retries used
     |    +-- RoleUnavailable   connection refused or dropped, HTTP 5xx or 429, all retries used
     |    +-- RoleBadResponse   HTTP 4xx, or an answer that breaks the protocol: never retried
     +-- BadRecord              a record of the data set cannot be used: the rollout is excluded, never scored 0
     +-- PromptTooLong          the prompt leaves no room for one new token: nothing was sent
     +-- Unscored               the judge could not give a verdict: the rollout is excluded, never scored 0
     +-- TooManyFailures        more rollouts failed than the configured share: the run must stop

Invariant: every error has a short `reason` (no spaces) under which the failure is counted, and survives pickling
(errors travel through Ray).
"""

from __future__ import annotations


class AgenticError(Exception):
    """Root of the tree; `reason` is the key under which failures are counted."""

    reason: str = "agentic_error"


class ConfigError(AgenticError, ValueError):
    """Configuration is wrong. The message names the file or flag, the value and the remedy."""

    reason = "config_error"


class InfrastructureError(AgenticError):
    """Something outside the model failed; the rollout must leave the statistics."""

    # Positional only: BaseException keeps exactly these arguments, which is what pickle calls the class with.
    def __init__(self, reason: str, detail: str = "", /) -> None:
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class RoleTimeout(InfrastructureError):
    """Role `role` did not answer in time; counted as `role_timeout:<role>`."""

    def __init__(self, role: str, detail: str = "", /) -> None:
        super().__init__(f"role_timeout:{role}", detail)


class RoleUnavailable(InfrastructureError):
    """Role `role` could not be reached or was overloaded; counted as `role_unavailable:<role>`."""

    def __init__(self, role: str, detail: str = "", /) -> None:
        super().__init__(f"role_unavailable:{role}", detail)


class RoleBadResponse(InfrastructureError):
    """Role `role` refused the request or broke the protocol; counted as `role_bad_response:<role>`."""

    def __init__(self, role: str, detail: str = "", /) -> None:
        super().__init__(f"role_bad_response:{role}", detail)


class BadRecord(AgenticError):
    """A record lacks what the method needs; `reason` says what, the detail which record and the remedy."""

    def __init__(self, reason: str, detail: str, /) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class PromptTooLong(AgenticError):
    """The prompt of a call leaves less than one token of room in the model's context."""

    reason = "prompt_too_long"


class Unscored(AgenticError):
    """No score could be given to a finished answer (judge unreachable, or no verdict in its output)."""

    reason = "unscored"


class TooManyFailures(AgenticError):
    """The share of failed rollouts is above the configured limit."""

    reason = "too_many_failures"
