"""Writes docs/en/reference/models.md: the models of scripts/models, and how much GPU memory they need.

    python tools/make_memory_tables.py [--check]

Every number comes from `slime.utils.memory_estimate`; nothing is measured. With `--check` nothing is written and the exit code
is 1 when the page is not what the code says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from slime.utils.memory_estimate import (
    GIB,
    OTHER_BYTES,
    activation_bytes,
    engine_memory,
    fsdp_memory,
    kv_bytes_per_token,
    megatron_memory,
)
from slime.utils.model_shape import SCRIPTS, ModelShape, read_model_args, shape_of_model_args
from slime.utils.parallel_sizes import ParallelSizes, check_training

PAGE = ROOT / "docs/en/reference/models.md"
GPU_GIB = 80
TOKENS = 16384
FRACTION = 0.85
RANKS = (1, 2, 4, 8, 16, 32)
MEGATRON = (
    ParallelSizes(8),
    ParallelSizes(8, tensor=2, sequence_parallel=True),
    ParallelSizes(8, tensor=4, sequence_parallel=True),
    ParallelSizes(8, expert=8),
    ParallelSizes(32, tensor=8, sequence_parallel=True),
    ParallelSizes(32, tensor=4, pipeline=2, sequence_parallel=True),
)

HEAD = """# Models and memory

This page is written by `python tools/make_memory_tables.py`; a test fails when it is out of date.

The sizes of a model are the `MODEL_ARGS` of its script in `scripts/models`, and are compared with the parameters of the published
checkpoint and with the model that transformers builds. A model is given as a folder, and its own `config.json` counts; the
scripts are there for `--dry-run` before the model is downloaded, and for tools that want the flags of megatron-core:

```bash
source scripts/models/qwen2.5-7B.sh && echo "${MODEL_ARGS[@]}"
```

## What is tested

| family | sizes | trained here | served here |
|---|---|---|---|
| Qwen2.5 | tested | a tiny model on the CPU, from start to end | the same, SGLang on the CPU |
| Llama | tested | SmolLM2-135M (this architecture) on the CPU, two rollouts | the same |
| Qwen3 | tested | **untested** | **untested** |
| Qwen3-30B-A3B (experts) | tested | a tiny model on the CPU, in tests | the same, SGLang on the CPU |

No model of the sizes below has been trained or served with this repository, and nothing has been run on a GPU.

## Sizes
"""
TRAINING = f"""
## Training memory

GiB on the fullest GPU, with a budget of {TOKENS} tokens per GPU, recomputed activations and the reference model of the KL.
A dash: more than {GPU_GIB}. What is counted, and what cannot be (CUDA context, buffers of libraries: {OTHER_BYTES / GIB:.0f} GiB are
added for them), is said in `slime/utils/memory_estimate.py`; the numbers are estimates, no measurements. With `--colocate` the engine
comes on top while it generates; `--dry-run` of a launcher adds it up for the run at hand.

### FSDP

| model | {" | ".join(f"{ranks} GPU{'s' * (ranks > 1)}" for ranks in RANKS)} |
|---|{"---|" * len(RANKS)}
"""
ACTIVATIONS = f"""
### Activations

GiB for {TOKENS} tokens on one GPU, without and with recomputation of layers (`--gradient-checkpointing`).

| model | kept | recomputed |
|---|---|---|
"""
ENGINES = f"""
## Generation memory

An engine with {GPU_GIB} GiB for each GPU and `--sglang-mem-fraction-static {FRACTION}`: thousands of tokens that its KV cache
holds, by GPUs of the engine. A dash: the weights do not fit, or the heads cannot be divided.

| model | weights, GiB | KV cache of a token, KiB | 1 GPU | 2 GPUs | 4 GPUs | 8 GPUs |
|---|---|---|---|---|---|---|
"""


def models() -> dict[str, ModelShape]:
    """By name, in the order of size within a family."""
    shapes = {path.stem: shape_of_model_args(read_model_args(path), path.name) for path in SCRIPTS.glob("*.sh")}
    return dict(sorted(shapes.items(), key=lambda item: (item[0].split("-")[0][:5], item[1].num_params)))


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


def gib(size: int) -> str:
    return f"{size / GIB:.1f}" if size <= GPU_GIB * GIB else "-"


def size_rows(shapes: dict[str, ModelShape]) -> Iterator[str]:
    yield row("model", "parameters", "layers", "hidden", "heads", "key/value heads", "vocabulary")
    yield row(*["---"] * 7)
    for name, shape in shapes.items():
        yield row(
            f"`{name}`",
            f"{shape.num_params / 1e9:.2f} B",
            shape.num_layers,
            shape.hidden_size,
            f"{shape.num_attention_heads} x {shape.kv_channels}",
            shape.num_query_groups,
            f"{shape.vocab_size:,}",
        )


def fsdp_rows(shapes: dict[str, ModelShape]) -> Iterator[str]:
    for name, shape in shapes.items():
        memory = [fsdp_memory(shape, ParallelSizes(ranks), TOKENS, True, True).total for ranks in RANKS]
        yield row(f"`{name}`", *map(gib, memory))


def megatron_cell(shape: ModelShape, sizes: ParallelSizes) -> str:
    try:
        check_training(sizes, shape)
    except ValueError:
        return "-"
    return gib(megatron_memory(shape, sizes, TOKENS, True, True).total)


def megatron_rows(shapes: dict[str, ModelShape]) -> Iterator[str]:
    heads = [f"{sizes.world} GPUs: {sizes.describe()}" for sizes in MEGATRON]
    yield "\n### Megatron\n\n" + row("model", *heads) + row(*["---"] * (len(heads) + 1))
    for name, shape in shapes.items():
        yield row(f"`{name}`", *(megatron_cell(shape, sizes) for sizes in MEGATRON))


def activation_rows(shapes: dict[str, ModelShape]) -> Iterator[str]:
    for name, shape in shapes.items():
        both = (activation_bytes(shape, ParallelSizes(1), TOKENS, recompute) for recompute in (False, True))
        yield row(f"`{name}`", *(f"{size / GIB:.1f}" for size in both))


def engine_cell(shape: ModelShape, gpus: int) -> str:
    tokens = engine_memory(shape, GPU_GIB * GIB, FRACTION, gpus).tokens
    divides = shape.num_attention_heads % gpus == 0
    return f"{tokens // 1000:,}" if divides and tokens > 0 else "-"


def engine_rows(shapes: dict[str, ModelShape]) -> Iterator[str]:
    for name, shape in shapes.items():
        cells = [engine_cell(shape, gpus) for gpus in (1, 2, 4, 8)]
        yield row(f"`{name}`", f"{2 * shape.num_params / GIB:.1f}", kv_bytes_per_token(shape) // 1024, *cells)


def page() -> str:
    shapes = models()
    parts = [HEAD, "\n", *size_rows(shapes), TRAINING, *fsdp_rows(shapes), *megatron_rows(shapes)]
    return "".join([*parts, ACTIVATIONS, *activation_rows(shapes), ENGINES, *engine_rows(shapes)])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Write docs/en/reference/models.md.", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="only compare, exit code 1 when the page is out of date")
    args = parser.parse_args(argv)
    if not args.check:
        PAGE.write_text(page(), encoding="utf-8")
        print(PAGE)
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"error: {PAGE} is out of date: run python tools/make_memory_tables.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
