"""Raw material of the RULER tasks: keys, values, coded words, needles and the text they are hidden in.

Inputs: a random generator, for essays the documents of a pool. Invariants: pure functions of the generator; keys, values
and words are distinct within one call. Leaves out: the tasks (`ruler`).
"""

from __future__ import annotations

import random
import re
import string
import uuid
from collections.abc import Sequence

from agentic.memagent.data_documents import DocumentPool, title_of

_FIRST = (
    "amber ancient bold brisk calm clever coastal copper crimson curious dusty eager early fabled faint gentle gilded "
    "hidden hollow humble icy ivory jolly keen late lively lonely marble mellow misty modern narrow noble northern "
    "patient pale proud quiet rapid rustic silent silver sturdy sunny velvet vivid western wild"
).split()
_LAST = (
    "anchor badge barrel beacon bridge candle canyon castle cellar chapel compass cottage engine falcon ferry forest "
    "fountain garden glacier harbor hammer island kettle ladder lantern library magnet meadow mirror needle orchard "
    "otter parcel pebble piano quarry ribbon river saddle shuttle spire stable summit teapot temple thimble tunnel "
    "valley violin willow"
).split()
NOISE = (
    "Rain fell on the roof all night.",
    "The path goes up the hill and down again.",
    "A bird sat on the fence.",
    "The kettle is on the stove.",
    "Somebody left the window open.",
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def make_keys(rng: random.Random, count: int) -> list[str]:
    """Distinct names such as `calm-silver-harbor`; more than 100 000 are possible."""
    keys: dict[str, None] = {}
    while len(keys) < count:
        keys["-".join([*rng.sample(_FIRST, 2), rng.choice(_LAST)])] = None
    return list(keys)


def make_numbers(rng: random.Random, count: int) -> list[str]:
    """Distinct numbers of seven digits."""
    return [str(number) for number in rng.sample(range(1_000_000, 10_000_000), count)]


def make_uuids(rng: random.Random, count: int) -> list[str]:
    """Random UUIDs of version 4."""
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(count)]


def make_words(rng: random.Random, count: int, letters: int, alphabet: str = string.ascii_lowercase) -> list[str]:
    """Distinct meaningless words."""
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choices(alphabet, k=letters))] = None
    return list(words)


def needle(kind: str, key: str, value: str) -> str:
    """The sentence that has to be found; `kind` is `number` or `uuid`."""
    return f"The secret {kind} of {key} is {value}."


def noise_sentences(count: int) -> list[str]:
    """The same few sentences again and again."""
    return [NOISE[place % len(NOISE)] for place in range(count)]


def essay_sentences(pool: DocumentPool, rng: random.Random, count: int) -> list[str]:
    """Sentences of random documents in their order; documents come again only when all have been used."""
    sentences: list[str] = []
    while len(sentences) < count:
        before = len(sentences)
        for place in rng.sample(range(len(pool)), len(pool)):
            body = pool[place][len(title_of(pool[place])) + 1 :]
            sentences += [sentence for sentence in _SENTENCE_END.split(body) if sentence]
            if len(sentences) >= count:
                break
        if len(sentences) == before:
            raise ValueError("the documents of the pool hold no sentences")
    return sentences[:count]


def scatter(haystack: Sequence[str], needles: Sequence[str], rng: random.Random) -> tuple[list[str], list[float]]:
    """Put the needles between the sentences at random places, in the order given, each place used once at most.

    Returns the sentences and the depth of each needle, 0 (start) to 1 (end).
    """
    total = len(haystack) + len(needles)
    places = sorted(rng.sample(range(total), len(needles)))
    waiting, straw = iter(needles), iter(haystack)
    chosen = set(places)
    sentences = [next(waiting) if place in chosen else next(straw) for place in range(total)]
    return sentences, [place / max(total - 1, 1) for place in places]
