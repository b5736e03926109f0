r"""Decides whether two mathematical expressions written by a model are equal, without evaluating text as code.

Input: LaTeX or plain text such as `\frac{1}{2}`, `2\sqrt{3}`, `x^2+1`, `3/4`. A small recursive-descent parser builds
nested tuples; they are computed exactly with fractions where possible, else with 50 digits, and expressions with
symbols are compared at fixed points of both signs (identity testing).

Invariants: nothing outside the grammar is accepted; the work is bounded by limits on length, depth and the size of
every intermediate value, so no time-out (signal, thread or process) is needed.
Left out: simplification, calculus, equations, units, sets.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

from mpmath.ctx_mp import MPContext

MAX_CHARS = 300
MAX_TOKENS = 150
MAX_DEPTH = 30
MAX_EXACT_BITS = 8192
MAX_MAGNITUDE_BITS = 20_000
MAX_FACTORIAL = 100
DIGITS = 50
TOLERANCE_DIGITS = 30

_mp = MPContext()
_mp.dps = DIGITS

_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*|\.\d+)|(\\[a-zA-Z]+|[a-zA-Z]+)|(\*\*|[-+*/^(){}\[\]|!]))")
_FUNCTIONS: dict[str, Any] = {
    **{name: getattr(_mp, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp")},
    **{name: getattr(_mp, name[:1] + name[3:]) for name in ("arcsin", "arccos", "arctan")},
    "ln": _mp.log,
    "log": _mp.log,
    "sqrt": _mp.sqrt,
    "abs": abs,
}
_WORDS = {"sqrt", "frac", "dfrac", "tfrac", "pi", "cdot", "times", "div", *_FUNCTIONS}
_OPERATOR_WORDS = {"cdot": "*", "times": "*", "div": "/"}
_IGNORED = re.compile(r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\[,;:! ]|\$|~")
_POINTS = (Fraction(7, 11), Fraction(-13, 17), Fraction(23, 9), Fraction(-31, 8), Fraction(5, 29))

Node = tuple[Any, ...]


class ExpressionError(ValueError):
    """The text is outside the grammar or the limits."""


def parse(text: str) -> Node:
    """Parses `text` into nested tuples `(operator, operands...)`; raises ExpressionError."""
    if len(text) > MAX_CHARS:
        raise ExpressionError(f"longer than {MAX_CHARS} characters")
    parser = _Parser(_tokenize(_IGNORED.sub(" ", text)))
    node = parser.sum(0)
    if parser.peek() is not None:
        raise ExpressionError(f"unexpected {parser.peek()!r}")
    return node


def _tokenize(text: str) -> list[str]:
    tokens: list[str] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise ExpressionError(f"unexpected character {text[position]!r}")
        number, word, symbol = match.groups()
        tokens.extend([number or symbol] if word is None else _split_word(word))
        position = match.end()
        if len(tokens) > MAX_TOKENS:
            raise ExpressionError(f"more than {MAX_TOKENS} tokens")
    return tokens


def _split_word(word: str) -> list[str]:
    """A known name stays whole; other letters are a product of one-letter symbols."""
    name = word.lstrip("\\")
    if name in _OPERATOR_WORDS:
        return [_OPERATOR_WORDS[name]]
    if name in _WORDS:
        return ["frac" if name.endswith("frac") else name]
    if word.startswith("\\"):
        return [word]  # a Greek letter or another command is one symbol
    return list(name)


def _is_number(token: str | None) -> bool:
    return token is not None and (token[0].isdigit() or token[0] == ".")


def _starts_factor(token: str | None) -> bool:
    return token is not None and (token in "({" or token[0].isalpha() or token[0] == "\\" or _is_number(token))


class _Parser:
    """Recursive descent over the token list; every method takes the nesting depth and returns a node."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0

    def peek(self, ahead: int = 0) -> str | None:
        index = self.position + ahead
        return self.tokens[index] if index < len(self.tokens) else None

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if token is None or (expected is not None and token != expected):
            raise ExpressionError(f"expected {expected or 'a value'}, found {token!r}")
        self.position += 1
        return token

    def sum(self, depth: int) -> Node:
        node = self.product(depth)
        while self.peek() in ("+", "-"):
            node = (self.take(), node, self.product(depth))
        return node

    def product(self, depth: int) -> Node:
        node = self.signed(depth)
        while True:
            token = self.peek()
            if token in ("*", "/"):
                node = (self.take(), node, self.signed(depth))
            elif _starts_factor(token):
                if _is_number(token):
                    raise ExpressionError("two numbers without an operator between them")
                node = ("*", node, self.power(depth))
            else:
                return node

    def signed(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"nested deeper than {MAX_DEPTH}")
        if self.peek() in ("+", "-"):
            sign = self.take()
            node = self.signed(depth + 1)
            return ("neg", node) if sign == "-" else node
        return self.power(depth)

    def power(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"nested deeper than {MAX_DEPTH}")
        node = self.atom(depth)
        while self.peek() == "!":
            self.take()
            node = ("!", node)
        if self.peek() in ("^", "**"):
            self.take()
            node = ("^", node, self.signed(depth + 1))
        return node

    def atom(self, depth: int) -> Node:
        token = self.take()
        if _is_number(token):
            return self.mixed_number(("num", Fraction(token)))
        if token in ("(", "{", "|"):
            node = self.sum(depth + 1)
            self.take({"(": ")", "{": "}", "|": "|"}[token])
            return ("call", "abs", node) if token == "|" else node
        if token == "frac":
            return ("/", self.argument(depth), self.argument(depth))
        if token == "sqrt":
            return self.root(depth)
        if token in _FUNCTIONS:
            return ("call", token, self.argument(depth, function=True))
        if token[0].isalpha() or token[0] == "\\":
            return ("pi",) if token == "pi" else ("sym", token)
        raise ExpressionError(f"unexpected {token!r}")

    def mixed_number(self, whole: Node) -> Node:
        r"""`2\frac{1}{2}` and `2 1/2` are two and a half; the parts must be plain integers."""
        plain = self.tokens[self.position : self.position + 3]
        if len(plain) == 3 and plain[1] == "/" and plain[0].isdigit() and plain[2].isdigit():
            self.position += 3
            return ("+", whole, ("/", ("num", Fraction(plain[0])), ("num", Fraction(plain[2]))))
        latex = self.tokens[self.position : self.position + 7]
        if len(latex) == 7 and latex[0] == "frac" and latex[2].isdigit() and latex[5].isdigit():
            self.position += 1
            return ("+", whole, ("/", self.argument(0), self.argument(0)))
        return whole

    def argument(self, depth: int, function: bool = False) -> Node:
        r"""The operand of `\frac`, `\sqrt` or a function: a group, or one token (`\frac12` is one half)."""
        token = self.peek()
        if token in ("(", "{"):
            return self.atom(depth)
        if token is not None and len(token) > 1 and token.isdigit() and not function:
            self.tokens[self.position : self.position + 1] = [token[0], token[1:]]
        if _is_number(token) and not function:
            return ("num", Fraction(self.take()))
        return self.power(depth + 1)

    def root(self, depth: int) -> Node:
        if self.peek() != "[":
            return ("call", "sqrt", self.argument(depth, function=True))
        self.take("[")
        order = self.sum(depth + 1)
        self.take("]")
        return ("root", order, self.argument(depth))


