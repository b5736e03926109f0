import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from agentic.memagent import tiny_world
from agentic.memagent.data_items import load_items
from agentic.memagent.prompts import PromptSet
from agentic.memagent.scoring import is_held, reward_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("chunks", [4, 32])
@pytest.mark.parametrize("wanted", [1, 2])
def test_every_fact_asked_for_stands_once_and_in_a_chunk_of_its_own(chunks: int, wanted: int) -> None:
    for number in range(40):
        problem = tiny_world.make_problem(f"t/{number}", chunks, wanted=wanted)
        assert [len(chunk) for chunk in problem.chunks] == [tiny_world.FACTS_PER_CHUNK] * chunks
        asked = [(i, fact) for i, chunk in enumerate(problem.chunks) for fact in chunk if fact.name in problem.names]
        assert sorted(map(str, problem.wanted)) == sorted(str(fact) for _, fact in asked)
        assert len({i for i, _ in asked}) == wanted
        assert problem.label == " ".join(fact.number for fact in problem.wanted)


def test_questions_are_the_same_at_every_length_and_documents_are_not() -> None:
    short, long = (tiny_world.make_problem("t/0", chunks) for chunks in (4, 8))
    assert short.question == long.question and short.label == long.label
    assert short.chunks != long.chunks[:4]


def test_a_share_of_the_questions_needs_two_facts_and_places_are_spread() -> None:
    problems = [tiny_world.make_problem(f"t/{i}", 4) for i in range(600)]
    two = sum(len(problem.wanted) == 2 for problem in problems) / 600
    assert two == pytest.approx(tiny_world.TWO_FACTS, abs=0.07)
    places = Counter(i for p in problems for i, chunk in enumerate(p.chunks) if set(chunk) & set(p.wanted))
    assert all(places[i] > 0.7 * sum(places.values()) / 4 for i in range(4)), "no place of the evidence is a hint"


def test_world_is_seeded_and_its_files_are_disjoint(tmp_path: Path) -> None:
    sizes = {"n_sft": 150, "n_train": 12, "n_heldout": 6}
    paths = tiny_world.write_world(tmp_path / "a", 3, **sizes)
    again = tiny_world.write_world(tmp_path / "b", 3, **sizes)
    assert all(paths[name].read_bytes() == again[name].read_bytes() for name in paths)
    documents: Counter[str] = Counter()
    for name in ("train", "validation", *tiny_world.HELDOUT_CHUNKS):
        items, problems = load_items(paths[name])
        assert not problems, "the method's own reader takes the file"
        documents.update(item.context.text for item in items)
        chunks = tiny_world.HELDOUT_CHUNKS.get(name, tiny_world.TRAIN_CHUNKS)
        words = chunks * tiny_world.FACTS_PER_CHUNK * tiny_world.TOKENS_PER_FACT
        assert {len(item.context.text.split()) for item in items} == {words}
    assert max(documents.values()) == 1
    shown = paths["sft"].read_text()
    assert len(shown.splitlines()) == 150
    assert not any(document[:200] in shown for document in documents)


def test_a_faultless_reading_is_right_and_fits_the_budgets() -> None:
    writer = tiny_world.ReadingWriter(PromptSet.load("compact"), 0)
    for number in range(20):
        problem = tiny_world.make_problem(f"t/{number}", 4)
        *memories, answer = (row["prompt"][-1]["content"] for row in writer.rows(problem, faultless=True))
        assert is_held(memories[-1], [problem.label])
        assert len(memories[-1].split()) == tiny_world.TOKENS_PER_FACT * len(problem.wanted)
        assert reward_of("em", answer, [problem.label], 300) == 1.0


def test_a_memory_is_the_last_reply_and_what_it_holds_is_kept() -> None:
    writer = tiny_world.ReadingWriter(PromptSet.load("compact"), 0)
    for number in range(40):
        rows = list(writer.rows(tiny_world.make_problem(f"t/{number}", 6)))
        known: set[str] = set()
        for before, after in zip(rows, rows[1:], strict=False):
            reply = before["prompt"][-1]["content"]
            assert f"\nm\n{reply}\n" in after["prompt"][0]["content"]
            numbers = set(reply.split()[2::4]) - {tiny_world.UNKNOWN}
            assert numbers >= known and len(reply.split()) % tiny_world.TOKENS_PER_FACT == 0
            known = numbers


