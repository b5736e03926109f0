"""Evaluation of MemAgent against length: memory agent, the same agent untrained, and the direct baseline.

    python -m agentic.memagent.eval --data FOLDER --lengths 7k,14k,...,3.5M --roles ROLES.yaml --runs K --out DIR
        [--tasks hqa,niah_single_1,...] [--documents FILE] [--config memagent.yaml]

The role file names the arms: `memagent`, `untrained`, `direct`; each has its own server. Data: `eval_<documents>.json` for
`hqa` (7k stands for 50 documents, 3.5M for 25600; a plain number is a number of documents), `eval_<task>_<tokens>.json`
for other tasks. Invariants: all arms share items, sampling and scoring; a failure counts as 0 and is listed, and is tried
again by the next start; answers that are there are never asked again; contexts of one length are in memory at a time.
Left behind: `runs/*.jsonl`, `protocol.json`, `checks.json`, `result.json`, `accuracy.svg`; the last two only when no
answer is missing (else exit code 3). Leaves out: starting servers (`eval.sh serve`), choosing a checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from agentic.common.clients import check_reachable
from agentic.common.command_line import Parser, positive, resumable_program
from agentic.common.data_files import count_reasons
from agentic.common.errors import ConfigError
from agentic.common.evaluation import Job, RunStore, check_protocol, exclusive, run_jobs, write_whole
from agentic.common.evaluation_provenance import commit, engine_info, model_fingerprint, sha256_file
from agentic.common.evaluation_roles import check_served
from agentic.common.evaluation_statistics import missing
from agentic.common.roles import POLICY, Role, RoleTable, nearest
from agentic.memagent.agent import MemAgent
from agentic.memagent.config import PREFIX, MemAgentConfig
from agentic.memagent.data import token_count
from agentic.memagent.data_documents import DocumentPool, load_pool
from agentic.memagent.data_items import Item, load_items
from agentic.memagent.eval_arms import ARMS, DIRECT, FORMS, AgentArm, DirectArm, Evaluator
from agentic.memagent.eval_plot import Point, render_svg
from agentic.memagent.eval_summary import mean_over_tasks, render_table, summarise_dataset
from agentic.memagent.yarn import read_config, uses_yarn
from slime.utils.processing_utils import load_tokenizer

logger = logging.getLogger(__name__)

INCOMPLETE = 3
HQA = "hqa"
HQA_DOCUMENTS = {
    "7k": 50,
    "14k": 100,
    "28k": 200,
    "56k": 400,
    "112k": 800,
    "224k": 1600,
    "448k": 3200,
    "896k": 6400,
    "1.75m": 12800,
    "3.5m": 25600,
}
SUFFIXES = (".json", ".jsonl", ".parquet")
# Not part of the protocol: how patient the client is, and what only training uses.
RUNTIME = ("timeout_s", "retries", "max_concurrency", "layout", "max_failure_rate", "max_chunks")


class DataSet(NamedTuple):
    """One task at one length; its items are read when their turn comes."""

    task: str
    label: str
    path: Path

    @property
    def name(self) -> str:
        return f"{self.task}_{self.label}"


# --------------------------------------------------------------------------------------------------------------------
# Set-up.


def find_data(args: Namespace) -> list[DataSet]:
    """The files of all tasks and lengths. Raises ConfigError for a bad length, FileNotFoundError for a missing file."""
    return [DataSet(task, label, _find_file(args.data, task, label)) for task in args.tasks for label in args.lengths]


def _find_file(folder: Path, task: str, label: str) -> Path:
    stem = f"eval_{_size(task, label)}" if task == HQA else f"eval_{task}_{_size(task, label)}"
    found = [folder / f"{stem}{suffix}" for suffix in SUFFIXES if (folder / f"{stem}{suffix}").is_file()]
    if not found:
        raise FileNotFoundError(
            f"--data {folder}: no {stem}.json (or {', '.join(SUFFIXES[1:])}) for {task} at {label}"
        )
    return found[0]


def _size(task: str, label: str) -> int:
    try:
        if task == HQA:
            return HQA_DOCUMENTS.get(label.lower()) or positive(label)
        return token_count(label)
    except (ValueError, argparse.ArgumentTypeError) as error:
        known = ", ".join(HQA_DOCUMENTS) + " or a number of documents" if task == HQA else "such as 8k or 8192"
        raise ConfigError(f"--lengths {label}: not a length of task {task}; use {known}") from error


def find_documents(args: Namespace) -> DocumentPool | None:
    """Documents behind contexts that are lists of indices. Raises FileNotFoundError, ConfigError."""
    return None if args.documents is None else load_pool([args.documents], strict=True)


def load_config(args: Namespace) -> MemAgentConfig:
    """Settings of the YAML file with the limits of this evaluation. Raises FileNotFoundError, ConfigError."""
    values: Any = {}
    if args.config is not None:
        if not args.config.is_file():
            raise FileNotFoundError(f"--config {args.config}: no such file")
        values = yaml.safe_load(args.config.read_text(encoding="utf-8")) or {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {args.config}: must hold a mapping with keys {PREFIX}...")
    config = MemAgentConfig.from_args(Namespace(**values))
    if args.answer_form == "answer_is" and config.prompt_set == "standard":
        config = replace(config, prompt_set="answer_is")
    return config


def load_roles(args: Namespace) -> dict[str, Role]:
    """Arms in the order of ARMS. Raises FileNotFoundError, ConfigError."""
    table = RoleTable.load(args.roles, f"http://{POLICY}", known_roles=ARMS)
    names = args.arms or [name for name in ARMS if name in table]
    roles = {name: replace(table[name], trained=False) for name in ARMS if name in names}
    for name, role in roles.items():
        where = f"{args.roles}: roles.{name}"
        if role.url == f"http://{POLICY}":
            raise ConfigError(f"{where}: `url: policy` is for training; give `server: NAME` or a url")
        if role.api != "generate":
            raise ConfigError(f"{where}: needs `api: generate`, which takes token ids")
        if (
            name != DIRECT
            and (Path(str(role.model)) / "config.json").is_file()
            and uses_yarn(read_config(Path(str(role.model))))
        ):
            raise ConfigError(f"{where}: {role.model} has YaRN, which is for `direct` only; serve the original model")
    return roles


def build_protocol(
    args: Namespace, data: Sequence[DataSet], config: MemAgentConfig, roles: Mapping[str, Role]
) -> dict[str, Any]:
    """Everything that must stay the same while answers are collected in one folder."""
    return {
        "seed": args.seed,
        "sampling": _sampling(args),
        "answer_form": args.answer_form,
        "limit": args.limit,
        "direct": {"context": args.direct_context, "max_new_tokens": args.direct_max_new_tokens},
        "settings": {key: value for key, value in asdict(config).items() if key not in RUNTIME},
        "documents": None if args.documents is None else sha256_file(args.documents),
        "data": {entry.name: sha256_file(entry.path) for entry in data},
        "arms": {name: model_fingerprint(str(role.model or role.tokenizer)) for name, role in roles.items()},
    }


def _sampling(args: Namespace) -> dict[str, Any]:
    return {"temperature": args.temperature, "top_p": args.top_p}


async def build_arms(
    args: Namespace, config: MemAgentConfig, roles: Mapping[str, Role]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arms after a health check of every server, and what the engines say of themselves.

    Raises RoleUnavailable, ConfigError.
    """
    arms: dict[str, Any] = {}
    engines: dict[str, Any] = {}
    for name, role in roles.items():
        await check_reachable(role)
        info = await engine_info(role.url)
        _check_engine(name, role, info, args.direct_context if name == DIRECT else config.window_tokens)
        tokenizer = load_tokenizer(str(role.tokenizer), trust_remote_code=True)
        if name == DIRECT:
            limits = (args.direct_context, args.direct_max_new_tokens)
            arms[name] = DirectArm.build(role, tokenizer, args.answer_form, *limits)
        else:
            arms[name] = AgentArm(MemAgent.build(_with_patience(config, role), tokenizer, role.url))
        shown = {key: info.get(key) for key in ("model_path", "version", "weight_version", "context_length")}
        engines[name] = {**shown, "deterministic": bool(info.get("enable_deterministic_inference"))}
    return arms, engines


