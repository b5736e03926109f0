"""Training data of ToolOrchestra: tasks -> slime's prompt file, with tools, models, prices and preference drawn per record.

    python -m agentic.toolorchestra.data tau2 --domain airline retail --aliases FILE --roles FILE --output OUT.jsonl
    python -m agentic.toolorchestra.data toolscale --input FILE ... --aliases FILE --output OUT.jsonl
    python -m agentic.toolorchestra.data qa --input FILE ... --aliases FILE --output OUT.jsonl
    python -m agentic.toolorchestra.data inspect FILE

Invariants: a record depends on the seed, its task and its variant only, not on its neighbours; what is left out is counted
by reason and shown with its place; a held-out task never stands in the training file; beside every file stands
`<file>.sources.json` with the hashes of what it was made from; files appear complete or not at all.
Leaves out: downloading.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import sys
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from agentic.common.command_line import Parser, positive
from agentic.common.data_files import Problem, count_reasons, split_good, warn_problems
from agentic.common.errors import ConfigError
from agentic.common.evaluation import write_whole
from agentic.common.evaluation_provenance import sha256_file
from agentic.toolorchestra.data_check import Checked, check_file
from agentic.toolorchestra.data_offers import Catalogue, Draw, draw_offer, load_catalogue, parse_fee
from agentic.toolorchestra.data_sources import (
    DOMAINS,
    SourceTask,
    official_files,
    official_source,
    qa_source,
    task_file_source,
)
from agentic.toolorchestra.preferences import Preference, choose_preference, load_preferences, sample_preference

logger = logging.getLogger(__name__)

BAD_ROWS = 1
BUILTIN = "builtin"
Report = dict[str, Any]


# --------------------------------------------------------------------------------------------------------------------
# Records.


def make_record(
    task: SourceTask, variant: int, args: Namespace, catalogue: Catalogue, pairs: Sequence[Preference]
) -> dict[str, Any]:
    """One line of the prompt file. Raises ConfigError when aliases or preferences do not fit the category."""
    rng = random.Random(f"{args.seed}/{task.key}/{variant}")
    draw = Draw(args.availability, args.price_spread, args.keep_mapping)
    offer = draw_offer(catalogue, task.category, rng, draw)
    aliases = offer.aliases
    preference = choose_preference(pairs, aliases, rng) if pairs else sample_preference(aliases, rng)
    metadata = {
        **task.metadata,
        "variant": variant,
        "tools": aliases,
        "model_mapping": offer.model_mapping,
        "tool_pricing": offer.tool_pricing,
        "pref_vec": dict(preference.vector),
        "preference": preference.instruction,
    }
    # A customer of tau2 does not read the prompt; there only the metadata say what is preferred.
    parts = [task.prompt, preference.instruction if task.category == "qa" else ""]
    return {"prompt": "\n\n".join(filter(None, parts)), "label": task.label, "metadata": metadata}


def held_out(task: SourceTask, share: float) -> bool:
    """Decided by the task's name alone, so that a larger file holds out the same tasks."""
    number = int.from_bytes(hashlib.sha256(task.key.encode()).digest()[:8], "big")
    return number < share * 2**64


# --------------------------------------------------------------------------------------------------------------------
# Commands that write a file.


def collect(args: Namespace) -> tuple[list[SourceTask], list[Problem], list[Path]]:
    """Tasks, what was left out, and the files they came from. Raises FileNotFoundError, ConfigError."""
    if args.command == "tau2":
        return list(official_source(args.domain, args.split)), [], official_files(args.domain)
    good: list[SourceTask] = []
    problems: list[Problem] = []
    for path in args.input:
        results = qa_source(path) if args.command == "qa" else task_file_source(path, args.domain)
        found, left_out = split_good(results)
        warn_problems(path, left_out)
        good, problems = good + found, problems + left_out
    return good, problems, list(args.input)


def first_of_each(tasks: Iterable[SourceTask]) -> tuple[list[SourceTask], list[Problem]]:
    """Each name and each text once; of a tau2 task the text is all but its name."""
    kept: dict[str, SourceTask] = {}
    texts: dict[str, str] = {}
    problems = []
    for task in tasks:
        whole = task.task and task.task.model_dump_json(exclude={"id", "description"})
        text = f"{task.domain} {whole or ' '.join(task.prompt.split())}"
        earlier = kept[task.key].where if task.key in kept else texts.get(text)
        if earlier:
            problems.append(Problem(task.where, "duplicate", f"{task.key} is at {earlier} already"))
        else:
            kept[task.key], texts[text] = task, task.where
    return list(kept.values()), problems


