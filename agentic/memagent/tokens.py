"""Texts as token ids: plain encoding, documents that are encoded piece by piece, chunks as slices of ids.

Inputs: the policy's tokenizer and a text. Invariants:
* text is text: the name of a control token in a question or document is encoded as ordinary characters;
* the ids of a document equal those of one encode of the whole text, and every character is encoded once. Pieces end at
  a single blank between two other characters, where no pre-tokenizer of the byte-level family joins anything; whether
  that holds is tried on the tokenizer at hand, and where it does not the document is encoded in one go;
* nothing beyond what was asked for is encoded, so that the first chunk is there at once.
Leaves out: chat markup (`prompts`), what is done with a document that is too long (`open_chunks`' caller).
"""

from __future__ import annotations

import copy
import re
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# About 4,000 tokens of English: some 5 ms of encoding, and little memory in each thread that does it.
PIECE_CHARS = 1 << 14
_CUT = re.compile(r"(?<=\S) (?=\S)")
_PROBE = "It's 12 o'clock, (a) b-c; 3.5% of x_1! Größe 中文 42 é \"q\" don't </s> U.S. e-mail a@b.c – end."


class TextEncoder:
    """Text -> int32 ids: no BOS, and control tokens are not recognised. Safe to call from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = copy.deepcopy(getattr(tokenizer, "backend_tokenizer", None))
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = True
        self.separable = self._is_separable()

    def __call__(self, text: str) -> np.ndarray:
        if self._backend is not None:
            # Without offsets: three times faster than `encode`.
            ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return np.array(ids, dtype=np.int32)

    def _is_separable(self) -> bool:
        """Whether a text may be cut at `_CUT`."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        if any(not token.special and (token.lstrip or token.rstrip or " " in token.content) for token in added):
            return False
        whole = self(_PROBE)
        cuts = [match.start() for match in _CUT.finditer(_PROBE)]
        return all(np.array_equal(whole, np.concatenate([self(_PROBE[:cut]), self(_PROBE[cut:])])) for cut in cuts)


def control_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens that structure a chat or end a text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {int(token_id) for token_id, token in added.items() if token.special}
    ends = tokenizer.eos_token_id
    special |= set(ends if isinstance(ends, (list, tuple)) else [ends]) | set(tokenizer.all_special_ids)
    return frozenset(token_id for token_id in special if token_id is not None)


class Document:
    """A text whose ids (int32, D of them) are made on demand and kept."""

    def __init__(self, text: str, encoder: TextEncoder, piece_chars: int = PIECE_CHARS) -> None:
        self._text = text
        self._encoder = encoder
        self._piece_chars = piece_chars if encoder.separable else max(len(text), 1)
        self._pieces: list[np.ndarray] = []
        self._ends: list[int] = []
        """Number of ids up to the end of each piece."""
        self._chars = 0
        self._lock = threading.Lock()

    @property
    def encoded(self) -> int:
        """Number of ids made so far."""
        return self._ends[-1] if self._ends else 0

    def reaches(self, count: int) -> bool:
        """Whether there are at least `count` ids; encodes no further than needed to know."""
        with self._lock:
            while self.encoded < count and self._chars < len(self._text):
                self._encode_piece()
        return self.encoded >= count

    def count(self) -> int:
        """D; encodes the rest."""
        with self._lock:
            while self._chars < len(self._text):
                self._encode_piece()
        return self.encoded

    def take(self, start: int, stop: int) -> list[int]:
        """The ids from `start` up to `stop`, fewer where the document ends."""
        if start >= stop or not self.reaches(start + 1):
            return []
        self.reaches(stop)
        ids: list[int] = []
        for number in range(bisect_right(self._ends, start), len(self._ends)):
            offset = self._ends[number] - len(self._pieces[number])
            if offset >= stop:
                break
            ids += self._pieces[number][max(start - offset, 0) : stop - offset].tolist()
        return ids

    def _encode_piece(self) -> None:
        cut = _CUT.search(self._text, self._chars + self._piece_chars)
        end = len(self._text) if cut is None else cut.start()
        piece = self._encoder(self._text[self._chars : end])
        self._pieces.append(piece)
        self._ends.append(self.encoded + len(piece))
        self._chars = end


@dataclass(frozen=True)
class Chunks:
    """A document in slices of `size` ids; of one that is too long, `skip` ids behind the first `head` are left out."""

    document: Document
    size: int
    head: int = 0
    skip: int = 0

    def take(self, number: int) -> list[int]:
        """Chunk `number` (from 0); empty behind the last one."""
        start, stop = number * self.size, (number + 1) * self.size
        front = self.document.take(start, min(stop, self.head))
        return front + self.document.take(max(start, self.head) + self.skip, stop + self.skip)


def open_chunks(document: Document, size: int, limit: int) -> Chunks:
    """Chunks of a document, of which at most `limit` (0: all) are kept: its first and its last half."""
    if not limit or not document.reaches(limit * size + 1):
        return Chunks(document, size)
    kept = limit * size
    return Chunks(document, size, head=(kept + 1) // 2, skip=document.count() - kept)


def clean_ids(
    ids: Sequence[int], stop_ids: Sequence[int], control: frozenset[int], vocabulary: int
) -> tuple[list[int], int]:
    """(generated ids without the stop ids at their end, number of others left out).

    Left out are control tokens, which would break the next prompt's structure, and ids the tokenizer does not know.
    """
    end = len(ids)
    while end and (ids[end - 1] in control or ids[end - 1] in stop_ids):
        end -= 1
    kept = [token for token in ids[:end] if token < vocabulary and token not in control]
    return kept, end - len(kept)
