"""From settings to running programs: what the launchers of the methods share.

Inputs: a `launch.yaml` with `settings` (name: default), `inputs` (settings that must exist: `directory` or `file`), `files`
(written first) and `commands` (program and its flags). A setting is overridden by its environment variable
(`<PREFIX><NAME>`), and that by its flag; flags behind `--` go to the program unchanged. In the YAML `${name}` stands for a
setting, and what has an empty `only_if` is left out.
Invariants: no host, port, path or number of a run is written here; what is missing or wrong is said before anything
starts: the program's own parser reads the command, and `tools/plan_run.py` checks and shows GPUs, parallel sizes and memory;
only processes that this one started are ended, and they end with it, however it ends; `--dry-run` does the same checks, with
stand-ins for inputs that are not there yet, prints the command, and starts nothing.
Leaves out: what the commands are, starting Ray on further machines.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from agentic.common.command_line import Parser
from agentic.common.errors import ConfigError

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
STOP_S = 90.0
POLL_S = 0.5
# Programs: the methods do not import the trainer and its parts.
PLANNER = ROOT / "tools/plan_run.py"
GUARD = ROOT / "slime/backends/sglang_utils/child_guard.py"

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
    limits: list[str] = field(default_factory=list)
    """Flags of `tools/plan_run.py`: the machine that the program is planned for."""


@dataclass(frozen=True)
class Launcher:
    """One method's launcher.

    `check(command, plan)` raises ConfigError for a plan its program would refuse, and returns what there is to show of it.
    """

    module: str
    template_path: Path
    check: Callable[[str, Plan], str]

    @property
    def prefix(self) -> str:
        """Prefix of environment variables, from the method's name."""
        return self.module.split(".")[-2].upper() + "_"

    @cached_property
    def template(self) -> dict[str, Any]:
        """Content of the YAML file; not to be changed."""
        return yaml.safe_load(self.template_path.read_text(encoding="utf-8"))

    def make_plan(self, command: str, settings: Settings, extra: Sequence[str] = ()) -> Plan:
        """Arguments, environment and files of a command."""
        entry = fill(self.template["commands"][command], settings)
        flags, limits = _merged(entry["flags"]), _merged(entry.get("limits", []))
        program = [str(ROOT / word) if word.endswith(".py") else word for word in entry["program"]]
        files = fill(self.template["files"][entry["files"]], settings)
        texts = {Path(entry["folder"]) / file: yaml.safe_dump(body, sort_keys=False) for file, body in files.items()}
        env = {key: str(value) for key, value in entry.get("env", {}).items()}
        return Plan([*program, *_arguments(flags), *extra], env, texts, list(_arguments(limits)))

    def missing_inputs(self, command: str, settings: Settings) -> dict[str, str]:
        """Inputs of a command that are set but not there, with what they should be (`directory`, `file`)."""
        kinds = {key: self.template["inputs"][key] for key in self.template["commands"][command]["inputs"]}
        there = {"directory": Path.is_dir, "file": Path.is_file}
        # A slice such as FILE@[0:100] belongs to the data reader.
        paths = {key: Path(str(settings[key]).partition("@[")[0]) for key in kinds if settings[key]}
        return {key: kinds[key] for key, path in paths.items() if not there[kinds[key]](path)}

    def check_command(self, command: str, settings: Settings, extra: Sequence[str]) -> str:
        """Let the program's parser read the command, in a scratch folder with stand-ins for missing inputs.

        Returns the plan as text. Raises ConfigError with the parser's message.
        """
        with tempfile.TemporaryDirectory() as scratch:
            folders = {key: f"{scratch}/{key}" for key in self.template["outputs"]}
            tried = {**settings, **folders}
            for key, kind in self.missing_inputs(command, settings).items():
                tried[key] = _stand_in(Path(scratch) / key, kind, settings[key])
            plan = self.make_plan(command, tried, extra)
            write_files(plan)

            def own_names(text: str) -> str:
                changed = [key for key, value in tried.items() if value != settings[key]]
                for key in sorted(changed, key=lambda key: -len(tried[key])):
                    text = text.replace(tried[key], settings[key])
                return text

            try:
                return own_names(self.check(command, plan))
            except (ConfigError, FileNotFoundError) as error:
                raise type(error)(own_names(str(error))) from error

    def run(self, argv: Sequence[str], environ: Mapping[str, str]) -> int:
        """Carry out the command line; the exit code of the program. Raises ConfigError, FileNotFoundError."""
        own, extra = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, ())
        args = self._parse(own)
        settings = read_settings(args, environ, self.prefix, self.template["settings"])
        for name in self.template.get("shipped", []):
            if settings[name] == self.template["settings"][name]:
                settings[name] = str(ROOT / settings[name])
        for command, more in [("serve-eval", ())] * args.serve + [(args.command, extra)]:
            self._rehearse(command, settings, more, args.dry_run)
        if args.dry_run:
            return 0
        plan = self.make_plan(args.command, settings, extra)
        write_files(plan)
        if not args.serve:
            return self.execute(args.command, settings, plan)
        # No deadline of ours: the servers' program has one, and its end is seen.
        with services(self.eval_services(settings), math.inf):
            return self.execute(args.command, settings, plan)

    def _rehearse(self, command: str, settings: Settings, extra: Sequence[str], dry_run: bool) -> None:
        """Check the command and show its plan. A dry run also prints the command, a real start needs the inputs.

        Raises ConfigError, FileNotFoundError.
        """
        for name, kind in self.missing_inputs(command, settings).items():
            if not dry_run:
                raise FileNotFoundError(f"{_flag(name)} {settings[name]}: no such {kind}")
            sys.stderr.write(f"note: {_flag(name)} {settings[name]} is not there yet\n")
        sys.stderr.write(self.check_command(command, settings, extra))
        if not dry_run:
            return
        plan = self.make_plan(command, settings, extra)
        assignments = [f"{key}={shlex.quote(value)}" for key, value in plan.env.items()]
        sys.stdout.write(" ".join([*assignments, shlex.join(["python", *plan.argv])]) + "\n")

    def eval_services(self, settings: Settings) -> list[Service]:
        """What an evaluation needs while it runs."""
        plan, log = self.make_plan("serve-eval", settings), Path(settings["eval_output"]) / "role_servers.log"
        return [Service("model servers", plan, log, says("ALL READY"))]

    def execute(self, command: str, settings: Settings, plan: Plan) -> int:
        """Run the program, whose files are written, to its end; its exit code. Methods add what must run around it."""
        with running(plan) as process:
            return process.wait()

    def _parse(self, argv: Sequence[str]) -> Namespace:
        settings = self.template["settings"]
        about = f"Settings and their defaults; the environment variable of each is {self.prefix}<NAME>."
        parser = Parser(prog=f"python -m {self.module}", description=about)
        parser.add_argument("command", choices=list(self.template["commands"]))
        parser.add_argument("--dry-run", action="store_true", help="print the command and check it, start nothing")
        parser.add_argument(
            "--serve", action="store_true", help="with `eval`: start its servers, and end them after it"
        )
        for name, default in settings.items():
            many: dict[str, Any] = {"nargs": "+"} if isinstance(default, list) else {}
            parser.add_argument(_flag(name), help=f"default: {default!r}".replace("%", "%%"), **many)
        args = parser.parse_args(argv)
        for name, default in settings.items():
            if isinstance(default, list) and getattr(args, name) is not None:
                setattr(args, name, " ".join(getattr(args, name)))
        if args.serve and args.command != "eval":
            raise ConfigError(f"--serve: `{args.command}` has no servers of an evaluation; leave it out")
        return args

    def main(self, argv: Sequence[str]) -> int:
        """`run` as a program: errors are one line and exit code 2, SIGTERM ends what was started."""
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        signal.signal(signal.SIGTERM, _raise_exit)
        try:
            return self.run(argv, os.environ)
        except (ConfigError, FileNotFoundError) as error:
            sys.stderr.write(f"error: {error}\n")
            return 2
        except KeyboardInterrupt:
            return 130


