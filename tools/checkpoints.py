"""Released checkpoints and their data sets: list, download, verify, evaluate, upload.

    python tools/checkpoints.py list
    python tools/checkpoints.py download NAME ... [--with-needed] [--endpoint MIRROR]
    python tools/checkpoints.py verify NAME_OR_FOLDER ...
    python tools/checkpoints.py evaluate NAME_OR_FOLDER [--method METHOD] [-- SETTINGS OF eval.sh]
    python tools/checkpoints.py upload FOLDER --repo ORG/NAME --method METHOD --base ORG/NAME --result result.json ...

NAME is one of `checkpoints.yaml`, or any `ORG/NAME` of the hub (`datasets/ORG/NAME` for data). Models go to
`models/NAME`, data sets to `data/NAME`. Every command can be stopped and given again: it goes on where it was. Exit code 0;
1 when files are wrong or the hub fails; 2 for bad input; `evaluate` ends as the evaluation does.
Leaves out: what is evaluated and how (`agentic/METHOD/launch.yaml`), the bytes (`slime/utils/hub_files.py`).
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agentic.common.command_line import Parser, positive
from agentic.common.errors import ConfigError
from agentic.common.launching import Plan, fill, running
from agentic.common.model_card import CardFacts, write_card
from agentic.common.roles import nearest
from slime.utils.hub_files import MANIFEST, UNFINISHED, HubError, Manifest, download, verify

METHODS = {"agentflow": "AgentFlow", "memagent": "MemAgent", "toolorchestra": "ToolOrchestra"}
POLICY_SETTING = {"agentflow": "trained_model", "memagent": "eval_model", "toolorchestra": "trained_model"}
CATALOGUE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class Entry:
    """A repository, and for a policy how it is evaluated (see the head of `checkpoints.yaml`)."""

    repo: str
    kind: str = "model"
    method: str = ""
    setting: str = ""
    base: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    needs: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    reported: str = ""
    use: str = ""

    def folder(self, args: Namespace) -> Path:
        """Where it lies: the last part of its name, which the launchers expect."""
        return (args.models if self.kind == "model" else args.data) / self.repo.rpartition("/")[2]

    def state(self, args: Namespace) -> str:
        """`absent`, `unfinished`, or the commit that is there."""
        folder = self.folder(args)
        manifest = Manifest.load(folder)
        if manifest is None:
            return "unfinished" if (folder / UNFINISHED).is_dir() else "absent"
        return manifest.revision[:12]


def load_catalogue() -> dict[str, Entry]:
    """Entries by name."""
    content = yaml.safe_load(CATALOGUE.read_text(encoding="utf-8"))
    models = {name: Entry(**values) for name, values in content["models"].items()}
    return models | {name: Entry(kind="dataset", **values) for name, values in content["datasets"].items()}


def find(name: str, catalogue: dict[str, Entry]) -> Entry:
    """The entry of a name, a repository of the catalogue, or any other repository. Raises ConfigError."""
    if name in catalogue:
        return catalogue[name]
    known = next((entry for entry in catalogue.values() if entry.repo == name), None)
    if known or name.count("/") == 1:
        return known or Entry(name)
    if name.startswith("datasets/") and name.count("/") == 2:
        return Entry(name.partition("/")[2], kind="dataset")
    raise ConfigError(f"{name}: not in {CATALOGUE.name}{nearest(name, catalogue)}; `list` shows all, or give ORG/NAME")


# --------------------------------------------------------------------------------------------------------------------
# Commands.


def run_list(args: Namespace, catalogue: dict[str, Entry]) -> int:
    rows = [("name", "repository", "here", "for")]
    for name, entry in catalogue.items():
        about = f"{METHODS[entry.method]}; reported: {entry.reported}" if entry.method else entry.use
        rows.append((name, entry.repo, entry.state(args), about))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]))
    return 0


def needed(entry: Entry, catalogue: dict[str, Entry]) -> Iterator[Entry]:
    """The entry, and what its evaluation needs besides: data, base model, models of the frozen roles."""
    yield entry
    yield from (catalogue[name] for name in entry.data)
    yield from (Entry(repo) for repo in [entry.base, *entry.needs] if repo)


def run_download(args: Namespace, catalogue: dict[str, Entry]) -> int:
    wanted = {}
    for name in args.names:
        entry = find(name, catalogue)
        for each in needed(entry, catalogue) if args.with_needed else [entry]:
            wanted[each.kind, each.repo] = each
    for entry in wanted.values():
        folder = entry.folder(args)
        print(f"{entry.repo} -> {folder}", flush=True)
        options = {"revision": args.revision, "endpoint": args.endpoint, "only": args.only, "workers": args.workers}
        manifest = download(entry.repo, entry.kind, folder, **options)
        total = sum(record.size for record in manifest.files.values())
        print(f"{folder}: {len(manifest.files)} files, {total / 1e9:.2f} GB, commit {manifest.revision}", flush=True)
    return 0


def run_verify(args: Namespace, catalogue: dict[str, Entry]) -> int:
    bad = 0
    for name in args.names:
        bad += not check_folder(Path(name) if Path(name).is_dir() else find(name, catalogue).folder(args))
    return int(bad > 0)


def check_folder(folder: Path) -> bool:
    """Whether all is right; what is wrong is printed with the remedy. Raises ConfigError for a folder without manifest."""
    manifest = Manifest.load(folder)
    if manifest is None:
        raise ConfigError(f"{folder}: no {MANIFEST}, so nothing is known about it; run `download` to its end")
    problems = verify(folder, manifest)
    for problem in problems:
        print(f"{folder / problem.file}: {problem.what}", file=sys.stderr)
    if problems:
        prefix = "datasets/" * (manifest.kind == "dataset")
        command = f"download {prefix}{manifest.repo} --revision {manifest.revision}"
        print(f"remedy: `{command}` fetches these files again and leaves the others", file=sys.stderr)
        return False
    print(f"{folder}: {len(manifest.files)} files of {manifest.repo} at {manifest.revision} are right")
    return True


def run_evaluate(args: Namespace, catalogue: dict[str, Entry]) -> int:
    """Check the files, then serve and evaluate with the method's own program."""
    own = Path(args.name).is_dir() and args.name not in catalogue
    entry = Entry(repo=Path(args.name).resolve().name) if own else find(args.name, catalogue)
    folder = Path(args.name) if own else entry.folder(args)
    method = args.method or entry.method
    if not method:
        raise ConfigError(f"{args.name}: whose policy is it? Give --method, one of {', '.join(METHODS)}")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder}: no model there; `download {args.name} --with-needed` brings it and what it needs"
        )
    if Manifest.load(folder) is not None and not check_folder(folder):
        return 1
    roots = {"base": str(args.models / entry.base.rpartition("/")[2]), "models": args.models, "data": args.data}
    out = args.out or Path("outputs/checkpoints") / folder.resolve().name
    settings = fill(entry.settings, roots) | {entry.setting or POLICY_SETTING[method]: folder, "eval_output": out}
    flags = [word for name, value in settings.items() for word in ("--" + name.replace("_", "-"), str(value))]
    plan = Plan(["-m", f"agentic.{method}.launch", "eval", "--serve", *flags, *args.settings], {}, {})
    if args.dry_run:
        return int(importlib.import_module(f"agentic.{method}.launch").LAUNCHER.main([*plan.argv[2:], "--dry-run"]))
    if entry.reported:
        print(f"reported by its publisher, not measured here: {entry.reported}", flush=True)
    with running(plan) as process:
        code = process.wait()
    if code == 0:
        print(f"results: {out / 'result.json'}")
    return code


