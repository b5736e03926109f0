"""Training records: draws, sources, leakage, preferences, the validator, and the program end to end."""

from __future__ import annotations

import copy
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from agentic.common.errors import ConfigError
from agentic.common.evaluation_provenance import sha256_file
from agentic.toolorchestra import data
from agentic.toolorchestra.data_offers import Catalogue, Draw, Price, draw_offer, load_catalogue, parse_fee
from agentic.toolorchestra.data_sources import DOMAINS, SourceTask, official_source, qa_source, task_file_source
from agentic.toolorchestra.preferences import (
    Features,
    Preference,
    check_vector,
    choose_preference,
    evaluation_score,
    load_preferences,
    preference_score,
    sample_preference,
)
from slime.utils.data import Dataset

ROOT = Path(__file__).resolve().parents[2]
ALIASES = {
    "search-1": {"model": "mid", "price_in": 0.25, "price_out": 2},
    "reasoner-1": {"model": "small", "price_in": 0.8, "price_out": 0.8},
    "answer-1": {"model": "big", "price_in": 1.25, "price_out": 10, "description": "strong", "latency_s": 96},
    "answer-math-1": {"model": "maths", "price_in": 0.9, "price_out": 0.9},
    "expert-1": {"model": "big", "price_in": 1.25, "price_out": 10},
    "expert-2": {"model": "mid", "price_in": 0.25, "price_out": 2},
    "expert-3": {"model": "small", "price_in": 0.8, "price_out": 0.8},
}
QUESTIONS = [
    {"question": "Where is the Louvre?", "reference_answer": "Paris", "question_id": 17},
    {"problem": "What is 2 + 2?", "answer": 4, "index": "general____a9"},
    {"prompt": "Who wrote Faust?", "label": "Goethe"},
]


def write(path: Path, records: list) -> Path:
    text = json.dumps(records) if path.suffix == ".json" else "".join(json.dumps(r) + "\n" for r in records)
    path.write_text(text, encoding="utf-8")
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def aliases(tmp_path: Path) -> Path:
    path = tmp_path / "aliases.yaml"
    path.write_text(yaml.safe_dump(ALIASES, sort_keys=False), encoding="utf-8")
    return path


@pytest.fixture
def catalogue(aliases: Path) -> Catalogue:
    return load_catalogue(aliases, None, [("search", 0.07)])


def run(*argv: object) -> int:
    return data.main([str(item) for item in argv])


def mock_tasks() -> list[dict]:
    """The toy tasks of the package, as a task file has them."""
    return [task.task.model_dump(mode="json", exclude_none=True) for task in official_source(["mock"], "train")]


# --------------------------------------------------------------------------------------------------------------------
# Draws.


def test_prices_are_per_token_and_fees_are_dollars(catalogue):
    assert catalogue.prices["big"] == Price(1.25e-6, 1e-5)
    offer = draw_offer(catalogue, "qa", random.Random(0), Draw(1.0, 1.0, True))
    assert offer.model_mapping == {name: ALIASES[name]["model"] for name in ALIASES if "expert" not in name}
    assert offer.tool_pricing["big"] == {"input": 1.25e-6, "output": 1e-5}
    assert offer.tool_pricing["search"] == 0.07
    assert "search" not in draw_offer(catalogue, "func_call", random.Random(0), Draw()).tool_pricing


def test_draws_vary_within_their_limits(catalogue):
    offers = [draw_offer(catalogue, "qa", random.Random(seed), Draw(0.5, 4.0)) for seed in range(200)]
    for offer in offers:
        assert any(alias.startswith("answer-") for alias in offer.aliases)
        assert set(offer.model_mapping.values()) <= set(offer.tool_pricing)
        assert offer.model_mapping.get("search-1", "mid") == "mid", "only models of its own kind"
        for model in offer.model_mapping.values():
            price = offer.tool_pricing[model]
            ratio = price["input"] / catalogue.prices[model].input
            assert 0.2499 < ratio < 4.001
            assert price["output"] / catalogue.prices[model].output == pytest.approx(ratio, rel=1e-2)
    assert len({tuple(offer.aliases) for offer in offers}) > 8
    models = Counter(offer.model_mapping.get("answer-1") for offer in offers)
    assert models["big"] > 20
    assert models["maths"] > 20


