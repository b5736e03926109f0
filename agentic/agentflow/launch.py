"""From settings to running programs: training, servers of the frozen roles, evaluation.

    python -m agentic.agentflow.launch {train,serve,serve-eval,eval} [--SETTING VALUE ...] [--dry-run] [-- MORE FLAGS]

Inputs: `launch.yaml` beside this file holds every setting, the files that are written from them and the flags of every
program; a setting is overridden by its environment variable (`AGENTFLOW_<NAME>`), and that by its flag. Flags behind
`--` go to the program unchanged. Invariants: no host, port, path or number of a run is written here; what is missing or
wrong is said before anything starts; only processes that this one started are ended. `--dry-run` prints the command and
checks it with the parsers of the programs, standing in for models and data that are not there yet.
Leaves out: starting Ray on further machines.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from agentic.common.command_line import Parser
from agentic.common.errors import ConfigError
from agentic.common.roles import load_servers

logger = logging.getLogger(__name__)

TEMPLATE = Path(__file__).with_name("launch.yaml")
ROOT = Path(__file__).resolve().parents[2]
VARIABLE_PREFIX = "AGENTFLOW_"
READY = "ALL READY"
STOP_S = 90.0
POLL_S = 0.5
# The parser lives with the trainer, which the method does not import.
CHECK_TRAIN = "from slime.utils.arguments import parse_args; parse_args()"

Settings = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """One program, ready to run."""

    argv: list[str]
    """Without the interpreter."""
    env: dict[str, str]
    """Added to the environment."""
    files: dict[Path, str]
    """Written first."""
    folder: Path


# --------------------------------------------------------------------------------------------------------------------
# Settings and templates.


@lru_cache(maxsize=1)
def load_template() -> dict[str, Any]:
    """The content of `launch.yaml`; not to be changed."""
    return yaml.safe_load(TEMPLATE.read_text(encoding="utf-8"))


def read_settings(given: Namespace, environ: Mapping[str, str], defaults: Mapping[str, Any]) -> Settings:
    """Defaults, then environment variables, then flags; every value has the type of its default.

    Raises ConfigError naming the flag or variable.
    """
    settings = {}
    for name, default in defaults.items():
        variable = VARIABLE_PREFIX + name.upper()
        value, source = default, ""
        if variable in environ:
            value, source = environ[variable], variable
        if getattr(given, name) is not None:
            value, source = getattr(given, name), _flag(name)
        settings[name] = _typed(value, default, source) if source else value
    return settings


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _typed(text: str, default: Any, source: str) -> Any:
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return text.split() if isinstance(default, list) else type(default)(text)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{source} {text!r}: expected a {type(default).__name__} such as {default!r}") from error


def fill(template: Any, settings: Settings) -> Any:
    """Replace `${name}` everywhere; a text that is one name only keeps the type of the setting.

    Mappings whose `only_if` is empty are left out of what contains them.
    """
    if isinstance(template, str):
        return _fill_text(template, settings)
    if isinstance(template, list):
        return [fill(value, settings) for value in template if _wanted(value, settings)]
    if isinstance(template, dict):
        kept = {key: value for key, value in template.items() if key != "only_if" and _wanted(value, settings)}
        return {key: fill(value, settings) for key, value in kept.items()}
    return template


def _wanted(template: Any, settings: Settings) -> bool:
    return not isinstance(template, dict) or "only_if" not in template or bool(fill(template["only_if"], settings))


def _fill_text(text: str, settings: Settings) -> Any:
    whole = re.fullmatch(r"\$\{(\w+)\}", text)
    if whole:
        return settings[whole.group(1)]
    return re.sub(r"\$\{(\w+)\}", lambda match: str(settings[match.group(1)]), text)


def make_plan(name: str, settings: Settings, extra: Sequence[str] = ()) -> Plan:
    """Arguments, environment and files of a program (`train`, `serve`, `serve-eval` or `eval`)."""
    template = load_template()
    command = fill(template["commands"][name], settings)
    folder = Path(command["folder"])
    flags: dict[str, Any] = {}
    for group in command["flags"]:
        flags |= group  # a later group replaces flags of an earlier one
    program = [str(ROOT / word) if word.endswith(".py") else word for word in command["program"]]
    files = fill(template["files"][command["files"]], settings)
    texts = {folder / file: yaml.safe_dump(content, sort_keys=False) for file, content in files.items()}
    env = {key: str(value) for key, value in command.get("env", {}).items()}
    return Plan([*program, *_arguments(flags), *extra], env, texts, folder)


def _arguments(flags: Mapping[str, Any]) -> Iterator[str]:
    for flag, value in flags.items():
        yield flag
        if value is not None:
            yield from map(str, value if isinstance(value, list) else [value])


# --------------------------------------------------------------------------------------------------------------------
# Checks.


def missing_inputs(name: str, settings: Settings) -> dict[str, str]:
    """Input settings of this program that are set but not there, with what they should be (`directory`, `file`)."""
    template = load_template()
    kinds = {key: template["inputs"][key] for key in template["commands"][name]["inputs"] if settings[key]}
    there = {"directory": Path.is_dir, "file": Path.is_file}
    # A slice such as FILE@[0:100] belongs to the data reader.
    return {key: kind for key, kind in kinds.items() if not there[kind](Path(str(settings[key]).partition("@[")[0]))}


def check_plan(name: str, settings: Settings, extra: Sequence[str]) -> None:
    """Let the program's own parser read the command, in a scratch folder with stand-ins for missing inputs.

    Raises ConfigError with the parser's message.
    """
    with tempfile.TemporaryDirectory() as scratch:
        tried = {**settings, "output": scratch, "eval_output": scratch}
        for key, kind in missing_inputs(name, settings).items():
            tried[key] = _stand_in(Path(scratch) / key, kind)
        plan = make_plan(name, tried, extra)
        write_files(plan)
        if name == "train":
            _check_train(plan)
        elif name == "eval":
            # Imported here: it loads the model libraries, which a launcher does not need.
            from agentic.agentflow import eval as evaluation

            args = evaluation.parse_args(plan.argv[2:])
            evaluation.check_args(args)
            evaluation.load_tables(args)
        else:
            load_servers(next(iter(plan.files)))


def _stand_in(path: Path, kind: str) -> str:
    if kind == "directory":
        path.mkdir()
        (path / "config.json").write_text("{}", encoding="utf-8")
        return str(path)
    file = path.with_suffix(".jsonl")
    file.write_text(json.dumps({"prompt": "1 + 1?", "label": "2"}) + "\n", encoding="utf-8")
    return str(file)


def _check_train(plan: Plan) -> None:
    command = [sys.executable, "-c", CHECK_TRAIN, *plan.argv[1:]]
    answer = subprocess.run(command, env=_environment(plan), capture_output=True, text=True, check=False)
    if answer.returncode:
        raise ConfigError((answer.stderr.strip() or "the trainer's parser failed").splitlines()[-1])


# --------------------------------------------------------------------------------------------------------------------
# Processes.


def write_files(plan: Plan) -> None:
    """The plan's role and settings files."""
    for path, text in plan.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _environment(plan: Plan) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **plan.env}


