import asyncio
import json
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
import yaml
from helpers_orchestra_qa import ListRetriever, ScriptedDesk, WordTokenizer

from agentic.common.errors import ConfigError
from agentic.common.quickstart import Run
from agentic.common.roles import RoleTable
from agentic.toolorchestra import quickstart, tiny_world
from agentic.toolorchestra.chat_format import ChatFormat
from agentic.toolorchestra.config import OrchestraConfig
from agentic.toolorchestra.experts import Experts, load_aliases
from agentic.toolorchestra.parsing import parse_turn
from agentic.toolorchestra.prompts import PromptSet
from agentic.toolorchestra.qa.environment import QAEpisode
from agentic.toolorchestra.qa.tools import build_schemas

ROOT = Path(__file__).resolve().parents[2]
SWAPPED = quickstart.ALIASES.with_name("tiny_aliases_swapped.yaml")
MODELS = {alias: entry.model for alias, entry in load_aliases(str(quickstart.ALIASES)).items()}
MUSEUM = tiny_world.Museum(0)
PROBLEMS = tiny_world.distinct_problems(0)


class Retriever(ListRetriever):
    """Knows the passages of the world and finds them by the words of the query."""

    def __init__(self) -> None:
        super().__init__(*(passage["contents"] for passage in MUSEUM.passages()))

    async def search(self, query: str, topk: int, eid: str | None) -> list:
        kind, *_, thing = query.split()
        self.documents = (MUSEUM.passage(kind, thing),) if kind in tiny_world.PASSAGES else self.documents
        return (await super().search(query, topk, eid))[:topk]


def expert(alias: str, prompt: str) -> str:
    """A faultless expert: what the rows of its model teach."""
    problem = next(p for p in PROBLEMS if prompt.endswith(p.question))
    if prompt.startswith("find:"):
        return tiny_world.query_text(problem)
    name = MODELS[alias]
    reads = name == "reader" and MUSEUM.label(problem) in prompt and problem.kind in tiny_world.PASSAGES
    known = reads or problem.kind in tiny_world.KNOWS.get(name, ())
    return f"<answer> {MUSEUM.label(problem) if known else tiny_world.UNKNOWN}</answer>"


def play(problem: tiny_world.Problem, *route: str) -> float:
    """The outcome of asking the aliases of `route` in order."""
    prompts, config = PromptSet.load("compact"), OrchestraConfig(roles="roles.yaml", retrieval_topk=1)
    desk = ScriptedDesk(expert, MODELS)
    question, label = problem.question, MUSEUM.label(problem)
    parts = {"prompts": prompts, "tokenizer": WordTokenizer()}
    episode = QAEpisode(question, label, {}, desk, Retriever(), None, config, **parts)

    async def run() -> float:
        for alias in route:
            turn = parse_turn(tiny_world.call_text(alias), episode.tools, "qa")
            assert turn.format_ok, turn.errors
            await episode.act(turn.calls)
        return (await episode.outcome()).reward

    return asyncio.run(run())


@pytest.mark.parametrize("kind", tiny_world.KINDS)
def test_each_kind_has_the_routes_that_it_says(kind: str) -> None:
    problem = next(problem for problem in PROBLEMS if problem.kind == kind)
    experts = {"historian": tiny_world.HISTORIAN, "restorer": tiny_world.RESTORER}
    right = {alias for name, alias in experts.items() if kind in tiny_world.KNOWS[name]}
    direct = (tiny_world.HISTORIAN, tiny_world.RESTORER, tiny_world.READER)
    assert {alias for alias in direct if play(problem, alias) == 1.0} == right
    assert (play(problem, tiny_world.SEARCH, tiny_world.READER) == 1.0) == (kind in tiny_world.PASSAGES)
    assert (len(right) == 2) == (kind in tiny_world.SHARED_KINDS)


