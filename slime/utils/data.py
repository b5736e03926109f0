"""Prompt files (.jsonl, .parquet) and the data set made of them; picking up a rank's share of train data.

Invariants: the order of the file is kept until `shuffle`; every problem of a record names file, line (or row) and
remedy; nothing is skipped silently. Blank lines of a .jsonl file are no records.
Leaves out: image, video and audio fields.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
_TOKENIZE_BATCH = 1024


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a `.jsonl` or `.parquet` file; a suffix `@[a:b]` selects them like a Python slice.

    Raises FileNotFoundError for a missing file and ValueError for another file type, or for a line that is no JSON
    object (naming file and line).
    """
    for _, record in _read_located(path):
        yield record


def check_prompt_file(path: str, prompt_key: str, label_key: str | None = None) -> int:
    """Read the whole file as `Dataset` will, raise its errors now, and return the number of records.

    Raises ValueError when a record has no usable `prompt_key`, no `label_key` (unless None), or the (sliced) file is empty.
    """
    count = 0
    for where, record in _read_located(path):
        _prompt_of(record, prompt_key, where)
        if label_key is not None:
            _field(record, label_key, where, "--label-key")
        count += 1
    if count == 0:
        raise ValueError(f"{path}: holds no records")
    return count


def _read_located(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Records with their place, as (`file:line`, record)."""
    match = _SLICE.match(path)
    file = match["path"] if match else path
    if not Path(file).is_file():
        raise FileNotFoundError(f"{file}: no such data file")
    records: Iterator[tuple[str, Any]]
    if file.endswith(".jsonl"):
        records = _read_jsonl(file)
    elif file.endswith(".parquet"):
        records = _read_parquet(file)
    else:
        raise ValueError(f"{file}: unknown type of data file; use .jsonl or .parquet")
    if match is not None:
        records = _slice(records, match["start"], match["stop"])
    for where, line in records:
        yield where, _parse_line(line, where) if isinstance(line, bytes) else line


def _slice(items: Iterator[Any], start: str, stop: str) -> Iterator[Any]:
    first, last = int(start) if start else None, int(stop) if stop else None
    if (first or 0) < 0 or (last or 0) < 0:
        return iter(list(items)[first:last])
    return islice(items, first, last)


def _read_jsonl(file: str) -> Iterator[tuple[str, bytes]]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield f"{file}:{number}", line


def _read_parquet(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        batches = pq.ParquetFile(file).iter_batches()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file}: not a parquet file ({error})") from error
    rows = (row for batch in batches for row in batch.to_pylist())
    for number, row in enumerate(rows):
        yield f"{file}: row {number}", row


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
    except ValueError as error:
        excerpt = line[:80].decode(errors="replace").strip()
        raise ValueError(f"{where}: not valid JSON ({error}): {excerpt}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(record).__name__}")
    return record


def _field(record: dict[str, Any], key: str, where: str, flag: str) -> Any:
    if key not in record:
        keys = ", ".join(sorted(map(str, record))) or "none"
        raise ValueError(f"{where}: record has no key '{key}' ({flag}); its keys: {keys}")
    return record[key]


def _prompt_of(record: dict[str, Any], key: str, where: str) -> str | list[dict[str, Any]]:
    prompt = _field(record, key, where, "--input-key")
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt):
        return prompt
    raise ValueError(f"{where}: '{key}' must be a non-empty text or list of chat messages, got {prompt!r:.80}")


def _dict_of(record: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = record.get(key)
    if isinstance(value, str) and value:
        value = _parse_line(value.encode(), f"{where}: '{key}'")
    if value and not isinstance(value, dict):
        raise ValueError(f"{where}: '{key}' must be an object, got {type(value).__name__}")
    return dict(value or {})


def _tools_of(record: dict[str, Any], key: str | None, where: str) -> list[Any] | None:
    tools = record.get(key) if key else None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools else None
        except ValueError as error:
            raise ValueError(f"{where}: '{key}' is no JSON list of tools ({error})") from error
    if tools is None:
        return None
    tools = tools.tolist() if hasattr(tools, "tolist") else tools
    if not isinstance(tools, list):
        raise ValueError(f"{where}: '{key}' must be a list of tools, got {type(tools).__name__}")
    return tools


def filter_long_prompt(
    origin_samples: list[Sample], tokenizer: Any, processor: Any, max_length: int | None
) -> list[Sample]:
    """Drop text prompts of more than `max_length` tokens, keeping the order. None keeps all.

    Prompts that are message lists have no fixed rendering yet and stay. `processor` is for media prompts, which this
    version does not load; passing samples that have some is a ValueError.
    """
    if max_length is None:
        return origin_samples
    if any(sample.multimodal_inputs for sample in origin_samples):
        raise ValueError(f"cannot measure prompts with media (processor: {type(processor).__name__})")
    texts = [sample.prompt for sample in origin_samples if isinstance(sample.prompt, str)]
    lengths: list[int] = []
    for start in range(0, len(texts), _TOKENIZE_BATCH):
        encoded = tokenizer(texts[start : start + _TOKENIZE_BATCH], add_special_tokens=False)
        lengths.extend(map(len, encoded["input_ids"]))
    remaining = iter(lengths)
    kept = [s for s in origin_samples if not isinstance(s.prompt, str) or next(remaining) <= max_length]
    if len(kept) < len(origin_samples):
        dropped = len(origin_samples) - len(kept)
        logger.warning("dropped %d of %d prompts longer than %d tokens", dropped, len(origin_samples), max_length)
    return kept


class Dataset:
    """All prompts of one file as `Sample`s, in file order or shuffled by epoch.

    `samples` is the current order, `origin_samples` the file's. Raises the errors of `read_file`, and ValueError
    for a record without `prompt_key` or `label_key`, and for a file of which nothing is left.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        processor: Any,
        max_length: int | None,
        *,
        prompt_key: str = "text",
        multimodal_keys: dict[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if multimodal_keys:
            raise ValueError(
                f"multimodal keys {sorted(multimodal_keys)} given, but this version loads text prompts only"
            )
        template_kwargs = apply_chat_template_kwargs or {}
        samples = []
        for where, record in _read_located(path):
            prompt = _prompt_of(record, prompt_key, where)
            metadata = _dict_of(record, metadata_key, where)
            tools = _tools_of(record, tool_key, where)
            if tools is not None:
                metadata["tools"] = tools
            if apply_chat_template:
                prompt = _render(tokenizer, prompt, tools, template_kwargs)
            label = _field(record, label_key, where, "--label-key") if label_key is not None else None
            samples.append(Sample(prompt=prompt, label=label, metadata=metadata))
        self.origin_samples = filter_long_prompt(samples, tokenizer, processor, max_length)
        if not self.origin_samples:
            reason = (
                f"none of its {len(samples)} prompts has at most {max_length} tokens" if samples else "it is empty"
            )
            raise ValueError(f"{path}: no prompts to use: {reason}")
        self.samples = self.origin_samples
        self.seed = seed
        self.epoch_id = -1

    def shuffle(self, new_epoch_id: int) -> None:
        """Order the samples for an epoch: a permutation of the file order that depends on seed + epoch only."""
        if new_epoch_id == self.epoch_id:
            return
        order = list(range(len(self.origin_samples)))
        random.Random(self.seed + new_epoch_id).shuffle(order)
        self.samples = [self.origin_samples[i] for i in order]
        self.epoch_id = new_epoch_id

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)


def _render(tokenizer: Any, prompt: str | list[dict[str, Any]], tools: Any, kwargs: dict[str, Any]) -> str:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs)


def process_rollout_data(args: Any, rollout_data_ref: list[Any], dp_rank: int, dp_size: int) -> dict[str, Any]:
    """Fetch the train data of one data-parallel rank from its `Box` and localise the whole-batch lists.

    `total_lengths` is restricted to the rank's `partition`; `local_raw_reward` is added beside the whole `raw_reward`.
    Raises ValueError when the number of boxes is not `dp_size`.
    """
    import ray

    if len(rollout_data_ref) != dp_size:
        raise ValueError(f"got train data for {len(rollout_data_ref)} data-parallel ranks, but there are {dp_size}")
    data: dict[str, Any] = ray.get(rollout_data_ref[dp_rank].inner)
    partition = data["partition"]
    data["total_lengths"] = [data["total_lengths"][i] for i in partition]
    if "raw_reward" in data:
        data["local_raw_reward"] = [data["raw_reward"][i] for i in partition]
    return data


def get_source(sample: Sample) -> str:
    """Name of the data source of a sample: its `source` attribute, else `metadata["source_name"]`, else "unknown"."""
    return getattr(sample, "source", None) or (sample.metadata or {}).get("source_name") or "unknown"