def test_same_generator_same_offer(catalogue):
    first, second = (draw_offer(catalogue, "func_call", random.Random("a"), Draw()) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tool-1": "big"}, "tool-1: an alias begins with one of answer-, search-"),
        ({"expert-4": {"model": "other"}}, "expert-4: give price_in and price_out .* or the role file: --roles"),
        ({"expert-1": {"model": "big", "price_in": 9, "price_out": 9}}, "expert-1: model 'big' has another price"),
        ({"expert-1": {"model": "big", "prize_in": 9}}, "unknown key 'prize_in'"),
    ],
)
def test_wrong_aliases_are_named(tmp_path, change, message):
    path = tmp_path / "aliases.yaml"
    path.write_text(yaml.safe_dump({**ALIASES, **change}, sort_keys=False))
    with pytest.raises(ConfigError, match=message):
        load_catalogue(path)


def test_prices_of_the_role_file_and_models_that_nobody_serves(tmp_path):
    roles = tmp_path / "roles.yaml"
    big = {"url": "http://127.0.0.1:1", "api": "chat", "model": "m", "price_in": 3, "price_out": 5}
    roles.write_text(yaml.safe_dump({"roles": {"orchestrator": {"url": "policy"}, "big": big}}))
    path = tmp_path / "aliases.yaml"
    path.write_text(yaml.safe_dump({"expert-1": "big", "answer-1": {"model": "big"}}))
    assert load_catalogue(path, roles).prices == {"big": Price(3e-6, 5e-6)}
    path.write_text(yaml.safe_dump({"expert-1": "bigg"}))
    with pytest.raises(ConfigError, match="serves the model 'bigg'.*big"):
        load_catalogue(path, roles)


def test_fee_names_and_values():
    assert parse_fee("search=0.07") == ("search", 0.07)
    with pytest.raises(ValueError, match="unknown fee 'serch'.*search"):
        parse_fee("serch=1")
    with pytest.raises(ValueError, match="must not be negative"):
        parse_fee("search=-1")


def test_category_without_its_tool(tmp_path, capsys):
    path = tmp_path / "aliases.yaml"
    path.write_text(yaml.safe_dump({name: ALIASES[name] for name in ("search-1", "expert-1")}))
    source = write(tmp_path / "q.jsonl", QUESTIONS)
    assert run("qa", "--input", source, "--aliases", path, "--output", tmp_path / "o.jsonl") == 2
    assert "there is no alias 'answer-...', which the category qa needs" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------------
# Preferences.


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        ({}, "pref_vec is {}"),
        ([1], r"pref_vec is \[1\]"),
        ({"cost": -0.3}, "from 0 to 1; cost and latency are negated already"),
        ({"answer-1": 1.5}, r"pref_vec\['answer-1'\] is 1.5; weights are numbers from 0 to 1$"),
        ({"outcome": True}, "is True"),
        ({"outcome": 1, "accuracy": 1}, "holds both 'outcome' and 'accuracy'"),
        (
            {"answer-9": 1},
            "weighs 'answer-9', which is no tool of this sample; known: outcome, cost, latency, answer-1",
        ),
        ({3: 1}, "has the key 3"),
    ],
)
def test_bad_vectors_are_named(vector, message):
    with pytest.raises(ConfigError, match=message):
        check_vector(vector, "sample 3", ["answer-1"])


def test_preference_file(tmp_path):
    path = write(
        tmp_path / "p.jsonl",
        [
            {"instruction": " Stay local. ", "pref_vec": {"expert-2": 1, "expert-9": 1}},
            {"pref_vec": {"accuracy": 1, "cost": 0.5}},
        ],
    )
    pairs = load_preferences(path)
    assert pairs == [
        Preference("Stay local.", {"expert-2": 1, "expert-9": 1}),
        Preference("", {"outcome": 1, "cost": 0.5}),
    ]
    seen = [choose_preference(pairs, ["expert-2"], random.Random(seed)) for seed in range(20)]
    assert {p.instruction for p in seen} == {"", "Stay local."}
    assert all("expert-9" not in p.vector for p in seen), "an alias that is not offered loses its weight"
    with pytest.raises(ConfigError, match="no preference weighs outcome"):
        choose_preference(pairs[:1], ["expert-1"], random.Random(0))
    bad = write(tmp_path / "bad.jsonl", [{"pref_vec": {"cost": 2}}])
    with pytest.raises(ConfigError, match=r"bad.jsonl:1: pref_vec\['cost'\] is 2"):
        load_preferences(bad)


