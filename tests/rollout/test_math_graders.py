r"""Graders: golden pairs of answers, safety against model text, DAPO and deepscaler rules."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score, normalize_answer
from slime.rollout.rm_hub.math_dapo_utils import compute_score, is_correct_strict_box, normalize_final_answer
from slime.rollout.rm_hub.math_utils import (
    extract_answer,
    grade_answer_mathd,
    grade_answer_sympy,
    grade_answer_verl,
    last_boxed_only_string,
    mathd_normalize_answer,
    remove_boxed,
    split_tuple,
)
from slime.rollout.rm_hub.safe_math import ExpressionError, expressions_equal, parse

EQUAL = [
    (r"\frac{1}{2}", "0.5"),
    ("0.5", r"\frac{1}{2}"),
    (r"\frac12", "1/2"),
    (r"\dfrac{3}{4}", "0.75"),
    (r"-\frac{1}{3}", r"\frac{-1}{3}"),
    ("1,234", "1234"),
    ("1,\\!234", "1234"),
    ("12,345,678", "12345678"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"2\frac{1}{2}", r"\frac{5}{2}"),
    ("(1, 2)", "(1,2)"),
    (r"(\frac{1}{2}, 3)", "(0.5,3)"),
    (r"[0, \infty)", r"[0,\infty)"),
    (r"\text{Evelyn}", "evelyn"),
    (r"5\text{ cm}", "5"),
    ("5 meters", "5"),
    (r"90^\circ", "90"),
    (r"\$3.50", "3.5"),
    ("50\\%", "50"),
    ("x = 7", "7"),
    ("7.0", "7"),
    ("3 million", "3000000"),
    (r"\left( 3, 4 \right)", "(3,4)"),
    ("2.5 million", "2,500,000"),
    ("10^{3}x", "1000x"),
    (r"\pi r^2", r"r^2 \pi"),
]

DIFFERENT = [
    ("2", "3"),
    ("0.333", r"\frac{1}{3}"),
    (r"\frac{2}{4}", r"\frac{1}{2}"),
    (r"\frac{4}{2}", "2"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "(1,2,3)"),
    ("(100,200)", "100200"),
    ("x+1", "x+2"),
    (r"\sqrt{x^2}", "x"),
    ("", "1"),
    ("evelyn", "angela"),
    ("1/0", "1"),
    ("10^{3}", "1000"),  # an integer label wants the integer
]


@pytest.mark.parametrize("given_answer, truth", EQUAL)
def test_equal_answers(given_answer, truth):
    assert grade_answer_verl(f"so it is \\boxed{{{given_answer}}}.", truth)


@pytest.mark.parametrize("given_answer, truth", DIFFERENT)
def test_different_answers(given_answer, truth):
    assert not grade_answer_verl(f"so it is \\boxed{{{given_answer}}}.", truth)


def test_label_may_be_boxed_and_the_last_box_counts():
    assert grade_answer_verl(r"\boxed{1} no, \boxed{\frac{1}{2}}", r"\boxed{0.5}")
    assert not grade_answer_verl("the answer is 5", "5")
    assert grade_answer_verl(r"\boxed{5}", 5)


@pytest.mark.parametrize(
    "text, content",
    [
        (r"a \boxed{\frac{1}{2}} b", r"\frac{1}{2}"),
        (r"\boxed{\left\{ \frac{a}{\sqrt{b}} \right\}}", r"\left\{ \frac{a}{\sqrt{b}} \right\}"),
        (r"\boxed{1} \fbox{2}", "2"),
        (r"$\boxed 7$ done", "7"),
        (r"\boxed{1} then \boxed{unfinished", None),
        ("nothing", None),
    ],
)
def test_boxes_are_found_by_balanced_braces(text, content):
    assert extract_answer(text) == content
    assert remove_boxed(last_boxed_only_string(text)) == content


def test_mathd_spelling():
    assert mathd_normalize_answer(" \\dfrac12 ") == r"\frac{1}{2}"
    assert mathd_normalize_answer("1/2") == mathd_normalize_answer("0.5") == r"\frac{1}{2}"
    assert mathd_normalize_answer(r"\sqrt3") == r"\sqrt{3}"
    assert mathd_normalize_answer(".5x") == "0.5x"
    assert mathd_normalize_answer("k = 4") == "4"
    assert mathd_normalize_answer(None) is None
    assert grade_answer_mathd(r"3\text{ apples}", "3")


def test_split_tuple_respects_nesting():
    assert split_tuple(r"(1, \frac{a}{b}, f(2,3))") == ["1", r"\frac{a}{b}", "f(2,3)"]
    assert split_tuple("[0,1)") == ["0", "1"]
    assert split_tuple("(1+2)") == ["(1+2)"]
    assert split_tuple("(1),(2)") == ["(1)", "(2)"]


HOSTILE = [
    "__import__('os').system('echo hi')",
    "9**9**9**9",
    "10^(10^(10^10))",
    "((((" * 60 + "1",
    "-" * 290 + "1",
    "1000000!",
    "exp(exp(exp(exp(9))))",
    "sin(10^(10^6))",
    "\\sqrt" * 60 + "{2}",
    "(" + "x^999*" * 40 + "1)",
    "(x+y)^9999999",
    "lambda: 0",
    "x" * 100_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_refused_quickly_and_never_run(text):
    start = time.perf_counter()
    assert not grade_answer_sympy(text, "1+x/3")
    assert not grade_answer_sympy("1+x/3", text)
    assert time.perf_counter() - start < 10.0  # evaluating any of them would take far longer, or for ever


@pytest.mark.parametrize("text", ["", "1 2", "(1", "1)", "1+", "*2", "a.b", "f'x'", "[1]", "\\frac{1}"])
def test_text_outside_the_grammar_is_an_error(text):
    with pytest.raises(ExpressionError):
        parse(text)


@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
@settings(max_examples=60, deadline=None)
def test_fractions_compare_exactly(a, b):
    def latex(f: Fraction) -> str:
        return rf"\frac{{{f.numerator}}}{{{f.denominator}}}"

    assert expressions_equal(latex(a), f"({a.numerator})/{a.denominator}")
    assert expressions_equal(latex(a), latex(b)) == (a == b)
    assert expressions_equal(f"{latex(a)}+({latex(b)})", latex(a + b))


@given(st.integers(-20, 20), st.integers(-20, 20))
@settings(max_examples=40, deadline=None)
def test_polynomial_identities(a, b):
    product = f"(x+({a}))*(x+({b}))"
    assert expressions_equal(product, f"x^2+({a + b})x+({a * b})")
    assert not expressions_equal(product, f"x^2+({a + b})x+({a * b + 1})")


def test_odd_roots_of_negative_numbers_are_real():
    assert expressions_equal(r"\sqrt[3]{-8}", "-2")


def test_dapo_score():
    good = compute_score("Thus...\nAnswer: \\boxed{1,000}", "1000")
    assert good == {"score": 1.0, "acc": True, "pred": "1000"}
    assert compute_score("Answer: 5\nAnswer: 7", "7")["acc"]
    assert compute_score("no final line 7", "7") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}
    assert not compute_score("Answer: 7\n" + "x" * 400, "7")["acc"]


def test_dapo_strict_box():
    assert compute_score(r"so \boxed{7}", "7", strict_box_verify=True)["score"] == 1.0
    assert is_correct_strict_box(r"\boxed{8}", "7") == (-1, "8")
    assert is_correct_strict_box("none", "7") == (-1, None)
    with pytest.raises(ValueError, match="4 positions"):
        is_correct_strict_box("x", "7", [1, 2])


@pytest.mark.parametrize(
    "text, expected",
    [
        ("x = 5", "5"),
        ("$5$", "5"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\text{12} cm", "12"),
        ("12,345", "12345"),
        (r"90^\circ", "90"),
        (r"\sqrt3", r"\sqrt{3}"),
    ],
)
def test_dapo_normalisation(text, expected):
    assert normalize_final_answer(text) == expected


def test_deepscaler_grades_the_part_after_thinking():
    assert get_deepscaler_rule_based_reward(r"<think>\boxed{1}</think> \boxed{2}", "2") == 1
    assert get_deepscaler_rule_based_reward(r"<think>\boxed{2}</think> so 2", "2") == 0
    assert get_deepscaler_rule_based_reward(r"\boxed{2}", "2") == 0
    assert get_deepscaler_rule_based_reward(r"a ###Response b ###Response \boxed{2}", ["3", "2"]) == 1
    assert get_deepscaler_rule_based_reward(r"</think>\boxed{2}", None) == 0


def test_f1():
    assert normalize_answer("The  Cat, a dog!") == "cat dog"
    assert f1_score("the cat sat", "cat sat down") == (0.8, 1.0, pytest.approx(2 / 3))
    assert f1_score("yes", "no") == (0.0, 0.0, 0.0)
    assert f1_score("yes", "yes it is") == (0.0, 0.0, 0.0)
    assert f1_score(None, "x") == (0.0, 0.0, 0.0)
    assert f1_score("Yes.", "yes")[0] == 1.0


def test_no_answer_equals_nothing() -> None:
    assert not grade_answer_sympy(None, "2") and not grade_answer_mathd(None, "2") and not grade_answer_mathd(None, "")
