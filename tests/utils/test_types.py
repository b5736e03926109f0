"""Sample: append function, lengths, metadata effects, dict round trip."""

from __future__ import annotations

import base64
import copy
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.utils.types import MultimodalTypes, Sample


def b64(values: list[int]) -> str:
    return base64.b64encode(np.array(values, dtype="<i4").tobytes()).decode()


def as_lists(sample: Sample) -> tuple[Any, ...]:
    return sample.tokens, sample.response_length, sample.loss_mask, sample.rollout_log_probs


def test_append_model_then_tool_tokens_sets_mask_and_log_probs() -> None:
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(tokens=[3, 4], log_probs=torch.tensor([-0.5, -0.25]), text="ab")
    sample.append_response_tokens(tokens=torch.tensor([5]), trainable=False, text="c")
    assert as_lists(sample) == ([1, 2, 3, 4, 5], 3, [1, 1, 0], [-0.5, -0.25, 0.0])
    assert sample.response == "abc" and sample.effective_response_length == 2


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tokens": [3, 4], "log_probs": [-1.0]}, "2 tokens but 1 log_probs"),
        ({"tokens": [3]}, "without log_probs"),
        ({"tokens": [3], "log_probs": [-1.0], "trainable": False}, "must come without log_probs"),
    ],
)
def test_append_rejects_wrong_log_probs_and_leaves_sample_alone(kwargs: dict[str, Any], message: str) -> None:
    sample = Sample(tokens=[1])
    before = copy.deepcopy(sample)
    with pytest.raises(ValueError, match=message):
        sample.append_response_tokens(**kwargs)
    assert sample == before


def test_earlier_response_is_back_filled() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2)
    sample.append_response_tokens(tokens=[4], trainable=False)
    assert as_lists(sample) == ([1, 2, 3, 4], 3, [1, 1, 0], [0.0, 0.0, 0.0])


def test_trainable_tokens_after_unlogged_ones_are_refused() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2)
    with pytest.raises(ValueError, match="no rollout_log_probs"):
        sample.append_response_tokens(tokens=[4], log_probs=[-1.0])


def test_final_length_check_catches_a_damaged_sample() -> None:
    sample = Sample(tokens=[1, 2], response_length=1, loss_mask=[1, 1], rollout_log_probs=[-1.0])
    with pytest.raises(ValueError, match="loss_mask has 3 entries, expected 2"):
        sample.append_response_tokens(tokens=[4], log_probs=[-1.0])


@pytest.mark.parametrize(("reason", "status"), [("length", "TRUNCATED"), ("abort", "ABORTED"), ("stop", "COMPLETED")])
def test_terminal_info(reason: str, status: str) -> None:
    meta = {
        "finish_reason": {"type": reason},
        "weight_version": "7",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "spec_accept_token_num": 3,
        "spec_draft_token_num": 6,
        "spec_verify_ct": 2,
        "completion_tokens": 5,
    }
    sample = Sample(tokens=[1])
    args = SimpleNamespace(sglang_speculative_algorithm="EAGLE")
    sample.append_response_tokens(args, tokens=[2], log_probs=[-1.0], meta_info=meta)
    assert sample.status is Sample.Status[status] and sample.weight_versions == ["7"]
    assert sample.prefix_cache_info.prefix_cache_hit_rate == 0.4
    assert (sample.spec_info.spec_accept_rate, sample.spec_info.spec_accept_length) == (0.5, 2.5)


def test_terminal_info_can_be_left_alone_and_speculation_needs_its_flag() -> None:
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "7", "spec_draft_token_num": 6}
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[2], log_probs=[-1.0], meta_info=meta, update_terminal_info=False)
    assert sample.status is Sample.Status.PENDING and sample.weight_versions == []
    sample.append_response_tokens(meta_info=meta)
    assert sample.status is Sample.Status.COMPLETED and sample.spec_info == Sample.SpecInfo()


def test_unknown_finish_reason_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown finish_reason type 'melted'"):
        Sample().append_response_tokens(meta_info={"finish_reason": {"type": "melted"}})


def test_nucleus_is_merged_with_shifted_offsets_and_empty_spans() -> None:
    sample = Sample(tokens=[1])
    first = {"top_p_token_ids": b64([3, 9, 4]), "top_p_token_offsets": b64([0, 2, 3])}
    second = {"top_p_kept_token_ids": [6, 7], "top_p_kept_token_offsets": [0, 2]}
    sample.append_response_tokens(tokens=[3, 4], log_probs=[-1.0, -1.0], meta_info=first)
    sample.append_response_tokens(tokens=[5], trainable=False)
    sample.append_response_tokens(tokens=[6], log_probs=[-1.0], meta_info=second)
    assert torch.as_tensor(sample.rollout_top_p_token_ids).tolist() == [3, 9, 4, 6, 7]
    assert torch.as_tensor(sample.rollout_top_p_token_offsets).tolist() == [0, 2, 3, 3, 5]