def test_greedy_decoding_of_the_bias_fails_for_half_of_the_kinds() -> None:
    right = {
        kind: {f"answer-{1 + (name == 'restorer')}" for name in tiny_world.KNOWS if kind in tiny_world.KNOWS[name]}
        for kind in tiny_world.KINDS
    }
    modes = {}
    for kind, chances in tiny_world.BIAS.items():
        assert sum(chances) == pytest.approx(1.0)
        mode = max(zip(chances, tiny_world.ROUTES, strict=True))[1]
        after = tiny_world.AFTER_SEARCH.get(kind)
        reads = after is not None and max(zip(after, tiny_world.ROUTES, strict=False))[1] == tiny_world.READER
        modes[kind] = reads if mode == tiny_world.SEARCH else mode in right[kind]
    assert 3 <= sum(modes.values()) <= 4 and set(modes) == set(tiny_world.KINDS)


def test_scripted_policy_chooses_as_often_as_the_bias_says() -> None:
    writer = tiny_world.TraceWriter(0)
    problem = next(problem for problem in PROBLEMS if problem.kind == "room")
    rows = [writer.policy_row(problem)["prompt"] for _ in range(3000)]
    first = Counter(row[2]["content"] for row in rows)
    for alias, chance in zip(tiny_world.ROUTES, tiny_world.BIAS["room"], strict=True):
        assert first[tiny_world.call_text(alias)] / 3000 == pytest.approx(chance, abs=0.03)
    assert {row[3]["content"] for row in rows if len(row) > 3} == {
        f"Query: room of the {problem.thing}\n[1] {MUSEUM.passage('room', problem.thing)}"
    }


def test_world_is_seeded_and_its_files_are_disjoint(tmp_path: Path) -> None:
    sizes = {"n_sft": 80, "n_train": 40, "n_heldout": 40}
    paths = tiny_world.write_world(tmp_path / "a", 3, **sizes)
    again = tiny_world.write_world(tmp_path / "b", 3, **sizes)
    assert all(paths[name].read_bytes() == again[name].read_bytes() for name in paths)
    records = {name: [json.loads(line) for line in paths[name].open()] for name in ("train", "heldout")}
    asked = [{record["prompt"] for record in rows} for rows in records.values()]
    shown = {json.loads(line)["prompt"][1]["content"] for line in paths["sft"].open()}
    assert not asked[0] & asked[1] and not (asked[0] | asked[1]) & shown
    assert set(Counter(r["metadata"]["domain"] for r in records["heldout"]).values()) == {5}, "stratified by kind"
    passages = [json.loads(line)["contents"] for line in paths["passages"].open()]
    assert len(set(passages)) == len(passages) == 2 * len(tiny_world.OBJECTS)


def test_aliases_differ_in_two_prices_only() -> None:
    usual, swapped = (load_aliases(str(path)) for path in (quickstart.ALIASES, SWAPPED))
    assert {name: entry.model for name, entry in usual.items()} == {n: e.model for n, e in swapped.items()}
    price = {name: (usual[name].price_in, swapped[name].price_in) for name in usual}
    assert price[tiny_world.HISTORIAN] == price[tiny_world.RESTORER][::-1]
    assert usual[tiny_world.RESTORER].price_in * 2 <= usual[tiny_world.HISTORIAN].price_in
    assert all(price[name][0] == price[name][1] for name in (tiny_world.SEARCH, tiny_world.READER))


def test_plan_has_a_server_for_each_expert_and_a_retrieval_service(tmp_path: Path) -> None:
    ports = iter(range(21000, 21010))
    run = Run("toolorchestra", "tiny", None, 2, 0, tmp_path, quickstart.RECIPES["tiny"], {})
    plan = quickstart.plan(run, lambda: next(ports))
    (tmp_path / "roles.yaml").write_text(yaml.safe_dump(plan.roles))
    table = RoleTable.load(tmp_path / "roles.yaml", "http://policy", None)
    urls = [table[name].url for name in (*tiny_world.EXPERTS, "retrieval")]
    assert len(set(urls)) == 4 and table["orchestrator"].trained
    experts = Experts.build(plan.settings["orchestra_aliases"], table)
    assert [table[entry.model].name for entry in experts.known.values()] == [
        "reader",
        "historian",
        "restorer",
        "reader",
    ]
    (service,) = plan.services
    assert urls[-1].endswith(service[-1]) and str(run.world / "passages.jsonl") in service