def test_own_preferences_are_valid_and_varied():
    drawn = [sample_preference(["answer-1", "search-1"], random.Random(seed)) for seed in range(100)]
    for preference in drawn:
        assert check_vector(preference.vector, "x", ["answer-1", "search-1"])["outcome"] == 1.0
    assert len({frozenset(p.vector) for p in drawn}) == 6
    named = [p for p in drawn if "search-1" in p.vector]
    assert named
    assert all("search-1" in p.instruction for p in named), "the policy can read what is wanted"


def test_evaluation_score():
    weights = {"outcome": 1.0, "cost": 0.5, "latency": 0.5, "answer-1": 0.25, "search-1": 1.0}
    base = Features({"answer-1": 2}, 0.0, 0.20, 40.0)
    own = Features({"answer-1": 1}, 1.0, 0.10, 20.0, weights)
    assert preference_score(own, base) == pytest.approx(1 + 0.5 * 20 / 10 + 0.5 * 40 / 20 + 0.25 * 1 / 2)
    free = Features({}, 1.0, 0.0, 0.5, weights)
    assert preference_score(free, base) == pytest.approx(1 + 0.5 * 20 + 0.5 * 40)
    wrong = Features({"answer-1": 1}, 0.0, 0.0, 0.0, weights)
    assert preference_score(wrong, base) == 0.0
    assert evaluation_score([own, wrong], [base, base]) == preference_score(own, base)
    with pytest.raises(ValueError, match="zip"):
        evaluation_score([own], [])


# --------------------------------------------------------------------------------------------------------------------
# Questions.


def test_questions_in_every_shape(tmp_path):
    tasks = list(qa_source(write(tmp_path / "q.jsonl", QUESTIONS)))
    assert all(isinstance(task, SourceTask) for task in tasks)
    assert [task.label for task in tasks] == ["Paris", "4", "Goethe"]
    assert [task.metadata["eid"] for task in tasks][:2] == ["17", "a9"]
    assert len(tasks[2].metadata["eid"]) == 16, "a record without an id is named by its question"
    table = pa.Table.from_pylist([{"question": "q?", "answer": "a", "id": "z"}])
    pq.write_table(table, tmp_path / "q.parquet")
    assert [task.key for task in qa_source(tmp_path / "q.parquet")] == ["qa/z"]


def test_broken_questions_cost_one_line_each(tmp_path, aliases, caplog):
    source = tmp_path / "q.jsonl"
    records = [*QUESTIONS, {"question": " ", "answer": "x"}, {"question": "q", "answer": "w " * 501}, {"answer": "x"}]
    records += [{"question": "q", "answer": ["x"]}, QUESTIONS[0], {"category": "func_call"}]
    write(source, records)
    source.write_text(source.read_text() + "{broken\n")
    report = build(aliases, "qa", "--input", source, "--output", tmp_path / "o.jsonl")
    wanted = {
        "no_question": 2,
        "no_answer": 1,
        "answer_too_long": 1,
        "duplicate": 1,
        "other_category": 1,
        "not_json": 1,
    }
    assert report["left_out"] == wanted
    assert report["read"] == 10
    assert "q.jsonl:10: not_json" in caplog.text or "q.jsonl: 6 rows left out" in caplog.text
    assert len(read(tmp_path / "o.jsonl")) == 3


def build(aliases: Path, *argv: object) -> dict:
    return data.build(data.parse_args([str(item) for item in (*argv, "--aliases", aliases)]))


