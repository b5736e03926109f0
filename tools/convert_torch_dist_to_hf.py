"""Turns a Megatron checkpoint (torch_dist) into a Hugging Face directory. One process, no Megatron model, no GPU.

    python tools/convert_torch_dist_to_hf.py --input-dir RUN/iter_0000010 --output-dir OUT --origin-hf-dir MODEL

Reads one parameter at a time, so memory holds little more than one output file (--chunk-size). The output appears complete or not at
all; an existing one is an error without -f. Configuration, tokenizer and other files are those of --origin-hf-dir; without it,
--model-name and what the checkpoint says about itself are enough for the weights, and no configuration is written.
Exit code 2 with one line `error: ...` for what the user can mend.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.backends.common.dcp_files import DcpReader
from slime.backends.common.hf_weights import SHARD_BYTES, SafetensorReader, write_hf_directory
from slime.backends.megatron_utils.param_names import all_names, hf_names
from slime.backends.megatron_utils.torch_dist import hf_tensors, read_common, shape_of_args
from slime.backends.megatron_utils.transformer_config import read_shape
from slime.utils.arguments.parser import SlimeArgumentParser
from slime.utils.model_shape import FAMILIES, ModelShape


def make_parser() -> SlimeArgumentParser:
    parser = SlimeArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--input-dir", type=Path, required=True, help="iter_* or release directory of a Megatron run")
    add("--output-dir", type=Path, required=True, help="Hugging Face directory to make")
    add("--origin-hf-dir", type=Path, help="model directory that the run started from")
    add("--model-name", choices=sorted([*FAMILIES, "qwen2.5"]), help="family, when --origin-hf-dir is not given")
    add("-f", "--force", action="store_true", help="replace an existing --output-dir")
    add(
        "-a",
        "--add-missing-from-origin-hf",
        action="store_true",
        help="take what the checkpoint lacks from the origin",
    )
    add("--chunk-size", type=int, default=SHARD_BYTES, help="bytes of one output file (default 5 GiB)")
    add("--vocab-size", type=int, help="rows of the vocabulary to keep (default: the origin's)")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raise ValueError or FileNotFoundError for flags that cannot be used together or directories that are not there."""
    if args.output_dir.exists() and not args.force:
        raise ValueError(f"--output-dir {args.output_dir}: exists already; remove it, choose another, or give -f")
    if args.chunk_size < 1:
        raise ValueError(f"--chunk-size {args.chunk_size}: must be at least 1 byte")
    if args.origin_hf_dir is None and args.model_name is None:
        raise ValueError(
            "--origin-hf-dir: needed, to know the sizes of the model (or --model-name, for the weights alone)"
        )
    if args.add_missing_from_origin_hf and args.origin_hf_dir is None:
        raise ValueError("--add-missing-from-origin-hf: needs --origin-hf-dir")


def find_shape(args: argparse.Namespace, rows: int) -> ModelShape:
    """Sizes of the model. `rows`: those of the stored embedding, padding included."""
    if args.origin_hf_dir is not None:
        shape = read_shape(args.origin_hf_dir)
    else:
        shape = shape_of_args(read_common(args.input_dir).get("args"), args.model_name, rows)
    if args.vocab_size is not None:
        shape = dataclasses.replace(shape, vocab_size=args.vocab_size)
    if shape.vocab_size > rows:
        raise ValueError(f"--vocab-size {shape.vocab_size}: the checkpoint has {rows} rows only")
    return shape


def tensors(args: argparse.Namespace, reader: DcpReader, shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    """What to write: from the checkpoint, and with -a from the origin what is not there."""
    absent: list[str] = []
    yield from hf_tensors(reader, shape, absent.append if args.add_missing_from_origin_hf else None)
    if absent:
        origin = SafetensorReader(args.origin_hf_dir)
        for name in (hf_name for parameter in absent for hf_name in hf_names(parameter)):
            yield name, origin.get_tensor(name)
        sys.stderr.write(f"{len(absent)} parameters came from {args.origin_hf_dir}, such as {absent[0]}\n")


def run(args: argparse.Namespace) -> None:
    check(args)
    reader = DcpReader(args.input_dir)
    embedding = "embedding.word_embeddings.weight"
    if embedding not in reader.names():
        raise ValueError(f"--input-dir {args.input_dir}: no {embedding} in it; is it a Megatron checkpoint?")
    shape = find_shape(args, reader.shape(embedding)[0])
    total = sum(len(hf_names(name)) for name in all_names(shape))
    stream: Any = tqdm(tensors(args, reader, shape), total=total, desc="write", unit="tensor")
    size = write_hf_directory(args.output_dir, stream, args.origin_hf_dir, args.chunk_size)
    print(f"{args.output_dir}: {total} tensors, {size:,} bytes")


def main() -> None:
    parser = make_parser()
    args = parser.parse_strictly()
    try:
        run(args)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
