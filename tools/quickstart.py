"""From nothing to a planner that learned: model, warm start, evaluation, GRPO, evaluation, report.

    python tools/quickstart.py [agentflow] [--model tiny|smollm2] [--data FILE.jsonl] [--num-rollout N] [--seed S] [--output DIR]

Every stage is a program that can be run by itself (its command line stands at the top of its log). A stage whose result is
there is skipped, and training goes on from its last checkpoint, so Ctrl-C and the same command resume. Children run under a
guard: whatever way this program ends, they end with it.

Writes to --output (default outputs/quickstart/METHOD): summary.json, metrics.jsonl, report.html, checkpoint/ (Hugging Face).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import yaml
from tqdm import tqdm

from slime.backends.sglang_utils.errors import ServerStartError
from slime.backends.sglang_utils.owned_process import OwnedProcess
from slime.observability.run_summary import eval_results, read_lines, step_rows, wilson_interval
from slime.utils.arguments.parser import SlimeArgumentParser
from slime.utils.data import check_prompt_file
from slime.utils.misc import get_free_port

METHODS = ("agentflow",)
FROZEN_ROLES = ("executor", "verifier", "base_generator", "python_coder", "generator")


@dataclass(frozen=True)
class Recipe:
    """Numbers of one model's run. Tiny: seen to learn on two cores within minutes. SmolLM2: a short run on real questions."""

    num_rollout: int
    prompts: int
    samples: int
    steps_per_rollout: int
    lr: float
    n_eval: int
    prompt_set: str
    max_steps: int
    max_new_tokens: int
    frozen_max_new_tokens: int
    context: int
    tokens_per_batch: int
    sft_rows: int = 0
    sft_rollouts: int = 0
    gradient_checkpointing: bool = False
    """Attention of a packed batch on the CPU keeps its whole score matrix for the backward pass otherwise."""


RECIPES = {
    "tiny": Recipe(60, 8, 8, 2, 2e-4, 200, "compact", 3, 24, 32, 512, 4096, sft_rows=1600, sft_rollouts=15),
    "smollm2": Recipe(2, 2, 4, 1, 1e-6, 4, "standard", 1, 48, 64, 4096, 1536, gradient_checkpointing=True),
}
SFT_BATCH = 16
# A server binds its port some seconds after we looked. So: below the range from which the system takes ports for outgoing
# connections, and a random start, which keeps two runs on one machine apart.
SERVER_PORTS = (21000, 25900)
SFT_LR = 2e-3


@dataclass(frozen=True)
class Run:
    """One quickstart: the user's choices and where things lie."""

    method: str
    model: str
    data: Path | None
    num_rollout: int
    seed: int
    output: Path
    recipe: Recipe

    @property
    def logs(self) -> Path:
        return self.output / "logs"

    @property
    def metrics(self) -> Path:
        return self.output / "run" / "metrics_raw.jsonl"

    @property
    def start_model(self) -> Path:
        return self.output / ("warm" if self.model == "tiny" else "smollm2")


class Interrupted(BaseException):
    """SIGTERM or Ctrl-C."""


def _raise_interrupted(_number: int, _frame: FrameType | None) -> None:
    raise Interrupted


def parse_args(argv: Sequence[str]) -> Run:
    parser = SlimeArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", nargs="?", choices=METHODS, default="agentflow")
    parser.add_argument(
        "--model", choices=RECIPES, default="tiny", help="tiny: built here, learns in minutes; smollm2: real"
    )
    parser.add_argument("--data", type=Path, help="jsonl with prompt (chat messages) and label; needs --model smollm2")
    parser.add_argument("--num-rollout", type=int, help="GRPO rollouts (default: tiny 60, smollm2 2)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the world, the model, the sampling and the training"
    )
    parser.add_argument("--output", type=Path, help="folder for everything (default: outputs/quickstart/METHOD)")
    args = parser.parse_strictly(argv)
    recipe = RECIPES[args.model]
    num_rollout = recipe.num_rollout if args.num_rollout is None else args.num_rollout
    output = (args.output or ROOT / "outputs" / "quickstart" / args.method).resolve()
    run = Run(args.method, args.model, args.data and args.data.resolve(), num_rollout, args.seed, output, recipe)
    check(run)
    claim_folder(run, move_aside=args.output is None)
    return run


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


