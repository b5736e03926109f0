"""Question answering: state and its budgets, the three tools, which calls of a turn run, and the score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers_orchestra_qa import CountingJudge, ListRetriever, ScriptedDesk, WordTokenizer
from hypothesis import given
from hypothesis import strategies as st

from agentic.common.errors import BadRecord, ConfigError, RoleUnavailable, Unscored
from agentic.toolorchestra.config import OrchestraConfig
from agentic.toolorchestra.environment import ToolCall
from agentic.toolorchestra.prompts import PromptSet
from agentic.toolorchestra.qa.environment import QAEpisode
from agentic.toolorchestra.qa.grading import Grade, extract_prediction, grade
from agentic.toolorchestra.qa.state import Budgets, QAState, count, expert_budgets, keep_tail
from agentic.toolorchestra.qa.tools import build_schemas, extract_code, extract_query, offered_names

WORDS = WordTokenizer()
PROMPTS = PromptSet.load("standard")
CONFIG = OrchestraConfig(roles="roles.yaml", sandbox_timeout_s=10.0, retrieval_topk=3)
PROGRAM = "```python\nprint(6 * 7)\n```"


def script(alias: str, prompt: str) -> str:
    if alias.startswith("search"):
        return "<query>capital of France</query>"
    return PROGRAM if alias.startswith("reasoner") else r"So <answer>Paris </answer> \boxed{\frac{1}{2}}"


def episode(
    write: Callable[[str, str], str] = script,
    label: str = "paris",
    judge: CountingJudge | None = None,
    retriever: ListRetriever | None = None,
    **metadata: Any,
) -> QAEpisode:
    found = retriever or ListRetriever("Paris is the capital.", "Lyon is not.")
    return QAEpisode(
        "Capital of France?",
        label,
        {"eid": "7", **metadata},
        ScriptedDesk(write),  # type: ignore[arg-type]
        found,  # type: ignore[arg-type]
        judge,
        CONFIG,
        prompts=PROMPTS,
        tokenizer=WORDS,
    )


def call(name: str, model: str) -> ToolCall:
    return ToolCall(name, {"model": model})


# --------------------------------------------------------------------------------------------------------------------
# State.


def test_new_hits_are_interleaved_with_the_old_ones_and_each_document_stands_once() -> None:
    state = QAState()
    assert state.add_documents(["a", "b"]) == ["a", "b"]
    assert state.add_documents(["c", "b", "d", "c", " "]) == ["c", "d"]
    assert state.documents == ["c", "a", "d", "b"]
    state.add_documents(["x" * 5000])
    assert len(state.documents[0]) == 4000


def words(mark: str, number: int) -> str:
    return " ".join(f"{mark}{n}" for n in range(number))


def test_budgets_keep_the_newest_code_and_the_best_documents() -> None:
    state = QAState([words("d", 30), words("e", 30)], [(words("p", 50), "1"), (words("q", 20), "2")], [words("t", 40)])
    text = state.render(Budgets(attempts=10, code=40, total=60), WORDS)
    documents, code, attempts = text.split("\n\n", 2)[0], text[: text.index("Earlier")], text[text.index("Earlier") :]
    assert "d0" in documents and "e0" not in documents
    assert "q19" in code and "p0 " not in code
    assert "t39" in attempts and "t0 " not in attempts
    headings = count("Documents: Python programs and what they printed: Earlier answers:", WORDS)
    assert count(text, WORDS) <= 60 + headings


@given(
    st.lists(st.text(max_size=40), max_size=5),
    st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20)), max_size=3),
    st.lists(st.text(max_size=20), max_size=3),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 40),
)
def test_a_rendering_is_within_its_budget(
    documents: list[str], code: list[tuple[str, str]], attempts: list[str], first: int, second: int, total: int
) -> None:
    state = QAState.from_metadata({"state": {"documents": documents, "code": code, "attempts": attempts}})
    assert count(state.render(Budgets(first, second, total), WORDS), WORDS) <= total + 9


def test_an_empty_state_is_an_empty_text() -> None:
    assert QAState().render(Budgets(), WORDS) == ""
    assert keep_tail("a b c", 2, WORDS).split()[-1] == "c"


def test_text_cannot_close_its_fence() -> None:
    state = QAState(code=[("print('```')", "```")])
    assert "````python\nprint('```')\n````\n````output\n```\n````" in state.render(Budgets(), WORDS)


def test_records_may_bring_a_state_along() -> None:
    first = episode(state={"documents": ["old"], "code": [["print(1)", "1"]], "attempts": ["x"]})
    content = first.state_prompt()[-1]["content"]
    assert "[1] old" in content and "print(1)" in content and "- x" in content
    with pytest.raises(BadRecord, match="metadata.state is"):
        episode(state={"code": [1]})


@pytest.mark.parametrize(
    ("model", "code", "total"),
    [
        ("gpt-5-mini", 40000, 100000),
        ("Qwen/Qwen3-32B", 16000, 24000),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", 16000, 24000),
        ("meta-llama/Llama-3.3-70B-Instruct", 40000, 80000),
        ("Qwen/Qwen2.5-Math-7B-Instruct", 1000, 2000),
        ("google/gemma-2-9b-it", 2000, 4000),
    ],
)
def test_experts_see_as_much_as_their_family_takes(model: str, code: int, total: int) -> None:
    budgets = expert_budgets(model)
    assert (budgets.code, budgets.total) == (code, total)


# --------------------------------------------------------------------------------------------------------------------
# Schemas.


def test_schemas_offer_the_tiers_of_the_sample() -> None:
    tools = {tool["function"]["name"]: tool["function"] for tool in episode().tools}
    assert list(tools) == ["search", "enhance_reasoning", "answer"]
    choice = tools["search"]["parameters"]["properties"]["model"]
    assert choice["enum"] == ["search-1", "search-2"] and tools["search"]["parameters"]["required"] == ["model"]
    assert "search-1: $1.25 in, $10 out, 96 s" in tools["search"]["description"]
    assert tools["answer"]["parameters"]["properties"]["model"]["enum"] == ["answer-1", "answer-4", "answer-math-1"]


@pytest.mark.parametrize(
    ("offered", "names"),
    [
        (["answer"], {"answer": 3}),
        (["answer-1", "search"], {"search": 2, "answer": 3}),
        ([{"type": "function", "function": {"name": "answer"}}, "reasoner-1"], {"enhance_reasoning": 1, "answer": 3}),
    ],
)
def test_a_sample_may_offer_a_part(offered: list[Any], names: dict[str, int]) -> None:
    tools = build_schemas(ScriptedDesk(script), offered_names(offered))  # type: ignore[arg-type]
    sizes = {t["function"]["name"]: len(t["function"]["parameters"]["properties"]["model"]["enum"]) for t in tools}
    assert sizes == names


def test_search_needs_a_retriever() -> None:
    arguments = ("Q?", "x", {}, ScriptedDesk(script), None, None, CONFIG)
    with pytest.raises(ConfigError, match="`search` needs the role `retrieval`"):
        QAEpisode(*arguments, prompts=PROMPTS, tokenizer=WORDS)  # type: ignore[arg-type]
    metadata = {"tools": ["answer", "enhance_reasoning"]}
    arguments = ("Q?", "x", metadata, ScriptedDesk(script), None, None, CONFIG)
    run = QAEpisode(*arguments, prompts=PROMPTS, tokenizer=WORDS)  # type: ignore[arg-type]
    assert [tool["function"]["name"] for tool in run.tools] == ["enhance_reasoning", "answer"]


def test_a_sample_without_an_answer_tier_is_a_bad_record() -> None:
    with pytest.raises(BadRecord, match="no `answer` tier"):
        episode(tools=["search"])


# --------------------------------------------------------------------------------------------------------------------
# Tools.


async def test_search_shows_documents_and_leaves_a_fee() -> None:
    retriever = ListRetriever("Paris is the capital.", "Lyon is not.")
    run = episode(retriever=retriever)
    seen = await run.act([call("search", "search-1")])
    assert retriever.queries == [("capital of France", 3, "7")]
    assert seen.kind == "tool" and seen.texts == (
        "Query: capital of France\n[1] Paris is the capital.\n[2] Lyon is not.",
    )
    again = await run.act([call("search", "search-2")])
    assert again.texts == ("Query: capital of France\nNo new documents.",)
    ledger = run.toolkit.desk.ledger
    assert ledger.counts == {"search-1": 1, "search-2": 1}
    assert ledger.entries["search-1"].dollars == pytest.approx(1 + 3 * 0.2e-6)
    run.toolkit.desk.fees["search"] = 0.07  # type: ignore[attr-defined]
    await run.act([call("search", "search-2")])
    assert ledger.entries["search-2"].dollars == pytest.approx(2.07 + 3 * 0.2e-6)


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("<query>a</query> <query> rivers \n of Peru</query>", "rivers of Peru"),
        ("<query>Peru</query>", "Which?"),
        ("no tag", "Which?"),
        ("<think><query>in a thought</query>", "Which?"),
        ("<think><query>in a thought</query></think><query>after it</query>", "after it"),
        (f"<query>{'x' * 500}</query>", "x" * 390),
    ],
)
def test_queries(text: str, query: str) -> None:
    assert extract_query(text, "Which?") == query


async def test_reasoning_runs_the_last_program_in_the_sandbox() -> None:
    run = episode()
    seen = await run.act([call("enhance_reasoning", "reasoner-1")])
    assert seen.texts == ("```python\nprint(6 * 7)\n```\n```output\n42\n```",)
    assert run.toolkit.state.code == [("print(6 * 7)", "42")]
    entry = run.toolkit.desk.ledger.entries["reasoner-1"]
    assert entry.calls == 1 and 1.0 < entry.dollars < 1.0 + 10 * 0.0000083 and entry.seconds > 1.0
    assert "42" in run.state_prompt()[-1]["content"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("```python\nx = 1\n```", "The program printed nothing."),
        ("```python\nraise SystemExit\n```", "The program printed nothing."),
        ("no block", "The model wrote no program; nothing was run."),
        ("```python\nprint(1)", "The model wrote no program; nothing was run."),
    ],
)
async def test_without_output_nothing_changes(text: str, shown: str) -> None:
    run = episode(lambda *_: text)
    before = run.state_prompt()
    assert (await run.act([call("enhance_reasoning", "reasoner-1")])).texts == (shown,)
    assert run.state_prompt() == before


def test_the_last_closed_block_is_the_program() -> None:
    assert extract_code("```python\na\n```\n```Python\nb\n```\n```\nc\n```") == "b"
    assert extract_code("<think>```python\na\n```</think> none") == ""


async def test_experts_see_the_state_within_their_budget() -> None:
    retriever = ListRetriever(words("w", 700), words("v", 700), words("u", 700))
    run = episode(retriever=retriever)
    await run.act([call("search", "search-1")])
    await run.act([call("answer", "answer-math-1")])
    shown = {alias: len(prompt.split()) for alias, prompt in run.toolkit.desk.asked}  # type: ignore[attr-defined]
    assert shown["search-1"] < 60 and 1900 < shown["answer-math-1"] < 2060


async def test_a_retriever_that_is_down_is_no_result() -> None:
    class Down(ListRetriever):
        async def search(self, query: str, topk: int, eid: str | None) -> list[Any]:
            raise RoleUnavailable("retrieval", "refused")

    with pytest.raises(RoleUnavailable):
        await episode(retriever=Down()).act([call("search", "search-1")])


# --------------------------------------------------------------------------------------------------------------------
# Turns and scores.


async def test_one_call_of_a_tool_in_a_turn_and_nothing_after_answer() -> None:
    """Acceptance fact 13."""
    run = episode()
    calls = [call("search", "search-1"), call("search", "search-2"), call("answer", "answer-1")]
    seen = await run.act([*calls, call("enhance_reasoning", "reasoner-1")])
    assert seen.kind == "end" and len(seen.texts) == 2
    assert run.toolkit.desk.ledger.counts == {"search-1": 1, "answer-1": 1}


async def test_a_boxed_tier_is_right_by_rule() -> None:
    """Acceptance fact 15: the prediction of a Qwen tier comes from its box."""
    judge = CountingJudge()
    run = episode(label=r"\frac{1}{2}", judge=judge)
    await run.act([call("answer", "answer-4")])
    assert run.toolkit.prediction == r"\frac{1}{2}"
    outcome = await run.outcome()
    assert (outcome.reward, outcome.valid_answer, outcome.termination, judge.calls) == (1.0, True, "answer", 0)


async def test_an_answer_without_a_box_is_wrong_without_the_judge() -> None:
    """Acceptance fact 15: no box, no prediction, no call of the judge."""
    judge = CountingJudge()
    run = episode(lambda *_: "It is 42, <answer>42</answer>", label="42", judge=judge)
    await run.act([call("answer", "answer-math-1")])
    outcome = await run.outcome()
    assert (run.toolkit.prediction, outcome.reward, outcome.valid_answer, judge.calls) == ("", 0.0, True, 0)
    assert outcome.breakdown == {"judged_by_empty": 1.0}


async def test_case_and_blanks_do_not_matter_and_cost_no_judge() -> None:
    """Acceptance fact 15: "Paris " is "paris"."""
    judge = CountingJudge("VERDICT: False")
    run = episode(judge=judge)
    await run.act([call("answer", "answer-1")])
    assert ((await run.outcome()).reward, judge.calls) == (1.0, 0)


async def grade_of(prediction: str, label: str, judge: CountingJudge | None) -> Grade:
    return await grade("Q?", prediction, label, judge, lambda **fields: [{"role": "user", "content": str(fields)}])


async def test_rule_first_then_judge() -> None:
    judge = CountingJudge()
    assert await grade_of("1/2", "0.5", judge) == (1.0, "rule")
    assert await grade_of("41", "42", judge) == (0.0, "rule")
    assert await grade_of(" ", "42", judge) == (0.0, "empty")
    assert await grade_of("word " * 501, "word", judge) == (0.0, "too_long")
    assert judge.calls == 0
    assert await grade_of("the French capital", "Paris", judge) == (1.0, "judge")
    assert await grade_of("the French capital", "Paris", CountingJudge("VERDICT: False")) == (0.0, "judge")
    assert await grade_of("the French capital", "Paris", None) == (0.0, "none")
    with pytest.raises(Unscored):
        await grade_of("the French capital", "Paris", CountingJudge("no idea"))


def test_predictions_come_from_the_asked_form_and_not_from_thoughts() -> None:
    assert extract_prediction("<answer>a</answer> <answer> b </answer>", boxed=False) == "b"
    assert extract_prediction(r"<think>\boxed{1}</think> \boxed{2}", boxed=True) == "2"
    assert extract_prediction(r"<think>\boxed{1}", boxed=True) == ""
    assert extract_prediction("opened by the template</think> <answer>yes</answer>", boxed=False) == "yes"


@pytest.mark.parametrize("termination", ["turn_limit", None])
async def test_without_an_answer_there_is_no_valid_answer(termination: str | None) -> None:
    outcome = await episode().outcome(termination)
    assert (outcome.reward, outcome.valid_answer) == (0.0, False)
    assert outcome.termination == (termination or "unanswered")
