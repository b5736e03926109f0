r"""Rule reward of DAPO: the `Answer:` line (or, strictly, the last `\boxed{}`) must equal the label as text.

Input: solution text, of which only the end is read, and the label. The normalisation follows the evaluation of
Minerva (Lewkowycz et al. 2022, appendix D). Left out: mathematical equality; that is `math_utils`.
"""

from __future__ import annotations

import re
import signal
from types import FrameType
from typing import Any

from slime.rollout.rm_hub.boxed import last_boxed_only_string, remove_boxed

__all__ = [
    "compute_score",
    "is_correct_minerva",
    "is_correct_strict_box",
    "last_boxed_only_string",
    "normalize_final_answer",
    "remove_boxed",
    "timeout",
    "verify",
]

_TAIL_CHARS = 300
_STRICT_TAIL_CHARS = 100
_INVALID = "[INVALID]"

_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots"),
)
_UNWRAPPED = tuple(re.compile(rf"\\{name}\{{(.*?)\}}") for name in ("text", "textbf", "overline"))
_LATEX_BOX = re.compile(r"\\boxed\{(.*)\}", re.DOTALL)
_MATH = re.compile(r"\$(.*?)\$", re.DOTALL)


class timeout:  # noqa: N801 - the public name
    """Context manager: TimeoutError after `seconds`, for checks of one's own. Main thread only, as all signals are."""

    def __init__(self, seconds: float = 1, error_message: str = "Timeout") -> None:
        self.seconds, self.error_message = seconds, error_message

    def handle_timeout(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler. Raises TimeoutError."""
        raise TimeoutError(self.error_message)

    def __enter__(self) -> None:
        self._previous = signal.signal(signal.SIGALRM, self.handle_timeout)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._previous)


def normalize_final_answer(final_answer: str) -> str:
    """Canonical text of a final answer: right of the last `=`, without units, wrappers and thousands separators."""
    text = final_answer.split("=")[-1]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for phrase in _REMOVED:
        text = text.replace(phrase, "")
    math = _MATH.search(text)
    text = math.group(1) if math else text
    for pattern in _UNWRAPPED:
        text = pattern.sub(r"\1", text)
    text = _LATEX_BOX.sub(r"\1", text)
    text = re.sub(r"(frac)([^{])(.)", r"frac{\2}{\3}", text)
    text = re.sub(r"(sqrt)([^{\[])", r"sqrt{\2}", text).replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def is_correct_minerva(
    solution_str: str,
    gt: str,
    gt_need_extract: bool = False,
    answer_pattern: str = r"(?i)Answer\s*:\s*([^\n]+)",
) -> tuple[bool, str]:
    """(equal, prediction) for the last match of `answer_pattern`; the prediction is `[INVALID]` without a match."""
    matches = re.findall(answer_pattern, solution_str)
    prediction = normalize_final_answer(matches[-1] if matches else _INVALID)
    truth = (remove_boxed(last_boxed_only_string(gt)) or "") if gt_need_extract else gt
    return prediction == normalize_final_answer(truth), prediction


def is_correct_strict_box(pred: str, gt: str, pause_tokens_index: list[int] | None = None) -> tuple[int, str | None]:
    """(1 or -1, boxed content) of the last 100 characters, or of the 100 before the last of four pause positions.

    Raises ValueError when `pause_tokens_index` does not hold four positions.
    """
    if pause_tokens_index is not None:
        if len(pause_tokens_index) != 4:
            raise ValueError(f"pause_tokens_index needs 4 positions, got {len(pause_tokens_index)}")
        pred = pred[pause_tokens_index[-1] - _STRICT_TAIL_CHARS :]
    else:
        pred = pred[-_STRICT_TAIL_CHARS:]
    content = remove_boxed(last_boxed_only_string(pred))
    return (1 if content == gt else -1), content


def verify(
    solution_str: str,
    answer: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> tuple[bool, str | None]:
    """(equal, prediction) by the strict box rule or the `Answer:` rule."""
    if strict_box_verify:
        correct, prediction = is_correct_strict_box(solution_str, answer, pause_tokens_index)
        return correct == 1, prediction
    return is_correct_minerva(solution_str, answer)


def compute_score(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """`{"score": 1.0 or -1.0, "acc": bool, "pred": text}` from the last 300 characters of the solution."""
    tail = solution_str[-_TAIL_CHARS:]
    correct, prediction = verify(tail, str(ground_truth), strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": prediction}
