"""Row-wise attention against one call with a block-diagonal mask: same output, same gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from slime.backends.fsdp_utils.attention import ROW_WISE, row_lengths

SHAPE = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
CONFIGS = {
    "qwen2": Qwen2Config(**SHAPE),
    "window": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "llama": LlamaConfig(**SHAPE),
}


def positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def run(config: PreTrainedConfig, attention: str, lengths: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    ids = torch.randint(SHAPE["vocab_size"], (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids, position_ids=positions(lengths), use_cache=False).logits
    (logits.softmax(-1) ** 2).sum().backward()
    return logits, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", [[9], [1, 12, 3, 7], [4, 4]])
def test_equals_masked_attention(name: str, lengths: list[int]) -> None:
    masked, row_wise = (run(CONFIGS[name], attention, lengths) for attention in ("sdpa", ROW_WISE))
    torch.testing.assert_close(row_wise[0], masked[0], rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(row_wise[1], masked[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_row_lengths(lengths: list[int]) -> None:
    assert row_lengths(positions(lengths)) == lengths
