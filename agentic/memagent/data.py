"""Data of MemAgent: long documents from questions and paragraphs, closed-book filter, RULER tasks, inspection.

    python -m agentic.memagent.data build --questions Q [--passages P ...] --num-docs 50 200 --split train --output DIR
    python -m agentic.memagent.data filter --questions Q --endpoint MODEL=URL ... --output KEPT.jsonl
    python -m agentic.memagent.data ruler --task niah_single_1 ... --lengths 8k ... --tokenizer PATH --output DIR
    python -m agentic.memagent.data convert --input FILE --output PROMPTS.jsonl [--documents FILE]
    python -m agentic.memagent.data inspect FILE [--documents FILE] [--tokenizer PATH]

Files: `train_<docs>.jsonl` is slime's prompt file, `eval_<docs>.json` and `eval_<task>_<length>.json` have the published
form. Invariants: what is left out is counted by reason and shown with its place, good rows are kept; output files appear
complete or not at all. Leaves out: downloading.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agentic.common.command_line import Parser, positive
from agentic.common.data_files import Problem, Row, count_reasons, one_line, scan_rows, warn_problems
from agentic.common.errors import AgenticError, ConfigError, RoleUnavailable
from agentic.memagent.data_documents import DocumentPool, Question, load_pool, load_questions
from agentic.memagent.data_filter import FilterSettings, ask, decide, parse_endpoints
from agentic.memagent.data_items import Item, load_items, scan_items
from agentic.memagent.data_synthesis import arrange, render_documents
from agentic.memagent.ruler import TASKS, Material, check_material, make_samples
from slime.utils.processing_utils import load_tokenizer

logger = logging.getLogger(__name__)

INCOMPLETE = 3
BAD_ROWS = 1
CHUNK_TOKENS = 5000
Report = dict[str, Any]


def write_stream(path: Path, records: Iterable[dict[str, Any]]) -> int:
    """Write records one at a time, as lines (.jsonl) or as one list (.json); returns how many."""
    lines = path.suffix == ".jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    count = 0
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write("" if lines else "[")
            for record in records:
                file.write("" if lines else ",\n" if count else "\n")
                file.write(json.dumps(record, ensure_ascii=False) + ("\n" if lines else ""))
                count += 1
            file.write("" if lines else "\n]\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


# --------------------------------------------------------------------------------------------------------------------
# build


def build(args: Namespace) -> Report:
    """One file for every number of documents. Raises FileNotFoundError, ConfigError."""
    if args.split == "train" and args.contexts == "indices":
        raise ConfigError("--contexts indices: training reads texts; use it with --split eval")
    questions, problems = load_questions(args.questions, args.limit)
    warn_problems(args.questions, problems)
    pool = load_pool(args.passages or [args.questions], questions)
    report: Report = {"questions": len(questions), "left_out": count_reasons(problems), "pool": len(pool), "files": {}}
    suffix = "jsonl" if args.split == "train" else "json"
    for num_docs in args.num_docs:
        path = args.output / f"{args.split}_{num_docs}.{suffix}"
        records = (_long_record(args, question, pool, num_docs) for question in questions)
        report["files"][str(path)] = write_stream(path, records)
    if args.contexts == "indices":
        path = args.output / "documents.jsonl"
        passages = (dict(zip(("title", "text"), text.split("\n", 1), strict=True)) for text in pool.documents)
        report["files"][str(path)] = write_stream(path, passages)
    return report


def _long_record(args: Namespace, question: Question, pool: DocumentPool, num_docs: int) -> dict[str, Any]:
    order = arrange(question, pool, num_docs, args.seed, args.compat_shuffle)
    indices = args.contexts == "indices"
    context = order.indices if indices else render_documents([pool[index] for index in order.indices])
    places = {"own": list(order.own), "evidence": [(place - 0.5) / num_docs for place in order.evidence]}
    common = {"context": context, "num_docs": num_docs, "index": question.index, **places}
    if args.split == "eval":
        return {"input": question.text, "answers": list(question.answers), "id": question.id, **common}
    metadata = {"ground_truth": list(question.answers), "data_source": "hotpotqa", "id": question.id, **common}
    return {"prompt": question.text, "label": question.answers[0], "metadata": metadata}


# --------------------------------------------------------------------------------------------------------------------
# filter


def filter_questions(args: Namespace) -> tuple[int, Report]:
    """Exit code and counts; the output holds the records of the kept questions, unchanged."""
    settings = FilterSettings(
        args.tries,
        args.temperature,
        args.top_p,
        args.max_new_tokens,
        args.timeout_s,
        args.concurrency,
        args.api_key_env,
    )
    roles = parse_endpoints(args.endpoint, settings)
    questions, problems = load_questions(args.questions)
    warn_problems(args.questions, problems)
    folder = args.replies or args.output.with_name(args.output.name + ".replies")
    kept, undecided, counts = decide(questions, ask(questions, roles, settings, folder, args.questions))
    report = {**counts, "left_out": count_reasons(problems)}
    if undecided:
        sys.stderr.write(f"incomplete: {len(undecided)} questions lack replies; the same command asks again\n")
        return INCOMPLETE, report
    wanted = {question.index for question in kept[: args.limit]}
    rows = (row for row in scan_rows(args.questions) if isinstance(row, Row) and row.number in wanted)
    return 0, {**report, "written": write_stream(args.output, (row.record for row in rows))}


# --------------------------------------------------------------------------------------------------------------------
# ruler


def ruler(args: Namespace) -> Report:
    """One file for every task and length. Raises FileNotFoundError, ConfigError."""
    questions, problems = load_questions(args.questions) if args.questions else ([], [])
    warn_problems(args.questions or "", problems)
    material = Material(load_pool(args.passages or [], questions), questions, args.seed)
    for task in args.task:
        check_material(task, material)
    tokenizer = load_tokenizer(args.tokenizer)
    report: Report = {"files": {}}
    for task in args.task:
        for length in args.lengths:
            path = args.output / f"eval_{task}_{length}.json"
            report["files"][str(path)] = write_stream(path, _ruler_records(args, task, length, tokenizer, material))
            logger.info("%s", path)
    return report


def _ruler_records(
    args: Namespace, task: str, length: int, tokenizer: Any, material: Material
) -> Iterator[dict[str, Any]]:
    samples = make_samples(task, length, args.num_samples, tokenizer, material, args.reserve)
    for index, sample in enumerate(samples):
        key = "answers" if sample.qa else "outputs"
        base = {"index": index, "input": sample.question, "context": sample.context, key: sample.outputs}
        yield {**base, "task": task, "length": length, "evidence": sample.evidence}


# --------------------------------------------------------------------------------------------------------------------
# convert and inspect


def _load_documents(path: Path | None) -> DocumentPool | None:
    return None if path is None else load_pool([path], strict=True)


def convert(args: Namespace) -> Report:
    """slime's prompt file from any known shape. Raises FileNotFoundError, ConfigError when no row is good."""
    if args.output.resolve() == args.input.resolve() or args.output.suffix != ".jsonl":
        raise ConfigError(f"--output {args.output}: must end in .jsonl and be another file than the input")
    items, problems = load_items(args.input, _load_documents(args.documents), args.limit)
    written = write_stream(args.output, (item.to_prompt() for item in items))
    return {"written": written, "left_out": count_reasons(problems)}