@pytest.mark.parametrize(
    "meta",
    [
        {"top_p_token_ids": [1]},
        {"top_p_token_ids": [1], "top_p_token_offsets": [1, 1]},
        {"top_p_token_ids": [1], "top_p_token_offsets": [0, 2]},
        {"top_p_token_ids": [1], "top_p_token_offsets": [0, 1, 1]},
    ],
)
def test_broken_nucleus_is_refused(meta: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="top-p"):
        Sample(tokens=[1]).append_response_tokens(tokens=[2], log_probs=[-1.0], meta_info=meta)


def test_trainable_tokens_without_nucleus_after_some_with_it_are_refused() -> None:
    sample = Sample(tokens=[1])
    meta = {"top_p_token_ids": [2], "top_p_token_offsets": [0, 1]}
    sample.append_response_tokens(tokens=[2], log_probs=[-1.0], meta_info=meta)
    with pytest.raises(ValueError, match="without top-p nucleus"):
        sample.append_response_tokens(tokens=[3], log_probs=[-1.0])


def test_routed_experts_replace_append_and_refuse() -> None:
    args = SimpleNamespace(num_layers=1, moe_router_topk=2)
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(args, tokens=[3], log_probs=[-1.0], meta_info={"routed_experts": b64([0, 1, 2, 3])})
    more = {"routed_experts": b64([4, 5]), "routed_experts_start_len": 2}
    sample.append_response_tokens(args, tokens=[4], log_probs=[-1.0], meta_info=more)
    assert torch.as_tensor(sample.rollout_routed_experts).tolist() == [[[0, 1]], [[2, 3]], [[4, 5]]]
    for start in (-1, 1, 9):
        bad = {"routed_experts": b64([4, 5]), "routed_experts_start_len": start}
        with pytest.raises(ValueError, match="routed_experts_start_len"):
            sample.append_response_tokens(args, tokens=[5], log_probs=[-1.0], meta_info=bad)
    with pytest.raises(ValueError, match="expected shape"):
        sample.append_response_tokens(args, meta_info={"routed_experts": b64([1])})


pieces = st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=4), st.booleans()), max_size=8)


@given(pieces)
def test_lengths_always_agree(parts: list[tuple[list[int], bool]]) -> None:
    sample = Sample(tokens=[100, 101])
    for ids, trainable in parts:
        sample.append_response_tokens(
            tokens=ids, log_probs=[-1.0] * len(ids) if trainable else None, trainable=trainable
        )
    flat = [token for ids, _ in parts for token in ids]
    assert sample.tokens == [100, 101] + flat and sample.response_length == len(flat)
    assert sample.loss_mask in (None, [int(t) for ids, t in parts for _ in ids])
    assert sample.rollout_log_probs in (None, [-float(t) for ids, t in parts for _ in ids])


def test_dict_round_trip_keeps_extra_attributes_and_input() -> None:
    sample = Sample(index=3, status=Sample.Status.FAILED, prefix_cache_info=Sample.PrefixCacheInfo(1, 2))
    sample.source = "gsm8k"  # type: ignore[attr-defined]
    data = sample.to_dict()
    assert data["status"] == "failed" and data["prefix_cache_info"] == {"cached_tokens": 1, "total_prompt_tokens": 2}
    frozen = copy.deepcopy(data)
    back = Sample.from_dict(data)
    assert data == frozen and back == sample and back.__dict__["source"] == "gsm8k"
    assert Sample.from_dict({"spec_info": {"spec_verify_ct": 2}}).spec_info == Sample.SpecInfo(spec_verify_ct=2)
    assert pickle.loads(pickle.dumps(sample)) == sample


def test_reward_value() -> None:
    assert Sample(reward=0.5).get_reward_value(SimpleNamespace(reward_key=None)) == 0.5
    assert Sample(reward={"acc": 1.0}).get_reward_value(SimpleNamespace(reward_key="acc")) == 1.0
    with pytest.raises(TypeError, match="--reward-key acc needs a dict reward"):
        Sample(reward=0.5).get_reward_value(SimpleNamespace(reward_key="acc"))


def test_multimodal_types() -> None:
    assert [kind.placeholder for kind in MultimodalTypes.all()] == ["<image>", "<video>", "<audio>"]
    assert MultimodalTypes.get("video") == MultimodalTypes.VIDEO and MultimodalTypes.get("smell") is None


def test_counters_are_nested_and_have_dicts_of_their_own() -> None:
    spec = Sample.SpecInfo(1, 2, 3, 4)
    assert Sample.SpecInfo.from_dict(spec.to_dict()) == spec and spec.spec_accept_rate == 0.5
    assert Sample.PrefixCacheInfo.from_dict({"cached_tokens": 3}).to_dict() == {
        "cached_tokens": 3,
        "total_prompt_tokens": 0,
    }
