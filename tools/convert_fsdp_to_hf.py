"""Turns a checkpoint of the FSDP backend into a Hugging Face directory. One process, no GPU.

    python tools/convert_fsdp_to_hf.py --input-dir RUN/iter_0000010 --output-dir OUT --origin-hf-dir MODEL

The whole model passes through host memory. Weights keep the dtype in which they were stored (the float32 master weights).
The output appears complete or not at all; an existing one is an error without -f. Configuration, tokenizer and other files are those of
--origin-hf-dir. Exit code 2 with one line `error: ...` for what the user can mend.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.backends.common.dcp_files import DcpReader
from slime.backends.common.hf_files import copy_companion_files
from slime.backends.common.hf_weights import new_directory, read_config
from slime.utils.arguments.parser import SlimeArgumentParser

PREFIX = "model_state.model."
NAMES_SHOWN = 5


def make_parser() -> SlimeArgumentParser:
    parser = SlimeArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--input-dir", type=Path, required=True, help="iter_* directory of a run with --train-backend fsdp")
    add("--output-dir", type=Path, required=True, help="Hugging Face directory to make")
    add("--origin-hf-dir", type=Path, required=True, help="model directory that the run started from")
    add("-f", "--force", action="store_true", help="replace an existing --output-dir")
    return parser


def empty_model(folder: Path) -> Any:
    """The model of a directory without any memory for its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def check_names(model: Any, names: set[str], folder: Path) -> None:
    """Raise ValueError when the checkpoint is not one of this model."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    wanted = {name for name in model.state_dict() if name not in tied}
    wrong = sorted(wanted ^ names)
    if wrong:
        shown = ", ".join(wrong[:NAMES_SHOWN])
        raise ValueError(
            f"--input-dir {folder}: not a checkpoint of --origin-hf-dir, {len(wrong)} names differ: {shown}"
        )


def run(args: argparse.Namespace) -> None:
    if args.output_dir.exists() and not args.force:
        raise ValueError(f"--output-dir {args.output_dir}: exists already; remove it, choose another, or give -f")
    read_config(args.origin_hf_dir)
    reader = DcpReader(args.input_dir / "model")
    stored = [name for name in reader.names() if name.startswith(PREFIX)]
    model = empty_model(args.origin_hf_dir)
    check_names(model, {name.removeprefix(PREFIX) for name in stored}, args.input_dir)
    progress = tqdm(stored, desc="read", unit="tensor")
    state = {name.removeprefix(PREFIX): reader.read(name) for name in progress}
    model.config.dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    with new_directory(args.output_dir) as partial:
        model.save_pretrained(partial, state_dict=state)
        copy_companion_files(args.origin_hf_dir, partial)
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    print(f"{args.output_dir}: {len(state)} tensors, {size:,} bytes")


def main() -> None:
    parser = make_parser()
    args = parser.parse_strictly()
    try:
        run(args)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
