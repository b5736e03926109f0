"""Hugging Face directories: checking one, writing one atomically.

Files that are not weights (tokenizer, chat template, generation config) are copied from the model it came from, so an exported
directory tokenises exactly like the original.

Invariant: the target directory either does not exist, or is complete: it is written beside itself and renamed.
Left out: the weights (the back end's), quantised formats.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def require_hf_dir(path: str, flag: str) -> Path:
    """The directory as a path. Raises `FileNotFoundError` naming flag, value and remedy when it has no `config.json`."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{flag} {path}: no config.json there; give a Hugging Face model directory")
    return folder


def _is_companion(path: Path) -> bool:
    weights = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
    return path.is_file() and not weights and path.name != "config.json"


def copy_companion_files(source: Path, target: Path) -> None:
    """Copy tokenizer and other non-weight files."""
    for path in sorted(source.iterdir()):
        if _is_companion(path):
            shutil.copyfile(path, target / path.name)


def replace_directory(finished: Path, target: Path) -> None:
    """Move a finished directory to its final name; an older one there is removed only after the move."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(finished, target)
    shutil.rmtree(old, ignore_errors=True)
