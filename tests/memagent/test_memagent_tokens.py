"""Plain encoding, lazy documents, chunks and memories as ids: facts 1, 6 and 25, and the cost of a long document."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_memagent import END, START, TOKENIZER, SmallTokenizer, make_backend
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from agentic.memagent.tokens import Chunks, Document, TextEncoder, clean_ids, control_ids, open_chunks

ENCODER = TextEncoder(TOKENIZER)
END_ID = TOKENIZER.eos_token_id
PIECES = [
    "the",
    "word",
    " ",
    "  ",
    "\n",
    "\n\n",
    ". ",
    ", ",
    "é",
    "中文",
    "42",
    " 7",
    "'s",
    "don't",
    START,
    "\t",
    "…",
    " a",
]


class CountingEncoder:
    """Counts characters, and stands for the ids by numbering them."""

    separable = True

    def __init__(self, separable: bool = True) -> None:
        self.chars, self.separable = 0, separable

    def __call__(self, text: str) -> np.ndarray:
        start, self.chars = self.chars, self.chars + len(text)
        return np.arange(start, self.chars, dtype=np.int32)


class Numbers:
    """A document of `size` ids 0, 1, 2, ..."""

    def __init__(self, size: int) -> None:
        self.size = size

    def take(self, start: int, stop: int) -> list[int]:
        return list(range(min(start, self.size), min(max(stop, start), self.size)))

    def reaches(self, count: int) -> bool:
        return count <= self.size

    def count(self) -> int:
        return self.size


def all_chunks(chunks: Chunks) -> list[list[int]]:
    taken = []
    while part := chunks.take(len(taken)):
        taken.append(part)
    return taken


def test_control_token_names_are_plain_text():
    ids = ENCODER(f"a {END} b").tolist()
    assert END_ID not in ids and TOKENIZER.decode(ids) == f"a {END} b"
    assert END_ID in TOKENIZER.encode(f"a {END} b"), "the tokenizer that renders chats still knows its tokens"
    assert control_ids(TOKENIZER) == {END_ID, TOKENIZER.backend_tokenizer.token_to_id(START)}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=60), st.integers(1, 12))
def test_pieces_give_the_ids_of_one_encode(parts, piece_chars):
    text = "".join(parts).encode(errors="ignore").decode()
    document = Document(text, ENCODER, piece_chars)
    whole = ENCODER(text).tolist()
    assert document.count() == len(whole) and document.take(0, len(whole)) == whole


@pytest.mark.parametrize(
    ("tokens", "chunks"), [(4999, 1), (5000, 1), (5001, 2), (28_123, 6), (112_200, 23), (903_100, 181)]
)
def test_number_of_chunks(tokens, chunks):
    taken = all_chunks(open_chunks(Numbers(tokens), 5000, 0))
    assert len(taken) == chunks and all(len(part) == 5000 for part in taken[:-1])
    assert [i for part in taken for i in part] == list(range(tokens))


def test_first_chunk_does_not_wait_for_the_text():
    encoder = CountingEncoder()
    document = Document("word " * 200_000, encoder, piece_chars=1000)
    assert document.take(0, 500) == list(range(500))
    assert encoder.chars <= 1010
    document.take(0, 500)
    assert encoder.chars <= 1010, "what is encoded is kept"
    assert document.count() == encoder.chars == 1_000_000, "every character once"


def test_ids_take_four_bytes():
    document = Document("word " * 50_000, CountingEncoder(), piece_chars=10_000)
    count = document.count()
    assert sum(piece.nbytes for piece in document._pieces) == 4 * count


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 40))
def test_slices(start, stop, piece_chars):
    document = Document("word " * 50, CountingEncoder(), piece_chars)
    assert document.take(start, stop) == list(range(250))[start:stop]


def test_text_without_a_place_to_cut_is_one_piece():
    assert Document("x" * 1000, CountingEncoder(), piece_chars=10).take(0, 3) == [0, 1, 2]
    encoder = CountingEncoder(separable=False)
    Document("word " * 100, encoder, piece_chars=10).take(0, 1)
    assert encoder.chars == 500


def test_added_token_with_blanks_forbids_cutting():
    backend = make_backend(300)
    backend.add_tokens([AddedToken("New York", normalized=False)])
    assert not TextEncoder(SmallTokenizer(backend)).separable
    assert ENCODER.separable


def test_centre_truncation():
    chunks = open_chunks(Numbers(50_000), 5000, 8)
    taken = all_chunks(chunks)
    assert len(taken) == 8 and chunks.skip == 10_000
    assert [i for part in taken for i in part] == [*range(20_000), *range(30_000, 50_000)]


@given(st.integers(0, 200), st.integers(1, 13), st.integers(0, 9))
def test_truncation_keeps_both_ends(tokens, size, limit):
    chunks = open_chunks(Numbers(tokens), size, limit)
    ids = [i for part in all_chunks(chunks) for i in part]
    kept = min(tokens, limit * size) if limit else tokens
    half = (kept + 1) // 2
    assert len(ids) == kept == tokens - chunks.skip
    assert ids == ([*range(half), *range(tokens - (kept - half), tokens)] if kept < tokens else list(range(tokens)))


@pytest.mark.parametrize(
    ("ids", "stop", "expected"),
    [
        ([5, 6, END_ID], [], ([5, 6], 0)),
        ([5, 6], [], ([5, 6], 0)),
        ([END_ID], [], ([], 0)),
        ([5, END_ID, 6, END_ID, END_ID], [], ([5, 6], 1)),
        ([5, 9999, 6, END_ID], [], ([5, 6], 1)),
        ([5, 6, 7], [7], ([5, 6], 0)),
        ([7, 6, 7], [7], ([7, 6], 0)),
    ],
)
def test_clean_ids(ids, stop, expected):
    assert clean_ids(ids, stop, control_ids(TOKENIZER), len(TOKENIZER)) == expected