def claim_folder(run: Run, move_aside: bool) -> None:
    """Make the output folder this run's. One that holds another run is kept: moved aside, or refused with ValueError."""
    settings = run.output / "run.json"
    wanted = {"model": run.model, "data": str(run.data), "num_rollout": run.num_rollout, "seed": run.seed}
    if settings.exists() and json.loads(settings.read_text()) != wanted:
        if not move_aside:
            raise ValueError(
                f"--output {run.output}: holds a run with other settings ({settings}); choose another folder"
            )
        number = next(n for n in itertools.count(1) if not run.output.with_name(f"{run.output.name}.{n}").exists())
        kept = run.output.rename(run.output.with_name(f"{run.output.name}.{number}"))
        print(f"note: the earlier run with other settings is kept in {kept}")
    run.output.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps(wanted))


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


def prepare_model(run: Run) -> None:
    """Build the tiny model and its world, or unpack SmolLM2; skipped when it is there."""
    python = sys.executable
    if run.model == "tiny" and not (run.output / "tiny" / "config.json").exists():
        flags = [
            "--world-dir",
            str(run.output / "world"),
            "--output",
            str(run.output / "tiny"),
            "--seed",
            str(run.seed),
        ]
        run_to_end(run, "make_model", [python, str(ROOT / "tools/make_tiny_model.py"), *flags])
    if run.model == "smollm2":
        if not (run.output / "smollm2" / "tokenizer_config.json").exists():
            command = [python, str(ROOT / "tools/make_smollm2.py"), "--output", str(run.output / "smollm2")]
            run_to_end(run, "make_model", command)
        if run.data is None and not (run.output / "world").exists():
            from agentic.agentflow.tiny_world import write_world

            write_world(run.output / "world", run.seed, n_sft=8, n_train=1000, n_heldout=200)