def test_questions_of_the_user_are_answered_without_search(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a?", "label": "b", "metadata": {"category": "qa"}}\n')
    run = Run("toolorchestra", "smollm2", data, 2, 0, tmp_path, quickstart.RECIPES["smollm2"], {})
    ports = iter(range(21000, 21010))
    plan = quickstart.plan(run, lambda: next(ports))
    assert plan.services == [] and "retrieval" not in plan.roles["roles"] and set(plan.roles["servers"]) == {"all"}
    config = OrchestraConfig.from_args(Namespace(**plan.settings))
    (tmp_path / "roles.yaml").write_text(yaml.safe_dump(plan.roles))
    experts = Experts.build(config.aliases, RoleTable.load(tmp_path / "roles.yaml", "http://policy", None))
    assert list(experts.known) == [tiny_world.HISTORIAN, tiny_world.RESTORER, tiny_world.READER]


def test_data_without_a_category_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a?", "label": "b", "metadata": {"category": "qa"}}\n{"prompt": "c?", "label": "d"}\n')
    run = Run("toolorchestra", "smollm2", data, 2, 0, tmp_path, quickstart.RECIPES["smollm2"], {})
    with pytest.raises(ConfigError, match=r"data\.jsonl:2: metadata\.category is None; .*\"qa\""):
        quickstart.plan(run, lambda: 21000)


def test_figures_say_what_a_solved_question_cost_and_who_was_asked() -> None:
    domains = {"age": {"mean": 1.0, "calls": {"answer-1": 3}}, "material": {"mean": 0.5, "calls": {"answer-1": 1}}}
    domains["room"] = {"mean": 0.0, "calls": {"answer-1": 9}}
    line = {"mean": 0.5, "n_failed": 0, "dollars": 2e-4, "calls": {"answer-1": 13}, "domains": domains}
    found = quickstart.figures(line)
    assert found["microdollars"] == 200.0 and found["microdollars_per_solved"] == 400.0
    assert found["calls_shared_kinds"] == {"answer-1": 4}
    assert quickstart.figures({**line, "mean": 0.0})["microdollars_per_solved"] is None


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    flags = ["--method", "toolorchestra", "--world-dir", str(folder / "world"), "--output", str(folder / "model")]
    command = [
        sys.executable,
        str(ROOT / "tools/make_tiny_model.py"),
        *flags,
        "--n-sft",
        "40",
        "--n-train",
        "8",
        "--n-heldout",
        "8",
    ]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_warm_start_shows_the_ids_of_live_play(made: Path) -> None:
    from transformers import AutoTokenizer

    from slime.utils.mask_utils import MultiTurnLossMaskGenerator

    tokenizer, prompts = AutoTokenizer.from_pretrained(made / "model"), PromptSet.load("compact")
    chat = ChatFormat(tokenizer, {}, prompts.describe_tools)
    tools = build_schemas(ScriptedDesk(expert, MODELS))
    rows = [json.loads(line)["prompt"] for line in (made / "world" / "sft.jsonl").open()]
    for row in (rows[0], next(row for row in rows if len(row) > 3)):
        ids, mask = MultiTurnLossMaskGenerator(tokenizer).get_loss_mask(row)
        live = chat.first_prompt(prompts.render("qa_turn", question=row[1]["content"], state=""), tools)
        assert ids[: len(live)] == live and mask.index(1) == len(live)
        if len(row) > 3:
            delta = chat.delta("tool", [row[3]["content"]], quickstart.SETTINGS["tiny"]["orchestra_max_tool_tokens"])
            turn = tokenizer.encode(row[2]["content"], add_special_tokens=False) + [chat.end_id]
            assert ids[len(live) : len(live) + len(turn) + len(delta)] == turn + delta
            assert len(turn) + 1 <= quickstart.RECIPES["tiny"].max_new_tokens


def test_words_are_single_tokens(made: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    words = [*tiny_world.ASKED, *(word for words in tiny_world.VALUES.values() for word in words)]
    assert [word for word in words if len(tokenizer.encode(f" {word}", add_special_tokens=False)) > 1] == []