def symbols(node: Node) -> set[str]:
    """The names of the free symbols of a node."""
    if node[0] == "sym":
        return {node[1]}
    return set().union(*(symbols(child) for child in node[1:] if isinstance(child, tuple)))


def _inexact(value: Any) -> Any:
    return _mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _bounded(value: Any) -> Any:
    """Keeps intermediate values small: huge fractions become floats, huge floats are refused."""
    if isinstance(value, Fraction):
        if value.numerator.bit_length() + value.denominator.bit_length() <= MAX_EXACT_BITS:
            return value
        value = _inexact(value)
    if not _mp.isfinite(value) or (value != 0 and abs(int(_mp.mag(value))) > MAX_MAGNITUDE_BITS):
        raise ExpressionError("value too large")
    return value


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = base.numerator.bit_length() + base.denominator.bit_length()
        if bits * abs(exponent.numerator) <= MAX_EXACT_BITS:
            return base**exponent.numerator
    base, exponent = _inexact(base), _inexact(exponent)
    if base == 0:
        return base if _mp.re(exponent) > 0 else _refuse("zero to a power that is not positive")
    if exponent != 0 and (abs(exponent) * abs(_mp.log(base, 2))) > MAX_MAGNITUDE_BITS:
        raise ExpressionError("power too large")
    return _mp.power(base, exponent)