def run_upload(args: Namespace, _: dict[str, Entry]) -> int:
    """Write the card, then send the folder."""
    if not (args.folder / "config.json").is_file():
        raise FileNotFoundError(f"{args.folder}: no config.json; give a checkpoint in Hugging Face format")
    if args.repo.count("/") != 1:
        raise ConfigError(f"--repo {args.repo}: write ORG/NAME")
    facts = CardFacts(args.repo, args.method, METHODS[args.method], args.base, args.license, args.note)
    print(f"card: {write_card(args.folder, facts, args.result)}", flush=True)
    if args.card_only:
        return 0
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    api = HfApi(endpoint=args.endpoint)
    try:
        api.create_repo(args.repo, private=not args.public, exist_ok=True)
        left_out = [MANIFEST, f"{UNFINISHED}/*", ".cache/*"]
        done = api.upload_folder(repo_id=args.repo, folder_path=args.folder, ignore_patterns=left_out)
    except OfflineModeIsEnabled as error:
        raise HubError("HF_HUB_OFFLINE is set; unset it to upload") from error
    except HfHubHTTPError as error:
        raise HubError(f"{args.repo}: {error}; `hf auth login` needs a token that may write there") from error
    print(f"uploaded: {done.commit_url}")
    return 0


# --------------------------------------------------------------------------------------------------------------------
# Command line.


