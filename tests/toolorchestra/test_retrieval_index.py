"""The index: corpora, building and resuming, and neighbours identical to brute force."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from helpers_retrieval import PASSAGES, WORDS, WordEmbedder, make_index, write_corpus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentic.common.errors import ConfigError
from agentic.toolorchestra.retrieval import build
from agentic.toolorchestra.retrieval.build import build_index
from agentic.toolorchestra.retrieval.corpus import read_corpus
from agentic.toolorchestra.retrieval.index import VectorIndex, unit


class Given:
    """An embedder whose passages have the given vectors, in order."""

    name, query_prompt = "given", ""

    def __init__(self, vectors: np.ndarray) -> None:
        self.vectors, self.dimension = vectors, vectors.shape[1]

    def encode(self, texts: Any) -> np.ndarray:
        return unit(self.vectors[[int(text.split()[1]) for text in texts]].reshape(len(texts), self.dimension))


def index_of(folder: Path, vectors: np.ndarray, ids: list[str] | None = None) -> VectorIndex:
    names = ids or [f"p{n}" for n in range(len(vectors))]
    passages = [{"id": name, "content": f"passage {n}"} for n, name in enumerate(names)]
    return make_index(folder, passages, embedder=Given(vectors))


def brute_force(index: VectorIndex, ids: list[str], query: np.ndarray, topk: int, rows: Any) -> list[tuple]:
    cosines = np.round(index.vectors.astype(np.float64) @ query.astype(np.float64), 6)
    return sorted((-cosines[row], ids[row], int(row)) for row in rows)[:topk]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32 - 1), count=st.integers(1, 300), distinct=st.integers(1, 300), topk=st.integers(1, 40)
)
def test_neighbours_are_those_of_brute_force(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, distinct: int, topk: int
) -> None:
    """Also with many equal passages, for batches below and above the limit of the matrix product, and limited views."""
    rng = np.random.default_rng(seed)
    base = rng.standard_normal((min(distinct, count), 24)).astype(np.float32)
    ids = [f"d{n}" for n in rng.permutation(count)]
    index = index_of(tmp_path_factory.mktemp("index"), base[rng.integers(0, len(base), count)], ids)
    queries = unit(np.concatenate([base[:3], rng.standard_normal((5, 24), dtype=np.float32)]))
    views = [
        None if n % 2 else rng.choice(count, rng.integers(0, count + 1), replace=False) for n in range(len(queries))
    ]
    for take in (2, len(queries)):
        for limited in (None, views[:take]):
            found = index.search(queries[:take], [topk] * take, limited)
            for number, hits in enumerate(found):
                rows = range(count) if limited is None or limited[number] is None else limited[number]
                wanted = brute_force(index, ids, queries[number], topk, rows)
                assert hits.rows.tolist() == [row for _, _, row in wanted]
                assert hits.scores.tolist() == pytest.approx([-score for score, _, _ in wanted], abs=1.1e-6)


def test_an_answer_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    index = index_of(tmp_path, rng.standard_normal((2000, 48)).astype(np.float32))
    queries = unit(rng.standard_normal((64, 48)))
    together = index.search(queries, list(range(1, 65)))
    for number, hits in enumerate(together):
        alone = index.search(queries[number : number + 1], [number + 1])[0]
        assert alone.rows.tolist() == hits.rows.tolist() and alone.scores.tolist() == hits.scores.tolist()


def test_the_scan_decides_when_candidates_are_too_close(tmp_path: Path) -> None:
    """A hundred equal passages: FAISS's candidates cannot be told from the others, ids decide."""
    index = index_of(tmp_path, np.ones((100, 4), np.float32), [f"{99 - n:02}" for n in range(100)])
    hits = index.search(unit(np.ones((1, 4))), [3])[0]
    assert hits.rows.tolist() == [99, 98, 97] and hits.scores.tolist() == [1.0] * 3


def test_documents_are_kept_as_they_are(tmp_path: Path) -> None:
    index = make_index(tmp_path)
    assert [json.loads(index.documents.raw(row)) for row in range(4)] == PASSAGES
    assert [index.documents.text(row)[:6] for row in (0, 1)] == ["Paris ", "Berlin"]
    assert index.documents.row_of_id() == {"paris": 0, "berlin": 1, "7": 2, "rome": 3}
    assert not index.vectors.flags.writeable


