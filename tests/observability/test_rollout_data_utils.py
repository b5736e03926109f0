"""Debug dumps: round trip, plain types only, subsampling; rollout ids; tensors for the trainer."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from slime.observability.rollout_data_utils import (
    load_debug_rollout_data,
    save_debug_rollout_data,
    tensorize_rollout_data_for_training,
    validate_rollout_id_annotated,
)
from slime.utils.types import Sample


def test_round_trip(tmp_path):
    template = str(tmp_path / "dump" / "{rollout_id}.pt")
    rich = Sample(index=0, prompt=[{"role": "user", "content": "a"}], tokens=[1, 2], response_length=1, reward=0.5)
    rich.metadata = {"array": np.arange(3), "number": np.float64(2.5), "pair": (1, "x"), "tensor": torch.ones(2)}
    rich.status = Sample.Status.TRUNCATED
    rich.source = "extra attribute"
    save_debug_rollout_data(template, [[rich], [[Sample(index=1)]]], rollout_id=4, evaluation=False)
    assert [p.name for p in (tmp_path / "dump").iterdir()] == ["4.pt"]
    first, second = load_debug_rollout_data(template, rollout_id=4)
    assert (first.tokens, first.reward, first.status, first.source) == ([1, 2], 0.5, rich.status, "extra attribute")
    assert first.metadata["array"].tolist() == [0, 1, 2] and first.metadata["pair"] == (1, "x")
    assert type(first.metadata["number"]) is float and second.index == 1
    assert isinstance(rich.metadata["array"], np.ndarray)  # the sample itself is untouched


def test_evaluation_has_its_own_name(tmp_path):
    template = str(tmp_path / "{rollout_id}.pt")
    data = {"a": {"rewards": [1.0], "samples": [Sample(index=0)]}, "b": {"rewards": [0.0]}}
    save_debug_rollout_data(template, data, rollout_id=2, evaluation=True)
    saved = torch.load(tmp_path / "eval_2.pt", weights_only=True)
    assert saved["rollout_id"] == 2 and [s["index"] for s in saved["samples"]] == [0]


def test_no_template_no_file(tmp_path):
    save_debug_rollout_data(None, [Sample()], rollout_id=0, evaluation=False)
    assert list(tmp_path.iterdir()) == []


def test_objects_are_refused_by_name(tmp_path):
    bad = Sample(index=3, metadata={"turns": [{"x": object()}]})
    with pytest.raises(TypeError, match=r"sample 3.metadata.turns\[0\].x: cannot dump object"):
        save_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), [bad], rollout_id=0, evaluation=False)
    assert list(tmp_path.iterdir()) == []


class Evil:
    def __reduce__(self):
        return os.mkdir, ("should_not_exist",)


def test_a_foreign_dump_cannot_run_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"rollout_id": 0, "samples": [Evil()]}, tmp_path / "0.pt")
    with pytest.raises(Exception, match="[Ww]eights"):
        load_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), rollout_id=0)
    assert not (tmp_path / "should_not_exist").exists()


@pytest.mark.parametrize("ratio, expected", [(0.5, [0, 1, 6, 7]), (0.3, [0, 7]), (0.1, []), (1.0, list(range(8)))])
def test_subsampling_takes_both_ends(tmp_path, ratio, expected):
    template = str(tmp_path / "{rollout_id}.pt")
    save_debug_rollout_data(template, [Sample(index=i) for i in range(8)], rollout_id=0, evaluation=False)
    rows = load_debug_rollout_data(template, rollout_id=0, subsample_ratio=ratio)
    assert [s.index for s in rows] == expected


def test_a_missing_dump_names_flag_and_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="--load-debug-rollout-data.*9.pt"):
        load_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), rollout_id=9)


def test_rollout_ids_of_fan_out():
    plain = [[Sample(), Sample()]]
    good = [[[Sample(rollout_id=1), Sample(rollout_id=1)], [Sample(rollout_id=2)]], [Sample()]]
    validate_rollout_id_annotated(plain)
    validate_rollout_id_annotated(good)
    for ids in [(None, None), (1, 2), (1, None)]:
        with pytest.raises(ValueError, match="same rollout_id"):
            validate_rollout_id_annotated([[[Sample(rollout_id=i, index=5) for i in ids]]])


def test_tensors_for_the_trainer():
    data = {"tokens": [[1, 2], [3]], "loss_masks": [[1], [0]], "rollout_log_probs": [[-0.5], [0.0]], "rewards": [1, 2]}
    tensorize_rollout_data_for_training(data)
    assert [t.dtype for t in data["tokens"]] == [torch.int64] * 2 and data["tokens"][0].tolist() == [1, 2]
    assert data["loss_masks"][0].dtype == torch.int32 and data["rollout_log_probs"][0].dtype == torch.float32
    assert data["rewards"] == [1, 2] and "teacher_log_probs" not in data
