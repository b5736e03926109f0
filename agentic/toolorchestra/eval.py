"""Evaluation of ToolOrchestra: untrained and trained policy under the same user, experts, retrieval and judge.

    python -m agentic.toolorchestra.eval --data airline retail:base hle=FILE ... --roles ROLES.yaml --trials K --out DIR
        [--arms untrained,trained] [--trained-roles ROLES2.yaml] [--config orchestra.yaml]

Data: a domain of tau2 with its official split (`airline`, `retail:base`; default: test), a task file (`tau2=FILE`), HLE
(text only), FRAMES or other questions (`hle=`, `frames=`, `qa=`), training records (`records=`).
Invariants: the arms differ in the policy's server only; every figure of success stands beside the floor that doing nothing
reaches; a failure of the infrastructure is no score and is tried again by the next start; a summary is printed and
`result.json` written only when nothing is missing (else exit code 3).
Leaves out: starting servers (`serve.sh`), choosing a checkpoint (use a development set, not the benchmark).
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from agentic.common.clients import check_reachable
from agentic.common.command_line import Parser, positive, resumable_program
from agentic.common.errors import ConfigError
from agentic.common.evaluation import Job, Line, RunStore, check_protocol, exclusive, run_jobs, write_whole
from agentic.common.evaluation_provenance import commit, engine_info
from agentic.common.evaluation_roles import (
    NO_ROUTER,
    check_same_world,
    check_served,
    evaluate_role,
    frozen_roles,
    model_of,
)
from agentic.common.evaluation_statistics import missing
from agentic.common.judge import check_judge
from agentic.common.roles import RoleTable, nearest
from agentic.toolorchestra.config import PREFIX, OrchestraConfig
from agentic.toolorchestra.crew import Crew
from agentic.toolorchestra.eval_arms import ARMS, Arm, Evaluator
from agentic.toolorchestra.eval_data import FORMATS, TAU2_FILE, DataSet, load_data
from agentic.toolorchestra.eval_summary import floor_facts, preference_weights, render_table, summarise_dataset
from agentic.toolorchestra.experts import ORCHESTRATOR, load_aliases
from slime.utils.processing_utils import load_tokenizer

logger = logging.getLogger(__name__)

INCOMPLETE = 3
# Not part of the protocol: where the files lie, and what only training uses.
RUNTIME = ("roles", "aliases", "reward", "min_group_std", "advantage_clip", "max_failure_rate", "tau2_workers")
Tables = dict[str, tuple[OrchestraConfig, RoleTable]]
Runs = dict[str, dict[str, list[dict[str, Line]]]]


# --------------------------------------------------------------------------------------------------------------------
# Set-up.


def load_config(args: Namespace, roles: Path) -> OrchestraConfig:
    """Settings of the YAML file (`--config`, keys `orchestra_*`) with this role file."""
    values: Any = {}
    if args.config is not None:
        if not args.config.is_file():
            raise FileNotFoundError(f"--config {args.config}: no such file")
        values = yaml.safe_load(args.config.read_text(encoding="utf-8")) or {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {args.config}: must hold a mapping with keys {PREFIX}...")
    return OrchestraConfig.from_args(Namespace(**{**values, f"{PREFIX}roles": str(roles)}))


def load_tables(args: Namespace) -> Tables:
    """Settings and role tables of the policies in use, by arm. Raises FileNotFoundError, ConfigError."""
    files = {"untrained": args.roles, "trained": args.trained_roles}
    if "trained" in args.arms and args.trained_roles is None:
        raise ConfigError("--arms trained: needs --trained-roles, the role file with the trained policy's server")
    tables: Tables = {}
    for arm in args.arms:
        config = load_config(args, files[arm])
        table = RoleTable.load(config.roles, NO_ROUTER, known_roles=None, required=(ORCHESTRATOR,), engines={})
        evaluate_role(table, ORCHESTRATOR, {**_sampling(args), "max_new_tokens": config.max_new_tokens})
        tables[arm] = (config, table)
    if len(tables) == 2:
        check_same_world(tables["untrained"][1], tables["trained"][1], ORCHESTRATOR)
    return tables


def _sampling(args: Namespace) -> dict[str, Any]:
    return {"temperature": args.temperature, "top_p": args.top_p}


def check_roles(data: Mapping[str, DataSet], tables: Tables) -> None:
    """Raises ConfigError for a role that the data need and the role file lacks; warns when no judge is there."""
    categories = {task.category for entry in data.values() for task in entry.tasks}
    for config, table in tables.values():
        if "func_call" in categories and config.user == "llm" and "user" not in table:
            raise ConfigError(f"{table.source}: tau2 needs the role `user`; add it, or set {PREFIX}user: scripted")
        if "qa" in categories and "judge" not in table:
            logger.warning("%s: no role `judge`: answers that the rule cannot confirm count as wrong", table.source)


def build_protocol(args: Namespace, data: Mapping[str, DataSet], tables: Tables) -> dict[str, Any]:
    """Everything that must stay the same while trials are collected in one folder."""
    config, table = next(iter(tables.values()))
    aliases = {name: asdict(alias) for name, alias in load_aliases(config.aliases).items()}
    return {
        "seed": args.seed,
        "sampling": _sampling(args),
        "chat_template_kwargs": args.chat_template_kwargs,
        "limit": args.limit,
        "settings": {key: value for key, value in asdict(config).items() if key not in RUNTIME},
        "aliases": aliases,
        "frozen": frozen_roles(table, ORCHESTRATOR),
        "data": {name: entry.source for name, entry in data.items()},
        "arms": {arm: model_of(roles[ORCHESTRATOR]) for arm, (_, roles) in tables.items()},
    }


async def build_arms(args: Namespace, tables: Tables) -> tuple[dict[str, Arm], dict[str, Any]]:
    """Arms after a health check of every server, and what the policies' engines say of themselves.

    Raises RoleUnavailable, FileNotFoundError, ConfigError.
    """
    arms, engines = {}, {}
    for arm, (config, table) in tables.items():
        for role in {(role.url, role.api): role for role in table}.values():
            await check_reachable(role)
        policy = table[ORCHESTRATOR]
        info = await engine_info(policy.url)
        check_served(policy, info)
        seeded = bool(info.get("enable_deterministic_inference"))
        tokenizer = load_tokenizer(str(policy.tokenizer), trust_remote_code=True)
        arms[arm] = Arm(Crew.build(config, table, tokenizer, args.chat_template_kwargs), seeded)
        shown = {key: info.get(key) for key in ("model_path", "version", "weight_version", "context_length")}
        engines[arm] = {**shown, "deterministic": seeded}
    return arms, engines


# --------------------------------------------------------------------------------------------------------------------
# Trials.


async def play_all(args: Namespace, data: Mapping[str, DataSet], tables: Tables, store: RunStore) -> None:
    """Everything that is not done yet; leaves `checks.json`, what was seen of the servers at the start."""
    arms, engines = await build_arms(args, tables)
    crew = next(iter(arms.values())).crew
    verdicts = await check_judge(crew.judge, partial(crew.prompts.render, "judge")) if crew.judge else None
    write_whole(args.out / "checks.json", json.dumps({"engines": engines, "judge": verdicts}, indent=2) + "\n")
    evaluator = Evaluator(arms, _sampling(args), args.seed)
    await run_jobs(build_jobs(args, data), evaluator.answer, store, args.concurrency)


def build_jobs(args: Namespace, data: Mapping[str, DataSet]) -> list[Job]:
    """All jobs: trial by trial, so that a stopped evaluation has whole trials."""
    return [
        Job(entry.name, arm, trial, task)
        for trial in range(args.trials)
        for entry in data.values()
        for arm in args.arms
        for task in entry.tasks
    ]


# --------------------------------------------------------------------------------------------------------------------
# Results.


def collect_runs(args: Namespace, data: Mapping[str, DataSet], store: RunStore) -> tuple[Runs, list[str]]:
    """Lines by data set and arm, one mapping a trial, and what is missing."""
    runs: Runs = {}
    gaps = []
    for name, entry in data.items():
        ids = [task.id for task in entry.tasks]
        for arm in args.arms:
            for trial in range(args.trials):
                store.settle(name, arm, trial, ids)
            lines = [store.load(name, arm, trial) for trial in range(args.trials)]
            runs.setdefault(name, {})[arm] = lines
            gaps += [f"{name}, {arm}, {gap}" for gap in missing(lines, ids, args.max_failure_rate)]
    return runs, gaps


def build_results(data: Mapping[str, DataSet], runs: Runs) -> dict[str, Any]:
    """Summary by data set."""
    results = {}
    for name, entry in data.items():
        metadata = {task.id: task.metadata for task in entry.tasks}
        floor, weights = floor_facts(metadata), preference_weights(metadata)
        results[name] = summarise_dataset(runs[name], list(metadata), floor, weights)
    return results


def build_report(args: Namespace, data: Mapping[str, DataSet], tables: Tables, runs: Runs) -> dict[str, Any]:
    """Content of `result.json`."""
    checks = args.out / "checks.json"
    return {
        "time": time.time(),
        "commit": commit(),
        "protocol": build_protocol(args, data, tables),
        "trials": args.trials,
        "data": {
            name: {**entry.source, "n": len(entry.tasks), "skipped": entry.skipped} for name, entry in data.items()
        },
        "roles": {arm: [asdict(role) for role in table] for arm, (_, table) in tables.items()},
        "models": {arm: {role.name: model_of(role) for role in table} for arm, (_, table) in tables.items()},
        "checks": json.loads(checks.read_text(encoding="utf-8")) if checks.exists() else {},
        "results": build_results(data, runs),
    }


# --------------------------------------------------------------------------------------------------------------------
# Command line.


def parse_args(argv: Sequence[str]) -> Namespace:
    parser = Parser(prog="python -m agentic.toolorchestra.eval", description="Evaluate ToolOrchestra.")
    add, known = parser.add_argument, ", ".join((TAU2_FILE, *FORMATS))
    add(
        "--data", nargs="+", action="extend", required=True, help=f"DOMAIN[:SPLIT], or FORMAT[:NAME]=PATH with {known}"
    )
    add("--roles", type=Path, required=True, help="role file; its orchestrator is the untrained policy")
    add(
        "--trained-roles",
        type=Path,
        help="role file that differs in the orchestrator's server only; for arm `trained`",
    )
    add("--arms", default="untrained", help=f"comma list of {', '.join(ARMS)}")
    add("--config", type=Path, help="YAML with orchestra_* settings, as in training")
    add("--out", type=Path, required=True, help="folder for runs/*.jsonl, protocol.json and result.json")
    add("--trials", type=positive, default=4, help="trials of each task and arm; pass^k goes up to this")
    add("--seed", type=int, default=0, help="seeds every trial where the engine samples deterministically")
    add("--temperature", type=float, default=0.0, help="of the policy (paper: 0)")
    add("--top-p", type=float, default=1.0, help="of the policy")
    add("--chat-template-kwargs", type=_json_object, default={}, help="JSON for the chat template, as in training")
    add("--limit", type=positive, help="first N tasks of each data set")
    add("--concurrency", type=positive, default=32, help="tasks in flight")
    add("--max-failure-rate", type=float, default=0.0, help="share of failed trials that a summary may have")
    add("--summary", action="store_true", help="play nothing, summarise what the folder holds")
    args = parser.parse_args(argv)
    args.arms = [arm.strip() for arm in args.arms.split(",")]
    return args


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text}: not a JSON object")
    return value


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


def run(args: Namespace) -> int:
    """The whole evaluation; 0, or INCOMPLETE when no summary can be given."""
    check_args(args)
    tables = load_tables(args)
    data = load_data(args.data, args.limit)
    check_roles(data, tables)
    for arm, (config, table) in tables.items():
        logger.info("%s: %s\n%s", arm, config, table.describe())
    with exclusive(args.out):
        check_protocol(args.out, build_protocol(args, data, tables), growing=("data", "arms"))
        store = RunStore(args.out)
        if not args.summary:
            asyncio.run(play_all(args, data, tables, store))
        runs, gaps = collect_runs(args, data, store)
        if gaps:
            sys.stderr.write("incomplete, no summary:\n" + "".join(f"  {gap}\n" for gap in gaps))
            sys.stderr.write("the same command does what is missing and tries failures again\n")
            return INCOMPLETE
        report = build_report(args, data, tables, runs)
        write_whole(args.out / "result.json", json.dumps(report, indent=2, default=str) + "\n")
    sys.stdout.write(render_table(report["results"]) + "\n")
    return 0


def main(argv: Sequence[str]) -> int:
    return resumable_program(lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
