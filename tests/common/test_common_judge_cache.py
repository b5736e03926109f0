"""The judge's cache: what is kept, what is not, and that processes share it."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from agentic.common.clients import Completion
from agentic.common.errors import ConfigError, RoleTimeout, Unscored
from agentic.common.judge import judge
from agentic.common.judge_cache import CachedJudge

ROOT = Path(__file__).resolve().parents[2]


class Client:
    def __init__(self, *texts: str | Exception) -> None:
        self.texts = list(texts)

    async def complete(self, messages: list[dict]) -> Completion:
        text = self.texts.pop(0)
        if isinstance(text, Exception):
            raise text
        return Completion(text, "stop", 1, 1, 0.0)


def prompt(question: str, answer: str, label: str) -> list[dict]:
    return [{"role": "user", "content": f"{question} {label} {answer}"}]


async def score(client: CachedJudge, answer: str = "it is Paris") -> float:
    return (await judge("Which city?", answer, "Paris", client, prompt)).score


async def test_a_verdict_is_asked_once_per_prompt_model_and_version(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cache.sqlite"
    first = CachedJudge(Client("VERDICT: True", "VERDICT: False"), path, "m")
    assert [await score(first), await score(first), await score(first, "it is Rome")] == [1.0, 1.0, 0.0]
    assert (first.calls, first.hits) == (2, 1)
    again = CachedJudge(Client(), path, "m")
    assert [await score(again), await score(again, "it is Rome")] == [1.0, 0.0]
    assert await score(CachedJudge(Client("VERDICT: False"), path, "other model")) == 0.0
    assert await score(CachedJudge(Client("VERDICT: False"), path, "m", "other version")) == 0.0


async def test_failures_are_never_kept(tmp_path: Path) -> None:
    texts = (RoleTimeout("judge"), "I cannot say", "VERDICT: True")
    client = CachedJudge(Client(*texts), tmp_path / "cache.sqlite", "m")
    for _ in range(2):
        with pytest.raises(Unscored):
            await score(client)
    assert [await score(client), await score(client)] == [1.0, 1.0] and client.calls == 3


async def test_processes_write_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    writer = f"""import asyncio, sys
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
from test_common_judge_cache import CachedJudge, Client, score
async def main():
    for n in range(40):
        await score(CachedJudge(Client("VERDICT: True"), {str(path)!r}, "m"), f"answer {{sys.argv[1]}} {{n}}")
asyncio.run(main())"""
    writers = [subprocess.Popen([sys.executable, "-c", writer, name]) for name in "ab"]
    assert [process.wait(240) for process in writers] == [0, 0]
    database = sqlite3.connect(path)
    assert database.execute("SELECT count(*) FROM verdicts").fetchone() == (80,)
    assert database.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    database.close()
    reader = CachedJudge(Client(), path, "m")
    assert await asyncio.gather(*(score(reader, f"answer b {n}") for n in range(40))) == [1.0] * 40


async def test_a_broken_file_is_an_error_at_start_and_a_call_later(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("no database" * 200)
    with pytest.raises(ConfigError, match="broken.*not a database"):
        CachedJudge(Client(), broken, "m")
    path = tmp_path / "cache.sqlite"
    client = CachedJudge(Client("VERDICT: True"), path, "m")
    for file in tmp_path.glob("cache.sqlite*"):
        file.write_text("no database" * 200)
    assert await score(client) == 1.0
