"""Episodes for the report page, read from the evaluation dumps of a run.

Inputs: dumps of `save_debug_rollout_data` whose samples carry `metadata["trace"]` (role calls in order: role, text) and
`train_metadata["turns"]` (the policy's calls: tokens, response_length, loss_mask, role, text). Invariant: both episodes
are the same evaluation problem. A sample without a trace is shown as one row of tokens, in which those that the policy did
not generate (tool results) count as read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime.observability.report import Call, Episode, Piece
from slime.observability.rollout_data_utils import load_debug_rollout_data
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample


def load_eval_episodes(folder: Path, rollout_ids: tuple[int, int], n_eval: int, model: Path) -> list[Episode]:
    """The problem to show, before and after: one failed first and solved later if there is one, else the first.

    Only the first `n_eval` samples (the first evaluation set) of each dump are looked at.
    """
    template = str(folder / "eval_{rollout_id}.pt")
    before, after = (load_debug_rollout_data(template, rollout_id=i)[:n_eval] for i in rollout_ids)
    gained = [i for i, (b, a) in enumerate(zip(before, after, strict=True)) if _score(a) > _score(b)]
    # The longest episode tells most.
    chosen = max(gained, key=lambda i: (len(after[i].metadata.get("trace", [])), after[i].response_length), default=0)
    tokenizer = load_tokenizer(str(model))
    return [_episode(title, dump[chosen], tokenizer) for title, dump in (("Before", before), ("After", after))]


def _score(sample: Sample) -> float:
    """The reward as a number: a failed sample counts as 0, a reward dict by its `score`."""
    reward = sample.reward.get("score") if isinstance(sample.reward, dict) else sample.reward
    return float(reward or 0.0)


def _episode(title: str, sample: Sample, tokenizer: Any) -> Episode:
    turns = list((sample.train_metadata or {}).get("turns", []))
    calls = []
    for entry in sample.metadata.get("trace", []):
        pieces: tuple[Piece, ...] = ()
        if turns and (turns[0]["role"], turns[0]["text"]) == (entry["role"], entry["text"]):
            pieces = _pieces(turns.pop(0), tokenizer)
        calls.append(Call(entry.get("tool_name") or entry["role"], entry["text"], pieces))
    if not calls and sample.tokens:
        calls = [Call("policy", sample.response, _row(sample, tokenizer))]
    question = sample.metadata.get("question") or str(sample.prompt)
    return Episode(title, question, str(sample.label), _score(sample), tuple(calls))


def _row(sample: Sample, tokenizer: Any) -> tuple[Piece, ...]:
    mask = sample.loss_mask or [1] * sample.response_length
    kinds = ["prompt"] * (len(sample.tokens) - len(mask)) + ["trained" if kept else "prompt" for kept in mask]
    return _decoded(sample.tokens, kinds, tokenizer)


def _pieces(turn: dict[str, Any], tokenizer: Any) -> tuple[Piece, ...]:
    prompt = len(turn["tokens"]) - turn["response_length"]
    kinds = ["prompt"] * prompt + ["trained" if m and turn["trained"] else "masked" for m in turn["loss_mask"]]
    return _decoded(turn["tokens"], kinds, tokenizer)


def _decoded(tokens: list[int], kinds: list[str], tokenizer: Any) -> tuple[Piece, ...]:
    return tuple(Piece(tokenizer.decode([t]), kind) for t, kind in zip(tokens, kinds, strict=True))