def _refuse(reason: str) -> Any:
    raise ExpressionError(reason)


def _factorial(value: Any) -> Any:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
        raise ExpressionError("factorial outside 0..100")
    return Fraction(math.factorial(int(value)))


def _root(order: Any, value: Any) -> Any:
    """Real root for an odd order of a negative number, principal root otherwise."""
    if isinstance(order, Fraction) and order.denominator == 1 and order % 2 == 1 and isinstance(value, Fraction):
        if value < 0:
            return -_power(-value, 1 / order)
    return _power(value, 1 / order)


def _call(name: str, value: Any) -> Any:
    if name == "abs":
        return abs(value)
    value = _inexact(value)
    if value == 0 and name in ("log", "ln"):
        raise ExpressionError("logarithm of zero")
    if abs(value) > MAX_MAGNITUDE_BITS and name not in ("sqrt", "log", "ln"):
        raise ExpressionError(f"argument of {name} too large")
    return _FUNCTIONS[name](value)


def _arithmetic(operator: str, left: Any, right: Any) -> Any:
    if not (isinstance(left, Fraction) and isinstance(right, Fraction)):
        left, right = _inexact(left), _inexact(right)
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    return left * right if operator == "*" else left / right


def evaluate(node: Node, values: dict[str, Fraction]) -> Any:
    """Value of a node: a Fraction where it is exact, else an mpmath number; raises ExpressionError or ZeroDivisionError."""
    kind = node[0]
    if kind == "num":
        return _bounded(node[1])
    if kind == "sym":
        return values[node[1]]
    if kind == "pi":
        return _mp.pi()
    if kind == "call":
        return _bounded(_call(node[1], evaluate(node[2], values)))
    operands = [evaluate(child, values) for child in node[1:]]
    if kind == "neg":
        return -operands[0]
    if kind == "!":
        return _factorial(operands[0])
    if kind in ("^", "root"):
        return _bounded((_power if kind == "^" else _root)(*operands))
    return _bounded(_arithmetic(kind, *operands))


def _same_value(left: Any, right: Any) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    left, right = _inexact(left), _inexact(right)
    return bool(abs(left - right) <= max(abs(left), abs(right), 1) * _mp.mpf(10) ** -TOLERANCE_DIGITS)


def expressions_equal(left: str, right: str) -> bool:
    """True when both texts parse and denote the same number or the same function of their symbols."""
    try:
        left_node, right_node = parse(left), parse(right)
    except ExpressionError:
        return False
    names = sorted(symbols(left_node) | symbols(right_node))
    compared = 0
    for shift in range(len(_POINTS) if names else 1):
        values = {name: _POINTS[(i * 2 + shift) % len(_POINTS)] + i for i, name in enumerate(names)}
        try:
            if not _same_value(evaluate(left_node, values), evaluate(right_node, values)):
                return False
            compared += 1
        except (ExpressionError, ZeroDivisionError):
            continue  # outside the domain of one side: this point says nothing
    return compared > 0