def test_reader_overlooks_as_often_as_the_table_says() -> None:
    writer = tiny_world.ReadingWriter(PromptSet.load("compact"), 0)
    seen: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for number in range(2500):
        problem = tiny_world.make_problem(f"t/{number}", 1, facts_per_chunk=6, wanted=1)
        memory = next(writer.rows(problem))["prompt"][-1]["content"]
        asked[problem.wanted[0].wording] += 1
        seen[problem.wanted[0].wording] += not is_held(memory, [problem.label])
    for wording, chance in tiny_world.OVERLOOKED.items():
        assert seen[wording] / asked[wording] == pytest.approx(chance, abs=0.05)


def test_warm_start_grows_to_live_play() -> None:
    rows = list(tiny_world.warm_start_rows(0, 2000))
    assert len(rows) == 2000
    texts = [row["prompt"][0]["content"] for row in rows]
    chunks = [text.split("\nc\n")[1].count(" .") for text in texts if text.endswith("\nu")]
    asked = [text.split("\n")[1].count(" and ") + 1 for text in texts]
    assert chunks[0] == tiny_world.SMALLEST_CHUNK and set(chunks[-400:]) == {tiny_world.FACTS_PER_CHUNK}
    assert set(asked[:100]) == {tiny_world.MANY}
    assert sum(count <= 2 for count in asked[-600:]) / 600 == pytest.approx(1 - tiny_world.MANY_AT_END, abs=0.12)


def test_tiny_model_keeps_facts_whole_and_reads_as_the_warm_start_showed(tmp_path: Path) -> None:
    flags = ["--method", "memagent", "--world-dir", str(tmp_path / "world"), "--output", str(tmp_path / "model")]
    flags += ["--n-sft", "60", "--n-train", "2", "--n-heldout", "2"]
    command = [sys.executable, str(ROOT / "tools/make_tiny_model.py"), *flags]
    subprocess.run(command, check=True, capture_output=True)
    from transformers import AutoTokenizer

    from agentic.memagent.tokens import TextEncoder
    from slime.utils.mask_utils import MultiTurnLossMaskGenerator

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    encode, prompts = TextEncoder(tokenizer), PromptSet.load("compact")
    problem = tiny_world.make_problem("t/1", 2)
    chunk = tiny_world.text_of(problem.chunks[0])
    size = tiny_world.FACTS_PER_CHUNK * tiny_world.TOKENS_PER_FACT
    document = encode("".join(map(tiny_world.text_of, problem.chunks))).tolist()
    assert len(document) == 2 * size and document[:size] == encode(chunk).tolist()
    rows = list(tiny_world.ReadingWriter(prompts, 0).rows(problem))
    ids, mask = MultiTurnLossMaskGenerator(tokenizer).get_loss_mask(rows[1]["prompt"])
    memory = encode(rows[0]["prompt"][-1]["content"]).tolist()
    slots = {"question": encode(problem.question).tolist(), "memory": memory, "chunk": document[size:]}
    prompt = prompts.compile("memory", tokenizer).render(**slots)
    assert ids[: len(prompt)] == prompt and mask.index(1) == len(prompt)
    ids, _ = MultiTurnLossMaskGenerator(tokenizer).get_loss_mask(rows[-1]["prompt"])
    memory = encode(rows[-2]["prompt"][-1]["content"]).tolist()
    prompt = prompts.compile("answer", tokenizer).render(question=slots["question"], memory=memory)
    assert ids[: len(prompt)] == prompt, "the answer begins with the prefilled box"


def test_streams_do_not_share_random_numbers() -> None:
    facts = {str(tiny_world.make_problem(f"t/{i}", 1).chunks[0]) for i in range(50)}
    assert len(facts) == 50 and random.Random("t/0").random() != random.Random("t/1").random()


def test_records_say_where_the_evidence_lies(tmp_path: Path) -> None:
    path = tiny_world.write_world(tmp_path, 0, n_sft=1, n_train=8, n_heldout=1)["train"]
    for record in map(json.loads, path.open()):
        words = record["metadata"]["context"].split()
        for place, number in zip(record["metadata"]["evidence"], sorted_numbers(record, words), strict=True):
            chunk = int(place * record["metadata"]["chunks"])
            assert words.index(number) // (tiny_world.FACTS_PER_CHUNK * 4) <= chunk


def sorted_numbers(record: dict, words: list[str]) -> list[str]:
    names = record["prompt"].partition(" of ")[2].split(" and ")
    return [words[words.index(name) + 2] for name in sorted(names, key=words.index)]
