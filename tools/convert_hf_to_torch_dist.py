"""Turns a Hugging Face model into a Megatron checkpoint (torch_dist) for --load and --ref-load. No Megatron model, no GPU.

    python tools/convert_hf_to_torch_dist.py --hf-checkpoint MODEL --save OUT [model arguments]
    torchrun --nproc-per-node 8 tools/convert_hf_to_torch_dist.py --hf-checkpoint MODEL --save OUT

Writes OUT/release and points OUT/latest_checkpointed_iteration.txt at it. The checkpoint loads with any tensor, pipeline and expert
parallel size. Sizes come from the model; model arguments (scripts/models) are compared with them. Of Megatron's other arguments only those
that say how far the vocabulary is padded matter; a training script's may all be given. Several processes (torchrun, or srun with one task a process) share the work. Values keep their dtype, unless
--bf16 or --fp16 says otherwise. An existing OUT/release is an error; OUT/release appears complete or not at all.
Exit code 2 with one line `error: ...` for what the user can mend.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.backends.common.dcp_files import write_pieces
from slime.backends.common.hf_weights import SafetensorReader
from slime.backends.megatron_utils.capabilities import check_model_flags
from slime.backends.megatron_utils.hf_to_megatron.common import check_tensor_names
from slime.backends.megatron_utils.torch_dist import (
    args_of_shape,
    extra_states,
    padded_rows,
    pieces_of_hf,
    write_common,
)
from slime.backends.megatron_utils.transformer_config import read_shape, read_text_config
from slime.utils.arguments.megatron import add_megatron_arguments
from slime.utils.arguments.parser import SlimeArgumentParser
from slime.utils.model_shape import ModelShape

NAME, TRACKER = "release", "latest_checkpointed_iteration.txt"


def make_parser() -> SlimeArgumentParser:
    parser = SlimeArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hf-checkpoint", type=Path, required=True, help="Hugging Face model directory")
    add("--save", type=Path, required=True, help="root of the checkpoint to make")
    add("--bf16", action="store_true", help="store bfloat16")
    add("--fp16", action="store_true", help="store float16")
    add("--padded-vocab-size", type=int, help="rows of the vocabulary, instead of the next multiple")
    add("--allgather-cp", action="store_true", help="not available: only architectures without a converter have it")
    add_megatron_arguments(parser)
    return parser


def check(args: argparse.Namespace, shape: ModelShape) -> None:
    """Raise ValueError for what cannot be done, before anything is written."""
    target = args.save / NAME
    if target.exists():
        raise ValueError(f"--save {args.save}: {target} exists already; remove it or choose another directory")
    if args.custom_model_provider_path or args.allgather_cp:
        flag = "--custom-model-provider-path" if args.custom_model_provider_path else "--allgather-cp"
        raise ValueError(f"{flag}: not available, only {args.hf_checkpoint}'s own architecture is converted; drop it")
    if args.bf16 and args.fp16:
        raise ValueError("--bf16 and --fp16: give one of them")
    if args.padded_vocab_size is not None and args.padded_vocab_size < shape.vocab_size:
        raise ValueError(f"--padded-vocab-size {args.padded_vocab_size}: the model has {shape.vocab_size} rows")


def rows_of(args: argparse.Namespace, shape: ModelShape) -> int:
    """Rows of the stored vocabulary."""
    if args.padded_vocab_size is not None:
        return args.padded_vocab_size
    return padded_rows(shape.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size)


def dtype_of(args: argparse.Namespace, reader: SafetensorReader) -> torch.dtype:
    """The dtype to store: the flag's, else the model's own."""
    if args.bf16 or args.fp16:
        return torch.bfloat16 if args.bf16 else torch.float16
    return reader.get_dtype("model.norm.weight")


@contextmanager
def ranks() -> Iterator[tuple[int, int]]:
    """(rank, number of ranks); joins the others over gloo when there are any."""
    for name, slurm in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")):
        if name not in os.environ and slurm in os.environ and "MASTER_ADDR" in os.environ:
            os.environ[name] = os.environ[slurm]
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        yield 0, 1
        return
    dist.init_process_group("gloo")
    yield dist.get_rank(), world
    dist.destroy_process_group()


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def write(
    args: argparse.Namespace, shape: ModelShape, reader: SafetensorReader, folder: Path, rank: int, world: int
) -> None:
    """This rank's share of the pieces, one after the other."""
    pieces = list(pieces_of_hf(reader, shape, rows_of(args, shape), dtype_of(args, reader)))[rank::world]
    states = list(extra_states(shape))[rank::world]
    with tqdm(total=len(pieces) + len(states), desc="write", unit="piece", disable=rank != 0) as progress:
        write_pieces(folder, pieces, states, lambda _: progress.update() and None)


def run(args: argparse.Namespace) -> None:
    shape = read_shape(args.hf_checkpoint)
    check(args, shape)
    check_model_flags(args, read_text_config(args.hf_checkpoint))
    reader = SafetensorReader(args.hf_checkpoint)
    check_tensor_names(reader, shape)
    target = args.save / NAME
    partial = args.save / f"{NAME}.tmp"
    with ranks() as (rank, world):
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        barrier()
        write(args, shape, reader, partial, rank, world)
        barrier()
        if rank == 0:
            write_common(partial, args_of_shape(shape), 1)
            os.rename(partial, target)
            (args.save / TRACKER).write_text(NAME + "\n")
            print(f"{target}: {shape.num_layers} layers; load it with --load {args.save}")


def main() -> None:
    parser = make_parser()
    args = parser.parse_strictly()
    try:
        run(args)
    except (ValueError, FileNotFoundError, AssertionError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