def _with_patience(config: MemAgentConfig, role: Role) -> MemAgentConfig:
    """Deadline, retries and concurrency are the role file's in an evaluation."""
    return replace(config, timeout_s=role.timeout_s, retries=role.retries, max_concurrency=role.max_concurrency)


def _check_engine(name: str, role: Role, info: Mapping[str, Any], needed: int) -> None:
    length = info.get("context_length")
    if isinstance(length, int) and length < needed:
        what = "--direct-context" if name == DIRECT else f"{PREFIX}window_tokens"
        raise ConfigError(f"roles.{name}: {role.url} has a context of {length} tokens, {what} is {needed}")
    check_served(role, info)


# --------------------------------------------------------------------------------------------------------------------
# Answers.


async def answer_all(
    args: Namespace,
    data: Sequence[DataSet],
    config: MemAgentConfig,
    roles: Mapping[str, Role],
    pool: DocumentPool | None,
    store: RunStore,
) -> None:
    """Everything that is not answered yet, length by length; leaves `checks.json`."""
    arms, engines = await build_arms(args, config, roles)
    write_whole(args.out / "checks.json", json.dumps({"engines": engines}, indent=2) + "\n")
    seeded = {name: info["deterministic"] for name, info in engines.items()}
    evaluator = Evaluator(arms, _sampling(args), args.answer_form, args.seed, seeded)
    for entry in data:
        items, _ = load_items(entry.path, pool, args.limit)
        logger.info("%s: %d items of %s", entry.name, len(items), entry.path)
        await run_jobs(list(build_jobs(args, entry, items, roles)), evaluator.answer, store, args.concurrency)


