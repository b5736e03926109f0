"""The error of the driver that is the user's to repair; it becomes exit code 2."""

from __future__ import annotations


class BadInput(ValueError):
    """What the user gave cannot be used; the message says what, where and how to repair it."""
