"""Writes every file that holds versions from `requirements/pins.yaml`; `--check` only says which are out of date.

    python tools/make_requirements.py [--check]

Written whole: the requirement files of `sets`. Written between their lines `pins: begin` and `pins: end`: the files of
`blocks`. A package of a set without a version, a version that no set uses, and a version that is no text (1.10 is 1.1 to
YAML) are errors. Exit code 0; 1 when `--check` finds a difference; 2 for a broken pin file.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "requirements/pins.yaml"
BLOCK = re.compile(r"(?<=# pins: begin\n).*?(?=# pins: end\n)", re.DOTALL)
NOTE = "Written by tools/make_requirements.py from requirements/pins.yaml."


def version_of(package: str, versions: dict[str, Any], kind: str) -> str:
    """What pip is to take, such as `==1.2`; "" for any. Raises ValueError naming the package."""
    name = package.partition("[")[0]
    if name not in versions:
        raise ValueError(f"{PINS}: {name} is in a set but has no version under `versions`")
    found = versions[name].get(kind) if isinstance(versions[name], dict) else versions[name]
    if not isinstance(found, str):
        raise ValueError(f'{PINS}: version of {name} is {found!r}; write it in quotes ("" for any)')
    return f"=={found}" if found[:1].isdigit() else found


def flat(packages: list[Any]) -> Iterator[str]:
    """Names of a list that may hold lists."""
    for package in packages:
        if isinstance(package, list):
            yield from flat(package)
        else:
            yield package


def requirements(entry: dict[str, Any], versions: dict[str, Any]) -> str:
    """Text of a requirement file."""
    lines = [f"# {NOTE}", f"# {entry['about']}"]
    for group in entry["groups"]:
        if "about" in group:
            lines += ["", f"# {group['about']}"]
        lines += [name + version_of(name, versions, entry["kind"]) for name in flat(group["packages"])]
    return "\n".join(lines) + "\n"


def with_block(path: Path, values: dict[str, str], versions: dict[str, Any]) -> str:
    """The file with new lines in its block. Raises ValueError when it has none."""
    kind = "gpu" if path.name in ("Dockerfile", "build_conda.sh") else "cpu"

    def version(match: re.Match[str]) -> str:
        return version_of(match.group(1), versions, kind).removeprefix("==")

    lines = [f"{name}={re.sub(r'[$]{([^}]+)}', version, value)}\n" for name, value in values.items()]
    text, count = BLOCK.subn("".join(lines), path.read_text(encoding="utf-8"))
    if count != 1:
        raise ValueError(f"{path}: needs one block between `# pins: begin` and `# pins: end`")
    return text


def check_all_used(pins: dict[str, Any]) -> None:
    """Raises ValueError for a version that nothing uses."""
    groups = [group for entry in pins["sets"].values() for group in entry["groups"]]
    used = {name.partition("[")[0] for group in groups for name in flat(group["packages"])}
    used |= set(re.findall(r"\$\{([^}]+)\}", str(pins["blocks"])))
    if unused := pins["versions"].keys() - used:
        raise ValueError(f"{PINS}: nothing uses the version of {', '.join(sorted(unused))}; remove it")


def contents() -> dict[Path, str]:
    """Every file that is written, and its text. Raises ValueError."""
    pins = yaml.safe_load(PINS.read_text(encoding="utf-8"))
    check_all_used(pins)
    versions = pins["versions"]
    files = {ROOT / name: requirements(entry, versions) for name, entry in pins["sets"].items()}
    return files | {ROOT / name: with_block(ROOT / name, values, versions) for name, values in pins["blocks"].items()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Write all files with versions from requirements/pins.yaml.")
    parser.add_argument("--check", action="store_true", help="write nothing, say what is out of date")
    args = parser.parse_args(argv)
    try:
        wanted = contents()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    changed = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in changed:
        if not args.check:
            path.write_text(wanted[path], encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'out of date' if args.check else 'written'}")
    if changed and args.check:
        print("error: change requirements/pins.yaml, then run python tools/make_requirements.py", file=sys.stderr)
    return int(bool(changed) and args.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