def make_parser() -> Parser:
    parser = Parser(prog="python tools/checkpoints.py", description="Released checkpoints and their data sets.")
    commands = parser.add_subparsers(dest="command", required=True)
    roots = Parser(add_help=False)
    roots.add_argument("--models", type=Path, default=Path("models"), help="folder of the models (default: models)")
    roots.add_argument("--data", type=Path, default=Path("data"), help="folder of the data sets (default: data)")
    hub = Parser(add_help=False)
    hub.add_argument("--endpoint", help="a mirror of the hub (default: HF_ENDPOINT, or the hub); gets no token")
    commands.add_parser("list", parents=[roots], help="what there is, and what of it is here")
    add = commands.add_parser(
        "download", parents=[roots, hub], help="fetch, with resume; hashes are recorded"
    ).add_argument
    add("names", nargs="+", metavar="NAME")
    add("--with-needed", action="store_true", help="also the data and the models that its evaluation needs")
    add("--revision", default="main", help="branch, tag or commit (default: main)")
    add("--only", nargs="+", default=[], metavar="PATTERN", help="files whose names match, such as '*.json'")
    add("--workers", type=positive, default=4, help="files at a time")
    add = commands.add_parser(
        "verify", parents=[roots], help="compare all files with the recorded hashes"
    ).add_argument
    add("names", nargs="+", metavar="NAME_OR_FOLDER")
    add = commands.add_parser(
        "evaluate", parents=[roots], help="serve and evaluate; after `--` settings of eval.sh"
    ).add_argument
    add("name", metavar="NAME_OR_FOLDER")
    add("--method", choices=list(METHODS), help="of a folder or repository that is not in the list")
    add("--out", type=Path, help="results (default: outputs/checkpoints/NAME)")
    add("--dry-run", action="store_true", help="check and print the commands, start nothing")
    add = commands.add_parser("upload", help="fill the model card from results and send the folder").add_argument
    add("folder", type=Path, metavar="FOLDER")
    add("--repo", required=True, metavar="ORG/NAME")
    add("--method", choices=list(METHODS), required=True)
    add("--base", required=True, metavar="ORG/NAME", help="the model before training")
    add("--result", type=Path, nargs="+", required=True, help="result.json of evaluations of exactly these weights")
    add("--license", default="apache-2.0", help="as the hub spells it")
    add("--note", default="", help="a paragraph about data and training")
    add("--public", action="store_true", help="a new repository is private without it")
    add("--card-only", action="store_true", help="write README.md and send nothing")
    add("--endpoint", help="another hub; gets the token")
    return parser


def parse_args(argv: list[str]) -> Namespace:
    own, settings = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = make_parser()
    args = parser.parse_args(own)
    if settings and args.command != "evaluate":
        parser.error(f"{settings[0]}: only `evaluate` takes settings after `--`")
    args.settings = settings
    return args


def _stop(number: int, _frame: FrameType | None) -> None:
    """Threads that fetch would be waited for otherwise; what they wrote is kept."""
    print("stopped; the same command goes on from here", file=sys.stderr, flush=True)
    os._exit(128 + number)


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    commands: dict[str, Any] = {"list": run_list, "download": run_download, "verify": run_verify}
    commands |= {"evaluate": run_evaluate, "upload": run_upload}
    try:
        args = parse_args(argv)
        if args.command == "download":
            signal.signal(signal.SIGINT, _stop)
        else:
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        return commands[args.command](args, load_catalogue())
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except HubError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
