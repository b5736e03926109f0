"""tools/plan_run.py in this process: programs cannot be imported, and starting one for each case would take minutes."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest

from agentic.common.errors import ConfigError
from agentic.common.launching import Plan


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PLANNER = _load(Path(__file__).resolve().parents[1] / "tools/plan_run.py")


def ask_planner(plan: Plan, run: Sequence[str]) -> str:
    """As `agentic.common.launching` asks the program: its output, or ConfigError with its last line."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("CUDA_VISIBLE_DEVICES", plan.env.get("CUDA_VISIBLE_DEVICES", ""))
        try:
            code = PLANNER.main([*plan.limits, *run])
        except SystemExit as left:  # the trainer's parser
            code = left.code
    if code:
        raise ConfigError(err.getvalue().strip().splitlines()[-1].removeprefix("error: "))
    return out.getvalue()