def test_missing_ids_are_numbered_and_short_passages_left_out(tmp_path: Path) -> None:
    passages = [{"content": "a b c d"}, {"content": "x"}, {"content": "   "}, {"contents": "e f g h"}]
    index = make_index(tmp_path, passages, min_text_chars=3)
    assert index.documents.row_of_id() == {"0": 0, "3": 1}
    assert (index.metadata.documents, index.metadata.left_out) == (2, 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{nonsense", r":2: not JSON"),
        ("[1]", r":2: expected an object"),
        ('{"id": "b", "text": "y"}', r":2: no text under `content` or `contents` \(fields: id, text\)"),
        ('{"id": "a", "content": "y"}', r":2: id 'a' is that of line 1"),
        ('{"id": 1.5, "content": "y"}', r":2: id 1.5 must be"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"id": "a", "content": "x"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        list(read_corpus(corpus))


def test_an_empty_corpus_makes_an_empty_index(tmp_path: Path) -> None:
    index = make_index(tmp_path, [])
    assert [hits.rows.tolist() for hits in index.search(unit(np.ones((2, 16))), [3, 3])] == [[], []]


# --------------------------------------------------------------------------------------------------------------------
# Building.


class Breaks(WordEmbedder):
    """Stops in its third call."""

    def encode(self, texts: Any) -> np.ndarray:
        if len(self.calls) == 2:
            raise KeyboardInterrupt
        return super().encode(texts)


def test_a_stopped_build_goes_on_and_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SHARD", 10)
    corpus = write_corpus(tmp_path / "c.jsonl", [{"content": f"word{n % 7} word{n}"} for n in range(45)])
    with pytest.raises(KeyboardInterrupt):
        build_index(corpus, tmp_path / "stopped", WORDS, embedder=Breaks())
    assert not (tmp_path / "stopped").exists()
    second = WordEmbedder()
    build_index(corpus, tmp_path / "stopped", WORDS, embedder=second)
    assert [len(call) for call in second.calls] == [10, 10, 5]
    build_index(corpus, tmp_path / "whole", WORDS, embedder=WordEmbedder())
    for name in ("vectors.faiss", "documents.jsonl", "metadata.json", "offsets.npy", "id_rank.npy"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.jsonl", "stopped", "whole"]


def test_what_another_corpus_left_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SHARD", 10)
    corpus = write_corpus(tmp_path / "c.jsonl", [{"content": f"word{n}"} for n in range(45)])
    with pytest.raises(KeyboardInterrupt):
        build_index(corpus, tmp_path / "index", WORDS, embedder=Breaks())
    write_corpus(corpus, [{"content": f"other{n}"} for n in range(45)])
    second = WordEmbedder()
    build_index(corpus, tmp_path / "index", WORDS, embedder=second)
    assert sum(map(len, second.calls)) == 45


def test_an_index_is_used_again_or_refused_but_never_replaced(tmp_path: Path) -> None:
    make_index(tmp_path)
    again = WordEmbedder()
    assert build_index(tmp_path / "corpus.jsonl", tmp_path / "index", WORDS, embedder=again).documents == 4
    assert again.calls == []
    write_corpus(tmp_path / "corpus.jsonl", PASSAGES[:2])
    with pytest.raises(ConfigError, match="holds an index with corpus_sha256"):
        build_index(tmp_path / "corpus.jsonl", tmp_path / "index", WORDS, embedder=again)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match="holds no index"):
        build_index(tmp_path / "corpus.jsonl", tmp_path / "notes", WORDS, embedder=again)


def test_two_builds_at_once_are_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    with build._partial_folder(tmp_path / "index"), pytest.raises(ConfigError, match="another process"):
        build_index(corpus, tmp_path / "index", WORDS, embedder=WordEmbedder())


def test_vectors_of_a_published_index_are_taken(tmp_path: Path) -> None:
    own = make_index(tmp_path)
    published = faiss.IndexFlatL2(16)
    published.add(np.ascontiguousarray(own.vectors) * 3)
    faiss.write_index(published, str(tmp_path / "train.index"))
    arguments = (tmp_path / "corpus.jsonl", tmp_path / "taken", WORDS, 30, tmp_path / "train.index")
    build_index(*arguments, embedder=WordEmbedder())
    taken = VectorIndex(tmp_path / "taken")
    assert taken.documents.row_of_id() == {"paris": 0, "berlin": 1}
    assert np.allclose(taken.vectors, own.vectors[:2], atol=1e-6)
    write_corpus(tmp_path / "corpus.jsonl", PASSAGES[:3])
    with pytest.raises(ConfigError, match="4 vectors of dimension 16, but the corpus has 3 passages"):
        build_index(tmp_path / "corpus.jsonl", tmp_path / "other", *arguments[2:], embedder=WordEmbedder())


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no index there"):
        VectorIndex(tmp_path)
    index = make_index(tmp_path)
    (index.folder / "vectors.faiss").write_bytes(b"IxFI123")
    with pytest.raises(ConfigError, match="FAISS cannot read it"):
        VectorIndex(index.folder)
    (index.folder / "metadata.json").write_text('{"format": 99}')
    with pytest.raises(ConfigError, match="not of format 1"):
        VectorIndex(index.folder)


def test_broken_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        unit(np.array([[1.0, np.nan]]))
    assert unit(np.array([[0.0, 0.0], [3.0, 4.0]])).tolist() == [[0.0, 0.0], pytest.approx([0.6, 0.8])]
