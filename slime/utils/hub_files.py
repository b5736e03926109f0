"""Repositories of a model hub on disk: download with resume, hashes in a manifest, and a check against it.

Input: a repository (`ORG/NAME`, model or dataset) of a server that speaks the Hugging Face Hub's API.
Invariants:
  * a file appears under its name only when it is whole and has the hash that the hub states for it; what was fetched
    before an interruption is kept under `.download/` and only the rest is asked for;
  * `manifest.sha256.json` names the commit, and size and SHA-256 of every file; it is written last, so a folder without
    one is not finished;
  * nothing that the hub did not send is deleted.
Left out: which repositories there are (`tools/checkpoints.yaml`), uploads, the shared cache of huggingface_hub, which
keeps no unfinished files.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from filelock import FileLock, Timeout
from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers
from tqdm import tqdm

logger = logging.getLogger(__name__)

HUB = "https://huggingface.co"
MANIFEST = "manifest.sha256.json"
UNFINISHED = ".download"
_BLOCK = 1 << 20


class HubError(RuntimeError):
    """The hub does not answer as it should, or sends other bytes than it announced; the text has the remedy."""


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: bytes and hexadecimal SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a folder was downloaded from; `kind` is `model` or `dataset`, `revision` a commit."""

    repo: str
    kind: str
    revision: str
    endpoint: str
    files: dict[str, FileRecord]

    @staticmethod
    def load(folder: Path) -> Manifest | None:
        """The folder's manifest, or None. Raises ValueError for a file that is none."""
        path = folder / MANIFEST
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            files = {name: FileRecord(**record) for name, record in values.pop("files").items()}
            return Manifest(**values, files=files)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: not a manifest ({error}); delete it and download again") from error

    def save(self, folder: Path) -> None:
        """Write it whole or not at all."""
        temporary = folder / f"{MANIFEST}.new"
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        temporary.replace(folder / MANIFEST)


@dataclass(frozen=True)
class Problem:
    """A file that is not what the manifest says; `what` is missing, truncated, too long or corrupted."""

    file: str
    what: str


# --------------------------------------------------------------------------------------------------------------------
# Check.


def verify(folder: Path, manifest: Manifest) -> list[Problem]:
    """What is wrong in the folder, in the order of the manifest; sizes first, so that hashing is for whole files only."""
    problems = []
    with _bytes_bar("checking", sum(record.size for record in manifest.files.values())) as bar:
        for name, record in manifest.files.items():
            problem = _problem(folder / name, record, bar)
            if problem:
                problems.append(Problem(name, problem))
    return problems


def _problem(path: Path, record: FileRecord, bar: tqdm[None]) -> str:
    if not path.is_file():
        return "missing"
    size = path.stat().st_size
    if size != record.size:
        return f"{'truncated' if size < record.size else 'too long'} ({size} bytes instead of {record.size})"
    return "" if _digest(path, hashlib.sha256(), bar) == record.sha256 else "corrupted (its SHA-256 differs)"


def _digest(path: Path, digest: hashlib._Hash, bar: tqdm[None] | None = None) -> str:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            if bar is not None:
                bar.update(len(block))
    return digest.hexdigest()


def _bytes_bar(title: str, total: int) -> tqdm[None]:
    return tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=None)


# --------------------------------------------------------------------------------------------------------------------
# Download.


def download(
    repo: str,
    kind: str,
    folder: Path,
    *,
    revision: str = "main",
    endpoint: str | None = None,
    only: Sequence[str] = (),
    workers: int = 4,
) -> Manifest:
    """Bring the folder to the state of the repository at `revision`, and write the manifest.

    `only`: shell patterns of file names; without any, all files. `endpoint`: a mirror (default: HF_ENDPOINT, or the
    hub). A file that is there and right is kept, a wrong one is fetched again, one of an earlier revision that the new
    one lacks is removed. Raises HubError, ValueError; what was fetched until then is kept for the next call.
    """
    before = Manifest.load(folder)
    api = HfApi(endpoint=endpoint)
    # A mirror gets no token: it is somebody else's machine.
    api.token = None if api.endpoint == HUB else False
    with _hub_errors(repo, api.endpoint):
        commit = api.repo_info(repo, repo_type=kind, revision=revision).sha or ""
        kept = _kept_records(folder, before, (repo, kind, commit), only)
        tree = api.list_repo_tree(repo, repo_type=kind, revision=commit, recursive=True)
        files = _chosen((entry for entry in tree if isinstance(entry, RepoFile)), only, repo)
        with _alone_in(folder):
            records = _bring_all(_Source(repo, kind, commit, api, folder), files, workers)
            manifest = Manifest(repo, kind, commit, api.endpoint, kept | records)
            _remove_outdated(folder, before, manifest)
            manifest.save(folder)
    return manifest


