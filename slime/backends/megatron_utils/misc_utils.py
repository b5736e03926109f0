"""Names of parameters as wrappers show them."""

from __future__ import annotations

_WRAPPER = "module."


def strip_param_name_prefix(name: str) -> str:
    """`module.module.decoder.x` -> `decoder.x`: without what data-parallel and precision wrappers put in front."""
    while name.startswith(_WRAPPER):
        name = name[len(_WRAPPER) :]
    return name
