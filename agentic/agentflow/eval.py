"""Evaluation of AgentFlow: single turn, untrained and trained planner under one protocol.

    python -m agentic.agentflow.eval --data NAME=PATH ... --roles ROLES.yaml --runs K --out DIR
        [--arms baseline,untrained,trained] [--trained-roles ROLES2.yaml]

Arms: `baseline` asks the untrained policy once; `untrained` and `trained` are the loop of `solver.py` with the planner of
their role file. Invariants: all arms share questions, sampling of the policy, limits, frozen roles, scoring rules and
judge; only the planner's model and address may differ between the two role files; the policy is sampled with the flags
of this program, whatever the role file says; a failure of the infrastructure is no score and is tried again by the next
start; a summary is printed and `result.json` written only when nothing is missing (else exit code 3).
Leaves out: starting servers (`serve.sh`), choosing a checkpoint (use a development set, not the benchmark).
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from agentic.agentflow.arms import ARMS, Arm, Evaluator
from agentic.agentflow.benchmarks import BENCHMARKS, Question, load_questions
from agentic.agentflow.config import PREFIX, AgentFlowConfig
from agentic.agentflow.crew import ROLES, Crew
from agentic.common.clients import check_reachable
from agentic.common.command_line import Parser, positive, resumable_program
from agentic.common.errors import ConfigError
from agentic.common.evaluation import (
    Job,
    Line,
    RunStore,
    check_protocol,
    exclusive,
    run_jobs,
    write_whole,
)
from agentic.common.evaluation_provenance import commit, engine_info, sha256_file
from agentic.common.evaluation_roles import (
    NO_ROUTER,
    check_same_world,
    check_served,
    evaluate_role,
    frozen_roles,
    model_of,
)
from agentic.common.evaluation_statistics import compare_arms, missing, render_results
from agentic.common.judge import check_judge
from agentic.common.roles import RoleTable, nearest
from slime.utils.processing_utils import load_tokenizer

logger = logging.getLogger(__name__)

INCOMPLETE = 3
PLANNER = "planner"


class DataSet(NamedTuple):
    """One entry of `--data`."""

    name: str
    benchmark: str
    path: Path
    questions: list[Question]
    skipped: dict[str, int]


# --------------------------------------------------------------------------------------------------------------------
# Set-up.


def load_data(entries: Sequence[str], limit: int | None) -> dict[str, DataSet]:
    """Data sets by name, from `BENCHMARK=PATH` or `BENCHMARK:NAME=PATH`. Raises ConfigError, FileNotFoundError."""
    sets: dict[str, DataSet] = {}
    for entry in entries:
        head, equals, path = entry.partition("=")
        benchmark, _, name = head.partition(":")
        name = name or benchmark
        if not (equals and path):
            raise ConfigError(f"--data {entry}: write BENCHMARK=PATH; benchmarks: {', '.join(BENCHMARKS)}")
        if name in sets or not name.replace("-", "_").isidentifier() and not name.isalnum():
            raise ConfigError(f"--data {entry}: {name!r} is used twice or no plain name; write BENCHMARK:NAME=PATH")
        questions, skipped = load_questions(benchmark, Path(path), limit)
        sets[name] = DataSet(name, benchmark, Path(path), questions, skipped)
    return sets


def load_config(args: Namespace, roles: Path) -> AgentFlowConfig:
    """Settings of the YAML file (`--config`, keys `agentflow_*`) with this role file and step limit."""
    values: dict[str, Any] = {}
    if args.config is not None:
        if not args.config.is_file():
            raise FileNotFoundError(f"--config {args.config}: no such file")
        values = yaml.safe_load(args.config.read_text(encoding="utf-8")) or {}
        if not isinstance(values, dict):
            raise ConfigError(f"--config {args.config}: must hold a mapping with keys {PREFIX}...")
    values = {**values, f"{PREFIX}roles": str(roles)}
    if args.max_steps is not None:
        values[f"{PREFIX}eval_max_steps"] = args.max_steps
    return AgentFlowConfig.from_args(Namespace(**values))


def load_table(args: Namespace, config: AgentFlowConfig) -> RoleTable:
    """The role table, its planner a normal role sampled with this program's flags.

    Raises ConfigError when the planner has no address of its own or cannot return token ids.
    """
    table = RoleTable.load(config.roles, NO_ROUTER, known_roles=ROLES, required=config.required_roles, engines={})
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "max_new_tokens": args.max_new_tokens}
    evaluate_role(table, PLANNER, sampling)
    return table


def load_tables(args: Namespace) -> dict[str, tuple[AgentFlowConfig, RoleTable]]:
    """Settings and role tables of the planners in use, by `untrained` and `trained`."""
    files = {"untrained": args.roles}
    if "trained" in args.arms:
        if args.trained_roles is None:
            raise ConfigError("--arms trained: needs --trained-roles, the role file with the trained planner's server")
        files["trained"] = args.trained_roles
    configs = {name: load_config(args, path) for name, path in files.items()}
    tables = {name: (config, load_table(args, config)) for name, config in configs.items()}
    if "trained" in tables:
        check_same_world(tables["untrained"][1], tables["trained"][1], PLANNER)
    return tables


def build_protocol(args: Namespace, data: Mapping[str, DataSet], tables: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that must stay the same while lines are collected in one folder."""
    config, table = tables["untrained"]
    settings = {key: value for key, value in asdict(config).items() if key not in ("roles", "judge_cache")}
    crews = {arm: tables["trained" if arm == "trained" else "untrained"][1] for arm in args.arms}
    return {
        "seed": args.seed,
        "sampling": {"temperature": args.temperature, "top_p": args.top_p, "max_new_tokens": args.max_new_tokens},
        "limit": args.limit,
        "settings": settings,
        "frozen": frozen_roles(table, PLANNER),
        "data": {
            name: {"benchmark": entry.benchmark, "sha256": sha256_file(entry.path)} for name, entry in data.items()
        },
        "arms": {arm: model_of(crew[PLANNER]) for arm, crew in crews.items()},
    }


