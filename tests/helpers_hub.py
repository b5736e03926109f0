"""A hub on this machine for tests: the few routes that huggingface_hub uses to list, fetch and upload, over HTTP.

It counts what it sends, and can hold a file back after some bytes, send wrong bytes, or refuse.
Leaves out: Xet, large-file uploads (every uploaded file is a regular one), pages of long listings.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

COMMITS = ("a" * 40, "b" * 40)
_API = re.compile(r"/api/(models|datasets)/(\w[\w.-]*/[\w.-]+)/(revision|tree|preupload|commit)/([^/]+)$")
_RESOLVE = re.compile(r"/(datasets/)?(\w[\w.-]*/[\w.-]+)/resolve/([^/]+)/(.+)$")


def blob_id(content: bytes) -> str:
    """Git's hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class FakeHub:
    """Repositories as folders in memory: `files` maps a repository to its files; `lfs` names those that are large.

    `sent` lists (file, first byte, bytes sent) of every download; `hold` maps a file to the bytes after which it stalls
    until `release` is set; `damage` is a set of files of which other bytes are sent; `uploads` are the commits received.
    """

    def __init__(self, **repos: dict[str, bytes]) -> None:
        self.files: dict[str, dict[str, bytes]] = dict(repos)
        self.lfs: set[str] = set()
        self.commit = COMMITS[0]
        self.sent: list[tuple[str, int, int]] = []
        self.headers: list[dict[str, str]] = []
        self.hold: dict[str, int] = {}
        self.damage: dict[str, int] = {}
        self.held, self.release = threading.Event(), threading.Event()
        self.uploads: list[dict[str, bytes]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()

    def sent_of(self, name: str) -> list[tuple[int, int]]:
        return [(first, count) for file, first, count in self.sent if file == name]

    def tree(self, repo: str) -> list[dict[str, Any]]:
        entries = []
        for path, content in self.files[repo].items():
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}
            if path in self.lfs:
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            entries.append(entry)
        return entries

    def bytes_of(self, repo: str, path: str) -> bytes:
        content = self.files[repo][path]
        if self.damage.get(path, 0) > 0:
            self.damage[path] -= 1
            return bytes(byte ^ 1 for byte in content)
        return content


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, body: Any, status: int = 200, **headers: str) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(content)),
                **headers,
            }.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_GET(self) -> None:
            hub.headers.append(dict(self.headers))
            path = self.path.partition("?")[0]
            if found := _API.fullmatch(path):
                _, repo, what, _ = found.groups()
                if repo not in hub.files:
                    self.answer({"error": "no"}, 404, X_Error_Code="RepoNotFound")
                elif what == "revision":
                    self.answer({"id": repo, "sha": hub.commit, "siblings": [], "tags": [], "private": False})
                else:
                    self.answer(hub.tree(repo))
            elif found := _RESOLVE.fullmatch(path.removeprefix("/cdn")):
                if found.group(4) in hub.lfs and not path.startswith("/cdn/"):
                    self.answer("", 302, Location=f"{hub.url}/cdn{path}")  # large files lie elsewhere
                else:
                    self.send_file(found.group(2), found.group(4))
            else:
                self.answer({"error": path}, 404)

        do_HEAD = do_GET

        def send_file(self, repo: str, name: str) -> None:
            content = hub.bytes_of(repo, name)
            span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            first = int(span.group(1)) if span else 0
            body = content[first:]
            self.send_response(206 if span else 200)
            self.send_header("ETag", f'"{blob_id(content)}"')
            self.send_header("X-Repo-Commit", hub.commit)
            self.send_header("Content-Length", str(len(body)))
            if span:
                self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            now = hub.hold.pop(name, len(body))
            hub.sent.append((name, first, now))
            self.wfile.write(body[:now])
            if now < len(body):
                self.wfile.flush()
                hub.held.set()
                hub.release.wait(60)
                self.close_connection = True

        def do_POST(self) -> None:
            hub.headers.append(dict(self.headers))
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found = _API.fullmatch(self.path.partition("?")[0])
            if self.path == "/api/repos/create":
                values = json.loads(body)
                repo = f"{values['organization']}/{values['name']}"
                hub.files.setdefault(repo, {})
                self.answer({"url": f"{hub.url}/{repo}", "id": repo})
            elif found and found.group(3) == "preupload":
                names = [file["path"] for file in json.loads(body)["files"]]
                modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
                self.answer({"files": modes})
            elif found and found.group(3) == "commit":
                lines = [json.loads(line) for line in body.splitlines()]
                files = {line["value"]["path"]: line["value"]["content"] for line in lines if line["key"] == "file"}
                hub.uploads.append({name: base64.b64decode(content) for name, content in files.items()})
                self.answer(
                    {
                        "commitUrl": f"{hub.url}/{found.group(2)}/commit/{hub.commit}",
                        "commitOid": hub.commit,
                        "success": True,
                    }
                )
            elif self.path == "/api/validate-yaml":
                self.answer({"errors": [], "warnings": []})
            else:
                self.answer({"error": self.path}, 404)

    return Handler


def write_all(folder: Path, files: dict[str, bytes]) -> None:
    """Files below `folder`."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
