"""Evaluation of MemAgent: arms, scores, failures as zero, resumption, strata, figure, YaRN tool."""

from __future__ import annotations

import json
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers_agentic import FakeEngine, Reply
from helpers_memagent import END, TOKENIZER, Play, document

from agentic.common.errors import ConfigError, PromptTooLong
from agentic.common.roles import Role
from agentic.memagent import eval as evaluation
from agentic.memagent import yarn
from agentic.memagent.data_items import Context, Item
from agentic.memagent.eval_arms import FORMS, DirectArm, depth_of, measures_of, predicted
from agentic.memagent.eval_plot import Point, render_svg
from agentic.memagent.eval_summary import by_position, mean_over_tasks
from agentic.memagent.prompts import PromptSet

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"memagent_chunk_tokens": 40, "memagent_memory_tokens": 16, "memagent_question_tokens": 32}
SMALL |= {"memagent_answer_tokens": 32}


@pytest.fixture(autouse=True)
def small_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "load_tokenizer", lambda *_, **__: TOKENIZER)


class Bench:
    """A folder with data of ten items and a role file; `run` starts the program on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        (folder / "memagent.yaml").write_text(yaml.safe_dump(SMALL))
        self.write("eval_5.json", [self.item(number) for number in range(10)])

    def item(self, number: int, **changes: Any) -> dict[str, Any]:
        base = {"context": document(100), "input": f"Q{number}?", "answers": ["blue", "navy"], "num_docs": 5}
        return base | {"evidence": [number / 10]} | changes

    def write(self, name: str, records: list[dict[str, Any]]) -> None:
        (self.folder / name).write_text(json.dumps(records))

    def run(self, engine: FakeEngine, *flags: str, arms: tuple[str, ...] = ("memagent",), lengths: str = "5") -> int:
        roles = {arm: {"url": engine.url, "tokenizer": "t", "retries": 0, "timeout_s": 60} for arm in arms}
        (self.folder / "roles.yaml").write_text(yaml.safe_dump({"roles": roles}))
        argv = ["--data", str(self.folder), "--roles", str(self.folder / "roles.yaml"), "--out", str(self.out)]
        argv += ["--config", str(self.folder / "memagent.yaml"), "--lengths", lengths, "--runs", "1"]
        return evaluation.main([*argv, "--direct-context", "400", "--direct-max-new-tokens", "32", *flags])

    def result(self) -> dict[str, Any]:
        return json.loads((self.out / "result.json").read_text())

    def lines(self, arm: str = "memagent", data: str = "hqa_5", run: int = 0) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / f"runs/{data}.{arm}.{run}.jsonl").read_text().splitlines()]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def failing(*questions: str, answer: str = r"It is \boxed{blue}.") -> Any:
    def script(prompt: str) -> str | Reply:
        if any(f"{question}?" in prompt for question in questions):
            return Reply("refused", status=400)
        return "noted" if "<section>" in prompt else answer

    return script


# --------------------------------------------------------------------------------------------------------------------
# The program.


def test_failures_count_as_zero_and_are_listed(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """10 items, 2 request failures, 8 right: 80.0, not 100."""
    with FakeEngine(failing("Q3", "Q7"), TOKENIZER) as engine:
        assert bench.run(engine) == 0
    stats = bench.result()["results"]["hqa_5"]["arms"]["memagent"]
    assert stats["mean"] == 0.8 and stats["n_failed"] == 2 and stats["measures"]["sub_em"] == 0.8
    assert stats["stderr"] == pytest.approx(0.1333, abs=1e-4)
    assert stats["failures"] == {"role_bad_response:memagent": ["0/3", "0/7"]} and stats["turns"] == 4
    out = capsys.readouterr().out
    assert " 80.0 " in out and "failed and counted as 0: role_bad_response:memagent x2 (run/item 0/3, 0/7)" in out


def test_a_second_start_asks_only_what_failed(bench: Bench) -> None:
    with FakeEngine(failing("Q3"), TOKENIZER) as engine:
        assert bench.run(engine) == 0
        before, engine.script = len(engine.requests), failing()
        assert bench.run(engine) == 0
        asked = engine.requests[before:]
    assert len(asked) == 4 and all("Q3?" in request.prompt for request in asked)  # 3 chunks and the answer
    stats = bench.result()["results"]["hqa_5"]["arms"]["memagent"]
    assert stats["mean"] == 1.0 and stats["n_failed"] == 0
    assert [line["id"] for line in bench.lines()] == [str(number) for number in range(10)]


def test_other_settings_or_data_are_refused_in_the_same_folder(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeEngine(failing(), TOKENIZER) as engine:
        assert bench.run(engine, "--limit", "2") == 0
        assert bench.run(engine, "--limit", "3") == 2
        assert "started with limit = 2, now 3" in capsys.readouterr().err
        assert bench.run(engine, "--limit", "2", "--temperature", "1.0") == 2
        assert "sampling.temperature" in capsys.readouterr().err


def test_summary_alone_says_what_is_missing(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeEngine(failing(), TOKENIZER) as engine:
        assert bench.run(engine, "--summary") == 3
    assert "hqa_5, memagent, run 0: 10 of 10 questions have no answer" in capsys.readouterr().err
    assert engine.requests == [] and not (bench.out / "result.json").exists()


def test_what_the_agent_did_is_recorded(bench: Bench) -> None:
    memories = ("first", "", Reply("long " * 40))
    with FakeEngine(Play(*memories, answer=r"\boxed{a navy coat}"), TOKENIZER) as engine:
        assert bench.run(engine, "--limit", "1") == 0
    stats = bench.result()["results"]["hqa_5"]["arms"]["memagent"]
    assert (stats["turns"], stats["context_tokens"]) == (4, 100)
    assert (stats["turn_truncated"], stats["empty_memory"], stats["context_truncated"]) == (1, 1, 0)
    assert 0 < stats["memory_tokens"] <= 16
    assert set(stats["tokens"]) == {"memory", "answer"} and stats["tokens"]["memory"]["calls"] == 3
    (line,) = bench.lines()
    assert line["answer"] == r"\boxed{a navy coat}" and line["details"]["prediction"] == "a navy coat"
    measures = line["details"]["measures"]
    assert line["score"] == measures["sub_em"] == measures["sub_em_one_way"] == 1.0
    assert measures["sub_em_first"] == measures["em_norm"] == measures["em"] == 0.0


def test_documents_over_the_chunk_limit_are_counted(bench: Bench) -> None:
    (bench.folder / "memagent.yaml").write_text(yaml.safe_dump(SMALL | {"memagent_eval_max_chunks": 2}))
    with FakeEngine(failing(), TOKENIZER) as engine:
        assert bench.run(engine, "--limit", "3") == 0
    stats = bench.result()["results"]["hqa_5"]["arms"]["memagent"]
    assert stats["context_truncated"] == 3 and stats["context_tokens"] == 100 and stats["turns"] == 3


def test_arms_runs_and_lengths(bench: Bench) -> None:
    bench.write("eval_50.json", [bench.item(number, context=document(900)) for number in range(3)])
    with FakeEngine(failing(), TOKENIZER) as engine:
        flags = ("--runs", "2", "--limit", "3")
        assert bench.run(engine, *flags, arms=("memagent", "direct", "untrained"), lengths="5,7K") == 0
    results = bench.result()["results"]
    assert list(results) == ["hqa_5", "hqa_7K"] and list(results["hqa_5"]["arms"]) == [
        "direct",
        "untrained",
        "memagent",
    ]
    assert list(results["hqa_5"]["differences"]) == ["untrained - direct", "memagent - direct", "memagent - untrained"]
    assert all(stats["n_runs"] == 2 and stats["n_questions"] == 3 for stats in results["hqa_7K"]["arms"].values())
    assert results["hqa_7K"]["arms"]["direct"]["context_truncated"] == 6
    assert results["hqa_5"]["arms"]["direct"]["context_truncated"] == 0
    figure = ElementTree.fromstring((bench.out / "accuracy.svg").read_text())
    assert len(figure.findall("{*}polyline")) == 3 and len(figure.findall("{*}circle")) == 6


def test_ruler_items_score_the_share_of_outputs(bench: Bench) -> None:
    item = {"context": document(60), "input": "Q0?", "outputs": ["11", "22", "33", "Ab"]}
    bench.write("eval_niah_multivalue_8192.json", [item])
    bench.write("eval_vt_8192.json", [item])
    with FakeEngine(failing(answer="I saw 11, 33 and aB."), TOKENIZER) as engine:
        assert bench.run(engine, "--tasks", "niah_multivalue,vt", lengths="8k") == 0
    report = bench.result()
    assert report["results"]["vt_8k"]["arms"]["memagent"]["mean"] == 0.75
    assert report["mean_over_tasks"] == {"8k": {"memagent": 0.75}}


def test_index_contexts_and_rows_that_are_left_out(bench: Bench) -> None:
    (bench.folder / "docs.jsonl").write_text('{"title": "t", "text": "x"}\n{"title": "u", "text": "y"}\n')
    good = {"context": [1, 0], "input": "Q0?", "answers": ["blue"]}
    bench.write("eval_2.json", [good, {**good, "context": [2]}])
    with FakeEngine(failing(), TOKENIZER) as engine:
        assert bench.run(engine, "--documents", str(bench.folder / "docs.jsonl"), lengths="2") == 0
        sections = "".join(request.prompt for request in engine.requests if "<section>" in request.prompt)
    assert "Document 1:\nu\ny" in sections
    assert bench.result()["data"]["hqa_2"]["left_out"] == {"context_index_out_of_range": 1}


def test_answer_is_form(bench: Bench) -> None:
    with FakeEngine(failing(answer="So the answer is (navy)."), TOKENIZER) as engine:
        assert bench.run(engine, "--answer-form", "answer_is", "--limit", "1", arms=("memagent", "direct")) == 0
    assert {line["details"]["prediction"] for arm in ("memagent", "direct") for line in bench.lines(arm)} == {"navy"}
    prompts = [request.prompt for request in engine.requests if "<section>" not in request.prompt]
    assert len(prompts) == 2 and all("the answer is (your final answer)" in prompt for prompt in prompts)
    standard, other = PromptSet.load("standard"), PromptSet.load("answer_is")
    assert standard.texts["memory"] == other.texts["memory"] and standard.no_memory == other.no_memory


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lengths", "7q"), "--lengths 7q: not a length of task hqa"),
        (("--lengths", "0"), "--lengths 0: not a length"),
        (("--lengths", "14k"), "no eval_100.json"),
        (("--tasks", "vt", "--lengths", "8k"), "no eval_vt_8192.json"),
        (("--arms", "memagant"), "did you mean 'memagent'"),
        (("--top-p", "0"), "--top-p 0.0: out of range"),
        (("--documents", "absent.json"), "absent.json: no such data file"),
        (("--config", "absent.yaml"), "--config absent.yaml: no such file"),
        (("--runs", "0"), "--runs"),
    ],
)
def test_wrong_flags_are_one_line_and_code_2(
    bench: Bench, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    with FakeEngine(failing(), TOKENIZER) as engine:
        assert bench.run(engine, *flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error and not engine.requests


def test_the_agent_refuses_yarn_and_short_engines(bench: Bench, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"rope_scaling": {"type": "yarn", "factor": 4.0}}))
    (tmp_path / "r.yaml").write_text(
        yaml.safe_dump({"roles": {"memagent": {"url": "http://x", "tokenizer": "t", "model": str(model)}}})
    )
    args = evaluation.parse_args(["--data", "d", "--lengths", "7k", "--roles", str(tmp_path / "r.yaml"), "--out", "o"])
    with pytest.raises(ConfigError, match="has YaRN, which is for `direct` only"):
        evaluation.load_roles(args)
    role = Role("memagent", "http://x")
    with pytest.raises(ConfigError, match="context of 4096 tokens, memagent_window_tokens is 8192"):
        evaluation._check_engine("memagent", role, {"context_length": 4096}, 8192)


# --------------------------------------------------------------------------------------------------------------------
# The direct baseline.


def direct(context: int = 400, new: int = 32, form: str = "boxed") -> DirectArm:
    return DirectArm.build(Role("direct", "http://x"), TOKENIZER, form, context, new)


@pytest.mark.parametrize("form", FORMS)
def test_a_tenfold_document_leaves_question_and_instruction_whole(form: str) -> None:
    arm, question = direct(form=form), "Who was the Chief of Protocol?"
    text = "".join(f" {number}" for number in range(2000))
    ids, total, left_out = arm.prompt(question, text)
    shown = TOKENIZER.decode(ids)
    assert total > 10 * 400 and len(ids) + 32 == 400
    assert shown.endswith(f"<problem>\n{question}\n</problem>\n\n{FORMS[form]}{END}\n<|im_start|>assistant\n")
    inside = shown.partition("<article>\n")[2].partition("\n</article>")[0]
    room = 400 - 32 - arm.template.overhead - len(TOKENIZER.encode(question))
    assert len(TOKENIZER.encode(inside)) == room == total - left_out
    whole = TOKENIZER.encode(text)
    head = (room + 1) // 2
    assert inside == TOKENIZER.decode(whole[:head]) + TOKENIZER.decode(whole[len(whole) - (room - head) :])


def test_a_short_document_is_whole_and_control_tokens_are_text() -> None:
    arm = direct()
    ids, total, left_out = arm.prompt(f"Q {END}?", f"{{question}} {END} x")
    shown = TOKENIZER.decode(ids)
    assert left_out == 0 and f"{{question}} {END} x" in shown and ids.count(TOKENIZER.eos_token_id) == 1


def test_limits_of_the_direct_prompt() -> None:
    with pytest.raises(PromptTooLong):
        direct().prompt("word " * 400, "text")
    with pytest.raises(ConfigError, match="--direct-context 100: no room"):
        direct(context=100, new=90)


# --------------------------------------------------------------------------------------------------------------------
# Scores and statistics.


@pytest.mark.parametrize(
    ("reply", "form", "prediction"),
    [
        (r"\boxed{a} then \boxed{b}", "boxed", "b"),
        ("no box", "boxed", None),
        ("the answer is x. No: the answer is (New York).", "answer_is", "New York"),
        ("the answer is: Paris.\nbye", "answer_is", "Paris"),
        ("The answer is Paris", "answer_is", None),
    ],
)
def test_predictions(reply: str, form: str, prediction: str | None) -> None:
    assert predicted(reply, form) == prediction


@pytest.mark.parametrize("reply", ["", r"\boxed{}", r"\boxed{the}", r"\boxed{.}", "nothing boxed"])
def test_empty_predictions_score_zero_in_every_metric(reply: str) -> None:
    assert set(measures_of(reply, ["blue", "the blue"], "boxed").values()) == {0.0}


def test_ruler_outputs_in_a_reply() -> None:
    assert measures_of("1001 and 1002; 1003", ["1001", "1002", "1003", "1004"], "boxed")["multi_value"] == 0.75


def test_depth_comes_from_the_file_or_the_first_occurrence() -> None:
    def item(*references: str, evidence: tuple[float, ...] = ()) -> Item:
        return Item("0", "Q", references, Context("x"), evidence=evidence)

    text = "0123456789Blue56789blue"
    assert depth_of(item("blue", evidence=(0.25, 0.5)), text) == 0.25
    assert depth_of(item("blue"), text) == pytest.approx(10 / len(text))
    assert [depth_of(item(reference), text) for reference in ("no", "56", "absent")] == [None] * 3


def position_line(id_: str, depth: float | None, score: float | None) -> dict[str, Any]:
    return {"id": id_, "score": score, "details": {"depth": depth}}


def test_strata_by_position_count_items_not_answers() -> None:
    lines = [position_line("a", 0.05, 1.0), position_line("a", 0.05, 0.0), position_line("b", 0.19, 1.0)]
    lines += [position_line("c", 1.0, None), position_line("d", None, 1.0)]
    table = by_position(lines)
    assert [(stratum["n"], stratum["mean"]) for stratum in table] == [
        (2, 0.75),
        (0, None),
        (0, None),
        (0, None),
        (1, 0.0),
    ]
    assert table[0]["stderr"] == pytest.approx(0.25)


def test_mean_over_tasks_needs_several() -> None:
    results = {
        name: {"arms": {"memagent": {"mean": mean}}} for name, mean in (("a_8k", 0.5), ("b_8k", 1.0), ("a_16k", 0.2))
    }
    keys = {"a_8k": ("a", "8k"), "b_8k": ("b", "8k"), "a_16k": ("a", "16k")}
    assert mean_over_tasks(results, keys) == {"8k": {"memagent": 0.75}}


def test_figure_is_self_contained_and_escaped() -> None:
    points = [Point("7k", 7000, 0.8, 0.1), Point("3.5M", 3.5e6, 0.7, None)]
    text = render_svg("a < b", {"x & y": points, "empty": []})
    root = ElementTree.fromstring(text)
    first, second = root.findall("{*}circle")
    assert float(first.get("cx")) < float(second.get("cx")) and float(first.get("cy")) < float(second.get("cy"))
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "") and "x &amp; y" in text
    ElementTree.fromstring(render_svg("nothing", {}))
    ElementTree.fromstring(render_svg("one", {"a": points[:1]}))


# --------------------------------------------------------------------------------------------------------------------
# YaRN for the baseline.


def test_yarn_writes_a_directory_that_links_to_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = tmp_path / "model", tmp_path / "long"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 32768, "rope_theta": 1e6}))
    main = runpy.run_path(str(ROOT / "tools/yarn_config.py"))["main"]
    argv = ["--model", str(model), "--output", str(out)]
    assert main(argv) == 0
    config = json.loads((out / "config.json").read_text())
    scaling = {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert config == {"max_position_embeddings": 131072, "rope_theta": 1e6, "rope_scaling": scaling}
    assert (out / "model.safetensors").read_bytes() == b"weights" and (out / "model.safetensors").is_symlink()
    assert "rope_scaling" not in json.loads((model / "config.json").read_text())
    assert main(argv) == 2
    assert main(["--model", str(out), "--output", str(tmp_path / "more")]) == 2
    assert "YaRN already" in capsys.readouterr().err


def test_yarn_keeps_what_newer_configurations_say() -> None:
    config = {"max_position_embeddings": 40960, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    made = yarn.with_yarn(config, 2.0, 32768)
    wanted = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768}
    assert made["rope_parameters"] == wanted and made["max_position_embeddings"] == 65536
    with pytest.raises(ConfigError, match="--original 65536"):
        yarn.with_yarn(config, 2.0, 65536)
