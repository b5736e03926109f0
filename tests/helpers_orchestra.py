"""ToolOrchestra against scripts: policy engine, experts and tasks; with Qwen3's real tokenizer.

The tokenizer is made of what PyPI ships: BPE ranks of dashscope, official chat template of trl. It is loaded once.
"""

from __future__ import annotations

import base64
import json
import socket
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tiktoken
from helpers_agentic import FakeEngine, Reply
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken

from agentic.toolorchestra.environment import Observation, Outcome, ToolCall
from slime.utils.types import Sample

IM_START, IM_END = 151644, 151645
_FIRST_ADDED = 151643
_BARRED = (
    "endoftext im_start im_end object_ref_start object_ref_end box_start box_end quad_start quad_end vision_start "
    "vision_end vision_pad image_pad video_pad"
)
_PLAIN = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<tool_response> </tool_response> <think> </think>"
)
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _package_file(package: str, *parts: str) -> Path:
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is not installed"
    return Path(spec.submodule_search_locations[0]).joinpath(*parts)


@lru_cache(maxsize=1)
def _encoding() -> tiktoken.Encoding:
    lines = _package_file("dashscope", "resources", "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    names = [f"<|{name}|>" for name in _BARRED.split()] + _PLAIN.split()
    added = {name: _FIRST_ADDED + number for number, name in enumerate(names)}
    return tiktoken.Encoding("qwen3", pat_str=_SPLIT, mergeable_ranks=ranks, special_tokens=added)


@lru_cache(maxsize=8)
def _template(text: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment.from_string(text)


@lru_cache(maxsize=1)
def qwen3_template() -> str:
    return _package_file("trl", "chat_templates", "qwen3.jinja").read_text()


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class QwenTokenizer:
    """What ToolOrchestra uses of a Hugging Face tokenizer."""

    eos_token, eos_token_id, pad_token_id = "<|im_end|>", IM_END, 151643

    def __init__(self, template: str | None = None) -> None:
        self._encoding = _encoding()
        self.template = template or qwen3_template()
        names = [f"<|{name}|>" for name in _BARRED.split()] + _PLAIN.split()
        self.added_tokens_decoder = {_FIRST_ADDED + i: AddedToken(name) for i, name in enumerate(names)}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        kept = [i for i in ids if not (skip_special_tokens and _FIRST_ADDED <= i < _FIRST_ADDED + 14)]
        return self._encoding.decode(kept)

    def apply_chat_template(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = False,
        **options: Any,
    ) -> Any:
        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        text = _template(self.template).render(
            messages=messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            raise_exception=refuse,
            **options,
        )
        return self.encode(text) if tokenize else text


QWEN = QwenTokenizer()


# --------------------------------------------------------------------------------------------------------------------
# A task, an engine and experts that follow a script.

Answer = tuple[int, bytes]


class RawServer:
    """An HTTP server whose answers are bytes: `answer(path, body)` gives status and content, after `delay_s` seconds."""

    def __init__(self, answer: Callable[[str, dict[str, Any]], Answer], delay_s: float = 0.0) -> None:
        self.answer, self.released = answer, threading.Event()
        self.delay_s = delay_s
        self.bodies: list[dict[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.bodies.append(body)
                server.released.wait(server.delay_s)
                status, content = server.answer(self.path, body)
                with suppress(BrokenPipeError, ConnectionResetError):
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> RawServer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()


def chat_answer(content: Any = "fine", tokens: tuple[int, int] = (10, 5), **message: Any) -> Answer:
    """A chat completion with usage."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content, **message}}
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    return 200, json.dumps({"choices": [choice], "usage": usage}).encode()


def refused_url() -> str:
    """An address at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def schema(name: str, parameter: str, *choices: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string", **({"enum": list(choices)} if choices else {})}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [schema("search", "model", "search-1", "search-2"), schema("answer", "model", "answer-1", "answer-2")]


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments})}\n</tool_call>'


SEARCH, FINISH = call("search", model="search-1"), call("answer", model="answer-1")


class ScriptedTask:
    """A task environment: each call of `search` gives the next text, `answer` ends it; messages get `replies`."""

    tools = TOOLS

    def __init__(
        self, texts: Sequence[str] = ("a result",), replies: Sequence[str] = (), category: Any = "qa"
    ) -> None:
        self.texts, self.replies, self.category = list(texts), list(replies), category
        self.desk: Any = None
        self.acted: list[tuple[ToolCall, ...]] = []
        self.said: list[str] = []
        self.answered = False
        self.closed = 0

    async def start(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "What is 2 + 2?"}]

    async def act(self, calls: Sequence[ToolCall]) -> Observation:
        self.acted.append(tuple(calls))
        if any(asked.name == "answer" for asked in calls):
            self.answered = True
            return Observation("end")
        return Observation("tool", tuple(self.texts.pop(0) if self.texts else "no more" for _ in calls))

    async def say(self, text: str) -> Observation:
        self.said.append(text)
        return Observation("user", (self.replies.pop(0),)) if self.replies else Observation("end")

    async def outcome(self, termination: str | None = None) -> Outcome:
        return Outcome(float(self.answered), self.answered, termination or "answer", {"correct": float(self.answered)})

    def close(self) -> None:
        self.closed += 1


class ExpertTask(ScriptedTask):
    """`answer` asks the expert of that alias first."""

    async def act(self, calls: Sequence[ToolCall]) -> Observation:
        for asked in calls:
            if asked.name == "answer":
                await self.desk.ask(asked.arguments["model"], [{"role": "user", "content": "What is 2 + 2?"}])
        return await super().act(calls)


class Stage:
    """Engine, arguments and samples for one test; the k-th rollout gets the k-th task."""

    def __init__(self, engine: FakeEngine, args: Namespace, tasks: list[ScriptedTask]) -> None:
        self.engine, self.args, self.tasks = engine, args, tasks

    def sample(self, index: int = 0, group: int = 0, **metadata: Any) -> Sample:
        given = {"category": "qa", "pref_vec": {"outcome": 1.0}, **metadata}
        return Sample(prompt="What is 2 + 2?", label="4", index=index, group_index=group, metadata=given)

    async def run(self, sample: Sample | None = None, evaluation: bool = False, **params: Any) -> Any:
        from agentic.toolorchestra.rollout import generate

        sample = self.sample() if sample is None else sample
        return await generate(self.args, sample, {"temperature": 1.0, **params}, evaluation=evaluation)

    def sent(self) -> list[list[int]]:
        return [request.body["input_ids"] for request in self.engine.requests]


def script(*turns: str | Reply) -> Callable[[str], str | Reply]:
    """The k-th request gets `turns[k]`, the last one repeats."""
    waiting = list(turns)
    return lambda prompt: waiting.pop(0) if len(waiting) > 1 else waiting[0]


@contextmanager
def stage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    turns: Callable[[str], str | Reply],
    *tasks: ScriptedTask,
    roles: Mapping[str, Any] | None = None,
    tokenizer: Any = QWEN,
    engine_tokenizer: Any = None,
    **settings: Any,
) -> Iterator[Stage]:
    """A scripted engine and arguments that point at it; without tasks the real environments are made."""
    from agentic.toolorchestra import crew, rollout

    with FakeEngine(turns, engine_tokenizer or tokenizer) as engine:
        table = {"orchestrator": {"url": "policy", "price_in": 0.2, "price_out": 0.2}, **(roles or {})}
        path = tmp_path / "roles.yaml"
        path.write_text(json.dumps({"defaults": {"retries": 0, "timeout_s": 20}, "roles": table}))
        host, _, port = engine.url.removeprefix("http://").partition(":")
        args = Namespace(sglang_router_ip=host, sglang_router_port=int(port), save=str(tmp_path / "save"))
        args.rewards_normalization, args.grpo_std_normalization, args.global_batch_size = True, True, 2
        args.orchestra_roles = str(path)
        for name, value in {"max_new_tokens": 256, **settings}.items():
            setattr(args, f"orchestra_{name}", value)
        monkeypatch.setattr(crew, "GenerateState", lambda args: Namespace(tokenizer=tokenizer))
        crew._CREWS.clear()
        waiting = list(tasks)

        def next_task(crew: Any, sample: Any, desk: Any, evaluation: bool) -> ScriptedTask:
            task = waiting.pop(0)
            task.desk = desk
            return task

        if tasks:
            monkeypatch.setattr(rollout, "make_environment", next_task)
        yield Stage(engine, args, list(tasks))
