"""From nothing to a planner that learned: model, warm start, evaluation, GRPO, evaluation, report.

    python tools/quickstart.py [METHOD] [--model tiny|smollm2] [--data FILE.jsonl] [--num-rollout N] [--seed S] [--output DIR]

Every stage is a program that can be run by itself (its command line stands at the top of its log). A stage whose result is
there is skipped, and training goes on from its last checkpoint, so Ctrl-C and the same command resume. Children run under a
guard: whatever way this program ends, they end with it.

Writes to --output (default outputs/quickstart/METHOD): summary.json, metrics.jsonl, report.html, checkpoint/ (Hugging Face).
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import FrameType
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import yaml
from tqdm import tqdm

from agentic.common.quickstart import Method, MethodPlan, Run, evaluation_document, hook_flags
from slime.backends.sglang_utils.errors import ServerStartError
from slime.backends.sglang_utils.owned_process import OwnedProcess
from slime.observability.run_summary import (
    BEFORE,
    eval_by_rollout,
    eval_results,
    read_lines,
    step_rows,
    wilson_interval,
)
from slime.utils.arguments.parser import SlimeArgumentParser
from slime.utils.data import check_prompt_file
from slime.utils.misc import get_free_port

METHODS = ("agentflow", "memagent", "toolorchestra")
FULLY_ASYNC = {
    "rollout-function-path": "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
    "rollout-max-staleness": 1,
    "eval-function-path": "slime.rollout.sglang_rollout.generate_rollout",
}
SCHEDULES: dict[str, tuple[str, dict[str, object]]] = {
    "sync": ("train.py", {}),
    "async": ("train_async.py", {}),
    "fully-async": ("train_async.py", FULLY_ASYNC),
}
"""The program that trains, and its flags, by `--schedule`."""
SFT_BATCH = 16
# A server binds its port some seconds after we looked. So: below the range from which the system takes ports for outgoing
# connections, and a random start, which keeps two runs on one machine apart.
SERVER_PORTS = (21000, 25900)
SFT_LR = 2e-3


class Interrupted(BaseException):
    """SIGTERM or Ctrl-C."""


def _raise_interrupted(_number: int, _frame: FrameType | None) -> None:
    raise Interrupted


def method_of(name: str) -> Method:
    """The method's part of the quickstart."""
    return cast(Method, importlib.import_module(f"agentic.{name}.quickstart"))


def parse_args(argv: Sequence[str]) -> Run:
    parser = SlimeArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", nargs="?", choices=METHODS, default="agentflow")
    parser.add_argument(
        "--model",
        choices=("tiny", "smollm2"),
        default="tiny",
        help="tiny: built here, learns in minutes; smollm2: real",
    )
    parser.add_argument("--data", type=Path, help="jsonl with prompt (chat messages) and label; needs --model smollm2")
    parser.add_argument("--num-rollout", type=int, help="GRPO rollouts (default: that of the recipe)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the world, the model, the sampling and the training"
    )
    parser.add_argument("--output", type=Path, help="folder for everything (default: outputs/quickstart/METHOD)")
    parser.add_argument("--train-backend", choices=("fsdp", "megatron"), default="fsdp", help="who trains in GRPO")
    parser.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default="sync",
        help="sync: train.py; async: train_async.py; fully-async: it never stops generating",
    )
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the method (docs/en/methods), for example agentflow_turn_weighting=token_mean; repeatable",
    )
    args = parser.parse_strictly(argv)
    recipe = method_of(args.method).RECIPES[args.model]
    num_rollout = recipe.num_rollout if args.num_rollout is None else args.num_rollout
    output = (args.output or ROOT / "outputs" / "quickstart" / args.method).resolve()
    run = Run(
        args.method,
        args.model,
        args.data and args.data.resolve(),
        num_rollout,
        args.seed,
        output,
        recipe,
        settings(args.setting),
        args.train_backend,
        args.schedule,
    )
    check(run)
    claim_folder(run, move_aside=args.output is None)
    return run


def settings(pairs: Sequence[str]) -> dict[str, Any]:
    """The --setting flags as a mapping; ValueError for one without a name or a value. The method checks the names."""
    for pair in pairs:
        if not all(pair.partition("=")[::2]):
            raise ValueError(f"--setting {pair}: expected NAME=VALUE, for example agentflow_turn_weighting=token_mean")
    return {name: yaml.safe_load(value) for name, _, value in (pair.partition("=") for pair in pairs)}


