"""Packing, batches, learning rates, finding checkpoints, refused options: pure parts, no process group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helpers_fsdp as helpers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.backends.common import checkpoint_files as checkpoint
from slime.backends.common.batches import plan_steps, prepare_rollout_data, take_rows
from slime.backends.common.hf_files import require_hf_dir
from slime.backends.common.packing import pack_rows
from slime.backends.common.schedule import learning_rate, planned_steps
from slime.backends.fsdp_utils.capabilities import check_supported

ROW = st.tuples(st.integers(1, 5), st.lists(st.integers(0, 1), min_size=1, max_size=6))


@given(st.lists(ROW, min_size=1, max_size=5))
def test_packing_selects_the_trained_tokens_and_scatters_back(rows: list[tuple[int, list[int]]]) -> None:
    tokens = [torch.arange(prompt + len(mask)) + 100 * i for i, (prompt, mask) in enumerate(rows)]
    masks = [torch.tensor(mask) for _, mask in rows]
    packed = pack_rows(tokens, [len(mask) for mask in masks], masks)
    flat = packed.input_ids_1T[0]
    assert flat.tolist() == [int(t) for row in tokens for t in row]
    assert packed.position_ids_1T[0].tolist() == [i for row in tokens for i in range(len(row))]
    assert torch.equal(flat[packed.select_N + 1], packed.targets_N)
    scattered = packed.scatter(packed.targets_N.float())
    for row, mask, seen in zip(tokens, masks, scattered, strict=True):
        assert seen.tolist() == (row[-len(mask) :] * mask).tolist()


def test_scatter_is_differentiable_only_at_trained_tokens() -> None:
    packed = pack_rows([torch.tensor([1, 2, 3, 4])], [3], [torch.tensor([1, 0, 1])])
    values = torch.tensor([5.0, 7.0], requires_grad=True)
    packed.scatter(values)[0].mul(torch.tensor([2.0, 3.0, 4.0])).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [2.0, 4.0]


def test_row_without_context_is_an_error() -> None:
    with pytest.raises(ValueError, match="row 1: the first token"):
        pack_rows([torch.tensor([1, 2]), torch.tensor([3, 4])], [1, 2], [torch.tensor([1]), torch.tensor([1, 1])])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_masks": [[1, 1, 1]]}, "row 0: loss_mask has 3 entries but response_length is 2"),
        ({"response_lengths": [5], "loss_masks": [[1] * 5]}, "row 0: response_length 5 does not fit into 3 tokens"),
        ({"rollout_log_probs": [[0.0]]}, "row 0: 1 rollout_log_probs but response_length is 2"),
        ({"rollout_mask_sums": None}, "rollout data lacks"),
    ],
)
def test_broken_rollout_data_names_the_row(change: dict[str, Any], message: str) -> None:
    data: dict[str, Any] = {
        "tokens": [[1, 2, 3]], "response_lengths": [2], "loss_masks": [[1, 1]], "rewards": [0.0], "rollout_mask_sums": [2],
        "micro_batch_indices": [[0]], "num_microbatches": [1], "global_batch_sizes": [1], **change,
    }  # fmt: skip
    if data["rollout_mask_sums"] is None:
        del data["rollout_mask_sums"]
    with pytest.raises(ValueError, match=message):
        prepare_rollout_data(data, torch.device("cpu"))


def test_batches_keep_rows_together() -> None:
    args = helpers.make_args("x")
    data = prepare_rollout_data(helpers.split(args, helpers.make_rollout(0), 0, 2), torch.device("cpu"))
    plans = plan_steps(data)
    assert [plan.global_batch_size for plan in plans] == [4, 4]
    rows = plans[1].micro_batches[1]
    batch, packed = take_rows(data, rows)
    assert [row.tolist() for row in batch["tokens"]] == [data["tokens"][i].tolist() for i in rows]
    assert batch["total_lengths"] == [len(data["tokens"][i]) for i in rows]
    assert "raw_reward" not in batch and packed.response_lengths == tuple(batch["response_lengths"])


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({"lr_decay_style": "constant", "lr_warmup_iters": 2}, [0.5, 1.0, 1.0, 1.0]),
        ({"lr_decay_style": "linear", "lr_decay_iters": 4}, [1.0, 0.775, 0.55, 0.325, 0.1, 0.1]),
        ({"lr_decay_style": "cosine", "lr_decay_iters": 2}, [1.0, 0.55, 0.1]),
        ({"lr_decay_style": "WSD", "lr_decay_iters": 4, "lr_wsd_decay_iters": 2}, [1.0, 1.0, 1.0, 0.55, 0.1]),
        ({"lr_decay_style": "linear", "num_rollout": 2, "global_batch_size": 4}, [1.0, 0.775]),
        ({"lr_decay_style": "linear", "num_rollout": 2, "global_batch_size": 5}, [1.0, 0.775]),  # 8 rollouts: 5 + 3
    ],
)
def test_learning_rates(flags: dict[str, Any], wanted: list[float]) -> None:
    args = helpers.make_args("x", lr=1.0, min_lr=0.1, **flags)
    assert [learning_rate(args, step) for step in range(len(wanted))] == pytest.approx(wanted)


def test_decay_without_an_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="--lr-decay-iters"):
        learning_rate(helpers.make_args("x", lr_decay_style="cosine", num_rollout=None), 0)
    with pytest.raises(ValueError, match="--lr-wsd-decay-iters"):
        learning_rate(helpers.make_args("x", lr_decay_style="WSD"), 0)


def _fake_iteration(root: Path, number: int, complete: bool = True) -> Path:
    folder = checkpoint.iteration_dir(root, number)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / ".metadata").write_text("x")
    if complete:
        (folder / "meta.json").write_text(json.dumps({}))
    return folder


def test_finding_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = _fake_iteration(tmp_path, 1)
    assert checkpoint.find_checkpoint(None) is None
    assert checkpoint.find_checkpoint(str(tmp_path / "absent")) is None
    assert checkpoint.find_checkpoint(str(tmp_path)) is None, "without a tracker nothing was finished"
    checkpoint.write_text_atomically(tmp_path / checkpoint.TRACKER, "1\n")
    assert checkpoint.find_checkpoint(str(tmp_path)) == first
    assert checkpoint.find_checkpoint(str(first)) == first
    _fake_iteration(tmp_path, 2, complete=False)
    _fake_iteration(tmp_path, 9)  # of an earlier run
    checkpoint.write_text_atomically(tmp_path / checkpoint.TRACKER, "2\n")
    assert checkpoint.find_checkpoint(str(tmp_path)) == first and "not a complete checkpoint" in caplog.text
    with pytest.raises(FileNotFoundError, match="--ckpt-step 2"):
        checkpoint.find_checkpoint(str(tmp_path), step=2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"use_routing_replay": True}, "--use-routing-replay=True is not available .* only with megatron"),
        ({"opd_type": "megatron"}, "--opd-type=megatron"),
        ({"loss_type": "value_loss"}, "--loss-type=value_loss"),
        ({"advantage_estimator": "dpo"}, "--advantage-estimator=dpo"),
        ({"lr_decay_style": "inverse"}, "--lr-decay-style=inverse"),
        ({"rollout_top_p": 0.9}, "--rollout-top-p=0.9"),
        ({"lora_alpha": 8.0}, "--lora-alpha 8.0: has no effect without --lora-rank"),
        ({"lora_dropout": 0.1}, "--lora-dropout 0.1: has no effect without --lora-rank"),
        ({"lora_rank": 4, "lora_dropout": 1.0}, "--lora-dropout 1.0: must be at least 0 and less than 1"),
        ({"lora_rank": 4, "freeze_params_name_list": ["x"]}, "--freeze-params-name-list: --lora-rank trains its"),
        ({"lora_rank": 4, "ref_update_interval": 2}, "--ref-update-interval: the reference of --lora-rank is"),
    ],
)
def test_options_that_would_be_ignored_are_refused(flags: dict[str, Any], message: str) -> None:
    check_supported(helpers.make_args("x"))
    with pytest.raises(ValueError, match=message):
        check_supported(helpers.make_args("x", **flags))


def test_the_critic_has_a_head_of_its_own() -> None:
    args = helpers.make_args("x", untie_embeddings_and_output_weights=True)
    check_supported(args, "critic")
    with pytest.raises(ValueError, match="--untie-embeddings-and-output-weights"):
        check_supported(args)


def test_model_directory_without_config_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--hf-checkpoint .*no config.json"):
        require_hf_dir(str(tmp_path), "--hf-checkpoint")


@pytest.mark.parametrize(
    ("mode", "global_batch_size", "steps"),
    [("carry", 3, 27), ("pad", 3, 30), ("drop", 3, 20), ("carry", 4, 20), ("carry", 16, 10)],
)
def test_planned_steps_follow_the_trailing_rollouts(mode: str, global_batch_size: int, steps: int) -> None:
    """10 batches of 8 rollouts; a batch that is smaller than a step is padded."""
    args = helpers.make_args(".", trailing_rollouts=mode, global_batch_size=global_batch_size)
    assert planned_steps(args) == steps
