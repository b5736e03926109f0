"""Loads a checkpoint into Megatron on any layout of ranks, gathers it, and writes or compares it as a Hugging Face model.

    python tools/convert_to_hf.py --hf-checkpoint MODEL --load RUN/iter_0000010 --output-dir OUT
    torchrun --nproc-per-node 2 tools/convert_to_hf.py --hf-checkpoint MODEL --load RUN --check-same --tensor-model-parallel-size 2

This is the path that weights take to the engines, so --check-same (every name, dtype and bit as in --hf-checkpoint) tells whether a
layout, or a converted checkpoint, is right. --load is a torch_dist directory, the --save of a run, or a Hugging Face directory. Without a
GPU it runs on gloo. To only change the format, tools/convert_torch_dist_to_hf.py needs less memory.
Exit code 2 with one line `error: ...` for what the user can mend, 1 when --check-same finds a difference.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.backends.common.hf_weights import SafetensorReader, write_hf_directory
from slime.backends.megatron_utils.capabilities import check_model_flags
from slime.backends.megatron_utils.transformer_config import read_text_config
from slime.utils.arguments.megatron import add_megatron_arguments
from slime.utils.arguments.parser import SlimeArgumentParser
from slime.utils.misc import get_free_port

NAMES_SHOWN = 5
PORTS_FROM = 21000
# What the model is built with, besides the flags of this tool.
FIXED = dict(
    gradient_checkpointing=False, only_train_params_name_list=None, freeze_params_name_list=None, distributed_backend=None,
    distributed_timeout_minutes=10, seed=0,
)  # fmt: skip


def make_parser() -> SlimeArgumentParser:
    parser = SlimeArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--hf-checkpoint",
        required=True,
        help="Hugging Face directory: configuration, tokenizer, and what --check-same compares",
    )
    add("--load", type=Path, required=True, help="checkpoint to read")
    add("--output-dir", type=Path, help="Hugging Face directory to make")
    add("--check-same", action="store_true", help="compare with the weights of --hf-checkpoint")
    add("-f", "--force", action="store_true", help="replace an existing --output-dir")
    add_megatron_arguments(parser)
    return parser


def check(args: argparse.Namespace) -> None:
    """Raise ValueError or FileNotFoundError before any process group or model is made."""
    if not args.check_same and args.output_dir is None:
        raise ValueError("--output-dir or --check-same: needed, else there is nothing to do")
    if args.output_dir is not None and args.output_dir.exists() and not args.force:
        raise ValueError(f"--output-dir {args.output_dir}: exists already; remove it, choose another, or give -f")
    if not args.load.is_dir():
        raise FileNotFoundError(f"--load {args.load}: no such directory")
    check_model_flags(args, read_text_config(args.hf_checkpoint))
    world = int(os.environ.get("WORLD_SIZE", 1))
    needed = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if world % needed:
        raise ValueError(
            f"{world} processes cannot be cut into groups of {needed} (tensor x pipeline x context parallel size)"
        )


def build(args: argparse.Namespace) -> Any:
    """This rank's stage with the weights of --load."""
    from slime.backends.megatron_utils import initialize

    initialize.init(args)
    from slime.backends.megatron_utils.checkpoint import load_weights, weights_dir
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_into
    from slime.backends.megatron_utils.model_provider import build_stage

    stage = build_stage(args)
    stored = weights_dir(args.load)
    if stored is not None:
        load_weights(stage, stored)
    else:
        load_hf_into([stage], args.load, args)
    return stage


def differences(tensors: Iterator[tuple[str, torch.Tensor]], reader: SafetensorReader) -> list[str]:
    """Names that are not the same in the directory, bit for bit. Exhausts `tensors`."""
    wrong, seen = [], set()
    for name, tensor in tensors:
        seen.add(name)
        theirs = reader.get_tensor(name) if name in reader.shards else None
        if theirs is None or theirs.dtype != tensor.dtype or not torch.equal(theirs, tensor.cpu()):
            wrong.append(name)
    return wrong + sorted(set(reader.shards) - seen)


def run(args: argparse.Namespace) -> int:
    """The exit code."""
    check(args)
    reader = SafetensorReader(args.hf_checkpoint)
    dtype = reader.get_dtype("model.norm.weight")
    args.train_dtype = "bf16" if dtype == torch.bfloat16 else "fp32"
    args.use_gpu = torch.cuda.is_available()
    vars(args).update(FIXED)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(get_free_port(PORTS_FROM)))
    stage = build(args)
    code = export(args, stage, reader)
    torch.distributed.destroy_process_group()
    return code


def export(args: argparse.Namespace, stage: Any, reader: SafetensorReader) -> int:
    """Write and compare; every rank takes part in gathering, rank 0 does the rest."""
    from slime.backends.megatron_utils.megatron_to_hf import export_hf

    main = torch.distributed.get_rank() == 0
    code = 0
    if args.output_dir is not None:
        tensors = export_hf([stage], args)
        if main:
            size = write_hf_directory(args.output_dir, tensors, Path(args.hf_checkpoint))
            print(f"{args.output_dir}: {size:,} bytes")
        else:
            exhaust(tensors)
    if args.check_same:
        wrong = differences(export_hf([stage], args), reader)
        code = 1 if wrong else 0
        if main:
            print(
                f"{len(wrong)} tensors differ, such as {', '.join(wrong[:NAMES_SHOWN])}"
                if wrong
                else "all tensors are the same"
            )
    torch.distributed.barrier()
    return code


def exhaust(tensors: Iterator[Any]) -> None:
    for _ in tensors:
        pass


def main() -> None:
    parser = make_parser()
    args = parser.parse_strictly()
    try:
        code = run(args)
    except (ValueError, FileNotFoundError, AssertionError) as error:
        parser.error(str(error))
    sys.exit(code)


if __name__ == "__main__":
    main()
