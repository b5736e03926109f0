"""A scripted model server over real HTTP, for tests of clients and of whole rollouts.

`FakeEngine` answers SGLang's `/generate` (ids, log-probs, meta_info) and OpenAI's `/v1/chat/completions`, records
every request, and takes its texts from a callable. `FakeTokenizer` encodes bytes plus two ChatML control tokens.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agentic.common.roles import Role

IM_START, IM_END = 1, 2
OFFSET = 3


class FakeTokenizer:
    """Bytes as tokens; `<|im_start|>` and `<|im_end|>` are single ids in chat templates only."""

    eos_token_id = IM_END
    pad_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [byte + OFFSET for byte in text.encode()]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        out = b""
        for token in ids:
            if token >= OFFSET:
                out += bytes([token - OFFSET])
            elif not skip_special_tokens:
                out += {0: b"<pad>", IM_START: b"<|im_start|>", IM_END: b"<|im_end|>"}[token]
        return out.decode(errors="replace")

    def apply_chat_template(
        self, messages: list[dict], tokenize: bool = True, add_generation_prompt: bool = False, **_: Any
    ) -> Any:
        ids: list[int] = []
        for message in messages:
            ids += [IM_START, *self.encode(f"{message['role']}\n{message['content']}"), IM_END, *self.encode("\n")]
        if add_generation_prompt:
            ids += [IM_START, *self.encode("assistant\n")]
        return ids if tokenize else self.decode(ids)


@dataclass
class Reply:
    """What the scripted model says; `text` is cut at max_new_tokens (finish reason `length`)."""

    text: str = ""
    finish_reason: str = "stop"
    status: int = 200
    delay_s: float = 0.0
    drop: bool = False
    """Close the connection without an answer."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Overrides inside meta_info."""


@dataclass
class Recorded:
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    prompt: str
    """Decoded input_ids, or the chat messages joined."""


Script = Callable[[str], "str | Reply"]


class FakeEngine:
    """`with FakeEngine(lambda prompt: "text") as engine: ... engine.url, engine.requests`."""

    def __init__(self, script: Script, tokenizer: Any | None = None) -> None:
        self.script = script
        self.tokenizer = tokenizer or FakeTokenizer()
        self.requests: list[Recorded] = []
        self.weight_version = "1"
        self.in_flight = 0
        self.max_in_flight = 0
        self.lock = threading.Lock()
        self.server = _Server(("127.0.0.1", 0), _Handler)
        self.server.engine = self  # type: ignore[attr-defined]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> FakeEngine:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def prompts(self) -> list[str]:
        return [request.prompt for request in self.requests]

    def answer(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[Reply, dict[str, Any]]:
        chat = path.endswith("/chat/completions")
        if chat:
            prompt = "\n".join(str(message["content"]) for message in body["messages"])
        else:
            prompt = body["text"] if "text" in body else self.tokenizer.decode(body["input_ids"])
        with self.lock:
            self.requests.append(Recorded(path, body, headers, prompt))
            self.in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            scripted = self.script(prompt)
            reply = Reply(scripted) if isinstance(scripted, str) else scripted
            time.sleep(reply.delay_s)
            return reply, self._chat(body, reply, prompt) if chat else self._generate(body, reply)
        finally:
            with self.lock:
                self.in_flight -= 1

    def _cut(self, reply: Reply, limit: int) -> tuple[list[int], str, str]:
        ids = self.tokenizer.encode(reply.text, add_special_tokens=False)
        closed = [*ids, self.tokenizer.eos_token_id] if reply.finish_reason == "stop" else ids
        if len(closed) > limit:
            return ids[:limit], self.tokenizer.decode(ids[:limit]), "length"
        return closed, reply.text, reply.finish_reason

    def _generate(self, body: dict[str, Any], reply: Reply) -> dict[str, Any]:
        ids, text, finish = self._cut(reply, body["sampling_params"].get("max_new_tokens", 128))
        reasons = {
            "stop": {"type": "stop", "matched": self.tokenizer.eos_token_id},
            "length": {"type": "length", "length": len(ids)},
            "abort": {"type": "abort", "message": "aborted"},
        }
        prompt = body.get("input_ids") or self.tokenizer.encode(body["text"])
        meta: dict[str, Any] = {
            "id": f"fake-{len(self.requests)}",
            "finish_reason": reasons.get(finish, {"type": finish}),
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self.weight_version,
            "e2e_latency": 0.001,
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.25 - 0.001 * (i % 7), token, None] for i, token in enumerate(ids)]
        return {"text": text, "output_ids": ids, "meta_info": meta | reply.meta}

    def _chat(self, body: dict[str, Any], reply: Reply, prompt: str) -> dict[str, Any]:
        ids, text, finish = self._cut(reply, body.get("max_tokens", 128))
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": len(self.tokenizer.encode(prompt)), "completion_tokens": len(ids)}
        return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "fake"}], "model_path": "fake"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        engine: FakeEngine = self.server.engine  # type: ignore[attr-defined]
        reply, data = engine.answer(self.path, body, dict(self.headers.items()))
        if reply.drop:
            self.close_connection = True
            self.connection.close()
            return
        self._send(reply.status, data if reply.status == 200 else {"error": {"message": reply.text}})

    def _send(self, status: int, data: dict[str, Any]) -> None:
        payload = json.dumps(data).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client gave up (a time-out test)

    def log_message(self, *_: object) -> None:
        return


def policy_role(url: str, **overrides: Any) -> Role:
    settings: dict[str, Any] = {"name": "planner", "url": url, "trained": True, "timeout_s": 60.0, "retries": 0}
    return Role(**(settings | overrides))


def frozen_role(name: str, url: str, **overrides: Any) -> Role:
    settings: dict[str, Any] = {"name": name, "url": url, "tokenizer": "fake", "model": "fake", "temperature": 0.0}
    settings |= {"top_p": 1.0, "max_new_tokens": 512, "timeout_s": 60.0, "retries": 0}
    return Role(**(settings | overrides))
