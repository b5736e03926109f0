"""Data source: order, numbering, epochs, buffer, saved position."""

from __future__ import annotations

import pytest
import torch
from helpers_rollout import rollout_args, save_tiny_tokenizer, write_jsonl

from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, pop_first


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    return save_tiny_tokenizer(tmp_path_factory.mktemp("tok"))


@pytest.fixture
def args(tokenizer_dir, tmp_path):
    data = write_jsonl(tmp_path / "data.jsonl", [{"prompt": f"p{i}", "label": str(i)} for i in range(5)])
    return rollout_args(tokenizer_dir, prompt_data=data, save=str(tmp_path / "ck"), load=str(tmp_path / "ck"))


def prompts(groups):
    return [group[0].prompt for group in groups]


def test_groups_are_numbered_over_the_whole_run(args):
    source = RolloutDataSource(args)
    groups = source.get_samples(2) + source.get_samples(1)
    assert [[s.group_index for s in g] for g in groups] == [[0, 0], [1, 1], [2, 2]]
    assert [[s.index for s in g] for g in groups] == [[0, 1], [2, 3], [4, 5]]
    assert prompts(groups) == ["p0", "p1", "p2"] and groups[1][0].label == "1"


def test_copies_are_independent(args):
    source = RolloutDataSource(args)
    (group,) = source.get_samples(1)
    group[0].metadata["x"] = 1
    assert "x" not in group[1].metadata and "x" not in source.dataset.samples[0].metadata


def test_epochs_wrap_as_often_as_needed(args):
    source = RolloutDataSource(args)
    assert prompts(source.get_samples(12)) == [f"p{i % 5}" for i in range(12)]
    assert source.epoch_id == 2 and source.sample_offset == 2 and len(source) == 5


def test_shuffle_depends_on_seed_and_epoch_only(args):
    args.rollout_shuffle = True
    first, second = RolloutDataSource(args), RolloutDataSource(args)
    a, b = prompts(first.get_samples(10)), prompts(second.get_samples(10))
    assert a == b and sorted(a[:5]) == sorted(a[5:]) == [f"p{i}" for i in range(5)] and a[:5] != a[5:]


@pytest.mark.parametrize("shuffle", [False, True])
def test_position_survives_save_and_load(args, shuffle):
    args.rollout_shuffle = shuffle
    source = RolloutDataSourceWithBuffer(args)
    source.get_samples(7)
    source.update_metadata({"note": [1, 2]})
    source.save(3)
    expected = source.get_samples(6)
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load(3)
    got = resumed.get_samples(6)
    assert prompts(got) == prompts(expected)
    assert [s.index for g in got for s in g] == [s.index for g in expected for s in g]
    assert resumed.get_metadata() == {"note": [1, 2]}


def test_position_is_found_when_load_names_one_iteration(args, tmp_path):
    source = RolloutDataSource(args)
    source.get_samples(3)
    source.save(4)
    args.load = str(tmp_path / "ck" / "iter_0000005")
    resumed = RolloutDataSource(args)
    resumed.load(4)
    assert prompts(resumed.get_samples(1)) == ["p3"]


def test_state_file_is_plain_and_at_the_contract_path(args, tmp_path):
    source = RolloutDataSource(args)
    source.get_samples(1)
    source.save(0)
    folder = tmp_path / "ck" / "rollout"
    assert [p.name for p in folder.iterdir()] == ["global_dataset_state_dict_0.pt"]
    state = torch.load(folder / "global_dataset_state_dict_0.pt", weights_only=True)
    assert state == {"sample_offset": 1, "epoch_id": 0, "sample_group_index": 1, "sample_index": 2, "metadata": {}}


def test_missing_state_starts_from_the_beginning(args):
    source = RolloutDataSource(args)
    source.load(99)
    assert prompts(source.get_samples(1)) == ["p0"]


def test_incomplete_state_is_an_error(args, tmp_path):
    path = tmp_path / "ck" / "rollout" / "global_dataset_state_dict_1.pt"
    path.parent.mkdir(parents=True)
    torch.save({"epoch_id": 1}, path)
    with pytest.raises(ValueError, match="sample_offset"):
        RolloutDataSource(args).load(1)


def test_without_prompt_data_samples_are_blank(tokenizer_dir):
    source = RolloutDataSource(rollout_args(tokenizer_dir))
    groups = source.get_samples(2)
    assert len(source) == 0 and [len(g) for g in groups] == [2, 2] and groups[0][0].prompt == ""


def test_plain_source_takes_nothing_back(args):
    with pytest.raises(RuntimeError, match="WithBuffer"):
        RolloutDataSource(args).add_samples([])


def test_buffer_is_served_first_and_in_order(args):
    source = RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(3)
    source.add_samples(groups)
    source.add_samples([])
    assert source.get_buffer_length() == 3
    assert source.get_samples(2) == groups[:2]
    assert prompts(source.get_samples(2)) == ["p2", "p3"] and source.get_buffer_length() == 0


@pytest.mark.parametrize("bad", [[["a"]], ["ab"], [[]]])
def test_malformed_groups_are_refused(args, bad):
    source = RolloutDataSourceWithBuffer(args)
    with pytest.raises(AssertionError, match="--n-samples-per-prompt 2|must be a list"):
        source.add_samples(bad)
    assert source.get_buffer_length() == 0


def last_first(args, rollout_id, buffer, num_samples):
    assert rollout_id is None
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def test_buffer_filter_hook(args):
    args.buffer_filter_path = f"{__name__}.last_first"
    source = RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(3)
    source.add_samples(groups)
    assert source.get_samples(1) == [groups[2]]


def test_pop_first_removes_what_it_returns():
    buffer = [["a"], ["b"], ["c"]]
    assert pop_first(None, None, buffer, 2) == [["a"], ["b"]] and buffer == [["c"]]
    assert pop_first(None, None, buffer, 5) == [["c"]] and buffer == []