def warm_start(run: Run) -> None:
    """Teach the tiny model its roles on scripted traces, through slime's SFT path without engines."""
    recipe, steps = run.recipe, run.recipe.sft_rows * run.recipe.sft_rollouts // SFT_BATCH
    if run.model != "tiny" or (run.start_model / "config.json").exists():
        return
    metrics = run.output / "run" / "sft_metrics.jsonl"
    command = [sys.executable, str(ROOT / "train.py"), "--train-backend", "fsdp", "--debug-train-only"]
    command += ["--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--loss-type", "sft_loss"]
    command += ["--disable-compute-advantages-and-returns", "--prompt-data", str(run.output / "world" / "sft.jsonl")]
    command += ["--input-key", "prompt", "--hf-checkpoint", str(run.output / "tiny"), "--seed", str(run.seed)]
    command += ["--num-rollout", str(recipe.sft_rollouts), "--rollout-batch-size", str(recipe.sft_rows)]
    command += ["--global-batch-size", str(SFT_BATCH), "--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048"]
    command += ["--lr", str(SFT_LR), "--lr-decay-style", "WSD", "--lr-warmup-iters", "50"]
    command += ["--lr-decay-iters", str(steps), "--lr-wsd-decay-iters", str(steps * 2 // 5)]
    command += ["--actor-num-gpus-per-node", "1", "--save", str(run.output / "run" / "sft"), "--save-interval", "4"]
    command += [
        "--load",
        str(run.output / "run" / "sft"),
        "--save-hf",
        str(run.output / "run" / "sft_hf_{rollout_id}"),
    ]
    command += ["--metrics-jsonl", str(metrics)]
    run_to_end(run, "warm_start", command, MetricsBar(metrics, "warm start", recipe.sft_rollouts, False))
    (run.output / "run" / f"sft_hf_{recipe.sft_rollouts - 1}").rename(run.start_model)


def write_configs(run: Run) -> dict[str, Path]:
    """The role file, the method's settings and the evaluation sets of this run."""
    recipe, folder = run.recipe, run.output / "run"
    folder.mkdir(exist_ok=True)
    options = {"max-total-tokens": 65536, "max-running-requests": 64, "context-length": recipe.context}
    port = get_free_port(random.randint(*SERVER_PORTS))
    server = {"model": str(run.start_model), "port": port, "options": options}
    frozen = {name: {"server": "frozen", "max_new_tokens": recipe.frozen_max_new_tokens} for name in FROZEN_ROLES}
    roles = {"planner": {"url": "policy", "max_new_tokens": recipe.max_new_tokens}, **frozen}
    method = {
        "agentflow_roles": str(folder / "roles.yaml"),
        "agentflow_prompt_set": recipe.prompt_set,
        "agentflow_max_steps": recipe.max_steps,
        "agentflow_eval_max_steps": recipe.max_steps,
        "agentflow_max_context_len": recipe.context,
        "agentflow_judge": "rule_only",
    }
    source = str(run.data) if run.data else str(run.output / "world" / "heldout.jsonl")
    data = f"{source}@[:{recipe.n_eval}]"
    sets = [
        {"name": "greedy", "path": data, "temperature": 0.0},
        {"name": "sampled", "path": data, "temperature": 1.0},
    ]
    common = {"input_key": "prompt", "label_key": "label", "max_response_len": recipe.max_new_tokens}
    documents = {
        "roles": {"defaults": {"timeout_s": 300, "retries": 12}, "servers": {"frozen": server}, "roles": roles},
        "agentflow": method,
        "eval": {"eval": {"defaults": common, "datasets": sets}},
    }
    paths = {name: folder / f"{name}.yaml" for name in documents}
    for name, document in documents.items():
        paths[name].write_text(yaml.safe_dump(document, sort_keys=False))
    return paths


def train_command(run: Run, configs: dict[str, Path]) -> list[str]:
    """The GRPO run as one command line of `train.py`."""
    recipe, checkpoints, batch = run.recipe, run.output / "run" / "grpo", run.recipe.prompts * run.recipe.samples
    world = run.output / "world" / "train.jsonl"
    data = f"{run.data}@[{recipe.n_eval}:]" if run.data else str(world)
    command = [sys.executable, str(ROOT / "train.py"), "--train-backend", "fsdp", "--seed", str(run.seed)]
    command += ["--hf-checkpoint", str(run.start_model), "--ref-load", str(run.start_model)]
    command += ["--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--rollout-seed", str(run.seed)]
    command += ["--prompt-data", data, "--input-key", "prompt", "--label-key", "label"]
    command += ["--num-rollout", str(run.num_rollout), "--rollout-batch-size", str(recipe.prompts)]
    command += [
        "--n-samples-per-prompt",
        str(recipe.samples),
        "--global-batch-size",
        str(batch // recipe.steps_per_rollout),
    ]
    command += ["--rollout-max-response-len", str(recipe.max_new_tokens), "--rollout-temperature", "1.0"]
    command += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", str(recipe.tokens_per_batch)]
    command += ["--advantage-estimator", "grpo", "--eps-clip", "0.2", "--eps-clip-high", "0.3", "--use-kl-loss"]
    command += [
        "--kl-loss-type",
        "low_var_kl",
        "--kl-loss-coef",
        "0.001",
        "--lr",
        str(recipe.lr),
        "--adam-beta2",
        "0.98",
    ]
    command += ["--custom-generate-function-path", "agentic.agentflow.rollout.generate"]
    command += ["--custom-rm-path", "agentic.agentflow.reward.reward_func"]
    command += ["--custom-convert-samples-to-train-data-path", "agentic.agentflow.convert.custom_convert"]
    command += ["--custom-eval-rollout-log-function-path", "agentic.agentflow.rollout.eval_log"]
    command += ["--custom-config-path", str(configs["agentflow"]), "--eval-config", str(configs["eval"])]
    command += ["--eval-interval", str(run.num_rollout), "--save", str(checkpoints), "--load", str(checkpoints)]
    command += [
        "--save-interval",
        str(max(run.num_rollout // 6, 1)),
        "--save-hf",
        str(run.output / "run" / "hf_{rollout_id}"),
    ]
    command += ["--gradient-checkpointing"] * recipe.gradient_checkpointing
    command += ["--sglang-context-length", str(recipe.context), "--sglang-log-dir", str(run.logs)]
    command += [
        "--metrics-jsonl",
        str(run.metrics),
        "--save-debug-rollout-data",
        str(run.output / "run/samples/{rollout_id}.pt"),
    ]
    return command


def train(run: Run) -> None:
    """Frozen role servers and the GRPO run with its evaluations; goes on from the last checkpoint."""
    if (run.output / "checkpoint" / "config.json").exists():
        return
    configs = write_configs(run)
    serve = [sys.executable, str(ROOT / "tools/serve_roles.py"), "--roles", str(configs["roles"])]
    servers = child(run, "role_servers", [*serve, "--log-dir", str(run.logs)])
    bar = MetricsBar(run.metrics, "GRPO", run.num_rollout, True)

    def tick() -> None:
        bar()
        if servers.poll() is not None:
            raise RuntimeError(f"the role servers ended; log: {servers.log_path}\n{servers.log_tail()}")

    try:
        # Both start at once: training brings up Ray, its engine and its model before it needs the frozen roles.
        run_to_end(run, "train", train_command(run, configs), tick)
    finally:
        servers.stop(timeout_s=45.0)
        bar.bar.close()
    (run.output / "run" / f"hf_{run.num_rollout - 1}").rename(run.output / "checkpoint")


def commit() -> str:
    """The commit of this tree, with `-dirty` when it was changed; 'unknown' outside a git checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


def summarise(run: Run, seconds: float) -> dict[str, Any]:
    """summary.json: success before and after on the held-out problems, with 95% intervals (greedy, and at temperature 1)."""
    results, n = eval_results(read_lines(run.metrics)), run.recipe.n_eval
    before, after = results[0], results[-1]
    return {
        "method": run.method,
        "model": run.model,
        "data": str(run.data) if run.data else "tiny world (generated)",
        "seed": run.seed,
        "n_eval": n,
        "eval_before": before["greedy"],
        "eval_after": after["greedy"],
        "ci95_before": [round(bound, 4) for bound in wilson_interval(before["greedy"], n)],
        "ci95_after": [round(bound, 4) for bound in wilson_interval(after["greedy"], n)],
        "eval_before_sampled": before["sampled"],
        "eval_after_sampled": after["sampled"],
        "num_rollouts": run.num_rollout,
        "seconds": round(seconds, 1),
        "commit": commit(),
    }


def finish(run: Run, started: float) -> None:
    """Write summary, metrics and report, and say where they are."""
    from slime.observability.episodes import load_eval_episodes
    from slime.observability.report import write_report

    path = run.output / "summary.json"
    earlier = json.loads(path.read_text())["seconds"] if path.exists() else 0.0
    summary = summarise(run, earlier or time.time() - started)
    rows = step_rows(read_lines(run.metrics))
    path.write_text(json.dumps(summary, indent=2) + "\n")
    (run.output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = load_eval_episodes(
        run.output / "run/samples", (0, run.num_rollout - 1), summary["n_eval"], run.start_model
    )
    write_report(run.output / "report.html", summary, rows, shown)
    print(
        f"\nheld-out success {summary['eval_before']:.3f} -> {summary['eval_after']:.3f} (greedy, n={summary['n_eval']})"
    )
    for name in ("summary.json", "metrics.jsonl", "report.html", "checkpoint"):
        print(f"  {name:13} {run.output / name}")


def main(argv: Sequence[str]) -> int:
    try:
        run = parse_args(argv)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, _raise_interrupted)
    stages = {"model": prepare_model, "warm start": warm_start, "evaluate, train, evaluate": train}
    started = time.time()
    try:
        for number, (title, stage) in enumerate(stages.items(), 1):
            print(f"[{number}/{len(stages) + 1}] {title}", flush=True)
            stage(run)
        print(f"[{len(stages) + 1}/{len(stages) + 1}] report", flush=True)
        finish(run, started)
    except Interrupted:
        print(f"\nstopped; the same command goes on from here. Logs: {run.logs}", file=sys.stderr)
        return 130
    except (RuntimeError, ServerStartError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