def inspect(args: Namespace) -> tuple[int, Report]:
    """One line for every bad row, and what the good ones hold; the exit code tells whether there are bad rows."""
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    problems: list[Problem] = []
    facts = _Facts(tokenizer)
    for result in scan_items(args.file, _load_documents(args.documents)):
        if isinstance(result, Problem):
            problems.append(result)
            if len(problems) <= args.show:
                sys.stderr.write(f"{result}\n")
        else:
            facts.add(result)
    if len(problems) > args.show:
        sys.stderr.write(f"... and {len(problems) - args.show} more\n")
    report = {"file": str(args.file), "good": facts.count, "bad": len(problems), "reasons": count_reasons(problems)}
    return (BAD_ROWS if problems else 0), report | facts.summary()


class _Facts:
    """What the good rows of a file hold; keeps numbers, not contexts."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer
        self.count = 0
        self.counters: dict[str, Counter[str]] = {"kinds": Counter(), "sources": Counter(), "contexts": Counter()}
        self.sizes: dict[str, list[int]] = {"num_docs": [], "context_chars": [], "references": []}
        self.first: dict[str, Any] | None = None

    def add(self, item: Item) -> None:
        text = item.context.text
        self.count += 1
        self.counters["kinds"][item.kind] += 1
        self.counters["sources"][item.source] += 1
        self.counters["contexts"]["text" if item.context.given is not None else "indices"] += 1
        self._note("context_chars", len(text))
        self._note("references", len(item.references))
        if item.num_docs is not None:
            self._note("num_docs", item.num_docs)
        if self.tokenizer is not None:
            tokens = len(self.tokenizer.encode(text, add_special_tokens=False))
            self._note("context_tokens", tokens)
            self._note(f"chunks_of_{CHUNK_TOKENS}", -(-tokens // CHUNK_TOKENS))
        if self.first is None:
            self.first = {"question": item.question, "references": list(item.references), "context": one_line(text)}

    def _note(self, name: str, value: int) -> None:
        self.sizes.setdefault(name, []).append(value)

    def summary(self) -> Report:
        spread = {
            name: {"min": min(values), "mean": round(sum(values) / len(values), 1), "max": max(values)}
            for name, values in self.sizes.items()
            if values
        }
        counters = {name: dict(counter.most_common(10)) for name, counter in self.counters.items()}
        return {**counters, **spread, "first": self.first}


# --------------------------------------------------------------------------------------------------------------------
# Command line.


def parse_args(argv: Sequence[str]) -> Namespace:
    parser = Parser(prog="python -m agentic.memagent.data", description="Data of MemAgent.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, add_flags, text in (
        ("build", _build_flags, "long documents from questions and passages"),
        ("filter", _filter_flags, "leave out questions that models answer without documents"),
        ("ruler", _ruler_flags, "RULER tasks"),
        ("convert", _convert_flags, "slime's prompt file from a published file"),
        ("inspect", _inspect_flags, "validate a file and say what it holds"),
    ):
        add_flags(commands.add_parser(name, help=text).add_argument)
    return parser.parse_args(argv)


def _build_flags(add: Callable[..., Any]) -> None:
    add("--questions", type=Path, required=True, help="HotpotQA file, or records with question, answers, gold")
    add("--passages", type=Path, nargs="+", help="files with further documents (default: those of the questions)")
    add("--num-docs", type=positive, nargs="+", required=True, help="documents in a context; one file each")
    add("--split", choices=("train", "eval"), required=True, help="train: slime's prompt file; eval: published form")
    add("--output", type=Path, required=True, help="folder")
    add(
        "--contexts",
        choices=("text", "indices"),
        default="text",
        help="indices: with documents.jsonl beside the files",
    )
    add("--seed", type=int, default=0, help="with the number of the question it seeds choice and order")
    add("--compat-shuffle", action="store_true", help="own documents in the places of the published files")
    add("--limit", type=positive, help="first N questions")


def _filter_flags(add: Callable[..., Any]) -> None:
    defaults = FilterSettings()
    add("--questions", type=Path, required=True, help="as for build")
    add("--endpoint", action="append", required=True, metavar="MODEL=URL", help="OpenAI chat service; may be repeated")
    add("--output", type=Path, required=True, help="kept records, .jsonl")
    add("--replies", type=Path, help="folder of the replies (default: OUTPUT.replies)")
    add("--tries", type=positive, default=defaults.tries, help="replies of each model")
    add("--temperature", type=float, default=defaults.temperature)
    add("--top-p", type=float, default=defaults.top_p)
    add("--max-new-tokens", type=positive, default=defaults.max_new_tokens)
    add("--timeout-s", type=float, default=defaults.timeout_s, help="of one attempt")
    add("--concurrency", type=positive, default=defaults.concurrency, help="requests in flight")
    add("--api-key-env", help="environment variable with the bearer token")
    add("--limit", type=positive, help="keep the first N of those that are left")


def _ruler_flags(add: Callable[..., Any]) -> None:
    add("--task", nargs="+", choices=list(TASKS), required=True, metavar="TASK", help=", ".join(TASKS))
    add("--lengths", type=token_count, nargs="+", required=True, help="tokens, such as 8192 or 8k (= 8192)")
    add("--num-samples", type=positive, default=128)
    add("--tokenizer", required=True, help="model directory whose tokenizer measures the lengths")
    add("--passages", type=Path, nargs="+", help="text to hide needles in, and other documents for qa_1")
    add("--questions", type=Path, help="for qa_1")
    add("--reserve", type=positive, default=256, help="tokens of a length that are left free for prompt and answer")
    add("--output", type=Path, required=True, help="folder")
    add("--seed", type=int, default=0)


def _convert_flags(add: Callable[..., Any]) -> None:
    add("--input", type=Path, required=True, help=".parquet, .json or .jsonl")
    add("--output", type=Path, required=True, help="file to write, .jsonl")
    add("--documents", type=Path, help="documents behind contexts that are lists of indices")
    add("--limit", type=positive, help="first N good rows")


def _inspect_flags(add: Callable[..., Any]) -> None:
    add("file", type=Path)
    add("--documents", type=Path, help="documents behind contexts that are lists of indices")
    add("--tokenizer", help="model directory; adds lengths in tokens")
    add("--show", type=positive, default=20, help="lines about bad rows")


def token_count(text: str) -> int:
    """An argparse type: a number of tokens; `k` stands for 1024."""
    return positive(text[:-1]) * 1024 if text.lower().endswith("k") else positive(text)


def run(args: Namespace) -> tuple[int, Report]:
    """Exit code and report of a command."""
    if args.command == "filter":
        return filter_questions(args)
    if args.command == "inspect":
        return inspect(args)
    return 0, {"build": build, "ruler": ruler, "convert": convert}[args.command](args)


def main(argv: Sequence[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        code, report = run(parse_args(argv))
    except (ConfigError, FileNotFoundError, RoleUnavailable) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except AgenticError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