def build_jobs(args: Namespace, entry: DataSet, items: Sequence[Item], arms: Mapping[str, Any]) -> Iterator[Job]:
    """Jobs of a data set, run by run, so that a stopped evaluation has whole runs."""
    for run in range(args.runs):
        for arm in arms:
            yield from (Job(entry.name, arm, run, item) for item in items)


# --------------------------------------------------------------------------------------------------------------------
# Results.


def summarise(
    args: Namespace, data: Sequence[DataSet], arms: Sequence[str], pool: DocumentPool | None, store: RunStore
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Results by data set, facts of the data, and what is missing."""
    results: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    gaps: list[str] = []
    for entry in data:
        items, problems = load_items(entry.path, pool, args.limit)
        ids = [item.id for item in items]
        facts[entry.name] = {"path": str(entry.path), "n": len(ids), "left_out": count_reasons(problems)}
        by_arm = {}
        for arm in arms:
            for run in range(args.runs):
                store.settle(entry.name, arm, run, ids)
            by_arm[arm] = [store.load(entry.name, arm, run) for run in range(args.runs)]
            # Failures count as 0, so only answers that were never asked for are missing.
            gaps += [f"{entry.name}, {arm}, {gap}" for gap in missing(by_arm[arm], ids, max_failure_rate=1.0)]
        results[entry.name] = summarise_dataset(by_arm, ids)
    return results, facts, gaps


def build_report(
    args: Namespace, protocol: Mapping[str, Any], data: Sequence[DataSet], results: Mapping[str, Any], facts: Any
) -> dict[str, Any]:
    """Content of `result.json`."""
    checks = args.out / "checks.json"
    keys = {entry.name: (entry.task, entry.label) for entry in data}
    return {
        "time": time.time(),
        "commit": commit(),
        "protocol": dict(protocol),
        "runs": args.runs,
        "data": facts,
        "checks": json.loads(checks.read_text(encoding="utf-8")) if checks.exists() else {},
        "results": dict(results),
        "mean_over_tasks": mean_over_tasks(results, keys),
    }


def draw(data: Sequence[DataSet], results: Mapping[str, Any]) -> str:
    """Accuracy against the mean number of tokens of the documents, one curve an arm and task."""
    several = len({entry.task for entry in data}) > 1
    series: dict[str, list[Point]] = {}
    for entry in data:
        for arm, stats in results[entry.name]["arms"].items():
            if stats["context_tokens"]:
                point = Point(entry.label, stats["context_tokens"], stats["mean"], stats["stderr"])
                series.setdefault(f"{entry.task}, {arm}" if several else arm, []).append(point)
    return render_svg("Accuracy against length, failures counted as 0, bars: one standard error", series)


# --------------------------------------------------------------------------------------------------------------------
# Command line.


def parse_args(argv: Sequence[str]) -> Namespace:
    parser = Parser(prog="python -m agentic.memagent.eval", description="Evaluate MemAgent against length.")
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with eval_*.json (or .jsonl, .parquet)")
    add("--tasks", nargs="+", default=[HQA], help="hqa, or names as in eval_<task>_<tokens>.json")
    add("--lengths", nargs="+", required=True, help="such as 7k,14k,...,3.5M (hqa) or 8k,16k (other tasks)")
    add("--documents", type=Path, help="documents behind contexts that are lists of indices (hotpotqa_dev.json)")
    add("--roles", type=Path, required=True, help=f"role file with some of {', '.join(ARMS)}")
    add("--arms", nargs="+", help="some of the role file's arms (default: all)")
    add("--config", type=Path, help="YAML with memagent_* settings, as in training")
    add("--out", type=Path, required=True, help="folder for runs/*.jsonl, protocol.json, result.json, accuracy.svg")
    add("--runs", type=positive, default=3, help="answers per item and arm")
    add("--limit", type=positive, help="first N items of each file")
    add("--seed", type=int, default=0, help="seeds every answer where the engine samples deterministically")
    add("--temperature", type=float, default=0.7)
    add("--top-p", type=float, default=0.95)
    add("--answer-form", choices=list(FORMS), default="boxed", help="answer_is: the form of the published script")
    add("--direct-context", type=positive, default=130_000, help="tokens of prompt and answer of the direct arm")
    add("--direct-max-new-tokens", type=positive, default=10_000, help="tokens of its answer")
    add("--concurrency", type=positive, default=64, help="items in flight")
    add("--summary", action="store_true", help="ask nothing, summarise what the folder holds")
    args = parser.parse_args(argv)
    for name in ("tasks", "lengths", "arms"):
        values = [part for value in getattr(args, name) or [] for part in value.split(",") if part]
        setattr(args, name, list(dict.fromkeys(values)))
    return args


def check_args(args: Namespace) -> None:
    """What can be checked without data and servers. Raises ConfigError, FileNotFoundError."""
    for arm in args.arms:
        if arm not in ARMS:
            raise ConfigError(f"--arms {arm}: no such arm{nearest(arm, ARMS)}")
    for task in args.tasks:
        for label in args.lengths:
            _size(task, label)
    for flag, value, fits in (
        ("--temperature", args.temperature, args.temperature >= 0),
        ("--top-p", args.top_p, 0 < args.top_p <= 1),
    ):
        if not fits:
            raise ConfigError(f"{flag} {value}: out of range")
    load_config(args)
    if not load_roles(args):
        raise ConfigError(f"{args.roles}: has none of the arms {', '.join(ARMS)}")


def run(args: Namespace) -> int:
    """The whole evaluation; 0, or INCOMPLETE when answers are missing."""
    check_args(args)
    data, config, roles = find_data(args), load_config(args), load_roles(args)
    pool = find_documents(args)
    protocol = build_protocol(args, data, config, roles)
    with exclusive(args.out):
        check_protocol(args.out, protocol, growing=("data", "arms"))
        store = RunStore(args.out)
        if not args.summary:
            asyncio.run(answer_all(args, data, config, roles, pool, store))
        results, facts, gaps = summarise(args, data, list(roles), pool, store)
        if gaps:
            sys.stderr.write("incomplete, no summary:\n" + "".join(f"  {gap}\n" for gap in gaps))
            return INCOMPLETE
        report = build_report(args, protocol, data, results, facts)
        write_whole(args.out / "result.json", json.dumps(report, indent=2) + "\n")
        write_whole(args.out / "accuracy.svg", draw(data, results))
    sys.stdout.write(render_table(results) + "\n")
    return 0


def main(argv: Sequence[str]) -> int:
    return resumable_program(lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
