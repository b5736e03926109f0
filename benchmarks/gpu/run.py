"""What can only be proven on a GPU, in one command: `bash scripts/gpu_check.sh --model FOLDER`.

Runs the checks of `checks.py` one after the other and writes `gpu_check.json` after each: machine, commit, model, and for
every check `pass`, `fail` or `skip` with the reason, its figures and their bounds. The same command goes on with what has not
passed yet. Exit code 0 when nothing failed, 1 when a check did, 2 for bad input and without a GPU. `--cpu-smoke` tries the
programs on a CPU with a tiny model: figures of speed and memory are then not judged.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NO_GPU = "error: torch sees no NVIDIA GPU here; run this where one is, or try the programs with --cpu-smoke"


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bash scripts/gpu_check.sh", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model", type=Path, default=Path("models/Qwen2.5-7B-Instruct"), help="folder in Hugging Face format")
    add("--gpus", type=int, help="GPUs to use (default: all)")
    add("--only", nargs="+", metavar="CHECK", help="some of the checks; --list shows them")
    add("--out", type=Path, default=Path("outputs/gpu_check"), help="folder for gpu_check.json, logs and data")
    add("--long-tokens", type=int, default=131_072, help="length of the long row")
    add("--limit-s", type=float, default=1800.0, help="seconds for one run of train.py")
    add("--cpu-smoke", action="store_true", help="tiny model on the CPU: do the programs run?")
    add("--list", action="store_true", help="name the checks and end")
    return parser.parse_args(argv)


def tiny_model(folder: Path) -> Path:
    """A random model with a tokenizer of its own, made here."""
    target = folder / "tiny_model"
    if not (target / "config.json").is_file():
        tool = Path(__file__).resolve().parents[2] / "tools/make_tiny_model.py"
        words = ["--world-dir", str(folder / "tiny_world"), "--output", str(target)]
        subprocess.run([sys.executable, str(tool), *words], check=True, stdout=subprocess.DEVNULL)
    return target


def run_check(name: str, setting: Any) -> dict[str, Any]:
    """One check's entry of the file."""
    from benchmarks.gpu.checks import CHECKS, Failed, Skip

    start = time.monotonic()
    entry: dict[str, Any] = {"status": "pass", "reason": "", "bounds": []}
    try:
        entry["bounds"] = [bound.as_json(not setting.smoke) for bound in CHECKS[name](setting)]
    except Skip as error:
        entry |= {"status": "skip", "reason": str(error)}
    except Failed as error:
        entry |= {"status": "fail", "reason": str(error)}
    broken = [bound["name"] for bound in entry["bounds"] if bound["ok"] is False]
    if broken:
        entry |= {"status": "fail", "reason": f"out of bounds: {', '.join(broken)}"}
    return {**entry, "seconds": round(time.monotonic() - start, 1)}


def load_passed(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Checks that passed before with the same code, model and machine."""
    if not path.is_file():
        return {}
    before = json.loads(path.read_text(encoding="utf-8"))
    same = all(before.get(key) == value for key, value in about.items())
    return {name: entry for name, entry in before["checks"].items() if same and entry["status"] == "pass"}


def show(name: str, entry: dict[str, Any]) -> None:
    print(f"{entry['status']:4}  {name}  {entry['seconds']} s  {entry['reason']}".rstrip(), flush=True)
    for bound in entry["bounds"]:
        limits = [f"{word} {bound[key]:g}" for key, word in (("at_least", ">="), ("at_most", "<=")) if key in bound]
        value = "not measured" if bound["value"] is None else f"{bound['value']:.6g}"
        judged = {True: "ok", False: "OUT OF BOUNDS", None: "not judged" if limits else ""}[bound["ok"]]
        print(f"        {bound['name']}: {value} {' '.join(limits)} {judged}".rstrip(), flush=True)


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    try:
        import torch
    except ImportError:
        print(f"error: {sys.executable} has no torch; set PYTHON to the project's interpreter", file=sys.stderr)
        return 2
    if not (args.cpu_smoke or args.list or torch.cuda.is_available()):
        print(NO_GPU, file=sys.stderr)
        return 2
    from agentic.common.evaluation_provenance import commit, model_fingerprint
    from benchmarks.gpu.bounds import machine
    from benchmarks.gpu.checks import CHECKS, Setting, describe

    if args.list:
        print("\n".join(f"{name}: {describe(check)}" for name, check in CHECKS.items()))
        return 0
    names = args.only or list(CHECKS)
    if unknown := [name for name in names if name not in CHECKS]:
        print(f"error: --only {unknown[0]}: no such check; there are {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    model = tiny_model(out) if args.cpu_smoke else args.model.resolve()
    if not (model / "config.json").is_file():
        print(f"error: --model {args.model}: no config.json there; give a Hugging Face model folder", file=sys.stderr)
        return 2
    gpus = args.gpus or (2 if args.cpu_smoke else torch.cuda.device_count())
    about = {"commit": commit(), "machine": machine(), "smoke": args.cpu_smoke, "used_gpus": gpus}
    about |= {"model": model_fingerprint(str(model)), "long_tokens": args.long_tokens}
    setting = Setting(model, out, gpus, args.cpu_smoke, args.limit_s, args.long_tokens)
    checks = load_passed(out / "gpu_check.json", about)
    for name in names:
        if name in checks:
            print(f"pass  {name}  (before)", flush=True)
            continue
        print(f"run   {name}", flush=True)
        checks[name] = run_check(name, setting)
        show(name, checks[name])
        (out / "gpu_check.json").write_text(json.dumps({**about, "checks": checks}, indent=2) + "\n", encoding="utf-8")
    failed = [name for name in names if checks[name]["status"] == "fail"]
    skipped = [name for name in names if checks[name]["status"] == "skip"]
    print(
        f"{len(names) - len(failed) - len(skipped)} passed, {len(failed)} failed, {len(skipped)} skipped", flush=True
    )
    print(f"results: {out / 'gpu_check.json'}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