def test_questions_end_to_end(tmp_path, aliases):
    output = tmp_path / "out" / "train.jsonl"
    source = write(tmp_path / "q.jsonl", QUESTIONS)
    flags = ("--fee", "search=0.07", "--variants", "5", "--seed", "3")
    command = [sys.executable, "-m", "agentic.toolorchestra.data", "qa", "--input", source, "--aliases", aliases]
    done = subprocess.run([*command, "--output", output, *flags], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == {str(output): 15}
    records = read(output)
    metadata = [record["metadata"] for record in records]
    assert len({json.dumps(m["model_mapping"]) + json.dumps(m["tool_pricing"]) for m in metadata[:5]}) == 5
    for record in records:
        own = record["metadata"]
        assert own["tools"] == list(own["model_mapping"])
        assert record["prompt"].endswith(own["preference"])
        assert record["prompt"].startswith(("Where", "What", "Who"))
    assert run("inspect", output) == 0
    dataset = Dataset(str(output), None, None, None, prompt_key="prompt", label_key="label", metadata_key="metadata")
    assert dataset.samples[0].metadata["pref_vec"]["outcome"] == 1.0
    facts = json.loads((tmp_path / "out" / "train.jsonl.sources.json").read_text())
    assert facts["records"] == 15
    assert facts["sha256"] == sha256_file(output)
    assert facts["sources"] == {str(source): sha256_file(source), str(aliases): sha256_file(aliases)}
    assert facts["settings"]["seed"] == 3


def test_record_depends_on_its_task_and_the_seed_only(tmp_path, aliases):
    whole, part = write(tmp_path / "a.jsonl", QUESTIONS), write(tmp_path / "b.jsonl", QUESTIONS[1:])
    build(aliases, "qa", "--input", whole, "--output", tmp_path / "1.jsonl")
    build(aliases, "qa", "--input", part, "--output", tmp_path / "2.jsonl")
    build(aliases, "qa", "--input", whole, "--output", tmp_path / "3.jsonl", "--seed", 1)

    def drawn(name: str) -> dict:
        keys = ("model_mapping", "tool_pricing", "pref_vec")
        return {r["metadata"]["task_id"]: [r["metadata"][key] for key in keys] for r in read(tmp_path / name)}

    first, second, other_seed = drawn("1.jsonl"), drawn("2.jsonl"), drawn("3.jsonl")
    assert all(first[name] == second[name] for name in second)
    assert first != other_seed


def test_held_out_tasks_are_apart(tmp_path, aliases):
    source = write(tmp_path / "q.jsonl", [{"question": f"q{n}?", "answer": "a", "id": n} for n in range(200)])
    report = build(aliases, "qa", "--input", source, "--output", tmp_path / "o.jsonl", "--held-out", "0.2")
    names = [{r["metadata"]["task_id"] for r in read(Path(path))} for path in report["files"]]
    assert len(names) == 2
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == 200
    assert 20 < len(names[1]) < 60
    more = write(tmp_path / "more.jsonl", [{"question": f"q{n}?", "answer": "a", "id": n} for n in range(400)])
    build(aliases, "qa", "--input", more, "--output", tmp_path / "m.jsonl", "--held-out", "0.2")
    later = {r["metadata"]["task_id"] for r in read(tmp_path / "m.held_out.jsonl")}
    assert names[1] <= later, "a larger file holds out the same tasks"


# --------------------------------------------------------------------------------------------------------------------
# tau2.


def test_domains_are_those_of_the_package():
    from agentic.toolorchestra.tau2 import tasks

    assert DOMAINS == tasks.DOMAINS


def test_official_records_are_the_train_split(tmp_path, aliases):
    from agentic.toolorchestra.tau2.tasks import official_splits, task_of

    tasks = list(official_source(["telecom", "retail"], "train"))
    for domain in ("telecom", "retail"):
        ids = {task.metadata["task_id"] for task in tasks if task.domain == domain}
        assert ids == set(official_splits(domain)["train"])
        assert not ids & set(official_splits(domain)["test"])
    args = data.parse_args(["tau2", "--aliases", str(aliases), "--output", "x.jsonl"])
    assert args.split == "train"
    record = data.make_record(tasks[0], 0, args, load_catalogue(aliases), [])
    assert task_of(record["metadata"])[1] == tasks[0].task
    assert set(record["metadata"]["tools"]) <= {"expert-1", "expert-2", "expert-3"}
    assert record["metadata"]["preference"] not in record["prompt"]
    assert len(data.first_of_each(tasks)[0]) == len(tasks) == 148


def test_tau2_end_to_end_states_the_floor(tmp_path, aliases):
    output = tmp_path / "t.jsonl"
    report = build(aliases, "tau2", "--domain", "mock", "--output", output)
    assert report["do_nothing_floors"]["mock"].startswith("do-nothing floor 1/9")
    whole = {record["metadata"]["task_id"] for record in read(output)}
    assert len(whole) == 9
    report = build(aliases, "tau2", "--domain", "mock", "--output", output, "--exclude-do-nothing")
    assert report["left_out"] == {"do_nothing": 1}
    assert len(whole - {record["metadata"]["task_id"] for record in read(output)}) == 1
    assert run("inspect", output) == 0
    facts = json.loads(output.with_name("t.jsonl.sources.json").read_text())
    assert sorted(Path(name).name for name in facts["sources"]) == ["aliases.yaml", "split_tasks.json", "tasks.json"]
    assert facts["do_nothing_floors"] == report["do_nothing_floors"]


@pytest.mark.parametrize("form", ["json", "jsonl", "parquet", "text_parquet"])
def test_task_files_in_every_form(tmp_path, form):
    tasks = mock_tasks()
    path = tmp_path / f"tasks.{'parquet' if 'parquet' in form else form}"
    if form == "text_parquet":
        rows = [{k: json.dumps(v) if isinstance(v, (dict, list)) else v for k, v in task.items()} for task in tasks]
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist([t for t in tasks if "initial_state" not in t]), path)
    else:
        write(path, tasks)
    found = list(task_file_source(path, "mock"))
    assert all(isinstance(task, SourceTask) for task in found), [str(item) for item in found][:2]
    by_id = {task["id"]: task for task in tasks}
    for task in found:
        assert isinstance(task, SourceTask)
        assert task.metadata["task"]["user_scenario"] == by_id[task.metadata["task_id"]]["user_scenario"]


