"""`Sample`: one training sample on its way from prompt to train data, and the small types around it.

Invariants (kept by `Sample.append_response_tokens`, the only function that should add response tokens):
  * `tokens` is prompt + response; the response is its last `response_length` ids.
  * `loss_mask` and `rollout_log_probs`, when not None, have `response_length` entries.
  * `rollout_top_p_token_offsets`, when not None, has `response_length + 1` entries, first 0, last the number of ids.
Leaves out: conversion to train data (`slime/rollout/conversion.py`) and everything that knows a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple

import torch

from slime.utils.misc import decode_int32_meta_array

RolloutBatch = dict[str, Any]


@dataclass
class Sample:
    """One prompt with its response, reward and bookkeeping. Extra attributes may be attached freely."""

    class Status(Enum):
        """Where the sample stands; the engine's finish reason decides between the three ends it knows."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    @dataclass
    class SpecInfo:
        """Speculative-decoding counters, summed over the engine calls of one sample."""

        spec_accept_token_num: int = 0
        spec_draft_token_num: int = 0
        spec_verify_ct: int = 0
        completion_token_num: int = 0

        def to_dict(self) -> dict[str, int]:
            """The four counters by name."""
            return dict(self.__dict__)

        @staticmethod
        def from_dict(data: dict[str, int]) -> Sample.SpecInfo:
            """Inverse of `to_dict`; absent counters are zero."""
            return Sample.SpecInfo(**data)

        def add(self, meta_info: dict[str, Any]) -> None:
            """Add the counters of one engine answer; absent ones count as zero."""
            self.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
            self.spec_draft_token_num += meta_info.get("spec_draft_token_num", 0)
            self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
            self.completion_token_num += meta_info.get("completion_tokens", 0)

        @property
        def spec_accept_rate(self) -> float:
            """Accepted / drafted tokens, 0.0 when nothing was drafted."""
            return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

        @property
        def spec_accept_length(self) -> float:
            """Completion tokens per verification step, 0.0 when there was none."""
            return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    @dataclass
    class PrefixCacheInfo:
        """Prefix-cache counters, summed over the engine calls of one sample."""

        cached_tokens: int = 0
        total_prompt_tokens: int = 0

        def to_dict(self) -> dict[str, int]:
            """Both counters by name."""
            return dict(self.__dict__)

        @staticmethod
        def from_dict(data: dict[str, int]) -> Sample.PrefixCacheInfo:
            """Inverse of `to_dict`; absent counters are zero."""
            return Sample.PrefixCacheInfo(**data)

        def add(self, meta_info: dict[str, Any]) -> None:
            """Add the counters of one engine answer; absent ones count as zero."""
            self.cached_tokens += meta_info.get("cached_tokens", 0)
            self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

        @property
        def prefix_cache_hit_rate(self) -> float:
            """Cached / all prompt tokens, 0.0 when nothing was sent."""
            return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    group_index: int | None = None
    """Running number of the prompt group, set by the data source."""
    index: int | None = None
    """Running number of the sample over the whole run; outputs are sorted by it."""
    rollout_id: int | None = None
    """Identity of one rollout execution; all samples cut from one trajectory share it."""
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    """Prompt + response ids."""
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    """Text for display; the tokens are what is trained."""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """0/1 per response token; None means all ones."""
    weight_versions: list[str] = field(default_factory=list)
    """One entry per finished engine call."""
    rollout_log_probs: list[float] | None = None
    """Engine log-prob per response token, 0.0 for tokens the model did not generate."""
    rollout_top_p_token_ids: list[int] | torch.Tensor | None = None
    rollout_top_p_token_offsets: list[int] | torch.Tensor | None = None
    rollout_routed_experts: list[list[int]] | torch.Tensor | None = None
    """(len(tokens) - 1, num_layers, topk) expert ids."""
    remove_sample: bool = False
    """True: the mask becomes zeros at conversion; the reward still takes part in group statistics."""
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    """Seconds spent in tools and other non-model work."""
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def to_dict(self) -> dict[str, Any]:
        """Shallow copy of all attributes; status becomes its string, the two infos become dicts."""
        data = dict(self.__dict__)
        data["status"] = self.status.value
        data["spec_info"] = self.spec_info.to_dict()
        data["prefix_cache_info"] = self.prefix_cache_info.to_dict()
        return data

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        """Inverse of `to_dict`; `data` is not changed and unknown keys become attributes."""
        known = {f.name for f in fields(Sample)}
        kwargs = {key: value for key, value in data.items() if key in known}
        if "status" in kwargs:
            kwargs["status"] = Sample.Status(kwargs["status"])
        kwargs["spec_info"] = Sample.SpecInfo.from_dict(data.get("spec_info") or {})
        kwargs["prefix_cache_info"] = Sample.PrefixCacheInfo.from_dict(data.get("prefix_cache_info") or {})
        sample = Sample(**kwargs)
        for key in data.keys() - known:
            setattr(sample, key, data[key])
        return sample

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or its `args.reward_key` entry when the reward is a dict selected by that flag."""
        reward_key = getattr(args, "reward_key", None)
        if not reward_key:
            return self.reward
        if not isinstance(self.reward, dict):
            raise TypeError(f"--reward-key {reward_key} needs a dict reward, got {self.reward!r}")
        return self.reward[reward_key]

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | torch.Tensor | None = None,
        log_probs: Sequence[float] | torch.Tensor | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append response tokens with mask, log-probs and engine metadata, keeping all lengths equal.

        Generated tokens (`trainable=True`) need `log_probs`; tokens from tools or the user (`trainable=False`) must
        not have any: they get log-prob 0.0 and mask 0. `meta_info` is the engine's answer: nucleus ids, routed
        experts and, with `update_terminal_info`, counters, weight version and status are taken from it.
        Raises ValueError on any inconsistency; inputs are checked before the sample is changed.
        """
        new_tokens: list[int] = _as_list(tokens)
        new_log_probs = self._check_new_tokens(new_tokens, log_probs, trainable)
        nucleus = _decode_nucleus(meta_info or {}, len(new_tokens))
        experts = self._merged_experts(args, meta_info or {}, len(self.tokens) + len(new_tokens))
        status = _terminal_status(meta_info) if update_terminal_info and meta_info else None

        self._append_nucleus(nucleus, len(new_tokens), trainable)
        self._append_token_lists(new_tokens, new_log_probs, trainable)
        self.response += text or ""
        if experts is not None:
            self.rollout_routed_experts = experts
        if status is not None and meta_info is not None:
            self._update_terminal_info(args, meta_info, status)
        self._validate_lengths()

    def _check_new_tokens(self, new_tokens: list[int], log_probs: Any, trainable: bool) -> list[float]:
        if not trainable and log_probs is not None:
            raise ValueError("non-trainable tokens must come without log_probs: the model did not generate them")
        if not trainable or not new_tokens and log_probs is None:
            return [0.0] * len(new_tokens)
        if log_probs is None:
            raise ValueError(f"{len(new_tokens)} trainable tokens came without log_probs; pass the engine's")
        new_log_probs = [float(value) for value in _as_list(log_probs)]
        if len(new_log_probs) != len(new_tokens):
            raise ValueError(f"{len(new_tokens)} tokens but {len(new_log_probs)} log_probs")
        if new_tokens and self.response_length and self.rollout_log_probs is None:
            raise ValueError(f"the {self.response_length} earlier response tokens have no rollout_log_probs")
        return new_log_probs

    def _append_token_lists(self, new_tokens: list[int], new_log_probs: list[float], trainable: bool) -> None:
        if not new_tokens:
            return
        mask = self.loss_mask if self.loss_mask is not None else [1] * self.response_length
        logged = self.rollout_log_probs if self.rollout_log_probs is not None else [0.0] * self.response_length
        self.loss_mask = list(mask) + [int(trainable)] * len(new_tokens)
        self.rollout_log_probs = list(logged) + new_log_probs
        self.tokens = list(self.tokens) + new_tokens
        self.response_length += len(new_tokens)

    def _append_nucleus(
        self, nucleus: tuple[torch.Tensor, torch.Tensor] | None, num_new: int, trainable: bool
    ) -> None:
        """Merge nucleus spans of the new tokens; tokens without any get empty spans once there is nucleus data."""
        if nucleus is not None and not trainable:
            raise ValueError("non-trainable tokens must come without top-p nucleus data")
        known = self.rollout_top_p_token_ids is not None and self.rollout_top_p_token_offsets is not None
        if nucleus is None and known and trainable and num_new:
            raise ValueError(f"{num_new} trainable tokens came without top-p nucleus data, but earlier ones have it")
        if nucleus is None and not known:
            return
        old_ids = torch.as_tensor(self.rollout_top_p_token_ids if known else [], dtype=torch.int32)
        old_offsets = torch.as_tensor(
            self.rollout_top_p_token_offsets if known else [0] * (self.response_length + 1), dtype=torch.int32
        )
        empty = (torch.zeros(0, dtype=torch.int32), torch.zeros(num_new + 1, dtype=torch.int32))
        ids, offsets = nucleus if nucleus is not None else empty
        self.rollout_top_p_token_ids = torch.cat([old_ids, ids])
        self.rollout_top_p_token_offsets = torch.cat([old_offsets, offsets[1:] + len(old_ids)])

    def _merged_experts(self, args: Any, meta_info: dict[str, Any], total_tokens: int) -> torch.Tensor | None:
        """Known expert rows plus those of this answer, which start at row `routed_experts_start_len`."""
        flat = decode_int32_meta_array(meta_info, "routed_experts")
        if flat is None:
            return None
        if args is None:
            raise ValueError("routed_experts in meta_info need args (num_layers, moe_router_topk)")
        start = int(meta_info.get("routed_experts_start_len", 0))
        known = 0 if self.rollout_routed_experts is None else len(self.rollout_routed_experts)
        if start < 0 or start not in (0, known):
            raise ValueError(f"routed_experts_start_len is {start}, but {known} rows are known; expected 0 or {known}")
        shape = (total_tokens - 1 - start, args.num_layers, args.moe_router_topk)
        if flat.numel() != shape[0] * shape[1] * shape[2]:
            raise ValueError(f"routed_experts has {flat.numel()} entries, expected shape {shape}")
        rows = flat.reshape(shape)
        return rows if start == 0 else torch.cat([torch.as_tensor(self.rollout_routed_experts), rows])

    def _update_terminal_info(self, args: Any, meta_info: dict[str, Any], status: Status) -> None:
        if getattr(args, "sglang_speculative_algorithm", None):
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if meta_info.get("weight_version") is not None:
            self.weight_versions.append(meta_info["weight_version"])
        self.status = status

    def _validate_lengths(self) -> None:
        expected = self.response_length
        if len(self.tokens) < expected:
            raise ValueError(f"{len(self.tokens)} tokens cannot hold a response of {expected}")
        for name, extra in (("loss_mask", 0), ("rollout_log_probs", 0), ("rollout_top_p_token_offsets", 1)):
            value = getattr(self, name)
            if value is not None and len(value) != expected + extra:
                raise ValueError(f"{name} has {len(value)} entries, expected {expected + extra}")