def _bring_all(source: _Source, files: Sequence[RepoFile], workers: int) -> dict[str, FileRecord]:
    pool = ThreadPoolExecutor(workers)
    try:
        return dict(zip([file.path for file in files], pool.map(source.bring, files), strict=True))
    finally:
        pool.shutdown(cancel_futures=True)


def _kept_records(
    folder: Path, before: Manifest | None, wanted: tuple[str, str, str], only: Sequence[str]
) -> dict[str, FileRecord]:
    """Records of the same commit, to which `only` adds. Raises ValueError for a folder of something else."""
    if before is None:
        return {}
    if (before.repo, before.kind) != wanted[:2]:
        raise ValueError(f"{folder}: holds {before.repo}, not {wanted[0]}; choose another folder")
    if before.revision == wanted[2]:
        return before.files
    if only:
        raise ValueError(
            f"{folder}: holds commit {before.revision}, now {wanted[2]}; download all files of it, without --only"
        )
    return {}


def _chosen(files: Iterable[RepoFile], only: Sequence[str], repo: str) -> list[RepoFile]:
    everything = list(files)
    chosen = [file for file in everything if not only or any(fnmatch.fnmatch(file.path, text) for text in only)]
    if not chosen:
        known = ", ".join(file.path for file in everything[:8]) or "none"
        raise HubError(f"{repo}: no file matches {' '.join(only) or '*'}; its files: {known}")
    return chosen


@dataclass(frozen=True)
class _Source:
    """One commit of a repository, and the folder it goes to."""

    repo: str
    kind: str
    commit: str
    api: HfApi
    folder: Path

    def bring(self, file: RepoFile) -> FileRecord:
        """Have the file under its name. Raises HubError when what is sent is wrong twice."""
        target = self.folder / file.path
        if not target.resolve().is_relative_to(self.folder.resolve()):
            raise HubError(f"{self.repo}: {file.path} would lie outside of {self.folder}; do not use this repository")
        if target.is_file() and _is_right(target, file):
            return FileRecord(file.size, _sha256(target, file))
        part = self.folder / UNFINISHED / f"{file.path}.{file.blob_id}"
        part.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            self._fetch(file, part)
            if _is_right(part, file):
                record = FileRecord(file.size, _sha256(part, file))
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(part, target)
                return record
            logger.warning("%s: other bytes than announced, fetching it again", file.path)
            part.unlink()
        raise HubError(f"{self.repo}: {file.path} arrives with a wrong hash; try another --endpoint, or later")

    def _fetch(self, file: RepoFile, part: Path) -> None:
        """Append what is missing. huggingface_hub tries again by itself when a connection breaks."""
        if part.exists() and part.stat().st_size > file.size:
            part.unlink()
        place = {"repo_type": self.kind, "revision": self.commit, "endpoint": self.api.endpoint}
        url = hf_hub_url(self.repo, file.path, **place)
        # Compressed answers cannot be resumed.
        headers = build_hf_headers(token=self.api.token, headers={"Accept-Encoding": "identity"})
        with part.open("ab") as output:
            here = output.tell()
            if here < file.size:
                http_get(url, output, resume_size=here, headers=headers, displayed_filename=file.path)


def _is_right(path: Path, file: RepoFile) -> bool:
    """By the hub's own hash: SHA-256 for large files, git's blob id for the others."""
    if path.stat().st_size != file.size:
        return False
    if file.lfs is not None:
        return _digest(path, hashlib.sha256()) == file.lfs.sha256
    return _digest(path, hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)) == file.blob_id


def _sha256(path: Path, file: RepoFile) -> str:
    return file.lfs.sha256 if file.lfs is not None else _digest(path, hashlib.sha256())


def _remove_outdated(folder: Path, before: Manifest | None, now: Manifest) -> None:
    if before is not None:
        for name in before.files.keys() - now.files.keys():
            logger.info("%s is not in %s any more, removed", name, now.revision)
            (folder / name).unlink(missing_ok=True)
    for path in sorted((folder / UNFINISHED).rglob("*"), reverse=True):
        if path.is_dir():
            path.rmdir()
        elif path.name != "lock":
            path.unlink()


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    (folder / UNFINISHED).mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / UNFINISHED / "lock", timeout=0):
            yield
    except Timeout as error:
        raise HubError(f"{folder}: another download is writing to it; wait for its end") from error


@contextmanager
def _hub_errors(repo: str, endpoint: str) -> Iterator[None]:
    """One line with a remedy instead of the client's errors."""
    again = "the same command goes on where it stopped"
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise HubError(f"{repo}: HF_HUB_OFFLINE is set; unset it to download") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        known = {
            401: "it does not exist, or needs `hf auth login`",
            403: "accept its terms and log in",
            404: "not found",
        }
        raise HubError(f"{repo} at {endpoint}: status {status}: {known.get(status, again)}") from error
    except (httpx.HTTPError, OSError) as error:
        raise HubError(f"{repo} at {endpoint}: {error or type(error).__name__}; {again}") from error
