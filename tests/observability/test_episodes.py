from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.observability import episodes
from slime.utils.types import Sample


def test_a_sample_without_a_trace_is_one_row_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest of those that were solved only later is shown; what the policy did not generate counts as read."""

    def sample(reward: float, length: int) -> Sample:
        mask = [1] * (length - 1) + [0]
        return Sample(
            prompt="p", response="r", tokens=[7, *range(length)], response_length=length, loss_mask=mask, reward=reward
        )

    dumps = {0: [sample(0.0, 2), sample(0.0, 3), sample(1.0, 9)], 5: [sample(1.0, 2), sample(1.0, 3), sample(1.0, 9)]}
    monkeypatch.setattr(episodes, "load_debug_rollout_data", lambda _, rollout_id: dumps[rollout_id])
    monkeypatch.setattr(episodes, "load_tokenizer", lambda _: SimpleNamespace(decode=lambda ids: f"<{ids[0]}>"))
    before, after = episodes.load_eval_episodes(Path("x"), (0, 5), 3, Path("m"))
    assert (before.reward, after.reward) == (0.0, 1.0)
    (call,) = after.calls
    assert [(piece.text, piece.kind) for piece in call.pieces] == [
        ("<7>", "prompt"), ("<0>", "trained"), ("<1>", "trained"), ("<2>", "prompt"),
    ]  # fmt: skip
