r"""Answer equality for competition mathematics: string normalisation (MATH) first, then exact or numeric comparison.

Input: model output and label as text. Conventions of the MATH and PRM800K graders are kept: a fraction must be
reduced, and an integer label wants an integer answer, because an unfinished calculation is not an answer.
Invariants: model text is never evaluated as code (see `safe_math`); time is bounded by the limits there.
Left out: equality of sets in another order, units of measure beyond removing their names, rounding.
"""

from __future__ import annotations

import re
from fractions import Fraction

from slime.rollout.rm_hub.boxed import last_boxed_only_string, remove_boxed
from slime.rollout.rm_hub.safe_math import MAX_CHARS, expressions_equal

__all__ = [
    "are_equal_under_sympy",
    "count_unknown_letters_in_expr",
    "extract_answer",
    "extract_boxed_answer",
    "grade_answer_mathd",
    "grade_answer_sympy",
    "grade_answer_verl",
    "last_boxed_only_string",
    "mathd_normalize_answer",
    "remove_boxed",
    "should_allow_eval",
    "split_tuple",
]

_WHOLE_TEXT = re.compile(r"^\\(?:text|mbox|mathrm|textbf)\s*\{([^{}]*)\}$")
_PART_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf)\s*\{[^{}]*\}(?:\^\{?\d\}?)?")
_UNITS = re.compile(
    r"(?<=[\d\s}])(degree|cm|centimeter|kilometer|km|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|"
    r"yard|dollar|cent)(?:es|s)?\b\s*(?:\^\{?\d\}?)?"
)
_SCALES = {"million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_SCALES)})s?\b")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?")
_THOUSANDS = re.compile(r"(?<=\d),(?:\\!)?\s?(?=\d{3}(?!\d))")
_SIMPLE_FRACTION = re.compile(r"^-?\d+/\d+$")
_INTEGER = re.compile(r"^[-+]?\d+(?:\.0*)?$")
_LATEX_FRACTION = re.compile(r"\\frac\{(-?\d+)\}\{(-?\d+)\}")
_KNOWN_WORDS = re.compile(
    r"\\?(sqrt|[dt]?frac|pi|cdot|times|div|left|right|arc(?:sin|cos|tan)|sin|cos|tan|ln|log|exp)"
)
_MAX_UNKNOWN_LETTERS = 2


def mathd_normalize_answer(answer: str | None) -> str | None:
    """Canonical spelling of an answer as in the MATH dataset's grader; equal strings are equal answers."""
    if answer is None:
        return None
    text = answer.strip()
    whole = _WHOLE_TEXT.match(text)
    text = whole.group(1).strip() if whole else text
    for old, new in (("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\$", "")):
        text = text.replace(old, new)
    text = re.sub(r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])", "", text)
    text = _DEGREES.sub("", text).replace("\\%", "").replace("%", "")
    text = text.split("\\text{ ")[0]  # a trailing unit
    text = re.sub(r"(^|[\s{])\.(?=\d)", r"\g<1>0.", text)
    left, _, right = text.partition("=")
    text = right if right and len(left.strip()) <= 2 and "=" not in right else text
    text = re.sub(r"\\sqrt\s*([^\s{\[\\])", r"\\sqrt{\1}", text).replace(" ", "")
    text = _brace_fractions(text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    return re.sub(r"^(-?\d+)/(\d+)$", r"\\frac{\1}{\2}", text)


def _brace_fractions(text: str) -> str:
    r"""`\frac12` and `\frac1{72}` get their braces."""
    return re.sub(r"\\frac(?:\{([^{}]*)\}|(\w))(?:\{([^{}]*)\}|(\w))", _braced, text)


def _braced(match: re.Match[str]) -> str:
    numerator = match.group(1) if match.group(1) is not None else match.group(2)
    denominator = match.group(3) if match.group(3) is not None else match.group(4)
    return f"\\frac{{{numerator}}}{{{denominator}}}"


def _normalize(expr: str) -> str:
    """Plain lower-case form used before the numeric comparison."""
    text = expr.strip().strip("$").strip()
    whole = _WHOLE_TEXT.match(text)
    text = whole.group(1).strip() if whole else _PART_TEXT.sub("", text)
    for old, new in (("\\$", ""), ("$", ""), ("\\%", ""), ("%", ""), ("\\!", ""), ("\u2212", "-"), ("\\ ", " ")):
        text = text.replace(old, new)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])", "", text)
    text = re.sub(r"\s+(?:or|and)\s+", ",", text)
    text = _SCALED.sub(_written_out, text)
    text = _UNITS.sub("", _DEGREES.sub("", text))
    left, _, right = text.partition("=")
    text = right if right and len(left.strip()) <= 2 and "=" not in right else text
    text = _LATEX_FRACTION.sub(r"\1/\2", _brace_fractions(text)) if _is_lone_fraction(text) else text
    text = text.strip().removesuffix(".").strip()
    return _integer_form(_strip_thousands(text)).lower()


