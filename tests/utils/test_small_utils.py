"""Weight deltas on disk, backed-up tensors, memory, FLOPs, media, mask helpers, shell commands, ended processes."""

from __future__ import annotations

import base64
import io
import multiprocessing
import subprocess
import time
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_rollout import save_tiny_tokenizer
from safetensors.torch import save_file

from slime.utils import disk_delta, flops_utils, memory_utils, processing_utils
from slime.utils.eval_config import build_eval_dataset_configs
from slime.utils.http_utils import terminate_process
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.misc import exec_command
from slime.utils.tensor_backper import TensorBackuper


def test_changed_elements_as_bytes() -> None:
    new = np.array([[1, 2], [3, 4]], dtype=np.int16)
    encoded = disk_delta.overwrite_encode(new, np.array([False, True, True, False]))
    count, positions = encoded[:4].view("<u4")[0], encoded[4:12].view("<u4")
    assert encoded.dtype == np.uint8 and (count, positions.tolist()) == (2, [1, 2])
    assert encoded[12:].view("<i2").tolist() == [2, 3]
    assert disk_delta.overwrite_encode(new, np.zeros(4, bool)).tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="3 entries"):
        disk_delta.overwrite_encode(new, np.zeros(3, bool))


def test_digests() -> None:
    data = np.arange(6, dtype=np.int32)
    assert int(disk_delta.checksum("adler32", data), 16) == zlib.adler32(data.tobytes())
    assert disk_delta.checksum("xxh3-128", data) == disk_delta.checksum("xxh3-128", bytearray(data.tobytes()))
    with pytest.raises(KeyError):
        disk_delta.checksum("md5", data)


def test_tensors_are_read_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([1.0]), "b": torch.tensor([2])}, tmp_path / "model.safetensors")
    read = disk_delta.make_tensor_reader(str(tmp_path))
    assert read("a").item() == 1.0 and read("b").item() == 2
    with pytest.raises(KeyError):
        read("c")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"c": "model.safetensors"}}')
    with pytest.raises(Exception, match="c"):
        disk_delta.make_tensor_reader(str(tmp_path))("c")
    with pytest.raises(FileNotFoundError, match="safetensors"):
        disk_delta.make_tensor_reader(str(tmp_path / "no"))


def test_several_sets_of_weights() -> None:
    weight = torch.tensor([1.0, 2.0])
    backup = TensorBackuper.create(lambda: [("w", weight)], single_tag=None)
    backup.backup("old")
    weight.mul_(10)
    backup.backup("new")
    backup.copy(src_tag="old", dst_tag="ref")
    backup.restore("ref")
    assert weight.tolist() == [1.0, 2.0] and sorted(backup.backup_tags) == ["new", "old", "ref"]
    assert backup.get("new")["w"].tolist() == [10.0, 20.0]
    with pytest.raises(KeyError):
        backup.restore("other")
    single = TensorBackuper.create(lambda: [("w", weight)], single_tag="actor")
    single.backup("actor")
    assert single.get("actor")["w"] is weight and single.backup_tags == ["actor"]
    with pytest.raises(KeyError, match="'actor'"):
        single.restore("ref")
    with pytest.raises(ValueError, match="one tag"):
        single.copy(src_tag="actor", dst_tag="ref")


def test_memory_is_reported() -> None:
    memory = memory_utils.print_memory("test", clear_before_print=True)
    assert memory["total_GB"] >= memory["free_GB"] > 0


def test_flops_of_a_dense_and_of_a_sparse_model() -> None:
    sizes = dict(
        hidden_size=8, num_layers=2, num_attention_heads=4, num_query_groups=2, vocab_size=16, ffn_hidden_size=32
    )
    dense = Namespace(**sizes)
    layer = 2 * 5 * 8 * 2 * (4 + 2 * 2) + 4 * 25 * (2 + 2) + 2 * 5 * 8 * 8 + 2 * 5 * 8 * 32 * 3
    assert flops_utils.calculate_layer_flops(dense, 5, 8, 4, 2, 32) == layer
    assert flops_utils.calculate_fwd_flops([5], dense) == 2 * layer + 2 * 5 * 8 + 2 * 5 * 8 * 16
    assert flops_utils.calculate_fwd_flops([5, 5], dense) == 2 * flops_utils.calculate_fwd_flops([5], dense)
    sparse = Namespace(**sizes, num_experts=8, moe_ffn_hidden_size=8, moe_router_topk=2, moe_layer_freq=[0, 1])
    saved = 2 * 5 * 8 * 3 * (32 - 16)
    assert flops_utils.calculate_fwd_flops([5], sparse) == flops_utils.calculate_fwd_flops([5], dense) - saved


def test_images_for_processor_and_engine(tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.new("RGB", (2, 2), (255, 0, 0))
    encoded = processing_utils.encode_image_for_rollout_engine(image)
    raw = base64.b64decode(encoded.removeprefix("data:image/png;base64,"))
    assert image_module.open(io.BytesIO(raw)).size == (2, 2)
    image.save(tmp_path / "a.png")
    parts = [{"type": "text", "text": "x"}, {"type": "image", "image": str(tmp_path / "a.png")}]
    parts.append({"type": "image_url", "image_url": {"url": encoded}})
    media = processing_utils.process_vision_info([{"role": "user", "content": parts}], None)
    assert [i.size for i in media["images"]] == [(2, 2), (2, 2)] and media["videos"] is None
    assert processing_utils.build_processor_kwargs({"images": [1]})["images"] == [1]
    with pytest.raises(ValueError, match="network"):
        processing_utils.load_image("https://example.com/a.png")


def test_mask_helpers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    generator = MultiTurnLossMaskGenerator(AutoTokenizer.from_pretrained(save_tiny_tokenizer(tmp_path)), "qwen3")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
    ids, mask = generator.get_loss_mask(chat)
    assert generator.gen_multi_turn_loss_mask_qwen3_5(chat) == (ids, mask)
    assert generator.gen_multi_turn_loss_mask_distill_qwen(chat)[1][-1] == 1
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}, chat[1]]
    assert generator.get_loss_mask_with_multimodal_alignment(parts, [9] * 3 + ids) == ([9] * 3 + ids, [0] * 3 + mask)
    with pytest.raises(ValueError, match="fewer"):
        generator.get_loss_mask_with_multimodal_alignment(parts, ids[1:])
    assert generator.find_all_sublist_indices([1, 2, 1, 2, 1], [1, 2]) == [0, 2]
    assert generator.get_system_message_length() == (0, len("assistant\n") + 1)


def test_shell_commands_of_ours() -> None:
    assert exec_command("echo a", capture_output=True) == "a\n" and exec_command("true") is None
    with pytest.raises(subprocess.CalledProcessError):
        exec_command("false")


def test_a_process_is_ended() -> None:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    terminate_process(process)  # type: ignore[arg-type]
    assert not process.is_alive()
    terminate_process(process)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["app_service", "min_eval_samples", "remote_environment"])
def test_evaluation_keys_without_a_service_are_refused(key: str) -> None:
    entry: dict[str, Any] = {"name": "a", "path": "b", key: {"x": 1} if key.startswith("remote") else 1}
    with pytest.raises(ValueError, match=f"{key}: not available"):
        build_eval_dataset_configs(Namespace(), [entry], {})