_STATUS_BY_FINISH_REASON = {
    "length": Sample.Status.TRUNCATED,
    "abort": Sample.Status.ABORTED,
    "stop": Sample.Status.COMPLETED,
}


def _terminal_status(meta_info: dict[str, Any]) -> Sample.Status | None:
    """Status named by the engine's finish reason; None while the request is unfinished."""
    if not meta_info.get("finish_reason"):
        return None
    reason = meta_info["finish_reason"]["type"]
    if reason not in _STATUS_BY_FINISH_REASON:
        known = ", ".join(_STATUS_BY_FINISH_REASON)
        raise ValueError(f"unknown finish_reason type {reason!r}; expected one of {known}")
    return _STATUS_BY_FINISH_REASON[reason]


def _as_list(values: Any) -> list[Any]:
    """Plain python list of a list, tuple, array or tensor; None gives []."""
    if values is None:
        return []
    return list(values.tolist()) if hasattr(values, "tolist") else list(values)


def _decode_nucleus(meta_info: dict[str, Any], num_new: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Ids and offsets of the top-p nucleus in one engine answer; None when it carries none."""
    ids = decode_int32_meta_array(meta_info, ("top_p_token_ids", "top_p_kept_token_ids"))
    offsets = decode_int32_meta_array(meta_info, ("top_p_token_offsets", "top_p_kept_token_offsets"))
    if ids is None and offsets is None:
        return None
    if ids is None or offsets is None:
        raise ValueError("top-p nucleus data needs both token ids and token offsets in meta_info")
    if len(offsets) != num_new + 1 or offsets[0] != 0 or offsets[-1] != len(ids) or (offsets.diff() < 0).any():
        raise ValueError(
            f"top-p token offsets must have {num_new + 1} ascending entries from 0 to {len(ids)}, got {offsets.tolist()}"
        )
    return ids, offsets


@dataclass(frozen=True)
class ParamInfo:
    """Description of one model parameter, enough to receive it: `size` in bytes, `src_rank` its owner."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    attrs: dict[str, Any]
    size: int
    src_rank: int


class MultimodalType(NamedTuple):
    """A media kind and the placeholder that stands for one item of it in a prompt."""

    name: str
    placeholder: str


class MultimodalTypes:
    """The media kinds known to the data set format."""

    IMAGE = MultimodalType("image", "<image>")
    VIDEO = MultimodalType("video", "<video>")
    AUDIO = MultimodalType("audio", "<audio>")

    @classmethod
    def all(cls) -> list[MultimodalType]:
        """All kinds, in a fixed order."""
        return [cls.IMAGE, cls.VIDEO, cls.AUDIO]

    @classmethod
    def get(cls, name: str) -> MultimodalType | None:
        """The kind called `name`, or None."""
        return next((kind for kind in cls.all() if kind.name == name), None)
