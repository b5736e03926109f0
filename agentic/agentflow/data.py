"""Training data of AgentFlow: public record shapes -> slime's prompt file.

    python -m agentic.agentflow.data convert --input FILE [--input FILE ...] --output OUT.jsonl [--seed N] [--limit N]
    python -m agentic.agentflow.data inspect FILE

Shapes (told apart by their fields): DAPO-Math-17k (`prompt`, `label`), its original (`prompt`, `reward_model`), the
authors' NQ + DeepMath mix (`question`, `result`, `source`), and the two sources of that mix: NQ (`question`,
`golden_answers`) and DeepMath (`question`, `final_answer`). Output: `{"prompt": question, "label": text, "metadata"}`.

Invariants: a record of no known shape is an error naming file and line; what is left out is counted by reason; the
first record of a question wins; instructions that a data set wraps around a question are removed, the original text is
kept in the metadata; the output file appears complete or not at all.
Leaves out: downloading, and prompts with images.
"""

from __future__ import annotations

import json
import logging
import random
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agentic.agentflow.rollout import question_of
from agentic.common.answers import is_integer_label
from agentic.common.command_line import Parser, positive
from agentic.common.errors import ConfigError
from agentic.common.evaluation import write_whole
from agentic.common.evaluation_records import Record, find_field, read_records

logger = logging.getLogger(__name__)

# The last sentences of a question that ask for answer tags: the roles' own prompts ask for their format themselves.
_TAG_REQUEST = re.compile(r"\s*(?:[^.?!\n]*<answer>[^\n]*)\Z", re.IGNORECASE)
# Fields that say which shape a record has; the first that fits, in this order.
SHAPES: dict[str, tuple[str, str]] = {
    "prompt_label": ("prompt", "label"),
    "prompt_reward_model": ("prompt", "reward_model"),
    "question_result": ("question", "result"),
    "nq": ("question", "golden_answers"),
    "deepmath": ("question", "final_answer"),
}


class Example(NamedTuple):
    """One question with its reference; empty texts are left to the caller to count."""

    prompt: str
    label: str
    metadata: dict[str, Any]
    shape: str


def read_example(record: Record, where: str) -> Example:
    """Bring a record of any known shape to question, label and metadata.

    Raises ConfigError for an unknown shape or a field of the wrong type.
    """
    shape = next((name for name, fields in SHAPES.items() if all(field in record for field in fields)), None)
    if shape is None:
        known = "; ".join(" + ".join(fields) for fields in SHAPES.values())
        raise ConfigError(f"{where}: record has the fields {', '.join(record)}; known shapes: {known}")
    text = _prompt_text(record[SHAPES[shape][0]], where)
    question = clean_question(text)
    if shape == "nq" and question and not question.endswith("?"):
        question += "?"
    metadata = {**_mapping(record.get("metadata")), **_origin(record)}
    if question != text.strip():
        metadata["original_prompt"] = text
    return Example(question, _label(record, shape, where), metadata, shape)


def clean_question(text: str) -> str:
    """The bare question: without DAPO's wrapper and without a trailing request for answer tags."""
    if not text.strip():
        return ""
    bare = _TAG_REQUEST.sub("", question_of(text, strip_wrapper=True)).strip()
    return bare or text.strip()


def _prompt_text(prompt: Any, where: str) -> str:
    if isinstance(prompt, str):
        return prompt
    users = [message for message in prompt if isinstance(message, Mapping)] if isinstance(prompt, list) else []
    texts = [message.get("content") for message in users if message.get("role") == "user"]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise ConfigError(f"{where}: the prompt must be a text or a list with one user message: {str(prompt)[:120]!r}")
    return texts[0]


def _label(record: Record, shape: str, where: str) -> str:
    value = record[SHAPES[shape][1]]
    if shape == "prompt_reward_model":
        value = _mapping(value).get("ground_truth")
    if isinstance(value, (list, tuple)):
        return "; ".join(str(answer) for answer in value)
    if value is None or isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return "" if value is None else str(value).strip()
    raise ConfigError(f"{where}: {SHAPES[shape][1]} is a {type(value).__name__}; expected a text or a number")


