"""An adapter in a thread of its own: bound to this machine, finished from another loop, stopped once."""

from __future__ import annotations

import asyncio
import logging
import socket

import aiohttp
import pytest
from aiohttp import web
from helpers_agent import ScriptedEngine, byte_tokenizer

from slime.agent.adapters.openai import OpenAIAdapter
from slime.agent.aiohttp_threaded import FilteredAccessLogger, run_app_in_thread
from slime.utils.types import Sample


async def test_sessions_are_finished_from_another_loop() -> None:
    tokenizer = byte_tokenizer()
    engine = ScriptedEngine(tokenizer, ["x"])
    async with engine.serving() as url:
        adapter = OpenAIAdapter(tokenizer=tokenizer, sglang_url=url + "/generate")
        handle = run_app_in_thread(adapter.app)
        try:
            assert handle.host == "127.0.0.1" and handle.port > 0
            adapter.open_session("s")
            engine.gate = asyncio.Event()
            async with aiohttp.ClientSession() as client:
                asked = asyncio.create_task(
                    client.post(
                        f"http://127.0.0.1:{handle.port}/v1/chat/completions",
                        json={"messages": [{"role": "user", "content": "a"}]},
                        headers={"Authorization": "Bearer s"},
                    )
                )
                while not engine.requests:
                    await asyncio.sleep(0.01)
                asyncio.get_running_loop().call_later(0.05, engine.gate.set)
                (sample,) = await adapter.finish_session("s", base_sample=Sample(index=0))
                assert (await asked).status == 200
            assert sample.response == "x<|im_end|>"
        finally:
            handle.stop()
            handle.stop()
        assert not handle.thread.is_alive()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", handle.port)) != 0


def test_a_taken_port_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError):
            run_app_in_thread(web.Application(), port=taken.getsockname()[1])


def test_health_checks_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    access = FilteredAccessLogger(logging.getLogger("access"), "%r")
    request = type("R", (), {"path": "/healthz", "method": "GET", "path_qs": "/healthz", "version": (1, 1)})()
    with caplog.at_level(logging.INFO, "access"):
        access.log(request, web.Response(status=200), 0.0)
        assert not caplog.records
        access.log(request, web.Response(status=500), 0.0)
        assert len(caplog.records) == 1
