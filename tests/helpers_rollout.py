"""Fakes for rollout tests: a `/generate` server in SGLang's shape, a tiny chat tokenizer, default arguments."""

from __future__ import annotations

import asyncio
import json
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_tiny_tokenizer(folder: Path) -> str:
    """A byte-level tokenizer without merges (one id per byte) with a ChatML template; returns its folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return str(folder)


def rollout_args(hf_checkpoint: str, **overrides: Any) -> Namespace:
    """The attributes that the rollout room reads, with the defaults of the command line."""
    values: dict[str, Any] = dict(
        hf_checkpoint=hf_checkpoint,
        rollout_global_dataset=True,
        rollout_batch_size=2,
        over_sampling_batch_size=2,
        n_samples_per_prompt=2,
        global_batch_size=4,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=8,
        rollout_max_context_len=None,
        rollout_max_prompt_len=None,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=False,
        rollout_seed=42,
        rollout_shuffle=False,
        sglang_router_ip="127.0.0.1",
        sglang_router_port=1,
        sglang_server_concurrency=4,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        partial_rollout=False,
        mask_offpolicy_in_partial_rollout=False,
        group_rm=False,
        custom_generate_function_path=None,
        custom_rm_path=None,
        rm_type="random",
        rm_url=None,
        reward_key=None,
        eval_reward_key=None,
        rollout_sample_hook_path=[],
        dynamic_sampling_filter_path=None,
        buffer_filter_path=None,
        rollout_sample_filter_path=None,
        rollout_all_samples_process_path=None,
        prompt_data=None,
        input_key="prompt",
        label_key="label",
        tool_key="tools",
        metadata_key="metadata",
        multimodal_keys=None,
        apply_chat_template=False,
        apply_chat_template_kwargs={},
        eval_max_prompt_len=None,
        eval_max_context_len=None,
        eval_datasets=[],
        loss_mask_type="qwen",
        save=None,
        load=None,
    )
    return Namespace(**{**values, **overrides})


def engine_answer(payload: dict[str, Any], ids: list[int], finish: str = "stop") -> dict[str, Any]:
    """What SGLang returns from `/generate` for `ids`, each with log-prob -0.5."""
    return {
        "text": f"text of {len(ids)}",
        "meta_info": {
            "prompt_tokens": len(payload["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "finish_reason": {"type": finish},
            "weight_version": "7",
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        },
    }


class FakeEngine:
    """Router and engine in one. `respond(payload, number of the request) -> ids` may be replaced by a test.

    With `hold` set, requests wait until `/abort_request` and then return what `respond` says with reason `abort`.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborts = 0
        self.abort_status = 200
        self.running = 0
        self.max_running = 0
        self.hold: Callable[[dict[str, Any]], bool] = lambda payload: False
        self.respond: Callable[[dict[str, Any], int], list[int]] = lambda payload, number: [65, 66]
        self.delay_s = 0.0
        self.url = ""
        self.port = 0
        self._released = asyncio.Event()

    async def generate(self, request: web.Request) -> web.Response:
        payload = await request.json()
        number = len(self.requests)
        self.requests.append(payload)
        self.headers.append(dict(request.headers))
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            finish = "stop"
            if self.hold(payload):
                await self._released.wait()
                finish = "abort"
            await asyncio.sleep(self.delay_s)
        finally:
            self.running -= 1
        return web.json_response(engine_answer(payload, self.respond(payload, number), finish))

    async def abort_request(self, request: web.Request) -> web.Response:
        self.aborts += 1
        if self.abort_status == 200:
            self._released.set()
        return web.json_response({}, status=self.abort_status)

    async def workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"id": "0", "url": self.url}]})

    async def loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": 0}]})

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort_request)
        app.router.add_get("/workers", self.workers)
        app.router.add_get("/v1/loads", self.loads)
        return app


@contextmanager
def serve_in_thread(app: web.Application) -> Iterator[int]:
    """Serves an application on a free port of 127.0.0.1 from a thread with its own event loop; yields the port."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    state: dict[str, Any] = {}

    async def start() -> None:
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        state.update(runner=runner, port=runner.addresses[0][1])

    def serve() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(state["runner"].cleanup())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(10), "the fake server did not start"
    try:
        yield state["port"]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


@contextmanager
def fake_engine() -> Iterator[FakeEngine]:
    """A running `FakeEngine`."""
    engine = FakeEngine()
    with serve_in_thread(engine.app()) as port:
        engine.port = port
        engine.url = f"http://127.0.0.1:{port}"
        yield engine


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)