def test_training_records_that_carry_a_task(tmp_path, aliases):
    from agentic.toolorchestra.tau2.tasks import task_of

    task = mock_tasks()[0]
    records = [{"index": "mock____0", "category": "func_call", "example": task}, {"category": "qa", "problem": "q"}]
    report = build(
        aliases, "toolscale", "--input", write(tmp_path / "d.jsonl", records), "--output", tmp_path / "o.jsonl"
    )
    assert report["left_out"] == {"other_category": 1}
    metadata = read(tmp_path / "o.jsonl")[0]["metadata"]
    domain, found = task_of(metadata)
    assert (domain, found.id) == ("mock", task["id"])
    assert found.evaluation_criteria is not None
    assert run("inspect", tmp_path / "o.jsonl") == 0


def test_tasks_that_cannot_be_used_are_counted(tmp_path):
    task = mock_tasks()[0]
    judged = copy.deepcopy(task)
    judged["evaluation_criteria"]["reward_basis"] = ["NL_ASSERTION"]
    unknown = copy.deepcopy(task)
    records = [
        {"domain": "mock", "example": judged},
        {"domain": "bank", "example": unknown},
        {"id": "x"},
        {"id": "y", "user_scenario": 3},
    ]
    problems = list(task_file_source(write(tmp_path / "t.jsonl", records), None))
    assert [problem.reason for problem in problems] == ["not_gradable", "not_gradable", "not_a_task", "not_a_task"]
    assert "domain 'bank' has no environment" in problems[1].detail
    assert problems[2].where.endswith("t.jsonl:3")


def test_tasks_of_the_official_test_split_never_enter(tmp_path):
    tasks = {split: next(iter(official_source(["retail"], split))) for split in ("test", "train")}
    records = []
    for split, task in tasks.items():
        assert task.task is not None
        records.append({**task.task.model_dump(mode="json", exclude_none=True), "id": f"renamed-{split}"})
    found = list(task_file_source(write(tmp_path / "t.json", records), "retail"))
    assert [getattr(item, "reason", "kept") for item in found] == ["official_test_task", "kept"]


# --------------------------------------------------------------------------------------------------------------------
# inspect.


def good_record() -> dict:
    metadata = {
        "category": "qa",
        "domain": "qa",
        "task_id": "1",
        "variant": 0,
        "tools": ["answer-1"],
        "model_mapping": {"answer-1": "big"},
        "tool_pricing": {"big": {"input": 1e-6, "output": 1e-5}, "search": 0.07},
        "pref_vec": {"outcome": 1.0},
    }
    return {"prompt": "q?", "label": "a", "metadata": metadata}