async def build_arms(args: Namespace, tables: Mapping[str, Any]) -> tuple[dict[str, Arm], dict[str, Any]]:
    """Arms after a health check of every server, and what the planners' engines say of themselves.

    Raises RoleUnavailable when a server does not answer.
    """
    built: dict[str, tuple[Crew, dict[str, Any]]] = {}
    for name, (config, table) in tables.items():
        for role in {role.url: role for role in table}.values():
            await check_reachable(role)
        info = await engine_info(table[PLANNER].url)
        check_served(table[PLANNER], info)
        built[name] = (Crew.build(config, table, load_tokenizer(str(table[PLANNER].tokenizer))), info)
    arms, engines = {}, {}
    for arm in args.arms:
        crew, info = built["trained" if arm == "trained" else "untrained"]
        seeded = bool(info.get("enable_deterministic_inference"))
        arms[arm] = Arm(arm, crew, seeded)
        shown = {key: info.get(key) for key in ("model_path", "version", "weight_version")}
        engines[arm] = {**shown, "deterministic": seeded}
    return arms, engines


# --------------------------------------------------------------------------------------------------------------------
# Results.


def build_jobs(args: Namespace, data: Mapping[str, DataSet]) -> list[Job]:
    """All jobs: run by run, so that a stopped evaluation has whole runs."""
    return [
        Job(entry.name, arm, run, question)
        for run in range(args.runs)
        for entry in data.values()
        for arm in args.arms
        for question in entry.questions
    ]


Runs = dict[tuple[str, str], list[dict[str, Line]]]


def collect_runs(args: Namespace, data: Mapping[str, DataSet], store: RunStore) -> tuple[Runs, list[str]]:
    """Lines by (data set, arm), one mapping a run, and what is missing."""
    runs: Runs = {}
    gaps = []
    for name, entry in data.items():
        ids = [question.id for question in entry.questions]
        for arm in args.arms:
            for run in range(args.runs):
                store.settle(name, arm, run, ids)
            runs[name, arm] = [store.load(name, arm, run) for run in range(args.runs)]
            gaps += [f"{name}, {arm}, {gap}" for gap in missing(runs[name, arm], ids, args.max_failure_rate)]
    return runs, gaps


def build_results(args: Namespace, data: Mapping[str, DataSet], runs: Runs) -> dict[str, Any]:
    """Summary by data set: every arm, and the differences of arms paired by question."""
    results: dict[str, Any] = {}
    for name, entry in data.items():
        by_arm = {arm: runs[name, arm] for arm in args.arms}
        results[name] = compare_arms(by_arm, [question.id for question in entry.questions])
        for arm, stats in results[name]["arms"].items():
            stats |= _measures(by_arm[arm])
    return results


def _measures(runs: Sequence[Mapping[str, Line]]) -> dict[str, Any]:
    """Means of what only some kinds of questions have, and how trajectories ended."""
    details = [line["details"] for lines in runs for line in lines.values()]
    f1 = [detail["f1"] for detail in details if "f1" in detail]
    stops = Counter(detail["stop_reason"] for detail in details if "stop_reason" in detail)
    truncated = sum(bool(detail.get("truncated")) for detail in details)
    measures: dict[str, Any] = {"truncated": truncated, "stop_reasons": dict(stops)}
    return measures | ({"f1": sum(f1) / len(f1)} if f1 else {})


def build_report(
    args: Namespace, data: Mapping[str, DataSet], tables: Mapping[str, Any], runs: Runs, checks: Mapping[str, Any]
) -> dict[str, Any]:
    """Content of `result.json`."""
    return {
        "time": time.time(),
        "commit": commit(),
        "protocol": build_protocol(args, data, tables),
        "runs": args.runs,
        "data": {name: {"path": str(e.path), "n": len(e.questions), "skipped": e.skipped} for name, e in data.items()},
        "roles": {name: [asdict(role) for role in table] for name, (_, table) in tables.items()},
        "models": {name: {role.name: model_of(role) for role in table} for name, (_, table) in tables.items()},
        "tools": list(tables["untrained"][0].tools),
        "checks": dict(checks),
        "results": build_results(args, data, runs),
    }


