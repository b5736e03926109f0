"""The torch_dist format: written from Hugging Face weights it loads into Megatron on any layout, and comes back bit for bit."""

from __future__ import annotations

import pickle
from argparse import Namespace
from pathlib import Path

import helpers_convert as helpers
import helpers_fsdp
import pytest
import torch

from slime.backends.common.dcp_files import DcpReader, Piece, write_pieces
from slime.backends.common.hf_weights import SafetensorReader
from slime.backends.megatron_utils.torch_dist import (
    extra_states,
    hf_tensors,
    padded_rows,
    pieces_of_hf,
    read_common,
    write_common,
)
from slime.backends.megatron_utils.transformer_config import read_shape


def convert(model: Path, out: Path) -> Path:
    """What tools/convert_hf_to_torch_dist.py writes, in this process."""
    shape, reader = read_shape(model), SafetensorReader(model)
    out.mkdir()
    dtype = reader.get_dtype("model.norm.weight")
    write_pieces(out, list(pieces_of_hf(reader, shape, 128, dtype)), list(extra_states(shape)))
    write_common(out, Namespace(hidden_size=shape.hidden_size), 1)
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(Hugging Face models, their torch_dist checkpoints), one folder for each family."""
    root = tmp_path_factory.mktemp("dist")
    for family in helpers.FAMILIES:
        helpers.save_family(root / "hf" / family, family)
    (root / "dist").mkdir()
    for family in helpers.FAMILIES:
        convert(root / "hf" / family, root / "dist" / family)
    return root / "hf", root / "dist"


@pytest.mark.parametrize("family", helpers.FAMILIES)
def test_hf_to_torch_dist_to_hf_is_bit_exact(folders: tuple[Path, Path], family: str) -> None:
    hf, dist = folders
    back = dict(hf_tensors(DcpReader(dist / family), read_shape(hf / family)))
    helpers.assert_same_tensors(back, helpers.tensors_of(hf / family))


def _load_with_megatron(hf: str, dist_root: str, layouts: dict[tuple[int, int, int], tuple[str, ...]]) -> None:
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state, safe_globals

    from slime.backends.megatron_utils.megatron_to_hf import export_hf

    safe_globals.register_safe_globals()  # `common.pt` has a Namespace
    for sizes, families in layouts.items():
        helpers.start_megatron(*sizes)
        for family in families:
            folder = Path(hf) / family
            (model,) = helpers.megatron_model(folder, *sizes)
            state = {"model": model.sharded_state_dict(metadata={})}
            model.load_state_dict(dist_checkpointing.load(state, f"{dist_root}/{family}")["model"])
            tensors = dict(export_hf([model], Namespace(hf_checkpoint=str(folder))))
            helpers.assert_same_tensors(tensors, helpers.tensors_of(folder))
        dist.barrier()
        parallel_state.destroy_model_parallel()


def test_megatron_loads_it_on_any_layout(folders: tuple[Path, Path]) -> None:
    layouts = {(2, 1, 1): ("qwen2", "llama"), (1, 2, 1): ("qwen2", "qwen3"), (2, 1, 2): ("qwen3-moe",)}
    helpers_fsdp.run_workers(_load_with_megatron, 2, str(folders[0]), str(folders[1]), layouts)


def test_a_piece_is_read_without_the_others(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(2, 3, 4)

    def piece(i: int) -> Piece:
        return Piece("x", (i,), (1, 3, 4), (2, 3, 4), torch.float32, lambda: whole[i])

    write_pieces(tmp_path / "x", [piece(0), piece(1)])
    reader = DcpReader(tmp_path / "x")
    assert (reader.names(), reader.shape("x"), reader.dtype("x")) == (["x"], (2, 3, 4), torch.float32)
    assert torch.equal(reader.read("x"), whole) and torch.equal(reader.read("x", (1, 2)), whole[1, 2])


def test_a_foreign_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "ran",)  # type: ignore[return-value]

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bad()))
    with pytest.raises(ValueError, match="not part of a checkpoint"):
        DcpReader(tmp_path)
    torch.save({"args": Bad()}, tmp_path / "common.pt")
    with pytest.raises(ValueError, match="more than plain values"):
        read_common(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_what_is_missing_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no .metadata"):
        DcpReader(tmp_path)
    with pytest.raises(ValueError, match="no decoder.layers.self_attention.linear_qkv.bias"):
        list(hf_tensors(DcpReader(folders[1] / "qwen3"), read_shape(folders[0] / "qwen2")))
    assert read_common(folders[1] / "qwen3")["args"].hidden_size == 32
    assert padded_rows(106, 16, 2) == 128 and padded_rows(128, 128, 1) == 128


def _save_with_megatron(hf: str, out: str) -> None:
    """Two tensor-parallel ranks, as a training run saves."""
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_into

    helpers.start_megatron(2)
    from megatron.core import dist_checkpointing

    for family in ("qwen2", "qwen3-moe"):
        folder = Path(hf) / family
        (model,) = helpers.megatron_model(folder, 2)
        load_hf_into([model], folder, Namespace())
        target = Path(out) / family
        target.mkdir(exist_ok=True)
        dist_checkpointing.save({"model": model.sharded_state_dict(metadata={}), "args": Namespace(tp=2)}, str(target))


def test_saved_at_tp_2_it_loads_at_pp_2_and_in_fsdp(folders: tuple[Path, Path], tmp_path: Path) -> None:
    from slime.backends.fsdp_utils.model import load_hf

    hf, dist = folders[0], tmp_path / "dist"
    dist.mkdir()
    helpers_fsdp.run_workers(_save_with_megatron, 2, str(hf), str(dist))
    helpers_fsdp.run_workers(_load_with_megatron, 2, str(hf), str(dist), {(1, 2, 1): ("qwen2", "qwen3-moe")})
    for family in ("qwen2", "qwen3-moe"):
        flags = ["--input-dir", dist / family, "--output-dir", tmp_path / family, "--origin-hf-dir", hf / family]
        assert helpers.run_tool("convert_torch_dist_to_hf", *flags) == 0
        helpers.assert_same_tensors(helpers.tensors_of(tmp_path / family), helpers.tensors_of(hf / family))
        args = helpers_fsdp.make_args(tmp_path / family)
        ours, theirs = (load_hf(args, folder).state_dict() for folder in (tmp_path / family, hf / family))
        helpers.assert_same_tensors(ours, theirs)
