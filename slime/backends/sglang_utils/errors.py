"""What can go wrong with an engine process or with a call to it.

    RuntimeError
      ServerStartError    a process we started did not become ready
      EngineError         an engine or router answered a control call with an error, or not at all

Configuration mistakes found before a process starts are plain `ValueError` / `FileNotFoundError`.
Both classes keep all their arguments in `args`, so they travel through Ray and pickle unchanged.
"""

from __future__ import annotations

from pathlib import Path


class ServerStartError(RuntimeError):
    """A server or router process died or missed its deadline; carries the end of its log.

    Args:
        name: what was started, for people ("SGLang server http://127.0.0.1:30000").
        reason: what happened to it.
        log_path: the whole log.
        log_tail: its last lines.
    """

    def __init__(self, name: str, reason: str, log_path: Path, log_tail: str) -> None:
        super().__init__(name, reason, log_path, log_tail)
        self.name, self.reason, self.log_path, self.log_tail = name, reason, log_path, log_tail

    def __str__(self) -> str:
        return f"{self.name} {self.reason}; log: {self.log_path}; its last lines:\n{self.log_tail}"


class EngineError(RuntimeError):
    """One failed control call.

    Args:
        url: base url of the server.
        endpoint: path called.
        status: HTTP status, or None when no answer came (refused, timed out).
        body: start of the answer, or the transport error.
    """

    def __init__(self, url: str, endpoint: str, status: int | None, body: str) -> None:
        super().__init__(url, endpoint, status, body)
        self.url, self.endpoint, self.status, self.body = url, endpoint, status, body

    def __str__(self) -> str:
        answer = "no answer" if self.status is None else f"status {self.status}"
        return f"{self.url}{self.endpoint}: {answer}: {self.body}"
