"""tools/checkpoints.py against a hub on this machine: list, download, verify, evaluate a tiny model, upload with its card."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import yaml
from helpers_hub import COMMITS, FakeHub
from helpers_source import ROOT

from agentic.common import launching
from agentic.common.evaluation_provenance import model_fingerprint
from slime.utils.hub_files import Manifest

TOOL = ROOT / "tools/checkpoints.py"
REPO = "BytedTsinghua-SIA/RL-MemoryAgent-7B"
FILES = {"config.json": b"{}", "model.safetensors": b"w" * 4000}


@pytest.fixture
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("checkpoints_tool", TOOL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    with FakeHub(**{REPO: dict(FILES)}) as server:
        server.lfs = {"model.safetensors"}
        yield server


# --------------------------------------------------------------------------------------------------------------------
# The catalogue.


def test_every_entry_fits_its_method(tool: Any) -> None:
    """Settings exist in launch.yaml, and what it needs has the folder names that launch.yaml expects."""
    catalogue = tool.load_catalogue()
    assert {entry.method for entry in catalogue.values() if entry.method} == set(tool.METHODS)
    for name, entry in catalogue.items():
        if entry.kind == "dataset":
            assert entry.use, name
            continue
        template = yaml.safe_load((ROOT / f"agentic/{entry.method}/launch.yaml").read_text())
        assert {entry.setting, *entry.settings} <= set(template["settings"]), name
        assert tool.POLICY_SETTING[entry.method] == entry.setting and entry.reported, name
        assert all(data in catalogue and catalogue[data].kind == "dataset" for data in entry.data), name
        defaults = set(map(str, template["settings"].values()))
        assert {f"models/{repo.rpartition('/')[2]}" for repo in entry.needs} <= defaults, name


# --------------------------------------------------------------------------------------------------------------------
# list, download, verify.


def test_list_shows_what_is_here(tool: Any, hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["download", "memagent-7b", "--endpoint", hub.url]) == 0
    capsys.readouterr()
    assert tool.main(["list"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert COMMITS[0][:12] in rows["memagent-7b"] and " absent " in rows["memagent-14b"]
    assert "best of five runs" in rows["memagent-lmis-7b"]


def test_download_verify_mend(tool: Any, hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["download", "memagent-7b", "--endpoint", hub.url]) == 0
    assert tool.main(["verify", "memagent-7b", "models/RL-MemoryAgent-7B"]) == 0
    Path("models/RL-MemoryAgent-7B/model.safetensors").write_bytes(b"v" * 4000)
    os.truncate("models/RL-MemoryAgent-7B/config.json", 1)
    capsys.readouterr()
    assert tool.main(["verify", "memagent-7b"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "models/RL-MemoryAgent-7B/config.json: truncated (1 bytes instead of 2)" in lines
    assert "models/RL-MemoryAgent-7B/model.safetensors: corrupted (its SHA-256 differs)" in lines
    assert lines[-1].startswith(f"remedy: `download {REPO} --revision {COMMITS[0]}`")
    assert tool.main(["download", "memagent-7b", "--endpoint", hub.url]) == 0
    assert tool.main(["verify", "memagent-7b"]) == 0


def test_needed_brings_data_and_base(tool: Any, hub: FakeHub) -> None:
    hub.files |= {
        "BytedTsinghua-SIA/hotpotqa": {"eval_50.json": b"[]"},
        "Qwen/Qwen2.5-7B-Instruct": {"config.json": b"{}"},
    }
    assert tool.main(["download", "memagent-7b", "--with-needed", "--endpoint", hub.url]) == 0
    assert Path("data/hotpotqa/eval_50.json").is_file() and Path("models/Qwen2.5-7B-Instruct/config.json").is_file()
    manifest = Manifest.load(Path("data/hotpotqa"))
    assert manifest and manifest.kind == "dataset"


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["download", "memagnet-7b"], 2, "memagnet-7b: not in checkpoints.yaml"),
        (["download", "org/none", "--endpoint", "HUB"], 1, "status 404: not found"),
        (["verify", "memagent-14b"], 2, "no manifest.sha256.json, so nothing is known about it"),
        (["evaluate", "memagent-14b"], 2, "`download memagent-14b --with-needed` brings it"),
        (["evaluate", "org/name"], 2, "whose policy is it? Give --method"),
        (["list", "--", "--runs"], 2, "only `evaluate` takes settings"),
    ],
)
def test_errors(
    tool: Any, hub: FakeHub, argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([word.replace("HUB", hub.url) for word in argv]) == code
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1
    assert not Path("models").exists()


def test_damaged_weights_are_not_evaluated(tool: Any, hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["download", "memagent-7b", "--endpoint", hub.url]) == 0
    os.truncate("models/RL-MemoryAgent-7B/model.safetensors", 7)
    assert tool.main(["evaluate", "memagent-7b", "--dry-run"]) == 1
    assert "model.safetensors: truncated" in capsys.readouterr().err


def test_evaluate_fills_the_settings(
    tool: Any, hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching.Launcher, "check_command", lambda *_: "")  # its own tests take seconds
    assert tool.main(["download", "memagent-7b", "--endpoint", hub.url]) == 0
    for folder in ("models/Qwen2.5-7B-Instruct", "data/hotpotqa"):
        Path(folder).mkdir(parents=True)
    Path("models/Qwen2.5-7B-Instruct/config.json").write_text("{}")
    capsys.readouterr()
    assert tool.main(["evaluate", "memagent-7b", "--dry-run", "--", "--runs", "7"]) == 0
    servers, evaluation = capsys.readouterr().out.splitlines()[-2:]
    assert "serve_roles.py --roles outputs/checkpoints/RL-MemoryAgent-7B/roles.yaml" in servers
    assert "-m agentic.memagent.eval --data data/hotpotqa" in evaluation and "--runs 7" in evaluation


# --------------------------------------------------------------------------------------------------------------------
# upload.


def result_of(folder: Path, **changes: Any) -> dict[str, Any]:
    stats = {"n_questions": 30, "n_runs": 4, "mean": 0.25, "stderr": 0.05, "stderr_runs": 0.01, "n_failed": 2}
    protocol = {"seed": 3, "sampling": {"temperature": 0.7}, "limit": None, "data": {"aime24": "d" * 64}}
    protocol["arms"] = {"untrained": {"name": "x"}, "trained": model_fingerprint(str(folder))}
    difference = {"trained - untrained": {"n": 30, "mean": 0.1, "stderr": 0.04}}
    results = {"aime24": {"arms": {"trained": stats}, "differences": difference}}
    return {"commit": "c" * 40, "protocol": protocol, "runs": 4, "results": results, **changes}


@pytest.fixture
def checkpoint(tmp_path: Path, hub: FakeHub) -> Path:
    folder = tmp_path / "hf_9"
    (folder / ".cache").mkdir(parents=True)
    (folder / ".cache/x").write_text("local")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (tmp_path / "result.json").write_text(json.dumps(result_of(folder)))
    return folder


def upload(tool: Any, folder: Path, *flags: str) -> int:
    known = ["--repo", "org/new", "--method", "agentflow", "--base", "Qwen/Qwen2.5-7B-Instruct"]
    return int(tool.main(["upload", str(folder), *known, "--result", str(folder.parent / "result.json"), *flags]))


def test_upload_sends_the_folder_with_a_filled_card(tool: Any, hub: FakeHub, checkpoint: Path) -> None:
    assert upload(tool, checkpoint, "--endpoint", hub.url, "--note", "Trained on my data.") == 0
    (sent,) = hub.uploads
    assert set(sent) == {"config.json", "model.safetensors", "README.md"}
    card = sent["README.md"].decode()
    header = yaml.safe_load(card.split("---")[1])
    assert header["base_model"] == "Qwen/Qwen2.5-7B-Instruct" and header["license"] == "apache-2.0"
    assert "| aime24 | trained | 30 | 4 | 25.00 | 5.00 | 1.00 | 2 | cccccccccccc | 3 |" in card
    assert "* aime24: trained - untrained = 10.00 ± 4.00 points (paired, n = 30)" in card
    assert model_fingerprint(str(checkpoint))["weights_sha256"] in card and "d" * 64 in card
    assert "Trained on my data." in card and "--runs 4 --eval-seed 3" in card


def test_results_of_other_weights_are_refused(
    tool: Any, hub: FakeHub, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"u" * 4000)
    assert upload(tool, checkpoint, "--endpoint", hub.url) == 2
    assert "measured other weights" in capsys.readouterr().err
    assert hub.uploads == [] and not (checkpoint / "README.md").exists()


def test_a_readme_of_somebody_is_kept(tool: Any, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / "README.md").write_text("mine")
    assert upload(tool, checkpoint, "--card-only") == 2
    assert "was not written here" in capsys.readouterr().err
    (checkpoint / "README.md").unlink()
    assert upload(tool, checkpoint, "--card-only") == 0 and upload(tool, checkpoint, "--card-only") == 0


@pytest.mark.parametrize("text", ["{}", "[1]", "no", '{"protocol": {"arms": {}}, "results": {}, "commit": null}'])
def test_a_file_that_is_no_result_is_refused(
    tool: Any, checkpoint: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint.parent / "result.json").write_text(text)
    assert upload(tool, checkpoint, "--card-only") == 2
    assert "result.json: " in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------------
# evaluate, with a real server.


@pytest.mark.engine
def test_evaluate_serves_and_measures_a_tiny_model(tmp_path: Path) -> None:
    from helpers_sglang import free_port, save_tiny_model

    save_tiny_model(tmp_path / "tiny")
    (tmp_path / "data").mkdir()
    items = [
        {"context": "ann has 117 . " * 20, "input": "ann?", "answers": ["117"], "num_docs": 5, "index": n}
        for n in range(2)
    ]
    (tmp_path / "data/eval_5.json").write_text(json.dumps(items))
    sizes = {"chunk-tokens": 150, "memory-tokens": 16, "question-tokens": 32, "answer-tokens": 16, "window": 400}
    settings = {
        "eval-folder": tmp_path / "data",
        "lengths": 5,
        "runs": 1,
        "prompt-set": "compact",
        "context": 420,
    } | sizes
    settings |= {"eval-gpus": 1, "eval-port": free_port(), "mem-fraction": 0.3, "eval-concurrency": 2}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    out, model = tmp_path / "out", tmp_path / "tiny"
    command = [
        sys.executable,
        str(TOOL),
        "evaluate",
        str(model),
        "--method",
        "memagent",
        "--out",
        str(out),
        "--",
        *flags,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "result.json").read_text())
    stats = report["results"]["hqa_5"]["arms"]["memagent"]
    assert (stats["n_questions"], stats["n_runs"], stats["n_failed"]) == (2, 1, 0)
    assert report["protocol"]["arms"]["memagent"] == model_fingerprint(str(model))
    flags = ["--repo", "org/tiny", "--method", "memagent", "--base", "org/base", "--result", str(out / "result.json")]
    card = subprocess.run(
        [sys.executable, str(TOOL), "upload", str(model), *flags, "--card-only"], check=False, timeout=120
    )
    assert card.returncode == 0 and "| hqa_5 | memagent | 2 | 1 |" in (model / "README.md").read_text()
