"""Context parallelism in one process: the ranks' parts are computed one after the other and must add up to the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.utils import cp_utils as C
from slime.utils.loss_reducers import get_sum_of_sample_mean

SAMPLE = st.tuples(st.integers(1, 12), st.lists(st.integers(0, 1), min_size=1, max_size=20))
SIZES = st.sampled_from([1, 2, 4])


def test_offsets_of_an_example() -> None:
    """L = 10, R = 6, two ranks: chunks of 3 over a padded length of 12; logits [3, 9) predict tokens [4, 10)."""
    chunk, chunks, logits, tokens = C.get_logits_and_tokens_offset_with_cp(10, 6, cp_size=2, cp_rank=0)
    assert (chunk, chunks) == (3, ((0, 3), (9, 12)))
    assert (logits, tokens) == (((0, 0), (0, 0)), ((0, 0), (0, 0)))
    _, chunks, logits, tokens = C.get_logits_and_tokens_offset_with_cp(10, 6, cp_size=2, cp_rank=1)
    assert (chunks, logits, tokens) == (((3, 6), (6, 9)), ((3, 6), (6, 9)), ((4, 7), (7, 10)))


@settings(max_examples=60)
@given(SAMPLE, SIZES)
def test_every_response_token_belongs_to_one_rank(sample: tuple[int, list[int]], cp: int) -> None:
    prompt, mask = sample
    length, total = len(mask), prompt + len(mask)
    values = torch.arange(length, dtype=torch.float64)
    parts = [C.slice_log_prob_with_cp(values, total, length, cp_size=cp, cp_rank=r) for r in range(cp)]
    assert sorted(torch.cat(parts).tolist()) == values.tolist()
    placed = [C.place_in_response(part, total, length, cp_size=cp, cp_rank=rank) for rank, part in enumerate(parts)]
    assert torch.stack(placed).sum(0).tolist() == values.tolist()
    as_lists = [C.slice_log_prob_with_cp(values.tolist(), total, length, cp_size=cp, cp_rank=r) for r in range(cp)]
    assert as_lists == [part.tolist() for part in parts]


@settings(max_examples=60)
@given(SAMPLE, SIZES)
def test_output_rows_match_the_tokens_they_predict(sample: tuple[int, list[int]], cp: int) -> None:
    """A 'model' whose output at position t is the token at t + 1: the selected rows are the response itself."""
    prompt, mask = sample
    length, total = len(mask), prompt + len(mask)
    tokens = torch.arange(100, 100 + total)
    output = torch.cat([tokens[1:], torch.tensor([-7])])
    for rank in range(cp):
        local = C.slice_with_cp(output, -1, cp_size=cp, cp_rank=rank)
        rows = C.take_response_logits(local, total, length, cp_size=cp, cp_rank=rank)
        wanted = C.slice_log_prob_with_cp(tokens[prompt:], total, length, cp_size=cp, cp_rank=rank)
        assert rows.tolist() == wanted.tolist()


@settings(max_examples=60)
@given(st.lists(SAMPLE, min_size=1, max_size=4), SIZES, st.booleans(), st.booleans())
def test_reduced_values_and_gradients_add_up(
    samples: list[tuple[int, list[int]]], cp: int, per_token: bool, grouped: bool
) -> None:
    masks = [torch.tensor(mask) for _, mask in samples]
    lengths, totals = [len(mask) for mask in masks], [prompt + len(mask) for prompt, mask in samples]
    denoms = [3.0 + i for i in range(len(samples))] if grouped else None
    rows = [torch.linspace(-1, 2, n, dtype=torch.float64) for n in lengths]
    whole = torch.cat(rows).requires_grad_()
    wanted = get_sum_of_sample_mean(totals, lengths, masks, denoms, per_token)(whole)
    wanted.backward()
    again = torch.cat(rows).requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(cp):
        reduce = get_sum_of_sample_mean(totals, lengths, masks, denoms, per_token, cp_size=cp, cp_rank=rank)
        parts = [
            C.slice_log_prob_with_cp(row, t, n, cp_size=cp, cp_rank=rank)
            for row, t, n in zip(again.split(lengths), totals, lengths, strict=True)
        ]
        total = total + reduce(torch.cat(parts))
    total.backward()
    torch.testing.assert_close(total, wanted)
    torch.testing.assert_close(again.grad, whole.grad)


def test_slice_pads_with_a_value_or_a_function() -> None:
    tokens = torch.arange(1, 6)
    assert [C.slice_with_cp(tokens, 0, cp_size=2, cp_rank=r).tolist() for r in (0, 1)] == [[1, 2, 0, 0], [3, 4, 5, 0]]
    padded = C.slice_with_cp(tokens, lambda t, n: torch.cat([t, t.new_full((n,), 9)]), cp_size=2, cp_rank=0)
    assert padded.tolist() == [1, 2, 9, 9]
    assert C.slice_with_cp(tokens, 0, cp_size=1, cp_rank=0) is tokens


def test_wrong_lengths_are_named() -> None:
    with pytest.raises(AssertionError, match="2 values for a response of 3 tokens"):
        C.slice_log_prob_with_cp([0.0, 0.0], 5, 3, cp_size=2, cp_rank=0)
    with pytest.raises(ValueError, match="owns 3 response tokens"):
        C.place_in_response(torch.zeros(2), 10, 3, cp_size=2, cp_rank=1)
