"""Rules that score answers other than mathematics: short-answer QA, multiple choice, the game of 24.

Inputs: candidate texts (untrusted) and references. Invariants: pure functions, no model is asked, model text is never
run: an expression is read through a syntax tree of which only numbers and + - * / are accepted, in exact fractions.
Leaves out: mathematical equality (`answers`), the judging model (`judge`).
"""

from __future__ import annotations

import ast
import re
import string
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from agentic.common.answers import answers_equal, normalize

MAX_EXPRESSION_CHARS = 200
LETTERS = string.ascii_uppercase
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_OPTION = re.compile(
    r"(?:(?:the )?(?:final )?(?:answer|option|choice)(?: is)?:? *)?\(?([a-z])\)?(?:\s*[.:)]\s*(.*))?", re.S
)
_OPERATORS = {r"\times": "*", r"\cdot": "*", r"\div": "/", "×": "*", "·": "*", "÷": "/", "−": "-"}


def qa_normalize(text: str) -> str:
    """Lower case without punctuation, articles and extra blanks: the usual form for comparing short answers."""
    words = text.casefold().translate(_PUNCTUATION).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def qa_exact(pred: str, labels: Sequence[str]) -> bool:
    """Whether the answer equals one of the references, after normalisation or as an exact number."""
    wanted = qa_normalize(pred)
    if wanted and wanted in (qa_normalize(label) for label in labels):
        return True
    return any(answers_equal(pred, label) is True for label in labels)


def qa_f1(pred: str, labels: Sequence[str]) -> float:
    """Best word-overlap F1 with any reference, from 0 to 1. Two empty texts are equal."""
    return max((_f1(qa_normalize(pred).split(), qa_normalize(label).split()) for label in labels), default=0.0)


def _f1(pred: list[str], gold: list[str]) -> float:
    if not pred or not gold:
        return float(pred == gold)
    common = sum((Counter(pred) & Counter(gold)).values())
    return 2 * common / (len(pred) + len(gold))


def option_of(candidate: str, options: Sequence[str]) -> str | None:
    """The capital letter that a candidate names, by letter first and by content second; None when it names none."""
    text = normalize(candidate)
    match = _OPTION.fullmatch(text)
    letters = LETTERS[: len(options)]
    if match and match.group(1).upper() in letters:
        return match.group(1).upper()
    same = [letter for letter, option in zip(letters, options, strict=True) if qa_exact(candidate, [option])]
    return same[0] if len(same) == 1 else None


def reaches(expression: str, numbers: Sequence[int], target: int = 24) -> bool:
    """Whether the expression uses exactly these numbers, each once, with + - * / and brackets, and gives the target.

    `= 24` behind it and LaTeX operators are accepted. Anything else (powers, other numbers, names) is False.
    """
    left, *rest = _plain_expression(expression).split("=")
    if rest and (len(rest) > 1 or rest[0].strip() != str(target)):
        return False
    if len(left) > MAX_EXPRESSION_CHARS or not re.fullmatch(r"[\d\s()+*/-]+", left):
        return False
    used: list[int] = []
    try:
        value = _value(ast.parse(left.strip(), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    return value == target and sorted(used) == sorted(numbers)


def _plain_expression(text: str) -> str:
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])|\\[!,;: ]|\\[()\[\]]|\$", "", text)
    for written, operator in _OPERATORS.items():
        text = text.replace(written, operator)
    before = None
    while before != text:  # innermost fractions first
        before, text = text, re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
    return text.translate(str.maketrans("[]{}", "()()")).strip(" .`")


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Value of the tree, noting the numbers in it; ValueError for anything but numbers and the four operations."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp):
        raise ValueError("only numbers and + - * /")
    left, right = _value(node.left, used), _value(node.right, used)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    if isinstance(node.op, ast.Div):
        return left / right
    raise ValueError("only numbers and + - * /")
