"""Loading tokenizers and processors from a model directory, and media in the form processors and engines take.

Leaves out: resizing and sampling of media (the processor's); code shipped inside a model directory runs only with `trust_remote_code=True`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
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


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Keyword arguments of a processor call: the media, and tensors as output, without truncation or padding."""
    kwargs = {name: value for name, value in (multimodal_inputs or {}).items() if value is not None}
    text = {"return_tensors": None, "truncation": False, "padding": False}
    media = {"return_tensors": "pt"}
    return {**kwargs, "text_kwargs": text, **{f"{name}_kwargs": dict(media) for name in ("images", "videos", "audio")}}


def process_vision_info(prompt: Any, processor: Any) -> dict[str, Any]:
    """Media of a chat, in order: `{"images": [...], "videos": [...]}`, None where there are none.

    `prompt` is a list of messages whose contents may be lists of parts; an image part holds a PIL image, a path, a
    `file://` or `data:` address. Raises ValueError for an address elsewhere: loading must not need the network.
    """
    images = [load_image(part) for part in _parts(prompt, "image")]
    videos = list(_parts(prompt, "video"))
    return {"images": images or None, "videos": videos or None}


def _parts(prompt: Any, kind: str) -> Iterator[Any]:
    for message in prompt if isinstance(prompt, list) else []:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if isinstance(part, dict) and part.get("type") in (kind, f"{kind}_url"):
                value = part.get(kind) or part.get(f"{kind}_url")
                yield value.get("url") if isinstance(value, dict) else value


def load_image(source: Any) -> Any:
    """A PIL image from a PIL image, bytes, a path, or a `file://` / `data:` address, in RGB."""
    from PIL import Image

    if isinstance(source, Image.Image):
        return source.convert("RGB")
    if isinstance(source, (bytes, bytearray)):
        return Image.open(io.BytesIO(source)).convert("RGB")
    text = str(source)
    if text.startswith("data:"):
        return load_image(base64.b64decode(text.partition(",")[2]))
    if "://" in text and not text.startswith("file://"):
        raise ValueError(f"image {text:.80}: give a file, loading from the network is not done")
    return Image.open(text.removeprefix("file://")).convert("RGB")


def encode_image_for_rollout_engine(image: Any) -> str:
    """A `data:image/png;base64,...` address of an image (PIL, bytes, path), as the engine takes it."""
    buffer = io.BytesIO()
    load_image(image).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