@pytest.mark.parametrize(
    ("change", "reason", "detail"),
    [
        ({"prompt": " "}, "no_prompt", "expected a text or chat messages"),
        ({"label": ""}, "no_label", "needs its reference answer"),
        ({"metadata": None}, "no_metadata", "metadata is None"),
        ({"category": "chat"}, "bad_category", "choose from qa, func_call"),
        ({"model_mapping": {"answer-1": 3}}, "bad_mapping", "is 3; expected the name of a model"),
        ({"model_mapping": {"expert-1": "big"}}, "bad_mapping", "'expert-1' does not begin with answer- or"),
        ({"model_mapping": {"search-1": "big"}}, "bad_mapping", "no alias 'answer-...'"),
        ({"tools": ["answer-1", "answer-2"]}, "bad_tools", "'answer-2', which model_mapping does not name"),
        ({"tool_pricing": {}}, "bad_pricing", "no entry for the model 'big' of answer-1"),
        ({"tool_pricing": {"big": {"input": 1.25, "output": 10}}}, "bad_pricing", "divide by a million"),
        ({"tool_pricing": {"big": {"input": -1, "output": 0}}}, "bad_pricing", r"\['input'\] is -1"),
        ({"tool_pricing": {"big": 3}}, "bad_pricing", "expected {input, output}"),
        ({"pref_vec": {"cost": -0.3}}, "bad_preference", "negated already"),
        ({"pref_vec": {"answer-2": 1}}, "bad_preference", "no tool of this sample"),
        ({"pref_vec": None}, "bad_preference", "pref_vec is None"),
        ({"category": "func_call", "domain": "retail", "task_id": "none"}, "bad_task", "no task 'none'"),
    ],
)
def test_broken_record_has_a_reason_a_place_and_a_remedy(tmp_path, capsys, change, reason, detail):
    record = good_record()
    for name, value in change.items():
        place = record if name in record else record["metadata"]
        place[name] = value
    path = write(tmp_path / "t.jsonl", [good_record(), record])
    if reason not in ("no_metadata", "no_prompt"):
        record["metadata"]["variant"] = 1
        write(path, [good_record(), record])
    assert run("inspect", path) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["reasons"] == {reason: 1}
    assert err.startswith(f"{path}:2: {reason}: ")
    assert len(err.splitlines()) == 1
    assert re.search(detail, err), err


def test_duplicates_and_broken_lines_and_many_problems(tmp_path, capsys):
    path = write(tmp_path / "t.jsonl", [good_record()] * 4)
    path.write_text(path.read_text() + "[1]\n{\n")
    assert run("inspect", path, "--show", 2) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["reasons"] == {"duplicate": 3, "not_an_object": 1, "not_json": 1}
    assert err.splitlines()[-1] == "... and 3 more"


def test_record_may_leave_mapping_and_prices_to_the_run(tmp_path):
    record = good_record()
    for name in ("tools", "model_mapping", "tool_pricing"):
        del record["metadata"][name]
    assert run("inspect", write(tmp_path / "t.jsonl", [record])) == 0


# --------------------------------------------------------------------------------------------------------------------
# Command line.


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["qa", "--input", "{q}", "--output", "{o}"], "--aliases"),
        (
            ["qa", "--input", "missing.jsonl", "--aliases", "{a}", "--output", "{o}"],
            "missing.jsonl: no such data file",
        ),
        (["qa", "--input", "{q}", "--aliases", "{a}", "--output", "{q}"], "is one of the inputs"),
        (["qa", "--input", "{q}", "--aliases", "{a}", "--output", "o.json"], "must end in .jsonl"),
        (["qa", "--input", "{q}", "--aliases", "none.yaml", "--output", "{o}"], "none.yaml does not exist"),
        (
            ["qa", "--input", "{q}", "--aliases", "{a}", "--output", "{o}", "--availability", "2"],
            "must be from 0 to 1",
        ),
        (["qa", "--input", "{q}", "--aliases", "{a}", "--output", "{o}", "--price-spread", "0"], "must be from 1"),
        (["qa", "--input", "{q}", "--aliases", "{a}", "--output", "{o}", "--fee", "serch=1"], "unknown fee 'serch'"),
        (["qa", "--input", "{e}", "--aliases", "{a}", "--output", "{o}"], "no usable task of 1"),
        (["tau2", "--domain", "airlin", "--aliases", "{a}", "--output", "{o}"], "airlin"),
        (["inspect", "{none}"], "no such data file"),
        (["tau2", "--held-out", "0.1", "--aliases", "{a}", "--output", "{o}"], "--held-out"),
    ],
)
def test_wrong_command_lines_are_one_line_and_exit_2(tmp_path, aliases, capsys, argv, message):
    paths = {"q": write(tmp_path / "q.jsonl", QUESTIONS), "a": aliases, "o": tmp_path / "o.jsonl"}
    paths |= {"e": write(tmp_path / "e.jsonl", [{"question": ""}]), "none": tmp_path / "none.jsonl"}
    assert run(*(item.format(**paths) for item in argv)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) == 1
