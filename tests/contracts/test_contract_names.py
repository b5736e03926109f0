"""Every public name of the interface: it exists where users import it from, and takes the parameters by name and place.

`public_interface.txt` has one row per name: module, kind, name, positional parameters | keyword-only parameters.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import pytest

Row = tuple[str, str, str]


@cache
def rows_of() -> dict[str, list[Row]]:
    table: dict[str, list[Row]] = {}
    for line in Path(__file__).with_name("public_interface.txt").read_text().splitlines():
        module, kind, name, *parameters = line.split()
        table.setdefault(module, []).append((kind, name, parameters[0] if parameters else ""))
    return table


def find(module: Any, name: str) -> Any:
    found = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
    return found


def has_field(module: Any, name: str) -> bool:
    owner = getattr(module, name.rpartition(".")[0])
    field = name.rpartition(".")[2]
    known = {f.name for f in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
    known |= {*getattr(owner, "model_fields", {}), *inspect.get_annotations(owner)}
    return field in known or hasattr(owner, field)


def check_parameters(function: Any, wanted: str, where: str) -> None:
    signature = inspect.signature(inspect.unwrap(getattr(function, "__func__", function)))
    positional, _, keyword = wanted.partition("|")
    names = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    expected = positional.split(",") if positional else []
    assert names[: len(expected)] == expected, where
    extra = [name for name in names[len(expected) :] if signature.parameters[name].default is inspect.Parameter.empty]
    assert not extra, f"{where}: more parameters are required: {extra}"
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    missing = [name for name in keyword.split(",") if name and name not in signature.parameters]
    assert not missing or open_ended, f"{where}: {missing}"


@pytest.mark.parametrize("module_name", sorted(rows_of()))
def test_module_has_its_public_names(module_name: str) -> None:
    module = importlib.import_module(module_name)
    for kind, name, parameters in rows_of()[module_name]:
        where = f"{module_name}.{name}"
        if kind == "field":
            assert has_field(module, name), where
            continue
        found = find(module, name)
        if kind == "class":
            assert inspect.isclass(found), where
        elif kind == "property":
            assert isinstance(found, property), where
        else:
            check_parameters(found, parameters, where)
            assert inspect.iscoroutinefunction(inspect.unwrap(found)) == (kind == "async"), where
