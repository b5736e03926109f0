"""`RolloutManager` as a plain class: data flow from a rollout function to the shares of the training ranks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from helpers_ray import manager_args, write_jsonl

from slime.ray.rollout import RolloutManager
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.staleness import usual_version
from slime.utils.types import Sample


def fake_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Two groups of two samples with rewards 0 and 1; evaluation returns one data set."""
    groups = data_source.get_samples(args.rollout_batch_size)
    for sample in (sample for group in groups for sample in group):
        sample.tokens, sample.response_length = [1, 2, 3, 4 + sample.index % 2], 2
        sample.rollout_log_probs = [-0.5, -0.25]
        sample.reward, sample.status = float(sample.index % 2), Sample.Status.COMPLETED
    if evaluation:
        return RolloutFnEvalOutput(data={"toy": {"rewards": [1.0, 0.0], "samples": groups[0]}})
    return RolloutFnTrainOutput(samples=groups, metrics={"rollout/extra": 7})


def wrong_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Returns the evaluation form where the training form is due, and the other way round."""
    output = fake_rollout(args, rollout_id, data_source, evaluation=not evaluation)
    return output


@pytest.fixture
def local_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.put` without a cluster: the box holds the object itself."""
    monkeypatch.setattr(ray, "put", lambda value: value)


def make_manager(**changes: Any) -> RolloutManager:
    path = f"{__name__}.fake_rollout"
    manager = RolloutManager(manager_args(**{"rollout_function_path": path, **changes}), None)
    manager.load_inputs()
    return manager


def test_generate_gives_every_rank_its_share(local_put: None, tmp_path: Path) -> None:
    metrics = tmp_path / "m.jsonl"
    manager = make_manager(metrics_jsonl=str(metrics))
    manager.set_train_parallel_config({"dp_size": 2, "cp_size": 1})
    boxes = manager.generate(0)
    assert boxes is not None and len(boxes) == 2
    shares = [box.inner for box in boxes]
    assert sorted(i for share in shares for i in share["partition"]) == [0, 1, 2, 3]
    assert all(share["global_batch_sizes"] == [4] and len(share["tokens"]) == 2 for share in shares)
    assert sorted(i for share in shares for i in share["sample_indices"]) == [0, 1, 2, 3]
    line = json.loads(metrics.read_text())
    assert line["rollout/raw_reward"] == 0.5 and line["rollout/extra"] == 7 and line["rollout/step"] == 0
    assert manager.latest() == {"reward": 0.5}


def test_rewards_are_normalised_within_a_group(local_put: None) -> None:
    manager = make_manager()
    samples, _ = manager._get_rollout_data(0)
    raw, rewards = manager._post_process_rewards(samples)
    assert raw == [0.0, 1.0, 0.0, 1.0]
    assert rewards[0] + rewards[1] == pytest.approx(0.0, abs=1e-6) and rewards[1] > 0
    data = manager._convert_samples_to_train_data(samples)
    assert data["loss_masks"] == [[1, 1]] * 4 and data["rewards"] == rewards


def test_trailing_rollouts_are_carried_counted_and_trained_at_the_end(local_put: None, tmp_path: Path) -> None:
    """Three batches of 4 rollouts in steps of 3; a second manager goes on from the first checkpoint."""
    metrics = tmp_path / "m.jsonl"
    common = {"num_rollout": 3, "global_batch_size": 3, "save": str(tmp_path), "load": str(tmp_path)}
    manager = make_manager(metrics_jsonl=str(metrics), **common)
    shares = [_only_share(manager, 0)]
    manager.save(0)
    other = make_manager(metrics_jsonl=str(metrics), **common)
    other.load(0)
    shares += [_only_share(other, 1), _only_share(other, 2)]
    assert [share["global_batch_sizes"] for share in shares] == [[3], [3], [3, 3]]
    trained = [i for share in shares for i in share["sample_indices"] if i >= 0]
    assert trained == list(range(12))
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    counts = [
        (line["rollout/carried_in"], line.get("rollout/carried_out")) for line in lines if "rollout/carried_in" in line
    ]
    assert counts == [(0, 1), (1, 2), (2, None)]


def _only_share(manager: RolloutManager, rollout_id: int) -> dict[str, Any]:
    boxes = manager.generate(rollout_id)
    assert boxes is not None
    return boxes[0].inner


