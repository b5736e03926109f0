"""Shared by the tests of weight sync: a real server's control calls behind the face of a Ray handle, and a question to it."""

from __future__ import annotations

from argparse import Namespace
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

PROMPT = [5, 17, 42, 9, 77]


class Handle:
    """The engine's control calls behind the face of a Ray handle; calls run in order in one thread."""

    def __init__(self, url: str, args: Namespace) -> None:
        self.url, self.args, self.pool = url, args, ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> Any:
        from slime.backends.sglang_utils import server_control
        from slime.backends.sglang_utils.sglang_engine import SGLangEngine

        if name == "pull_weights":
            call, first = SGLangEngine.pull_weights, Namespace(args=self.args)
        else:
            call, first = getattr(server_control, name), self.url

        class _Call:
            remote = staticmethod(lambda *a, **k: self.pool.submit(call, first, *a, **k))

        return _Call


def wait(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(timeout=120) for future in futures]


def ask(url: str) -> tuple[list[int], list[float], str]:
    from helpers_sglang import generate, ids_and_log_probs

    answer = generate(url, PROMPT, max_new_tokens=8)
    return *ids_and_log_probs(answer), answer["meta_info"]["weight_version"]