def check(run: Run) -> None:
    """Raise ValueError or FileNotFoundError, with the flag and the remedy, before anything is built."""
    if run.num_rollout < 2:
        raise ValueError(
            f"--num-rollout {run.num_rollout}: must be at least 2, so that there is a before and an after"
        )
    if run.data and run.model == "tiny":
        raise ValueError(f"--data {run.data}: the tiny model only knows its own world; add --model smollm2")
    if run.data:
        check_prompt_file(str(run.data), "prompt", "label")
        method_of(run.method).plan(run, server_port)  # what the method asks of the data


def claim_folder(run: Run, move_aside: bool) -> None:
    """Make the output folder this run's. One that holds another run is kept: moved aside, or refused with ValueError."""
    record = run.output / "run.json"
    wanted = {"model": run.model, "data": str(run.data), "num_rollout": run.num_rollout, "seed": run.seed}
    wanted |= {"settings": run.settings} if run.settings else {}
    choices = [field for field in fields(Run) if field.default is not MISSING]
    wanted |= {field.name: value for field in choices if (value := getattr(run, field.name)) != field.default}
    if record.exists() and json.loads(record.read_text()) != wanted:
        if not move_aside:
            raise ValueError(
                f"--output {run.output}: holds a run with other settings ({record}); choose another folder"
            )
        number = next(n for n in itertools.count(1) if not run.output.with_name(f"{run.output.name}.{n}").exists())
        kept = run.output.rename(run.output.with_name(f"{run.output.name}.{number}"))
        print(f"note: the earlier run with other settings is kept in {kept}")
    run.output.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(wanted))


def child(run: Run, name: str, command: Sequence[str]) -> OwnedProcess:
    """A started child with its own log, whose first line is its command line."""
    log = run.logs / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(f"$ {shlex.join(command)}\n")
    process = OwnedProcess(name, command, log, {**os.environ, "PYTHONPATH": str(ROOT)})
    process.start(grace_s=30.0)
    return process


def run_to_end(run: Run, name: str, command: Sequence[str], tick: Callable[[], None] = lambda: None) -> None:
    """Run a child to its end, calling `tick` twice a second; RuntimeError with the log's tail when it fails."""
    process = child(run, name, command)
    try:
        while (status := process.poll()) is None:
            time.sleep(0.5)
            tick()
        tick()
    finally:
        process.stop(timeout_s=45.0)
    if status:
        raise RuntimeError(f"{name} ended with status {status}; log: {process.log_path}\n{process.log_tail()}")


class MetricsBar:
    """A progress bar that follows the metrics file of a training run and announces its evaluations."""

    def __init__(self, path: Path, title: str, total: int, shows_reward: bool) -> None:
        self.path, self.shows_reward, self.evals, self.seen = path, shows_reward, 0, -1
        self.bar = tqdm(total=total, desc=title, unit="rollout", dynamic_ncols=True, mininterval=0)

    def __call__(self) -> None:
        lines = read_lines(self.path)
        if sys.stderr.isatty():
            self.bar.refresh()  # the clock; in a log one line per rollout is enough
        if len(lines) == self.seen:
            return
        self.seen = len(lines)
        rewards = [line["rollout/raw_reward"] for line in lines if line.get("rollout/raw_reward") is not None]
        if self.shows_reward and rewards:
            self.bar.set_postfix(reward=f"{rewards[-1]:.2f}", refresh=False)
        for result in eval_results(lines)[self.evals :]:
            self.evals += 1
            self.bar.write("  held-out success: " + ", ".join(f"{name} {rate:.3f}" for name, rate in result.items()))
        done = {line["train/rollout_id"] for line in lines if line["step_key"] == "train/step"}
        self.bar.update(len(done) - self.bar.n)


def flags(values: Mapping[str, object]) -> list[str]:
    """`{"lr": 1e-3, "save": None}` as command-line words; None is a flag without a value."""
    return [word for name, value in values.items() for word in (f"--{name}", *([] if value is None else [str(value)]))]


