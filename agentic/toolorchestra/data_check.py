"""Validator of training records: one reason and one line for each broken one.

Inputs: a training file (jsonl). Invariants: a record that passes can be used by `rollout.generate` as far as the file can
tell: its task exists, every alias has a model, every model a price per token, weights are in range; mapping, prices and
tools may be absent, then the run's settings decide. Leaves out: whether a model has an endpoint (role file).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from agentic.common.data_files import Problem, Row, RowError, one_line, scan_rows
from agentic.common.errors import BadRecord, ConfigError
from agentic.toolorchestra.data_offers import FEES, PREFIXES
from agentic.toolorchestra.preferences import check_vector

# 1000 dollars per million tokens: above it the price was meant per million.
HIGHEST_PRICE = 1e-3
CATEGORIES = tuple(PREFIXES)


class Checked(NamedTuple):
    """What `inspect` counts of a good record."""

    category: str
    domain: str
    aliases: tuple[str, ...]
    models: tuple[str, ...]
    weights: dict[str, float]


def check_file(path: Path) -> Iterator[Checked | Problem]:
    """All records in order. Raises FileNotFoundError, or ConfigError for an unknown type of file."""
    seen: dict[str, str] = {}
    for row in scan_rows(path):
        try:
            yield row if isinstance(row, Problem) else check_record(row, seen)
        except RowError as error:
            yield Problem(row.where, error.reason, error.detail)


def check_record(row: Row, seen: dict[str, str]) -> Checked:
    """Check one record; `seen` remembers names of earlier ones. Raises RowError with reason, value and remedy."""
    prompt, metadata = row.record.get("prompt"), row.record.get("metadata")
    if not prompt or not isinstance(prompt, (str, list)) or isinstance(prompt, str) and not prompt.strip():
        raise RowError("no_prompt", f"prompt is {one_line(repr(prompt))}; expected a text or chat messages")
    if not isinstance(metadata, Mapping):
        raise RowError(
            "no_metadata", f"metadata is {one_line(repr(metadata))}; make records with the commands of this tool"
        )
    category = metadata.get("category")
    if category not in CATEGORIES:
        raise RowError("bad_category", f"metadata.category is {category!r}; choose from {', '.join(CATEGORIES)}")
    _check_task(category, row.record, metadata)
    _check_unique(row.where, metadata, seen)
    mapping = _check_mapping(category, metadata)
    _check_pricing(metadata, mapping)
    try:
        weights = check_vector(metadata.get("pref_vec"), "metadata", mapping or None)
    except ConfigError as error:
        raise RowError("bad_preference", str(error)) from error
    return Checked(
        category, str(metadata.get("domain")), tuple(mapping), tuple(sorted(set(mapping.values()))), weights
    )


def _check_task(category: str, record: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    if category == "qa":
        label = record.get("label")
        if not isinstance(label, str) or not label.strip():
            raise RowError("no_label", f"label is {label!r}; a question needs its reference answer")
        return
    from agentic.toolorchestra.tau2.tasks import task_of  # here: files of questions need no tau2

    try:
        task_of(metadata)
    except (BadRecord, ConfigError) as error:
        raise RowError("bad_task", str(error)) from error


def _check_unique(where: str, metadata: Mapping[str, Any], seen: dict[str, str]) -> None:
    if "task_id" not in metadata:
        return
    name = "/".join(str(metadata.get(part, "")) for part in ("domain", "task_id", "variant"))
    first = seen.setdefault(name, where)
    if first != where:
        raise RowError("duplicate", f"task and variant {name} occur at {first} as well; keep one")


def _check_mapping(category: str, metadata: Mapping[str, Any]) -> dict[str, str]:
    """Empty when the record leaves the mapping to the run's settings."""
    mapping = metadata.get("model_mapping")
    if mapping is None:
        return {}
    if not isinstance(mapping, Mapping) or not mapping:
        raise RowError("bad_mapping", f"model_mapping is {one_line(repr(mapping))}; expected {{alias: model}}")
    for alias, model in mapping.items():
        if not isinstance(model, str) or not model:
            raise RowError("bad_mapping", f"model_mapping['{alias}'] is {model!r}; expected the name of a model")
        if not alias.startswith(PREFIXES[category]):
            raise RowError("bad_mapping", f"alias '{alias}' does not begin with {' or '.join(PREFIXES[category])}")
    needed = PREFIXES[category][0]
    if not any(alias.startswith(needed) for alias in mapping):
        raise RowError("bad_mapping", f"model_mapping has no alias '{needed}...', without which the task cannot end")
    _check_tools(metadata.get("tools"), mapping)
    return dict(mapping)


def _check_tools(tools: Any, mapping: Mapping[str, str]) -> None:
    if tools is None:
        return
    if not isinstance(tools, list) or not tools:
        raise RowError("bad_tools", f"tools is {one_line(repr(tools))}; expected the list of offered aliases")
    unknown = [tool for tool in tools if tool not in mapping]
    if unknown:
        raise RowError(
            "bad_tools", f"tools offers {unknown[0]!r}, which model_mapping does not name; remove it or map it"
        )


def _check_pricing(metadata: Mapping[str, Any], mapping: Mapping[str, str]) -> None:
    pricing = metadata.get("tool_pricing")
    if pricing is None:
        return
    if not isinstance(pricing, Mapping):
        raise RowError(
            "bad_pricing", f"tool_pricing is {one_line(repr(pricing))}; expected {{model: {{input, output}}}}"
        )
    for alias, model in mapping.items():
        if not {alias, model} & set(pricing):
            raise RowError(
                "bad_pricing", f"tool_pricing has no entry for the model '{model}' of {alias}; add its prices"
            )
    for name, price in pricing.items():
        values = {name: price} if name in FEES else price
        if not isinstance(values, Mapping) or name not in FEES and set(values) != {"input", "output"}:
            raise RowError(
                "bad_pricing", f"tool_pricing['{name}'] is {one_line(repr(price))}; expected {{input, output}}"
            )
        for part, dollars in values.items():
            _check_price(f"tool_pricing['{name}']" + ("" if name in FEES else f"['{part}']"), dollars, name in FEES)


def _check_price(where: str, dollars: Any, fee: bool) -> None:
    number = isinstance(dollars, (int, float)) and not isinstance(dollars, bool)
    if not number or not math.isfinite(dollars) or dollars < 0:
        raise RowError("bad_pricing", f"{where} is {dollars!r}; expected dollars, not negative")
    if not fee and dollars > HIGHEST_PRICE:
        raise RowError("bad_pricing", f"{where} is {dollars}; prices are dollars per token, divide by a million")