def without_idle(tasks: Sequence[SourceTask], exclude: bool) -> tuple[list[SourceTask], list[Problem], Report]:
    """Floors by domain: which tasks an agent passes that does nothing; with `exclude` these are left out."""
    by_domain: dict[str, list[SourceTask]] = {}
    for task in tasks:
        if task.task is not None:
            by_domain.setdefault(task.domain, []).append(task)
    idle: set[str] = set()
    floors: Report = {}
    for domain, members in by_domain.items():
        from agentic.toolorchestra.tau2.floors import floor_of  # here: questions need no tau2

        floor = floor_of(domain, [member.task for member in members if member.task is not None])
        idle |= {f"{domain}/{id_}" for id_ in floor.passed}
        floors[domain] = floor.describe()
    if not exclude:
        return list(tasks), [], floors
    detail = "doing nothing passes it"
    problems = [Problem(task.where, "do_nothing", detail) for task in tasks if task.key in idle]
    return [task for task in tasks if task.key not in idle], problems, floors


def build(args: Namespace) -> Report:
    """Write the file or files and return the counts. Raises FileNotFoundError, or ConfigError, also for no usable task."""
    catalogue = load_catalogue(args.aliases, args.roles, args.fee)
    pairs = [] if args.preferences == BUILTIN else load_preferences(Path(args.preferences))
    tasks, problems, sources = collect(args)
    _check_output(args, sources)
    read = len(tasks) + len(problems)
    tasks, repeated = first_of_each(tasks)
    tasks, idle, floors = without_idle(tasks, args.exclude_do_nothing)
    left_out = count_reasons([*problems, *repeated, *idle])
    if not tasks:
        raise ConfigError(f"no usable task of {read} ({left_out or 'none read'}); see the lines above")
    share = getattr(args, "held_out", 0.0)
    apart = [task for task in tasks if held_out(task, share)]
    kept = [task for task in tasks if not held_out(task, share)][: args.limit]
    report: Report = {"read": read, "left_out": left_out, "do_nothing_floors": floors, "files": {}}
    files = {args.output: kept} | ({args.output.with_suffix(".held_out.jsonl"): apart} if share else {})
    for path, members in files.items():
        records = [make_record(t, v, args, catalogue, pairs) for t in members for v in range(args.variants)]
        report["files"][str(path)] = write_with_sources(path, records, sources, args, report)
    return report


def _check_output(args: Namespace, sources: Sequence[Path]) -> None:
    if args.output.suffix != ".jsonl":
        raise ConfigError(f"--output {args.output}: must end in .jsonl")
    if args.output.resolve() in [path.resolve() for path in sources]:
        raise ConfigError(f"--output {args.output}: is one of the inputs; choose another file")