def prepare_model(run: Run) -> None:
    """Build the tiny model and its world, or unpack SmolLM2; skipped when it is there."""
    if run.model == "tiny" and not (run.output / "tiny" / "config.json").exists():
        made = {"method": run.method, "world-dir": run.world, "output": run.output / "tiny", "seed": run.seed}
        run_to_end(run, "make_model", [sys.executable, str(ROOT / "tools/make_tiny_model.py"), *flags(made)])
    if run.model == "smollm2":
        if not (run.output / "smollm2" / "tokenizer_config.json").exists():
            command = [sys.executable, str(ROOT / "tools/make_smollm2.py"), "--output", str(run.output / "smollm2")]
            run_to_end(run, "make_model", command)
        if run.data is None and not run.world.exists():
            method_of(run.method).write_world(run.world, run.seed, run.recipe)


def warm_start(run: Run) -> None:
    """Teach the tiny model its roles on scripted traces, and make the method's further models, if it has any."""
    recipe = run.recipe
    if run.model != "tiny":
        return
    teach(run, run.output / "tiny", run.start_model, "sft", recipe.sft_rollouts)
    for name, rollouts in method_of(run.method).FURTHER_MODELS.items():
        teach(run, run.output / "tiny", run.output / name, name, rollouts)


def teach(run: Run, base: Path, target: Path, name: str, rollouts: int) -> None:
    """Train `base` on the rows of `world/<name>.jsonl` through slime's SFT path, without engines, into `target`."""
    if (target / "config.json").exists():
        return
    recipe, folder = run.recipe, run.output / "run"
    steps, metrics = recipe.sft_rows * rollouts // SFT_BATCH, folder / f"{name}_metrics.jsonl"
    values = {
        "train-backend": "fsdp",
        "debug-train-only": None,
        "rollout-function-path": "slime.rollout.sft_rollout.generate_rollout",
        "loss-type": "sft_loss",
        "disable-compute-advantages-and-returns": None,
        "prompt-data": run.world / f"{name}.jsonl",
        "input-key": "prompt",
        "hf-checkpoint": base,
        "seed": run.seed,
        "num-rollout": rollouts,
        "rollout-batch-size": recipe.sft_rows,
        "global-batch-size": SFT_BATCH,
        "use-dynamic-batch-size": None,
        "max-tokens-per-gpu": recipe.sft_tokens_per_batch,
        "lr": recipe.sft_lr,
        "lr-decay-style": "WSD",
        "lr-warmup-iters": min(50, steps // 4),
        "lr-decay-iters": steps,
        "lr-wsd-decay-iters": max(steps * 2 // 5, 1),
        "actor-num-gpus-per-node": 1,
        "save": folder / name,
        "load": folder / name,
        "save-interval": 4,
        "save-hf": folder / (name + "_hf_{rollout_id}"),
        "metrics-jsonl": metrics,
    }
    command = [sys.executable, str(ROOT / "train.py"), *flags(values)]
    run_to_end(run, f"teach_{name}", command, MetricsBar(metrics, f"teach {name}", rollouts, False))
    (folder / f"{name}_hf_{rollouts - 1}").rename(target)


def write_documents(run: Run, plan: MethodPlan) -> dict[str, Path]:
    """The YAML files of this run: settings of the method, evaluation sets and roles."""
    folder = run.output / "run"
    folder.mkdir(exist_ok=True)
    documents = {
        "settings": {**plan.settings, **run.settings},
        "eval": evaluation_document(plan.evaluation, run.recipe),
        "final": evaluation_document(plan.final, run.recipe),
        "roles": plan.roles,
    }
    for name, document in documents.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    return {name: folder / f"{name}.yaml" for name in documents}


def shared_flags(run: Run, documents: Mapping[str, Path], evaluation: str) -> list[str]:
    """What training and evaluation have in common: the method's hooks, settings and data, and the engine."""
    recipe = run.recipe
    data = f"{run.data}@[{recipe.n_eval}:]" if run.data else str(run.world / "train.jsonl")
    values = {
        "train-backend": run.train_backend,
        "seed": run.seed,
        "actor-num-gpus-per-node": 1,
        "rollout-num-gpus": 1,
        "rollout-seed": run.seed,
        "prompt-data": data,
        "input-key": "prompt",
        "label-key": "label",
        "rollout-batch-size": recipe.prompts,
        "n-samples-per-prompt": recipe.samples,
        "global-batch-size": recipe.prompts * recipe.samples // recipe.steps_per_rollout,
        "rollout-max-response-len": recipe.max_new_tokens,
        "use-dynamic-batch-size": None,
        "max-tokens-per-gpu": recipe.tokens_per_batch,
        "custom-config-path": documents["settings"],
        "eval-config": documents[evaluation],
        "sglang-context-length": recipe.context,
        "sglang-log-dir": run.logs,
        "metrics-jsonl": run.metrics if evaluation == "eval" else run.final_metrics,
        "save-debug-rollout-data": run.output
        / "run"
        / ("samples" if evaluation == "eval" else "final")
        / "{rollout_id}.pt",
    }
    return flags(values) + hook_flags(run.method)


def train_command(run: Run, documents: Mapping[str, Path], plan: MethodPlan) -> list[str]:
    """The GRPO run as one command line of `train.py` or `train_async.py`."""
    recipe, checkpoints = run.recipe, run.output / "run" / "grpo"
    program, more = SCHEDULES[run.schedule]
    values = {
        "hf-checkpoint": run.start_model,
        "ref-load": run.start_model,
        "num-rollout": run.num_rollout,
        "rollout-temperature": 1.0,
        "advantage-estimator": "grpo",
        "eps-clip": 0.2,
        "eps-clip-high": 0.3,
        "use-kl-loss": None,
        "kl-loss-type": "low_var_kl",
        "kl-loss-coef": 0.001,
        "lr": recipe.lr,
        "adam-beta2": 0.98,
        "eval-interval": run.save_interval if plan.selection else run.num_rollout,
        "save": checkpoints,
        "load": checkpoints,
        "save-interval": run.save_interval,
        "save-hf": run.output / "run" / "hf_{rollout_id}",
        **({"gradient-checkpointing": None} if recipe.gradient_checkpointing else {}),
        **more,
    }
    return [sys.executable, str(ROOT / program), *shared_flags(run, documents, "eval"), *flags(values)]


def train(run: Run) -> None:
    """GRPO with its evaluations beside the method's own servers; goes on from the last checkpoint."""
    if (run.output / "checkpoint" / "config.json").exists():
        return
    plan = method_of(run.method).plan(run, server_port)
    documents = write_documents(run, plan)
    bar = MetricsBar(run.metrics, "GRPO", run.num_rollout, True)
    try:
        with_services(run, plan, documents, "train", train_command(run, documents, plan), bar)
    finally:
        bar.bar.close()
    chosen = choose_rollout(run, plan.selection)
    (run.output / "run" / "chosen.json").write_text(json.dumps({"rollout": chosen, "by": plan.selection or "last"}))
    (run.output / "run" / f"hf_{chosen}").rename(run.output / "checkpoint")


def server_port() -> int:
    """A free port for a server of ours."""
    return get_free_port(random.randint(*SERVER_PORTS))


def with_services(
    run: Run,
    plan: MethodPlan,
    documents: Mapping[str, Path],
    name: str,
    command: Sequence[str],
    tick: Callable[[], None],
) -> None:
    """Run `command` to its end beside the method's servers and programs; RuntimeError when one of these ends before."""
    programs = {f"service_{number}": words for number, words in enumerate(plan.services)}
    if plan.roles:
        serve = [str(ROOT / "tools/serve_roles.py"), "--roles", str(documents["roles"]), "--log-dir", str(run.logs)]
        programs["role_servers"] = serve
    # All start at once: training brings up Ray, its engine and its model before it needs the others.
    services = [child(run, title, [sys.executable, *words]) for title, words in programs.items()]

    def watch() -> None:
        tick()
        for service in services:
            if service.poll() is not None:
                raise RuntimeError(f"{service.name} ended; log: {service.log_path}\n{service.log_tail()}")

    try:
        run_to_end(run, name, command, watch)
    finally:
        for service in services:
            service.stop(timeout_s=45.0)


def choose_rollout(run: Run, selection: str) -> int:
    """The rollout whose checkpoint did best on the data set `selection`, the earliest of several; the last one without."""
    if not selection:
        return run.num_rollout - 1
    rates = {i: result[selection] for i, result in eval_by_rollout(read_lines(run.metrics)).items()}
    saved = [i for i in rates if (run.output / "run" / f"hf_{i}").exists()]
    return max(saved, key=lambda i: rates[i])


def measure(run: Run) -> None:
    """Evaluate the chosen checkpoint on the method's final data sets, if it has any."""
    plan = method_of(run.method).plan(run, server_port)
    if not plan.final or eval_results(read_lines(run.final_metrics)):
        return
    documents, model = write_documents(run, plan), run.output / "checkpoint"
    values = {"hf-checkpoint": model, "num-rollout": 0, "eval-interval": 1, "save": run.output / "run" / "final"}
    command = [sys.executable, str(ROOT / "train.py"), *shared_flags(run, documents, "final"), *flags(values)]
    with_services(run, plan, documents, "measure", command, lambda: None)


def commit() -> str:
    """The commit of this tree, with `-dirty` when it was changed; 'unknown' outside a git checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


def summarise(run: Run) -> dict[str, Any]:
    """summary.json: success before and after on the held-out problems, with 95% intervals (greedy, and at temperature 1)."""
    chosen = json.loads((run.output / "run" / "chosen.json").read_text())
    results, n = eval_by_rollout(read_lines(run.metrics)), run.recipe.n_eval
    before, after = results[BEFORE], results[chosen["rollout"]]
    return {
        "method": run.method,
        "model": run.model,
        "data": str(run.data) if run.data else "tiny world (generated)",
        "seed": run.seed,
        "settings": run.settings,
        "n_eval": n,
        "eval_before": before["greedy"],
        "eval_after": after["greedy"],
        "ci95_before": [round(bound, 4) for bound in wilson_interval(before["greedy"], n)],
        "ci95_after": [round(bound, 4) for bound in wilson_interval(after["greedy"], n)],
        "eval_before_sampled": before["sampled"],
        "eval_after_sampled": after["sampled"],
        "num_rollouts": run.num_rollout,
        "checkpoint_of_rollout": chosen["rollout"],
        "checkpoint_chosen_by": chosen["by"],
        **method_of(run.method).details(run, chosen["rollout"]),
        "seconds": round(seconds_spent(run), 1),
        "commit": commit(),
    }


def seconds_spent(run: Run, more: float = 0.0) -> float:
    """Wall clock of all calls of this run so far, after adding `more`."""
    path = run.output / "run" / "seconds.json"
    total = more + (json.loads(path.read_text()) if path.exists() else 0.0)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(total))
    return total


def finish(run: Run) -> None:
    """Write summary, metrics and report, and say where they are."""
    from slime.observability.episodes import load_eval_episodes
    from slime.observability.report import Chart, write_report

    summary, rows = summarise(run), step_rows(read_lines(run.metrics))
    (run.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    (run.output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dumps = (0, summary["checkpoint_of_rollout"])
    shown = load_eval_episodes(run.output / "run/samples", dumps, summary["n_eval"], run.start_model)
    method = method_of(run.method)
    charts = [Chart(**chart) for chart in method.charts(summary)]
    write_report(run.output / "report.html", summary, rows, shown, method.ABOUT, charts)
    rates = f"{summary['eval_before']:.3f} -> {summary['eval_after']:.3f}"
    print(f"\nheld-out success {rates} (greedy, n={summary['n_eval']})")
    for name in ("summary.json", "metrics.jsonl", "report.html", "checkpoint"):
        print(f"  {name:13} {run.output / name}")


STAGES = {
    "model": prepare_model,
    "warm start": warm_start,
    "evaluate, train, evaluate": train,
    "measure": measure,
    "report": finish,
}


def main(argv: Sequence[str]) -> int:
    try:
        run = parse_args(argv)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, _raise_interrupted)
    started = time.time()
    try:
        for number, (title, stage) in enumerate(STAGES.items(), 1):
            print(f"[{number}/{len(STAGES)}] {title}", flush=True)
            try:
                stage(run)
            finally:
                started, ended = time.time(), started
                seconds_spent(run, started - ended)
    except Interrupted:
        print(f"\nstopped; the same command goes on from here. Logs: {run.logs}", file=sys.stderr)
        return 130
    except (RuntimeError, ServerStartError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