# --------------------------------------------------------------------------------------------------------------------
# Command line.


def parse_args(argv: Sequence[str]) -> Namespace:
    parser = Parser(prog="python -m agentic.agentflow.eval", description="Evaluate AgentFlow.")
    add = parser.add_argument
    names = ", ".join(BENCHMARKS)
    add("--data", nargs="+", action="extend", required=True, metavar="BENCHMARK[:NAME]=PATH", help=f"one of {names}")
    add("--roles", type=Path, required=True, help="role file; its planner is the untrained policy")
    add("--trained-roles", type=Path, help="role file that differs in the planner's server only; for arm `trained`")
    add("--arms", default="baseline,untrained", help=f"comma list of {', '.join(ARMS)}")
    add("--config", type=Path, help="YAML with agentflow_* settings, as in training")
    add("--out", type=Path, required=True, help="folder for runs/*.jsonl, protocol.json and result.json")
    add("--runs", type=positive, default=8, help="answers per question and arm (AIME: 16)")
    add("--seed", type=int, default=0, help="seeds every answer where the engine samples deterministically")
    add("--temperature", type=float, default=0.7, help="of the policy (paper: 0.7)")
    add("--top-p", type=float, default=1.0, help="of the policy")
    add("--max-new-tokens", type=positive, default=2048, help="of one call of the policy (paper: 2048)")
    add("--max-steps", type=positive, help="tool steps (default: agentflow_eval_max_steps, paper: 10)")
    add("--limit", type=positive, help="first N questions of each data set")
    add("--concurrency", type=positive, default=32, help="questions in flight")
    add("--max-failure-rate", type=float, default=0.0, help="share of failed answers in a run that a summary may have")
    add("--summary", action="store_true", help="ask nothing, summarise what the folder holds")
    args = parser.parse_args(argv)
    args.arms = [arm.strip() for arm in args.arms.split(",")]
    return args


def check_args(args: Namespace) -> None:
    """Raises ConfigError naming the flag."""
    for arm in args.arms:
        if arm not in ARMS:
            raise ConfigError(f"--arms {arm}: no such arm{nearest(arm, ARMS)}")
    if len(set(args.arms)) != len(args.arms):
        raise ConfigError(f"--arms {','.join(args.arms)}: an arm is named twice")
    for flag, value, fits in (
        ("--temperature", args.temperature, args.temperature >= 0),
        ("--top-p", args.top_p, 0 < args.top_p <= 1),
        ("--max-failure-rate", args.max_failure_rate, 0 <= args.max_failure_rate < 1),
    ):
        if not fits:
            raise ConfigError(f"{flag} {value}: out of range")


async def answer_all(args: Namespace, data: Mapping[str, DataSet], tables: Mapping[str, Any], store: RunStore) -> None:
    """Everything that is not answered yet; leaves `checks.json`, what was seen of the servers at the start."""
    arms, engines = await build_arms(args, tables)
    crew = next(iter(arms.values())).crew
    checks = {
        "engines": engines,
        "judge": await check_judge(crew.judge, partial(crew.prompts.render, "judge")) if crew.judge else None,
    }
    write_whole(args.out / "checks.json", json.dumps(checks, indent=2) + "\n")
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "max_new_tokens": args.max_new_tokens}
    evaluator = Evaluator(arms, sampling, args.seed)
    await run_jobs(build_jobs(args, data), evaluator.answer, store, args.concurrency)


def run(args: Namespace) -> int:
    """The whole evaluation; 0, or INCOMPLETE when no summary can be given."""
    check_args(args)
    data = load_data(args.data, args.limit)
    tables = load_tables(args)
    for name, (config, table) in tables.items():
        logger.info("%s: %s\n%s", name, config, table.describe())
    with exclusive(args.out):
        check_protocol(args.out, build_protocol(args, data, tables), growing=("data", "arms"))
        store = RunStore(args.out)
        if not args.summary:
            asyncio.run(answer_all(args, data, tables, store))
        runs, gaps = collect_runs(args, data, store)
        if gaps:
            sys.stderr.write("incomplete, no summary:\n" + "".join(f"  {gap}\n" for gap in gaps))
            sys.stderr.write("the same command does what is missing and tries failures again\n")
            return INCOMPLETE
        checks_file = args.out / "checks.json"
        checks = json.loads(checks_file.read_text(encoding="utf-8")) if checks_file.exists() else {}
        report = build_report(args, data, tables, runs, checks)
        write_whole(args.out / "result.json", json.dumps(report, indent=2, default=str) + "\n")
    sys.stdout.write(render_results(report["results"], args.runs) + "\n")
    return 0


def main(argv: Sequence[str]) -> int:
    return resumable_program(lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
