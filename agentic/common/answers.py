r"""Final answers: extraction from text and equality by exact arithmetic.

Inputs: text of a model (untrusted) and reference labels.
Invariants: model text is matched by our own small grammar, never evaluated or handed to an algebra system; numbers are
compared as fractions, never as floats; `True` is only returned when the two are certainly the same.
Left out: heuristics that guess an answer from prose ("so x = 73" without a box grants nothing), algebra, intervals,
sets. Whatever the grammar does not cover is None, "cannot tell".
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

MAX_NUMBER_CHARS = 200
MAX_EXPONENT = 400

# No one-letter units: "2 m" or "3 s" may as well be an algebraic term.
UNITS = frozenset(
    "unit units degree degrees deg dollar dollars usd cent cents euro euros pound pounds "
    "mm cm dm km meter meters metre metres centimeter centimeters kilometer kilometers "
    "inch inches ft foot feet yard yards mile miles mph kg gram grams kilogram kilograms lb lbs ounce ounces oz "
    "ton tons tonne tonnes ml liter liters litre litres gallon gallons "
    "sec second seconds min minute minutes hr hour hours day days week weeks month months year years".split()
)

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_BRACED = rf"(?:\{{([+-]?{_DECIMAL})\}}|(\d))"
_NUMBER = re.compile(rf"[+-]?{_DECIMAL}")
_SLASH = re.compile(rf"([+-]?{_DECIMAL})/([+-]?{_DECIMAL})")
_FRAC = re.compile(rf"([+-]?)\\frac{_BRACED}{_BRACED}")
_MIXED = re.compile(rf"([+-]?)({_DIGITS}) ?\\frac\{{(\d+)\}}\{{(\d+)\}}|([+-]?)({_DIGITS}) (\d+)/(\d+)")
_SCIENTIFIC = re.compile(
    rf"([+-]?{_DECIMAL})(?:e([+-]?\d{{1,4}})|\\times10\^(?:\{{([+-]?\d{{1,4}})\}}|([+-]?\d)))", re.IGNORECASE
)
_INTEGER = re.compile(rf"[+-]?{_DIGITS}")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_ASSIGNMENT = re.compile(r"[a-zA-Z]\s*=\s*(?=[^=\s])")


@dataclass(frozen=True)
class _Quantity:
    value: Fraction
    unit: str | None
    """None, `%`, or a word of UNITS."""


def extract_boxed(text: str) -> str | None:
    r"""Content of the last balanced `\boxed{...}`, without surrounding blanks; None when there is none.

    One pass, linear in the text. Of nested boxes the inner one is taken.
    """
    best: tuple[int, int] | None = None
    opened: list[tuple[int, bool]] = []  # content start, is a box
    for match in re.finditer(r"\\boxed\s*\{|\\.|[{}]", text, re.DOTALL):
        token = match.group()
        if token == "{" or token.startswith("\\boxed"):
            opened.append((match.end(), token != "{"))
        elif token == "}" and opened:
            start, is_box = opened.pop()
            if is_box and (best is None or start > best[0]):
                best = (start, match.start())
    return None if best is None else text[best[0] : best[1]].strip()


def extract_answer_tag(text: str) -> str | None:
    """Content of the last complete `<answer>...</answer>`, any case; None when there is none."""
    lowered = text.lower()
    end = lowered.rfind("</answer>")
    start = lowered.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def normalize(text: str) -> str:
    r"""Canonical spelling for comparison: NFC, lower case, no LaTeX dressing, single blanks, no final full stop.

    `$x$`, `\text{x}`, `\left(`, `\,`, `\dfrac` become `x`, `x`, `(`, nothing, `\frac`.
    """
    # NFC, not NFKC: the latter turns "10\u00b2" into "102" and "1\u00bd" into "11/2".
    text = unicodedata.normalize("NFC", text).replace("\u2212", "-").replace("{,}", ",")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\cfrac", "\\frac")
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])|\\[!,;:]", "", text)
    text = _TEXT_COMMAND.sub(r" \1 ", text).replace("\\ ", " ").replace("~", " ")
    text = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|°", " degrees", text)
    text = text.replace("\\$", "$").replace("\\%", "%").replace("\\(", "").replace("\\)", "")
    text = " ".join(text.split()).strip(" \"'`*").casefold()
    text = re.sub(r"(?<=[^.])\.$", "", text)
    while len(text) > 2 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    text = re.sub(r"(?<=[^.])\.$", "", text)
    choice = re.fullmatch(r"\(([a-z])\)", text)
    return choice.group(1) if choice else text.strip()


def answers_equal(pred: str | None, gt: str) -> bool | None:
    """True: certainly the same. False: certainly different. None: cannot tell (ask a judge).

    Numbers (integers, decimals, fractions, mixed and scientific) are compared exactly; leading zeros, thousands
    separators, currency signs and known units do not matter, two different units cannot be told.
    """
    if pred is None or not pred.strip():
        return False
    left, right = normalize(pred), normalize(str(gt))
    if left == right or _tight(left) == _tight(right):
        return True
    left_number, right_number = _quantity(left), _quantity(right)
    if left_number is None or right_number is None:
        return None
    return _same_quantity(left_number, right_number)


def is_integer_label(label: str) -> bool:
    """Whether the reference is a plain integer, for which the rule check alone decides."""
    return bool(_INTEGER.fullmatch(normalize(str(label))))


def _tight(text: str) -> str:
    return re.sub(r"\s*([-+*/=,;:(){}\[\]<>^])\s*", r"\1", text)


def _same_quantity(left: _Quantity, right: _Quantity) -> bool | None:
    if left.value == right.value:
        return True if None in (left.unit, right.unit) or left.unit == right.unit else None
    if left.unit == right.unit:
        return False
    if "%" in (left.unit, right.unit) and None in (left.unit, right.unit):
        return _fraction_of(left) == _fraction_of(right)
    return False if None in (left.unit, right.unit) else None


def _fraction_of(quantity: _Quantity) -> Fraction:
    return quantity.value / 100 if quantity.unit == "%" else quantity.value


def _quantity(text: str) -> _Quantity | None:
    """Parse normalised text as a number with an optional unit; None when the grammar does not cover it."""
    if len(text) > MAX_NUMBER_CHARS:
        return None
    text = _ASSIGNMENT.sub("", text, count=1) if _ASSIGNMENT.match(text) else text
    body, unit = _split_unit(text.strip(" $"))
    body = body.replace("$", "").strip()
    value = _number(body) if body else None
    return None if value is None else _Quantity(value, unit)


def _split_unit(text: str) -> tuple[str, str | None]:
    if text.endswith("%"):
        return text[:-1], "%"
    if text.endswith(" percent"):
        return text[: -len(" percent")], "%"
    head, _, word = text.rpartition(" ")
    if head and word in UNITS:
        return head, word
    glued = re.fullmatch(r"(.*[\d}])([a-z]+)", text)
    if glued and glued.group(2) in UNITS:
        return glued.group(1), glued.group(2)
    return text, None


def _number(text: str) -> Fraction | None:
    for parse in (_plain, _slash, _frac, _mixed, _scientific):
        value = parse(text)
        if value is not None:
            return value
    return None


def _exact(text: str) -> Fraction:
    return Fraction(text.replace(",", "").rstrip("."))


def _ratio(top: str, bottom: str, sign: str = "") -> Fraction | None:
    divisor = _exact(bottom)
    if divisor == 0:
        return None
    value = _exact(top) / divisor
    return -value if sign == "-" else value


def _plain(text: str) -> Fraction | None:
    return _exact(text) if _NUMBER.fullmatch(text) else None


def _slash(text: str) -> Fraction | None:
    match = _SLASH.fullmatch(_tight(text))
    return _ratio(match.group(1), match.group(2)) if match else None


def _frac(text: str) -> Fraction | None:
    match = _FRAC.fullmatch(text.replace(" ", ""))
    if match is None:
        return None
    sign, top, top_digit, bottom, bottom_digit = match.groups()
    return _ratio(top or top_digit, bottom or bottom_digit, sign)


def _mixed(text: str) -> Fraction | None:
    match = _MIXED.fullmatch(text)
    if match is None:
        return None
    sign, whole, top, bottom = match.groups()[:4] if match.group(2) else match.groups()[4:]
    part = _ratio(top, bottom)
    if part is None:
        return None
    value = _exact(whole) + part
    return -value if sign == "-" else value


def _scientific(text: str) -> Fraction | None:
    match = _SCIENTIFIC.fullmatch(text.replace(" ", "").replace("\\cdot", "\\times"))
    if match is None:
        return None
    exponent = int(next(group for group in match.groups()[1:] if group))
    return _exact(match.group(1)) * Fraction(10) ** exponent if abs(exponent) <= MAX_EXPONENT else None
