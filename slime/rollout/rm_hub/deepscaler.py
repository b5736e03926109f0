r"""Rule reward of DeepScaleR: the boxed answer after the model's thinking must equal the label.

Left out: partial credit. A response without `</think>` or `###Response` has no final part and scores 0; use
`rm_type: math` for models that answer without thinking.
"""

from __future__ import annotations

from typing import Any

from slime.rollout.rm_hub.math_utils import grade_answer_verl

_THINK_END = "</think>"
_RESPONSE_MARK = "###Response"


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """1 when the boxed answer of the final part equals the label (one answer or a list of accepted ones), else 0."""
    solution = _final_part(response)
    if solution is None or label is None:
        return 0
    accepted = label if isinstance(label, list | tuple) else [label]
    return int(any(grade_answer_verl(solution, str(answer)) for answer in accepted))


def _final_part(response: str) -> str | None:
    for mark in (_THINK_END, _RESPONSE_MARK):
        if mark in response:
            return response.rsplit(mark, 1)[1]
    return None