def _written_out(match: re.Match[str]) -> str:
    value = Fraction(match.group(1)) * _SCALES[match.group(2)]
    return f"{value.numerator}" if value.denominator == 1 else f"{value.numerator}/{value.denominator}"


def _is_lone_fraction(text: str) -> bool:
    return bool(_LATEX_FRACTION.fullmatch(_brace_fractions(text.strip().lstrip("-"))))


def _strip_thousands(text: str) -> str:
    """Drops the separators of `1,000`; inside brackets a comma separates the parts of a tuple."""
    return text if text[:1] in "([" and text[:1] else _THOUSANDS.sub("", text)


def _integer_form(text: str) -> str:
    return text.split(".")[0].lstrip("+") if _INTEGER.match(text) else text


def count_unknown_letters_in_expr(expr: str) -> int:
    """Number of different letters that belong to no known function or constant."""
    return len({character for character in _KNOWN_WORDS.sub(" ", expr) if character.isalpha()})


def should_allow_eval(expr: str) -> bool:
    """False for prose and long text: it is not worth parsing."""
    return len(expr) <= MAX_CHARS and count_unknown_letters_in_expr(expr) <= _MAX_UNKNOWN_LETTERS


def are_equal_under_sympy(ground_truth_normalized: str, given_normalized: str) -> bool:
    """Mathematical equality of two normalised expressions (the name is the interface's; no sympy is involved)."""
    if not (should_allow_eval(ground_truth_normalized) and should_allow_eval(given_normalized)):
        return False
    return expressions_equal(ground_truth_normalized, given_normalized)


def split_tuple(expr: str) -> list[str]:
    """Parts of `(a, b)`, `[a, b]` or `a, b` at commas outside nested brackets; one part for anything else."""
    text = expr.strip()
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and "," in text and _one_bracket_pair(text):
        text = text[1:-1]
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current.strip()]


def _one_bracket_pair(text: str) -> bool:
    """True when the first bracket closes only at the end (half-open intervals included)."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if depth == 0:
            return position == len(text) - 1
    return False


def _parts_equal(truth: str, given: str) -> bool:
    if truth == given:
        return True
    if _SIMPLE_FRACTION.match(truth) and _SIMPLE_FRACTION.match(given):
        return False  # both are plain fractions and differ as text: the given one is not reduced, or wrong
    if bool(_INTEGER.match(truth)) != bool(_INTEGER.match(given)):
        return False
    return are_equal_under_sympy(truth, given)


def grade_answer_sympy(given_answer: str | None, ground_truth: str | None) -> bool:
    """Equality of two answers up to notation, part by part for tuples and intervals (same brackets, same order).

    False when either is None: no answer equals nothing.
    """
    if given_answer is None or ground_truth is None:
        return False
    truth, given = _normalize(ground_truth), _normalize(given_answer)
    if not given:
        return False
    if truth.replace(" ", "") == given.replace(" ", ""):
        return True
    truth_parts, given_parts = split_tuple(truth), split_tuple(given)
    if len(truth_parts) != len(given_parts):
        return False
    if len(truth_parts) > 1 and (truth[0] in "([" or given[0] in "(["):
        if truth[0] != given[0] or truth[-1] != given[-1]:
            return False
    return all(_parts_equal(_integer_form(t), _integer_form(g)) for t, g in zip(truth_parts, given_parts, strict=True))


def grade_answer_mathd(given_answer: str | None, ground_truth: str | None) -> bool:
    """Equality of the MATH-normalised strings; False when there is no answer (None)."""
    return given_answer is not None and mathd_normalize_answer(given_answer) == mathd_normalize_answer(ground_truth)


def extract_boxed_answer(solution: str) -> str | None:
    r"""Content of the last complete `\boxed{...}`, or None."""
    return remove_boxed(last_boxed_only_string(solution))


def extract_answer(passage: str) -> str | None:
    r"""The final answer of a solution: its last boxed content, or None."""
    return extract_boxed_answer(passage)


def grade_answer_verl(solution_str: str, ground_truth: str) -> bool:
    r"""True when the boxed answer of the solution equals the label; the label may itself contain `\boxed{...}`."""
    given = extract_answer(solution_str)
    truth = str(ground_truth)
    truth = extract_answer(truth) or "" if "\\boxed" in truth else truth
    if not given or not truth:
        return False
    return grade_answer_mathd(given, truth) or grade_answer_sympy(given, truth)
