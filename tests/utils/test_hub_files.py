"""Downloads from a hub on this machine: whole files only, resumption, hashes, and the check against the manifest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from helpers_hub import COMMITS, FakeHub

from slime.utils import hub_files
from slime.utils.hub_files import HubError, Manifest, download, verify

REPO = "org/model"
WEIGHTS = "model-00001-of-00001.safetensors"
FILES = {"config.json": b'{"model_type": "qwen2"}', WEIGHTS: bytes(range(256)) * 500, "sub/tokenizer.json": b"{}"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with FakeHub(**{REPO: dict(FILES)}) as server:
        server.lfs = {WEIGHTS}
        yield server


def fetch(hub: FakeHub, folder: Path, *only: str) -> Manifest:
    return download(REPO, "model", folder, endpoint=hub.url, only=only)


def test_everything_arrives_and_is_recorded(hub: FakeHub, tmp_path: Path) -> None:
    manifest = fetch(hub, tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == FILES
    assert (
        Manifest.load(tmp_path) == manifest and manifest.revision == COMMITS[0] and set(manifest.files) == set(FILES)
    )
    assert verify(tmp_path, manifest) == []
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".part")]


def test_what_is_there_is_not_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    hub.sent.clear()
    fetch(hub, tmp_path)
    assert hub.sent == []


def test_a_killed_download_fetches_only_the_missing_bytes(hub: FakeHub, tmp_path: Path) -> None:
    """Killed by SIGKILL while the server holds the file back; huggingface_hub writes in blocks of 10 MiB."""
    block = huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE
    content = os.urandom(block + 3000)
    hub.files[REPO][WEIGHTS] = content
    hub.hold[WEIGHTS] = block + 1000
    root = Path(hub_files.__file__).parents[2]
    code = f"from slime.utils.hub_files import *; download({REPO!r}, 'model', Path({str(tmp_path)!r}), endpoint={hub.url!r})"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=root, env={**os.environ, "HF_HUB_OFFLINE": "0"})
    assert hub.held.wait(60)
    while not [p for p in (tmp_path / ".download").glob("model*") if p.stat().st_size == block]:
        assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    hub.release.set()
    assert not (tmp_path / WEIGHTS).exists() and Manifest.load(tmp_path) is None
    fetch(hub, tmp_path)
    assert hub.sent_of(WEIGHTS) == [(0, block + 1000), (block, 3000)]
    assert (tmp_path / WEIGHTS).read_bytes() == content


def test_a_file_with_a_wrong_hash_never_gets_its_name(hub: FakeHub, tmp_path: Path) -> None:
    hub.damage = {WEIGHTS: 1}
    assert verify(tmp_path, fetch(hub, tmp_path)) == [] and len(hub.sent_of(WEIGHTS)) == 2
    hub.damage = {"config.json": 2}
    with pytest.raises(HubError, match="config.json arrives with a wrong hash; try another --endpoint"):
        fetch(hub, tmp_path / "other")
    assert not (tmp_path / "other/config.json").exists() and Manifest.load(tmp_path / "other") is None


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: os.truncate(path, 1000), "truncated (1000 bytes instead of 128000)"),
        (lambda path: path.write_bytes(FILES[WEIGHTS] + b"x"), "too long (128001 bytes instead of 128000)"),
        (lambda path: path.write_bytes(bytes(128000)), "corrupted (its SHA-256 differs)"),
    ],
)
def test_the_check_names_what_is_wrong_and_a_download_mends_it(
    hub: FakeHub, tmp_path: Path, damage: object, what: str
) -> None:
    manifest = fetch(hub, tmp_path)
    assert callable(damage)
    damage(tmp_path / WEIGHTS)
    (problem,) = verify(tmp_path, manifest)
    assert (problem.file, problem.what) == (WEIGHTS, what)
    hub.sent.clear()
    assert verify(tmp_path, fetch(hub, tmp_path)) == []
    assert {file for file, *_ in hub.sent} == {WEIGHTS}


def test_a_new_revision_replaces_and_removes(hub: FakeHub, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    hub.commit, hub.files[REPO] = COMMITS[1], {"config.json": b"{}", WEIGHTS: FILES[WEIGHTS]}
    with pytest.raises(ValueError, match="holds commit aaa.* without --only"):
        fetch(hub, tmp_path, "*.json")
    hub.sent.clear()
    manifest = fetch(hub, tmp_path)
    assert manifest.revision == COMMITS[1] and [file for file, *_ in hub.sent] == ["config.json"]
    assert not (tmp_path / "sub/tokenizer.json").exists() and (tmp_path / "notes.txt").exists()


def test_patterns_choose_and_add(hub: FakeHub, tmp_path: Path) -> None:
    assert set(fetch(hub, tmp_path, "*.json").files) == {"config.json", "sub/tokenizer.json"}
    assert set(fetch(hub, tmp_path, "*.safetensors").files) == set(FILES)
    with pytest.raises(HubError, match=r"no file matches \*.bin; its files: config.json"):
        fetch(hub, tmp_path, "*.bin")


def test_a_folder_of_another_repository_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    with pytest.raises(ValueError, match="holds org/model, not org/other"):
        hub.files["org/other"] = {}
        download("org/other", "model", tmp_path, endpoint=hub.url)


def test_a_name_that_leaves_the_folder_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    hub.files[REPO]["../evil.json"] = b"{}"
    with pytest.raises(HubError, match="would lie outside"):
        fetch(hub, tmp_path / "in")
    assert not (tmp_path / "evil.json").exists()


def test_errors_have_a_remedy(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HubError, match="org/none at http.*: status 404: not found"):
        download("org/none", "model", tmp_path, endpoint=hub.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set; unset it"):
        fetch(hub, tmp_path)


def test_a_mirror_gets_no_token(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(hub, tmp_path)
    assert hub.headers and not [
        headers for headers in hub.headers if "authorization" in {name.lower() for name in headers}
    ]


def test_two_downloads_do_not_share_a_folder(hub: FakeHub, tmp_path: Path) -> None:
    with hub_files._alone_in(tmp_path):
        with pytest.raises(HubError, match="another download is writing"):
            fetch(hub, tmp_path)