def _origin(record: Record) -> dict[str, Any]:
    """Where the record comes from: `source` and `id`, as far as it says."""
    extra = _mapping(record.get("extra_info"))
    source = find_field(record, "source", "data_source")
    id_ = find_field({**extra, **record}, "id", "index", "idx")
    return {key: value for key, value in (("source", source), ("id", id_)) if value is not None}


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def collect(paths: Iterable[Path]) -> tuple[list[Example], Counter[str]]:
    """Examples of all files in order, each question once, and counts by reason.

    Reasons: `read`, `kept`, `empty_prompt`, `empty_label`, `duplicate`, and `conflicting_label` (the same question
    again with another label).
    """
    kept: dict[str, Example] = {}
    counts: Counter[str] = Counter(read=0, kept=0)
    for path in paths:
        for where, record in read_records(path):
            example = read_example(record, where)
            counts["read"] += 1
            reason = _refusal(example, kept)
            counts[reason or "kept"] += 1
            if reason is None:
                kept[_key(example)] = example
    return list(kept.values()), counts


def _refusal(example: Example, kept: Mapping[str, Example]) -> str | None:
    if not example.prompt:
        return "empty_prompt"
    if not example.label:
        return "empty_label"
    earlier = kept.get(_key(example))
    if earlier is None:
        return None
    return "duplicate" if earlier.label == example.label else "conflicting_label"


def _key(example: Example) -> str:
    return " ".join(example.prompt.split())


def convert(inputs: Sequence[Path], output: Path, seed: int | None, limit: int | None) -> dict[str, int]:
    """Write the prompt file and return the counts; with a seed the examples of all files are shuffled together.

    Raises FileNotFoundError or ConfigError, also when nothing is left.
    """
    if output.suffix != ".jsonl":
        raise ConfigError(f"--output {output}: must end in .jsonl")
    if output.resolve() in [path.resolve() for path in inputs]:
        raise ConfigError(f"--output {output}: is one of the inputs; choose another file")
    examples, counts = collect(inputs)
    if seed is not None:
        random.Random(seed).shuffle(examples)
    examples = examples[:limit]
    if not examples:
        raise ConfigError(f"{', '.join(map(str, inputs))}: no usable example ({dict(counts)})")
    lines = ({"prompt": e.prompt, "label": e.label, "metadata": e.metadata} for e in examples)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return {**counts, "written": len(examples)}


def inspect(path: Path) -> dict[str, Any]:
    """What a file holds: counts, shapes, sources, kinds of labels, lengths of questions in characters, an example."""
    examples, counts = collect([path])
    if not examples:
        raise ConfigError(f"{path}: no usable example ({dict(counts)})")
    lengths = sorted(len(example.prompt) for example in examples)
    first = examples[0]
    return {
        "file": str(path),
        **counts,
        "shapes": dict(Counter(example.shape for example in examples)),
        "sources": dict(Counter(str(example.metadata.get("source")) for example in examples).most_common(10)),
        "labels": dict(Counter("integer" if is_integer_label(e.label) else "other" for e in examples)),
        "unwrapped": sum("original_prompt" in example.metadata for example in examples),
        "prompt_chars": {"min": lengths[0], "median": lengths[len(lengths) // 2], "max": lengths[-1]},
        "first": {"prompt": first.prompt, "label": first.label, "metadata": first.metadata},
    }


def parse_args(argv: Sequence[str]) -> Namespace:
    parser = Parser(prog="python -m agentic.agentflow.data", description="Training data of AgentFlow.")
    commands = parser.add_subparsers(dest="command", required=True)
    to_jsonl = commands.add_parser("convert", help="write slime's prompt file (jsonl)")
    to_jsonl.add_argument("--input", type=Path, action="append", required=True, help=".jsonl, .json, .parquet, .csv")
    to_jsonl.add_argument("--output", type=Path, required=True, help="file to write, .jsonl")
    to_jsonl.add_argument("--seed", type=int, help="shuffle all examples together (the authors' mix: 42)")
    to_jsonl.add_argument("--limit", type=positive, help="keep the first N, after shuffling")
    commands.add_parser("inspect", help="say what a file holds").add_argument("file", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    try:
        args = parse_args(argv)
        if args.command == "convert":
            report: dict[str, Any] = convert(args.input, args.output, args.seed, args.limit)
        else:
            report = inspect(args.file)
    except (ConfigError, FileNotFoundError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