def write_with_sources(
    path: Path, records: Sequence[dict[str, Any]], sources: Sequence[Path], args: Namespace, report: Report
) -> int:
    """The records, and beside them what they were made from; returns how many there are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    preferences = None if args.preferences == BUILTIN else Path(args.preferences)
    made_from = [file for file in (*sources, args.aliases, args.roles, preferences) if file is not None]
    facts = {
        "records": len(records),
        "sha256": sha256_file(path),
        "sources": {str(source): sha256_file(source) for source in made_from},
        "settings": {name: _plain(value) for name, value in sorted(vars(args).items())},
        **{name: report[name] for name in ("read", "left_out", "do_nothing_floors")},
    }
    write_whole(path.with_name(path.name + ".sources.json"), json.dumps(facts, indent=2) + "\n")
    return len(records)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


# --------------------------------------------------------------------------------------------------------------------
# inspect


def inspect(args: Namespace) -> tuple[int, Report]:
    """One line for every broken record, and what the good ones hold; exit code 1 when there is a broken one."""
    problems: list[Problem] = []
    good: list[Checked] = []
    for result in check_file(args.file):
        if isinstance(result, Checked):
            good.append(result)
            continue
        problems.append(result)
        if len(problems) <= args.show:
            sys.stderr.write(f"{result}\n")
    if len(problems) > args.show:
        sys.stderr.write(f"... and {len(problems) - args.show} more\n")
    report = {"file": str(args.file), "good": len(good), "bad": len(problems), "reasons": count_reasons(problems)}
    if not good and not problems:
        raise ConfigError(f"{args.file}: holds no records")
    return (BAD_ROWS if problems else 0), report | _summary(good)


def _summary(good: Sequence[Checked]) -> Report:
    def count(names: Iterable[str]) -> dict[str, int]:
        return dict(sorted(Counter(names).items()))

    return {
        "categories": count(record.category for record in good),
        "domains": count(record.domain for record in good),
        "aliases": count(alias for record in good for alias in record.aliases),
        "models": count(model for record in good for model in record.models),
        "weighted": count(name for record in good for name, weight in record.weights.items() if weight),
    }


# --------------------------------------------------------------------------------------------------------------------
# Command line.


def parse_args(argv: Sequence[str]) -> Namespace:
    parser = Parser(prog="python -m agentic.toolorchestra.data", description="Training data of ToolOrchestra.")
    commands = parser.add_subparsers(dest="command", required=True)
    tau2 = commands.add_parser("tau2", help="records from the tasks of the installed tau2 package").add_argument
    tau2("--domain", nargs="+", choices=DOMAINS, default=["airline", "retail", "telecom"], help="domains")
    tau2(
        "--split",
        choices=("train", "base", "test"),
        default="train",
        help="official split; only train is for training",
    )
    _common_flags(tau2)
    _idle_flag(tau2)
    toolscale = commands.add_parser("toolscale", help="records from tau2-format or ToolScale files").add_argument
    toolscale("--input", type=Path, nargs="+", required=True, help=".jsonl, .json, .parquet")
    toolscale("--domain", help="domain of all tasks (default: as the records say)")
    _common_flags(toolscale)
    _idle_flag(toolscale)
    _held_out_flag(toolscale)
    qa = commands.add_parser("qa", help="records from questions with a reference answer").add_argument
    qa("--input", type=Path, nargs="+", required=True, help=".jsonl, .json, .parquet")
    _common_flags(qa)
    _held_out_flag(qa)
    check = commands.add_parser("inspect", help="validate a training file and say what it holds").add_argument
    check("file", type=Path)
    check("--show", type=positive, default=20, help="lines about broken records")
    args = parser.parse_args(argv)
    args.exclude_do_nothing = getattr(args, "exclude_do_nothing", False)
    return args


def _common_flags(add: Callable[..., Any]) -> None:
    add("--aliases", type=Path, required=True, help="YAML file of orchestra_aliases")
    add("--roles", type=Path, help="role file with the prices that the aliases do not give")
    add("--output", type=Path, required=True, help="file to write, .jsonl")
    add("--preferences", default=BUILTIN, help="file with pref_vec and instruction, or 'builtin'")
    add("--seed", type=int, default=0, help="of everything that is drawn")
    add("--variants", type=positive, default=1, help="records of each task, drawn independently")
    add("--availability", type=_share, default=0.75, help="probability that an alias is offered")
    add("--price-spread", type=_spread, default=2.0, help="prices are multiplied by a factor from 1/SPREAD to SPREAD")
    add("--keep-mapping", action="store_true", help="every alias stands for its own model")
    add("--fee", type=_fee, action="append", default=[], metavar="NAME=DOLLARS", help="search or sandbox_second")
    add("--limit", type=positive, help="first N tasks")


def _idle_flag(add: Callable[..., Any]) -> None:
    add(
        "--exclude-do-nothing", action="store_true", help="leave out tasks that an agent passes without doing anything"
    )


def _held_out_flag(add: Callable[..., Any]) -> None:
    add("--held-out", type=_share, default=0.0, help="share of tasks written to OUTPUT.held_out.jsonl instead")


def _fee(text: str) -> tuple[str, float]:
    try:
        return parse_fee(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ArgumentTypeError(f"{text}: must be from 0 to 1")
    return value


def _spread(text: str) -> float:
    value = float(text)
    if not 1 <= value <= 1000:
        raise ArgumentTypeError(f"{text}: must be from 1 (prices as they are) to 1000")
    return value


def main(argv: Sequence[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        args = parse_args(argv)
        code, report = inspect(args) if args.command == "inspect" else (0, build(args))
    except (ConfigError, FileNotFoundError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
