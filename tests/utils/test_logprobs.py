import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.utils import logprobs
from slime.utils.logprobs import selected_log_probs_and_entropy

N, D, V = 13, 8, 37


def make(n=N, dtype=torch.float32, bias=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    b = torch.randn(V, generator=generator).to(dtype).requires_grad_() if bias else None
    return hidden, weight, b, torch.randint(V, (n,), generator=generator)


def reference(hidden, weight, bias, targets, temperature):
    logits = hidden.float() @ weight.float().t()
    if bias is not None:
        logits = logits + bias.float()
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def gradients(outputs, inputs, with_entropy=True):
    log_probs, entropy = outputs
    scale = torch.linspace(-1, 2, len(log_probs))
    loss = (log_probs * scale).sum() + (0.7 * (entropy * scale.flip(0)).sum() if with_entropy else 0.0)
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_the_full_computation(chunk, bias, temperature):
    hidden, weight, b, targets = make(bias=bias)
    inputs = [hidden, weight] + ([b] if bias else [])
    got = selected_log_probs_and_entropy(hidden, weight, targets, temperature, chunk, b)
    want = reference(hidden, weight, b, targets, temperature)
    for a, e in zip(got, want, strict=True):
        torch.testing.assert_close(a, e, atol=1e-5, rtol=1e-5)
    for a, e in zip(gradients(got, inputs), gradients(want, inputs), strict=True):
        torch.testing.assert_close(a, e, atol=1e-5, rtol=1e-5)


def test_entropy_without_gradient_still_has_its_value():
    hidden, weight, _, targets = make()
    got = selected_log_probs_and_entropy(hidden, weight, targets, 1.0, 4, with_entropy=False)
    want = reference(hidden, weight, None, targets, 1.0)
    torch.testing.assert_close(got[1], want[1].detach(), atol=1e-5, rtol=1e-5)
    assert not got[1].requires_grad and got[0].requires_grad
    pairs = zip(
        gradients(got, [hidden, weight], with_entropy=False),
        gradients(want, [hidden, weight], with_entropy=False),
        strict=True,
    )
    for a, e in pairs:
        torch.testing.assert_close(a, e, atol=1e-5, rtol=1e-5)


def test_bf16_inputs_are_computed_in_float32(monkeypatch):
    monkeypatch.setattr(logprobs, "_CAST_ROWS", 10)  # several weight blocks, the last one short
    hidden, weight, _, targets = make(dtype=torch.bfloat16)
    got = selected_log_probs_and_entropy(hidden, weight, targets, 0.8, 4)
    want = reference(hidden, weight, None, targets, 0.8)
    for a, e in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, e, atol=1e-5, rtol=1e-5)
    for a, e in zip(gradients(got, [hidden, weight]), gradients(want, [hidden, weight]), strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a, e, atol=1e-5, rtol=2**-7)  # one rounding step of bfloat16


def test_tied_weight_collects_both_gradients():
    ids = torch.tensor([1, 5, 5, 30])
    weight = make()[1]

    def run(head):
        hidden = torch.nn.functional.embedding(ids, weight)
        return gradients(head(hidden), [weight])[0]

    got = run(lambda h: selected_log_probs_and_entropy(h, weight, ids.flip(0), 1.0, 3))
    want = run(lambda h: reference(h, weight, None, ids.flip(0), 1.0))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_no_rows_give_empty_results_and_zero_gradients():
    hidden, weight, _, targets = make(n=0)
    log_probs, entropy = selected_log_probs_and_entropy(hidden, weight, targets, 1.0, 4)
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, D) and not weight.grad.any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    hidden, weight, _, targets = make()
    with mode():
        got = selected_log_probs_and_entropy(hidden, weight, targets, 1.0, 4)
        want = reference(hidden, weight, None, targets, 1.0)
    torch.testing.assert_close(got[0], want[0], atol=1e-5, rtol=1e-5)
    assert not got[0].requires_grad


def test_frozen_hidden_states_train_the_weight_only():
    hidden, weight, _, targets = make()
    got = selected_log_probs_and_entropy(hidden.detach(), weight, targets, 1.0, 4)
    want = reference(hidden.detach(), weight, None, targets, 1.0)
    torch.testing.assert_close(gradients(got, [weight])[0], gradients(want, [weight])[0], atol=1e-5, rtol=1e-5)


def test_autocast_does_not_lower_the_precision():
    hidden, weight, _, targets = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = selected_log_probs_and_entropy(hidden, weight, targets, 1.0, 4)
    torch.testing.assert_close(got[0], reference(hidden, weight, None, targets, 1.0)[0], atol=1e-5, rtol=1e-5)


def test_extreme_logits_stay_finite():
    hidden, weight, _, targets = make()
    got = selected_log_probs_and_entropy(hidden * 1e4, weight, targets, 1.0, 4)
    assert all(torch.isfinite(x).all() for x in (*got, *gradients(got, [hidden, weight])))


def test_logits_exist_one_chunk_at_a_time(monkeypatch):
    sizes = []
    original = logprobs._chunk_logits

    def recording(*inputs):
        logits = original(*inputs)
        sizes.append(logits.numel())
        return logits

    monkeypatch.setattr(logprobs, "_chunk_logits", recording)
    hidden, weight, _, targets = make(n=50)
    gradients(selected_log_probs_and_entropy(hidden, weight, targets, 1.0, 8), [hidden])
    assert max(sizes) == 8 * V and len(sizes) == 14


@settings(max_examples=30, deadline=None)
@given(n=st.integers(0, 20), chunk=st.integers(1, 25), seed=st.integers(0, 5))
def test_chunk_size_does_not_matter(n, chunk, seed):
    hidden, weight, _, targets = make(n=n, seed=seed)
    got = selected_log_probs_and_entropy(hidden, weight, targets, 0.9, chunk)
    want = selected_log_probs_and_entropy(hidden, weight, targets, 0.9, 1000)
    for a, e in zip(got, want, strict=True):
        torch.testing.assert_close(a, e, atol=1e-5, rtol=1e-5)


def test_bad_arguments_are_refused():
    hidden, weight, _, targets = make()
    with pytest.raises(ValueError, match="temperature must be positive"):
        selected_log_probs_and_entropy(hidden, weight, targets, 0.0, 4)
    with pytest.raises(ValueError, match="--log-probs-chunk-size"):
        selected_log_probs_and_entropy(hidden, weight, targets, 1.0, -1)
    with pytest.raises(ValueError, match="expected hidden"):
        selected_log_probs_and_entropy(hidden, weight, targets[:-1], 1.0, 4)
