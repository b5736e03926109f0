"""Loading tokenizers and processors from a model directory.

Leaves out: vision pre-processing; code shipped inside a model directory runs only with `trust_remote_code=True`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """Tokenizer of a Hugging Face model directory or hub name. Raises OSError when there is none."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path, **kwargs)


def load_processor(name_or_path: str, **kwargs: Any) -> Any | None:
    """Multimodal processor of a model directory, or None for a text-only model."""
    path = Path(name_or_path)
    if path.is_dir() and not any((path / name).is_file() for name in _PROCESSOR_FILES):
        return None
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    # transformers falls back to the bare tokenizer when a hub model has no processor.
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor
