"""`eval_log.jsonl`: one line per data set for every evaluation during training.

Inputs: the evaluation result of slime's rollout (`{dataset: {rewards, truncated, samples}}`). Invariants: the file is
only appended to, a line in one write, so lines of concurrent writers do not mix; failed rollouts are counted by reason.
Leaves out: what else a method records in its lines.
"""

from __future__ import annotations

import json
import logging
import os
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentic.common.evaluation_statistics import standard_error
from agentic.common.failures import failure_reason
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

UNUSABLE = (Sample.Status.FAILED, Sample.Status.ABORTED)


def eval_log_path(args: Namespace, rollout_id: int) -> Path | None:
    """`args.save/eval_log.jsonl`; None, with a warning, without `--save`."""
    if not args.save:
        logger.warning(
            "eval_log: --save is not set, the evaluation of rollout %d is not written to a file", rollout_id
        )
        return None
    return Path(args.save) / "eval_log.jsonl"


def append_evaluation(path: Path, rollout_id: int, dataset: str, content: Mapping[str, Any]) -> None:
    """One line: time, rollout, data set, then `content` (values JSON does not know are written as text)."""
    line = {"time": time.time(), "rollout_id": rollout_id, "dataset": dataset, **content}
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, (json.dumps(line, default=str) + "\n").encode())
    finally:
        os.close(descriptor)


def reward_figures(result: Mapping[str, Any], failures_as_zero: bool = False) -> dict[str, Any]:
    """n, n_failed, mean, stderr, truncated, failure_reasons of one data set.

    Failed rollouts are outside n and mean, or count as 0 in them. mean is None without any score, stderr below two.
    """
    samples: Sequence[Sample] = result.get("samples") or []
    usable = [sample.status not in UNUSABLE for sample in samples] or [True] * len(result["rewards"])
    pairs = zip(result["rewards"], usable, strict=True)
    scores = [float(reward) if ok else 0.0 for reward, ok in pairs if ok or failures_as_zero]
    reasons = (failure_reason(sample) for sample in samples if sample.status in UNUSABLE)
    return {
        "n": len(scores),
        "n_failed": len(usable) - sum(usable),
        "mean": sum(scores) / len(scores) if scores else None,
        "stderr": standard_error(scores),
        "truncated": sum(bool(flag) for flag in result.get("truncated") or []),
        "failure_reasons": dict(Counter(str(reason) for reason in reasons)),
    }