def test_shares_name_the_weights_of_their_rollout_when_old_ones_are_kept(local_put: None) -> None:
    samples = [Sample(weight_versions=versions) for versions in (["1", "2"], ["2"], ["3"], [])]
    assert (usual_version(samples), usual_version(samples[3:])) == (2, None)
    manager = make_manager(keep_old_actor=True, rollout_function_path=f"{__name__}.versioned_rollout")
    assert _only_share(manager, 0)["weight_version"] == 7
    assert "weight_version" not in _only_share(make_manager(), 0)


def versioned_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """`fake_rollout` of an engine with version 7."""
    output = fake_rollout(args, rollout_id, data_source)
    for sample in (sample for group in output.samples for sample in group):
        sample.weight_versions = ["7"]
    return output


def test_rollout_only_returns_no_data(local_put: None) -> None:
    assert make_manager(debug_rollout_only=True).generate(0) is None


def test_recorded_samples_are_replayed(local_put: None, tmp_path: Path) -> None:
    template = str(tmp_path / "{rollout_id}.pt")
    recorded = make_manager(save_debug_rollout_data=template).generate(3)
    replayed = make_manager(load_debug_rollout_data=template, debug_train_only=True).generate(3)
    assert recorded is not None and replayed is not None
    first, second = recorded[0].inner, replayed[0].inner
    assert [row.tolist() for row in first["tokens"]] == [row.tolist() for row in second["tokens"]]
    assert first["rewards"] == second["rewards"]


def test_evaluation_is_logged_and_needs_engines(tmp_path: Path) -> None:
    metrics = tmp_path / "m.jsonl"
    make_manager(metrics_jsonl=str(metrics)).eval(4)
    line = json.loads(metrics.read_text())
    assert (line["eval/toy"], line["eval/toy/n"], line["eval/step"]) == (0.5, 2, 4)
    skipped = tmp_path / "none.jsonl"
    make_manager(metrics_jsonl=str(skipped), debug_train_only=True).eval(4)
    assert not skipped.exists()


def test_a_rollout_function_must_return_the_form_that_was_asked_for() -> None:
    manager = make_manager(rollout_function_path=f"{__name__}.wrong_rollout")
    with pytest.raises(TypeError, match="RolloutFnEvalOutput"):
        manager.generate(0)
    with pytest.raises(TypeError, match="RolloutFnTrainOutput"):
        manager.eval(0)


def test_position_in_the_data_is_saved_and_restored(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"input": f"p{i}"} for i in range(10)])
    source = f"{__name__}.ListSource"
    manager = make_manager(data_source_path=source, save=str(tmp_path))
    manager.generate_rollout(manager.args, 0, manager.data_source, evaluation=False)
    manager.save(0)
    other = make_manager(data_source_path=source, load=str(tmp_path))
    other.load(0)
    assert other.data_source.position == manager.data_source.position == 2


class ListSource:
    """The least a `--data-source-path` class can be."""

    def __init__(self, args: Any) -> None:
        self.args, self.position = args, 0

    def __len__(self) -> int:
        return 10

    def get_samples(self, count: int) -> list[list[Sample]]:
        start, self.position = self.position, self.position + count
        size = self.args.n_samples_per_prompt
        return [[Sample(group_index=g, index=g * size + i) for i in range(size)] for g in range(start, self.position)]

    def save(self, rollout_id: int) -> None:
        Path(self.args.save, str(rollout_id)).write_text(str(self.position))

    def load(self, rollout_id: int) -> None:
        self.position = int(Path(self.args.load, str(rollout_id)).read_text())


def test_rollouts_of_an_epoch() -> None:
    assert make_manager().get_num_rollout_per_epoch() is None
    assert make_manager(data_source_path=f"{__name__}.ListSource").get_num_rollout_per_epoch() == 5


def test_engines_for_the_trainer() -> None:
    manager = make_manager()
    assert manager.get_updatable_engines_and_lock() == ([], None, 0, [], [], [])
    server = SimpleNamespace(
        update_weights=True,
        engines=["e"],
        num_new_engines=1,
        engine_gpu_counts=[1],
        engine_gpu_offsets=[2],
        engine_parallel_configs=[{"tp_size": 1}],
    )
    manager.servers = {"default": server}  # type: ignore[dict-item]
    assert manager.get_updatable_engines_and_lock() == (["e"], None, 1, [1], [2], [{"tp_size": 1}])
    manager.clear_updatable_num_new_engines()
    assert manager.get_updatable_engines_and_lock()[2] == 0 and manager.rollout_engines == ["e"]