@contextmanager
def running(plan: Plan, log: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """The program as a child that does not outlive the block; its output goes to `log` or to ours."""
    output = log.open("wb") if log else None
    try:
        process = subprocess.Popen(
            [sys.executable, *plan.argv], env=_environment(plan), stdout=output, stderr=output and subprocess.STDOUT
        )
        try:
            yield process
        finally:
            _end(process)
    finally:
        if output:
            output.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_roles(process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    """Return when the frozen servers are ready. Raises ConfigError when they end or take too long."""
    deadline = time.monotonic() + timeout_s
    while READY not in (text := log.read_text(encoding="utf-8", errors="replace")):
        if process.poll() is not None or time.monotonic() > deadline:
            state = "did not become ready" if process.poll() is None else f"ended with status {process.returncode}"
            last = text.strip().splitlines()[-1:] or ["no output"]
            raise ConfigError(f"the servers of the frozen roles {state}: {last[0]}; log: {log}")
        time.sleep(POLL_S)


def train(settings: Settings, plan: Plan) -> int:
    """The training run, with the frozen servers around it unless they are started elsewhere."""
    write_files(plan)
    if not settings["start_roles"]:
        with running(plan) as process:
            return process.wait()
    log = plan.folder / "role_servers.log"
    with running(make_plan("serve", settings), log) as servers:
        logger.info("starting the servers of the frozen roles; log: %s", log)
        wait_for_roles(servers, log, settings["start_roles_timeout_s"])
        with running(plan) as process:
            return process.wait()


def _raise_exit(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # the children are being ended, which must not be cut short
    raise SystemExit(128 + number)


# --------------------------------------------------------------------------------------------------------------------
# Command line.


def parse_args(argv: Sequence[str], defaults: Mapping[str, Any], commands: Sequence[str]) -> Namespace:
    parser = Parser(
        prog="python -m agentic.agentflow.launch",
        description=f"Settings and their defaults; the environment variable of each is {VARIABLE_PREFIX}<NAME>.",
    )
    parser.add_argument("command", choices=commands)
    parser.add_argument("--dry-run", action="store_true", help="print the command and check it, start nothing")
    for name, default in defaults.items():
        many: dict[str, Any] = {"nargs": "+"} if isinstance(default, list) else {}
        parser.add_argument(_flag(name), help=f"default: {default!r}".replace("%", "%%"), **many)
    args = parser.parse_args(argv)
    for name, default in defaults.items():
        if isinstance(default, list) and getattr(args, name) is not None:
            setattr(args, name, " ".join(getattr(args, name)))
    return args


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Carry out the command line; the exit code of the program."""
    own, extra = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, ())
    template = load_template()
    args = parse_args(own, template["settings"], list(template["commands"]))
    settings = read_settings(args, environ, template["settings"])
    plan, absent = make_plan(args.command, settings, extra), missing_inputs(args.command, settings)
    if args.dry_run:
        for name in absent:
            sys.stderr.write(f"note: {_flag(name)} {settings[name]} is not there yet\n")
        check_plan(args.command, settings, extra)
        assignments = [f"{key}={shlex.quote(value)}" for key, value in plan.env.items()]
        sys.stdout.write(" ".join([*assignments, shlex.join(["python", *plan.argv])]) + "\n")
        return 0
    for name, kind in absent.items():
        raise FileNotFoundError(f"{_flag(name)} {settings[name]}: no such {kind}")
    if args.command == "train":
        return train(settings, plan)
    write_files(plan)
    with running(plan) as process:
        return process.wait()


def main(argv: Sequence[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    signal.signal(signal.SIGTERM, _raise_exit)
    try:
        return run(argv, os.environ)
    except (ConfigError, FileNotFoundError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