# --------------------------------------------------------------------------------------------------------------------
# Settings and templates.


def read_settings(given: Namespace, environ: Mapping[str, str], prefix: str, defaults: Mapping[str, Any]) -> Settings:
    """Defaults, then environment variables, then flags; every value has the type of its default.

    Raises ConfigError naming the flag or variable.
    """
    settings = {}
    for name, default in defaults.items():
        variable = prefix + name.upper()
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


def _merged(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A later group replaces flags of an earlier one."""
    return {flag: value for group in groups for flag, value in group.items()}


def _arguments(flags: Mapping[str, Any]) -> Iterator[str]:
    for flag, value in flags.items():
        yield flag
        if value is not None:
            yield from map(str, value if isinstance(value, list) else [value])


# --------------------------------------------------------------------------------------------------------------------
# Checks and processes.


def _stand_in(path: Path, kind: str, stands_for: str) -> str:
    if kind == "directory":
        path.mkdir()
        # The planner knows models by this name.
        (path / "config.json").write_text(json.dumps({"stand_in_for": stands_for}), encoding="utf-8")
        return str(path)
    file = path.with_suffix(".jsonl")
    file.write_text(json.dumps({"prompt": "1 + 1?", "label": "2"}) + "\n", encoding="utf-8")
    return str(file)


def check_train(plan: Plan) -> str:
    """What the planner says of a training run and the servers beside it. Raises ConfigError with its last line."""
    return _ask_planner(plan, ["--", *plan.argv[1:]])


def check_servers(plan: Plan) -> str:
    """What the planner says of the servers of a role file. Raises ConfigError with its last line."""
    return _ask_planner(plan, [])


def _ask_planner(plan: Plan, run: Sequence[str]) -> str:
    command = [sys.executable, str(PLANNER), *plan.limits, *run]
    answer = subprocess.run(command, env=_environment(plan), capture_output=True, text=True, check=False)
    if answer.returncode:
        last = (answer.stderr.strip() or "the planner failed").splitlines()[-1]
        raise ConfigError(last.removeprefix("error: "))
    return answer.stdout


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
    guard = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), str(STOP_S)]
    with log.open("wb") if log else nullcontext() as output:
        process = subprocess.Popen(
            [*guard, sys.executable, *plan.argv],
            env=_environment(plan),
            stdout=output,
            stderr=output and subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()  # the guard kills what does not end within STOP_S


@dataclass(frozen=True)
class Service:
    """A program that another one needs while it runs; its output goes to `log`."""

    name: str
    plan: Plan
    log: Path
    is_ready: Callable[[Path], bool]
    """Asked again and again, with `log`."""


def says(line: str) -> Callable[[Path], bool]:
    """Readiness of a program that prints `line`."""
    return lambda log: line in log.read_text(encoding="utf-8", errors="replace")


@contextmanager
def services(wanted: Sequence[Service], timeout_s: float) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start all, go on when all are ready, end them with the block.

    Raises ConfigError, with the last line of its log, when one of them ends or takes too long.
    """
    with ExitStack() as stack:
        processes = []
        for service in wanted:
            write_files(service.plan)
            service.log.parent.mkdir(parents=True, exist_ok=True)
            processes.append(stack.enter_context(running(service.plan, service.log)))
            logger.info("starting %s; log: %s", service.name, service.log)
        deadline = time.monotonic() + timeout_s
        for service, process in zip(wanted, processes, strict=True):
            _wait_ready(service, process, deadline)
        yield processes


def _wait_ready(service: Service, process: subprocess.Popen[bytes], deadline: float) -> None:
    while not service.is_ready(service.log):
        if process.poll() is not None or time.monotonic() > deadline:
            state = "not ready in time" if process.poll() is None else f"ended with status {process.returncode}"
            last = service.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or ["no output"]
            raise ConfigError(f"{service.name}: {state}: {last[0]}; log: {service.log}")
        time.sleep(POLL_S)
    logger.info("%s: ready", service.name)


def _raise_exit(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # the children are being ended, which must not be cut short
    raise SystemExit(128 + number)
