"""Choice of the reward function, batching, the remote reward server."""

from __future__ import annotations

from argparse import Namespace

import httpx
import pytest
from aiohttp import web
from helpers_rollout import serve_in_thread

from slime.rollout import rm_hub
from slime.rollout.rm_hub import async_rm, batched_async_rm, remote_rm
from slime.utils.types import Sample


def rm_args(**overrides):
    return Namespace(**{"custom_rm_path": None, "rm_type": None, "rm_url": None, **overrides})


async def from_flag(args, sample, **kwargs):
    return 10.0


async def from_sample(args, sample, **kwargs):
    return 20.0


async def batched(args, samples, **kwargs):
    return [float(i) for i in range(len(samples))]


async def too_few(args, samples, **kwargs):
    return [1.0]


async def test_order_of_choice():
    args = rm_args(custom_rm_path=f"{__name__}.from_flag", rm_type="math")
    own = Sample(custom_rm_path=f"{__name__}.from_sample", metadata={"rm_type": "f1"})
    assert await async_rm(args, own) == 20.0
    assert await async_rm(args, Sample(metadata={"rm_type": "f1"})) == 10.0
    plain = Sample(response="the cat", label="cat", metadata={"rm_type": "f1"})
    assert await async_rm(rm_args(rm_type="math"), plain) == 1.0
    assert await async_rm(rm_args(rm_type=" math "), Sample(response=r"\boxed{2}", label="2")) == 1


@pytest.mark.parametrize(
    "rm_type, response, expected",
    [
        ("math", r"\boxed{3}", 1),
        ("math", r"\boxed{4}", 0),
        ("boxed_math", r"\boxed{3}", 1),
        ("deepscaler", r"</think>\boxed{3}", 1),
        ("boxed_f1", r"I think \boxed{3}", 1.0),
        ("boxed_f1", "3", 0.0),
        ("dapo", "Answer: 3", {"score": 1.0, "acc": True, "pred": "3"}),
    ],
)
async def test_built_in_rules(rm_type, response, expected):
    assert await async_rm(rm_args(rm_type=rm_type), Sample(response=response, label="3")) == expected


async def test_random_is_zero_or_one():
    assert {await async_rm(rm_args(rm_type="random"), Sample()) for _ in range(50)} == {0, 1}


@pytest.mark.parametrize("rm_type", [None, "", "unheard_of"])
async def test_unknown_rule_names_the_choices(rm_type):
    with pytest.raises(NotImplementedError, match="deepscaler"):
        await async_rm(rm_args(rm_type=rm_type), Sample())


async def test_batched_custom_function_is_called_once_with_the_list():
    args = rm_args(custom_rm_path=f"{__name__}.batched")
    assert await batched_async_rm(args, [Sample(), Sample(), Sample()]) == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match="2 samples"):
        await batched_async_rm(rm_args(custom_rm_path=f"{__name__}.too_few"), [Sample(), Sample()])


async def test_batched_built_in_keeps_order():
    samples = [Sample(response=r"\boxed{1}", label="1"), Sample(response=r"\boxed{1}", label="2")]
    assert await batched_async_rm(rm_args(rm_type="math"), samples) == [1, 0]


def reward_app(failures: int, seen: list) -> web.Application:
    async def reward(request: web.Request) -> web.Response:
        seen.append(await request.json())
        if len(seen) <= failures:
            return web.Response(status=500)
        return web.json_response({"score": 0.5})

    app = web.Application()
    app.router.add_post("/rm", reward)
    return app


@pytest.fixture
def no_back_off(monkeypatch):
    monkeypatch.setattr(rm_hub, "_REMOTE_MAX_BACKOFF_S", 0)
    monkeypatch.setattr(rm_hub.random, "random", lambda: 0.0)


async def test_remote_reward_retries(no_back_off):
    seen: list = []
    with serve_in_thread(reward_app(2, seen)) as port:
        args = rm_args(rm_type="remote_rm", rm_url=f"http://127.0.0.1:{port}/rm")
        reward = await async_rm(args, Sample(prompt="p", response="r", label="l"))
    assert reward == {"score": 0.5} and seen == [{"prompt": "p", "response": "r", "label": "l"}] * 3


async def test_remote_reward_gives_up_after_max_retries(no_back_off):
    seen: list = []
    with serve_in_thread(reward_app(99, seen)) as port:
        with pytest.raises(httpx.HTTPStatusError):
            await remote_rm(rm_args(rm_url=f"http://127.0.0.1:{port}/rm"), Sample(), max_retries=3)
    assert len(seen) == 3
