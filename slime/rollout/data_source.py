"""Where prompts come from: groups of equal samples read from the prompt data, and a buffer for groups that come back.

Input: `--prompt-data` (see `slime.utils.data.Dataset`). Output of `get_samples(n)`: n groups of `n_samples_per_prompt`
independent copies, numbered over the whole run by `group_index` and `index`.
Invariants: the order depends only on `--rollout-seed` and the epoch; the position (offset, epoch, counters) is saved
beside every checkpoint and restored from it, as plain types. Left out: the buffer's content is not saved.
"""

from __future__ import annotations

import abc
import copy
import logging
import os
import re
from pathlib import Path
from typing import Any

import torch

from slime.utils.data import Dataset
from slime.utils.misc import load_function
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_STATE_KEYS = ("sample_offset", "epoch_id", "sample_group_index", "sample_index", "metadata")


class DataSource(abc.ABC):
    """Interface of `--data-source-path` classes; the constructor takes `args`."""

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """The next `num_samples` groups."""

    @abc.abstractmethod
    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Takes groups back."""

    @abc.abstractmethod
    def save(self, rollout_id: int) -> None:
        """Writes the position that belongs to the checkpoint of `rollout_id`."""

    @abc.abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Restores the position of `rollout_id`."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of prompts of one epoch, 0 without a data set."""


class RolloutDataSource(DataSource):
    """Prompts of `--prompt-data`, epoch after epoch; blank samples when there is none."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.epoch_id = 0
        self.sample_offset = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.metadata: dict[str, Any] = {}
        self.dataset = _load_dataset(args) if args.rollout_global_dataset and args.prompt_data else None
        if self.dataset is not None and args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """The next `num_samples` groups, going on into the next epochs where needed."""
        return [self._new_group(prompt) for prompt in self._next_prompts(num_samples)]

    def _next_prompts(self, count: int) -> list[Sample]:
        if self.dataset is None:
            return [Sample() for _ in range(count)]
        prompts: list[Sample] = []
        while len(prompts) < count:
            if self.sample_offset >= len(self.dataset):
                self._start_epoch(self.epoch_id + 1)
            end = self.sample_offset + count - len(prompts)
            taken = self.dataset.samples[self.sample_offset : end]
            self.sample_offset += len(taken)
            prompts += taken
        return prompts

    def _start_epoch(self, epoch_id: int) -> None:
        self.epoch_id = epoch_id
        self.sample_offset = 0
        if self.dataset is not None and self.args.rollout_shuffle:
            self.dataset.shuffle(epoch_id)

    def _new_group(self, prompt: Sample) -> list[Sample]:
        group = [copy.deepcopy(prompt) for _ in range(self.args.n_samples_per_prompt)]
        for sample in group:
            sample.group_index = self.sample_group_index
            sample.index = self.sample_index
            self.sample_index += 1
        self.sample_group_index += 1
        return group

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Raises RuntimeError: this class keeps nothing."""
        raise RuntimeError(
            f"{type(self).__name__} cannot take samples back; use slime.rollout.data_source.RolloutDataSourceWithBuffer"
        )

    def save(self, rollout_id: int) -> None:
        """Writes `{save}/rollout/global_dataset_state_dict_{rollout_id}.pt`; the file appears whole or not at all."""
        if not self.args.rollout_global_dataset:
            return
        path = _state_path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        torch.save({key: getattr(self, key) for key in _STATE_KEYS}, partial)
        partial.replace(path)

    def load(self, rollout_id: int | None = None) -> None:
        """Restores the position from `--load`; without such a file the data set starts from its beginning."""
        if not self.args.rollout_global_dataset or self.args.load is None:
            return
        path = _state_path(checkpoint_root(self.args.load), rollout_id)
        if not path.exists():
            logger.info("no data set position at %s: starting from the beginning", path)
            return
        # Plain types only: a checkpoint directory may come from elsewhere and must not run code.
        state = torch.load(path, weights_only=True)
        missing = [key for key in _STATE_KEYS if key not in state]
        if missing:
            raise ValueError(f"{path}: keys {missing} are missing; it is not a data set position")
        for key in _STATE_KEYS:
            setattr(self, key, state[key])
        if self.dataset is not None and self.args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)
        logger.info("data set position restored from %s: epoch %d, row %d", path, self.epoch_id, self.sample_offset)

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """As `RolloutDataSource`, but groups given back (aborted ones, for example) are served first."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.buffer: list[list[Sample]] = []
        path = getattr(args, "buffer_filter_path", None)
        self.buffer_filter = load_function(path) if path else pop_first

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Up to `num_samples` groups out of the buffer, the rest from the data set."""
        if num_samples <= 0:
            return []
        groups: list[list[Sample]] = (
            self.buffer_filter(self.args, None, self.buffer, num_samples) if self.buffer else []
        )
        return groups + super().get_samples(num_samples - len(groups))

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Appends groups to the buffer.

        Raises AssertionError when it is not a list of lists of `n_samples_per_prompt` members.
        """
        wanted = self.args.n_samples_per_prompt
        assert isinstance(samples, list), f"add_samples takes a list of groups, got {type(samples).__name__}"
        for group in samples:
            assert isinstance(group, list), f"a group must be a list of samples, got {type(group).__name__}"
            assert len(group) == wanted, f"a group needs --n-samples-per-prompt {wanted} members, got {len(group)}"
        self.buffer.extend(samples)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Merges `metadata` (plain types) into what is saved with the position."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """The metadata saved with the position."""
        return self.metadata

    def get_buffer_length(self) -> int:
        """Number of groups in the buffer."""
        return len(self.buffer)


def pop_first(args: Any, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """Default buffer filter: removes and returns the oldest groups."""
    taken = buffer[:num_samples]
    del buffer[: len(taken)]
    return taken


def checkpoint_root(load: str) -> Path:
    """The directory that `--load` means: it may name one iteration, and what the rollout side saves lies beside the iterations."""
    root = Path(load)
    return root.parent if re.fullmatch(r"iter_\d+", root.name) else root


def _state_path(root: str | Path, rollout_id: int | None) -> Path:
    return Path(root) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"


def _load_dataset(args: Any) -> Dataset:
    return Dataset(
        args.prompt_data,
        tokenizer=load_tokenizer(args.hf_checkpoint, trust_remote_code=True),
        processor=load_processor(args.hf_checkpoint, trust_remote_code=True),
        max_length=args.rollout_max_prompt_len,
        prompt_key=args.input_key,
        multimodal_keys=args.multimodal_keys,
        label_key=args.label_key,
        tool_key=args.tool_key,
        metadata_key=args.metadata_key,
        seed=args.rollout_seed,
        apply_chat_template=args.apply_chat_template,
        apply_chat_template_kwargs=args.apply_chat_template_kwargs,
    )
