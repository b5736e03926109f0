"""Parsers: facts 11 to 13 and 16 of the method's acceptance list, and texts of hostile or careless models."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic.agentflow.parsing import (
    Malformed,
    NextStep,
    extract_program,
    normalize_tool_name,
    parse_command,
    parse_next_step,
    parse_stop,
    strip_reasoning,
)

PLAIN = "Justification: because\nContext: 3 and 4\nSub-Goal: add them\nTool Name: python_coder"


def kwargs_of(text: str, max_calls: int = 1) -> list[dict]:
    commands = parse_command(text, max_calls)
    assert not isinstance(commands, Malformed), commands
    return [dict(command.kwargs) for command in commands]


def test_last_complete_triple_wins():
    text = PLAIN.replace("add them", "first") + "\n\n" + PLAIN + "\nContext: dangling"
    step = parse_next_step(text)
    assert isinstance(step, NextStep)
    assert (step.context, step.sub_goal, step.tool_name) == ("3 and 4", "add them", "python_coder")


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        PLAIN.lower().replace("because", "because"),
        PLAIN.upper().replace("3 AND 4", "3 and 4").replace("ADD THEM", "add them").replace("PYTHON_C", "python_c"),
        "**Justification:** because\n**Context:** 3 and 4\n**Sub-Goal:** add them\n**Tool Name:** `python_coder`.",
        "**Justification**: because\n**Context**: 3 and 4\n**Sub Goal**: add them\n**Tool Name**: [python_coder]",
        '### Justification: because\n### Context: 3 and 4\n### Sub-Goal: add them\n### Tool Name: "python_coder"',
        "1. Justification: because\n2. Context: 3 and 4\n3. Sub-Goal: add them\n4. Tool Name: python_coder",
        "- Justification: because\n- Context: 3 and 4\n- Sub-goal: add them\n- Tool name: python_coder",
        "```\n" + PLAIN + "\n```<|im_end|>",
        "<think>Context: x\nSub-Goal: y\nTool Name: z</think>\n" + PLAIN,
        "hidden thoughts</think>" + PLAIN,
        '{"justification": "because", "context": "3 and 4", "sub_goal": "add them", "tool_name": "python_coder"}',
        'So: {"a": {} {"Context": "3 and 4", "Sub-Goal": "add them", "Tool Name": "python_coder."}',
        "I see.\nContext: of the justification\n" + PLAIN + "\nand this is more text",
    ],
)
def test_decoration_gives_the_same_triple(text):
    step = parse_next_step(text)
    assert isinstance(step, NextStep), step
    assert (step.context, step.sub_goal) == ("3 and 4", "add them")
    assert step.tool_name.lower() == "python_coder"


def test_multi_line_context_is_kept_and_tool_name_is_one_line():
    step = parse_next_step("Context: a\nb\n\nSub-Goal: g\nTool Name: python_coder\nNote: done")
    assert step == NextStep("a\nb", "g", "python_coder")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "Context, Sub-Goal, Tool Name"),
        ("Context: a\nTool Name: t", "Sub-Goal"),
        ("Context: a\nSub-Goal: b\nTool Name:\nt", "Tool Name"),
        ("Context:\nSub-Goal: b\nTool Name: t", "Context"),
        ("<think>" + PLAIN, "Context, Sub-Goal, Tool Name"),
    ],
)
def test_malformed_step_names_what_is_missing(text, named):
    step = parse_next_step(text)
    assert isinstance(step, Malformed)
    assert f"missing or empty: {named})" in step.reason


def test_tool_names_compare_without_decoration():
    names = ["python_coder", "Python Coder Tool", "PYTHON-CODER", "python coder", "Python_Coder_Tool"]
    assert {normalize_tool_name(name) for name in names} == {"pythoncoder"}
    assert normalize_tool_name("Tool") == "tool"


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ('execution = tool.execute(query="""a "b" c""")', 'a "b" c'),
        ('```python\nexecution = tool.execute(query="""a "b" c""")\n```', 'a "b" c'),
        ('```python\nq = "x"\nexecution = tool.execute(query=q)\n```', "x"),
        ('```\nexecution = tool.execute(query="a" "b")\n```', "ab"),
        ("execution = tool.execute(query=f'plain')", "plain"),
        ('tool.execute(query="bare call")', "bare call"),
        ('Here it is:\n```python\nexecution = tool.execute(query="x")', "x"),
        ('The call: execution = tool.execute(query="prose around")', "prose around"),
        ('execution = tool.execute(query="say "hi" now")', 'say "hi" now'),
        ('```python\nprint(1)\n```\n```python\nexecution = tool.execute(query="x")\n```', "x"),
    ],
)
def test_command_literals(text, query):
    assert kwargs_of(text) == [{"query": query}]


@pytest.mark.parametrize(
    "text",
    [
        'execution = tool.execute(query=open("/etc/passwd").read())',
        "import sys; sys.exit()",
        'execution = tool.execute(query=f"{1+1}")',
        'execution = tool.execute("positional")',
        'execution = tool.execute(**{"query": "x"})',
        "execution = tool.execute(query=undefined)",
        'execution = other.execute(query="x")',
        "x.y = 3\nexecution = tool.execute(query='x')",
        "while True: pass",
        "def f(): return 1",
        "execution = tool.execute(query=[x for x in range(3)])",
        "",
        "no command at all",
        'tool.execute(query="a" or: broken) tool.execute(query="b")',
        "(" * 5000,
        "x = 1\0",
        'execution = tool.execute(query="' + "y" * 70000 + '")',
    ],
)
def test_command_beyond_literals_is_malformed(text):
    assert isinstance(parse_command(text), Malformed)


def test_calls_are_limited_and_kept_in_order():
    text = 'a = "1"\nexecution = tool.execute(query=a)\nexecution = tool.execute(query="2")'
    assert isinstance(parse_command(text, 1), Malformed)
    assert kwargs_of(text, 2) == [{"query": "1"}, {"query": "2"}]


@given(st.text(max_size=200))
def test_parsers_never_raise(text):
    for wrapped in (text, f"execution = tool.execute(query={text})", f"Context: {text}\nTool Name: {text}"):
        assert isinstance(parse_command(wrapped), (list, Malformed))
        assert isinstance(parse_next_step(wrapped), (NextStep, Malformed))
        assert parse_stop(wrapped) in (True, False, None)
        assert isinstance(extract_program(wrapped), str)


@given(st.text(max_size=200))
def test_any_text_survives_as_a_literal(text):
    assert kwargs_of(f"execution = tool.execute(query={text!r})") == [{"query": text}] or "<" in text


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("we should not stop yet ...\nConclusion: CONTINUE", False),
        ("Conclusion: STOP\nbut then\nConclusion: CONTINUE", False),
        ("Conclusion: CONTINUE\n**Conclusion:** **STOP**", True),
        ("Verdict: stop", True),
        ("STOP", True),
        ("stop.", True),
        ("all is known\n`CONTINUE`", False),
        ("we should not stop yet", None),
        ("STOP\n1\n2\n3", None),
        ("", None),
        ("<think>Conclusion: STOP</think>Conclusion: CONTINUE<|im_end|>", False),
    ],
)
def test_verifier_verdict(text, stop):
    assert parse_stop(text) is stop


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nprint(1)\n```\n```python\nprint(2)\n```", "print(1)"),
        ("```bash\nls\n```\n```py\nprint(2)\n```", "print(2)"),
        ("```\nprint(3)\n```", "print(3)"),
        ("print(4)", "print(4)"),
        ("text\n```python\nprint(5)", "print(5)"),
        ("", ""),
    ],
)
def test_program(text, code):
    assert extract_program(text) == code


def test_reasoning_is_removed():
    assert strip_reasoning("<think>a</think> b <|im_end|>") == "b"
    assert strip_reasoning("a</think>b") == "b"
    assert strip_reasoning("b<think>cut off") == "b"


def test_escapes_of_half_characters_become_whole_or_a_mark():
    commands = parse_command(r'tool.execute(query="\ud83d\ude00 \ud800", more=["\udfff"])')
    assert [command.kwargs for command in commands] == [{"query": "\U0001f600 \ufffd", "more": ["\ufffd"]}]
