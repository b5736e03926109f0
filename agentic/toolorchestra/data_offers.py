"""What a training record offers: which tools, which model behind each alias, at what price; drawn anew for each record.

Inputs: the experts of the run (the file of `orchestra_aliases`), with prices in dollars per million tokens. Invariants: a
draw is a pure function of its generator, so a record depends on the seed and its own name only; an alias stands for a model
of its own kind (`search-1` for that of any `search-...`); prices leave here in dollars per token, and every model has one;
the tool without which a task cannot be solved keeps an alias. Leaves out: preferences, tasks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentic.common.errors import ConfigError
from agentic.common.roles import RoleTable, nearest
from agentic.toolorchestra.experts import MILLION, Alias, Experts, load_aliases
from agentic.toolorchestra.preferences import RESERVED

# The prefixes of the aliases of each category; the first is the tool that a task cannot do without.
PREFIXES = {"qa": ("answer-", "search-", "reasoner-"), "func_call": ("expert-",)}
FEES = ("search", "sandbox_second")


@dataclass(frozen=True)
class Price:
    """Dollars per token."""

    input: float
    output: float

    def scaled(self, factor: float) -> dict[str, float]:
        return {"input": rounded(self.input * factor), "output": rounded(self.output * factor)}


@dataclass(frozen=True)
class Catalogue:
    """Everything that records may offer."""

    aliases: Mapping[str, str]
    """Alias -> model, as the file has them."""
    prices: Mapping[str, Price]
    """By model."""
    fees: Mapping[str, float]
    """Dollars per use."""

    def models_like(self, alias: str) -> list[str]:
        """Models that an alias of this kind may stand for, each once, in the order of the file."""
        kind = kind_of(alias)
        return list(dict.fromkeys(model for name, model in self.aliases.items() if kind_of(name) == kind))


@dataclass(frozen=True)
class Draw:
    """How much is left to chance."""

    availability: float = 0.75
    """Probability that an alias is offered."""
    price_spread: float = 2.0
    """Prices are multiplied by a factor that is log-uniform in [1 / price_spread, price_spread]."""
    keep_mapping: bool = False
    """Every alias stands for its own model."""


@dataclass(frozen=True)
class Offer:
    """The part of a record's metadata that differs from record to record."""

    model_mapping: dict[str, str]
    tool_pricing: dict[str, Any]

    @property
    def aliases(self) -> list[str]:
        return list(self.model_mapping)


def kind_of(alias: str) -> str:
    """`answer` for `answer-1` and `answer-math-2`."""
    return alias.partition("-")[0]


def rounded(value: float, digits: int = 4) -> float:
    """To so many significant digits: prices stay readable."""
    return float(f"{value:.{digits}g}")


def load_catalogue(path: Path, roles: Path | None = None, fees: Sequence[tuple[str, float]] = ()) -> Catalogue:
    """The experts of a run as material for draws; an alias without prices has those of its role in the role file.

    Raises FileNotFoundError, or ConfigError for an alias of no known kind, a model that no role serves, or one without a
    price or with two.
    """
    table = None if roles is None else RoleTable.load(roles, "http://policy", None)
    known = load_aliases(str(path))
    if not known:
        raise ConfigError(f"{path}: holds no alias")
    prefixes = tuple(prefix for group in PREFIXES.values() for prefix in group)
    prices: dict[str, Price] = {}
    for alias, entry in known.items():
        if not alias.startswith(prefixes) or alias in RESERVED:
            raise ConfigError(f"{path}: {alias}: an alias begins with one of {', '.join(prefixes)}")
        price = _price(entry, table, f"{path}: {alias}")
        if prices.setdefault(entry.model, price) != price:
            raise ConfigError(
                f"{path}: {alias}: model '{entry.model}' has another price at an earlier alias; give it one"
            )
    return Catalogue({alias: entry.model for alias, entry in known.items()}, prices, dict(fees))


def _price(entry: Alias, table: RoleTable | None, where: str) -> Price:
    price_in, price_out = entry.price_in, entry.price_out
    if table is not None:
        experts = Experts({}, table, {})
        role = experts.find_role(entry.model)
        if role is None:
            raise ConfigError(f"{where}: {experts.no_role(entry.model)}")
        price_in = role.price_in if price_in is None else price_in
        price_out = role.price_out if price_out is None else price_out
    if price_in is None or price_out is None:
        raise ConfigError(
            f"{where}: give price_in and price_out (dollars for a million tokens), or the role file: --roles"
        )
    return Price(price_in / MILLION, price_out / MILLION)


def parse_fee(text: str) -> tuple[str, float]:
    """`search=0.07`. Raises ValueError with the remedy."""
    name, _, value = text.partition("=")
    if name not in FEES:
        raise ValueError(f"unknown fee '{name}'{nearest(name, FEES)}; write {' or '.join(FEES)} = dollars")
    dollars = float(value)
    if not math.isfinite(dollars) or dollars < 0:
        raise ValueError(f"fee {text}: dollars must not be negative")
    return name, dollars


def draw_offer(catalogue: Catalogue, category: str, rng: random.Random, draw: Draw) -> Offer:
    """Aliases that are offered, a model for each, and prices: one factor for each model, and for each fee.

    Raises ConfigError when there is no alias of the tool that the category needs.
    """
    offered = _draw_aliases(catalogue, category, rng, draw.availability)
    chosen = {alias: rng.choice(catalogue.models_like(alias)) for alias in offered}
    mapping = {alias: catalogue.aliases[alias] if draw.keep_mapping else model for alias, model in chosen.items()}
    pricing: dict[str, Any] = {}
    for model in sorted(set(mapping.values())):
        pricing[model] = catalogue.prices[model].scaled(_factor(rng, draw.price_spread))
    if category == "qa":
        for name, dollars in sorted(catalogue.fees.items()):
            pricing[name] = rounded(dollars * _factor(rng, draw.price_spread))
    return Offer(mapping, pricing)


def _draw_aliases(catalogue: Catalogue, category: str, rng: random.Random, availability: float) -> list[str]:
    known = [alias for alias in catalogue.aliases if alias.startswith(PREFIXES[category])]
    needed = [alias for alias in known if alias.startswith(PREFIXES[category][0])]
    if not needed:
        raise ConfigError(f"there is no alias '{PREFIXES[category][0]}...', which the category {category} needs")
    kept = {alias for alias in known if rng.random() < availability}
    if not kept & set(needed):
        kept.add(rng.choice(needed))
    return [alias for alias in known if alias in kept]


def _factor(rng: random.Random, spread: float) -> float:
    return math.exp(rng.uniform(-1, 1) * math.log(spread))
