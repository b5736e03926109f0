"""misc and async_utils: dotted paths, singletons, periodic actions, ports, grouping, chunking, background loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.utils import async_utils
from slime.utils.misc import (
    Box,
    SingletonMeta,
    chunk_named_params_by_size,
    decode_int32_meta_array,
    get_free_port,
    group_by,
    load_function,
    should_run_periodic_action,
)


def test_load_function_finds_functions_and_class_attributes() -> None:
    assert load_function("slime.utils.misc.group_by") is group_by
    assert load_function("slime.utils.types.Sample.from_dict").__name__ == "from_dict"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("group_by", "not a dotted path"),
        ("slime.utils.misc.nothing", "no attribute 'nothing'"),
        ("no_such_package_xy.fn", "no module named 'no_such_package_xy'"),
        ("slime.utils..misc", "not a dotted path"),
    ],
)
def test_load_function_explains_bad_paths(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_function(path)


def test_load_function_shows_the_users_own_import_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hook_with_bad_import.py").write_text("import missing_dependency_xy\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="missing_dependency_xy"):
        load_function("hook_with_bad_import.fn")


@pytest.fixture
def singleton() -> Iterator[type]:
    class Counter(metaclass=SingletonMeta):
        def __init__(self, value: int) -> None:
            self.value = value

    yield Counter
    SingletonMeta.clear_instances()


def test_singleton_keeps_first_arguments_until_cleared(singleton: Any) -> None:
    assert singleton(1) is singleton(2) and singleton(3).value == 1
    singleton.clear_instances()
    assert singleton(4).value == 4


def test_periodic_action() -> None:
    assert [i for i in range(7) if should_run_periodic_action(i, 3)] == [2, 5]
    assert [i for i in range(7) if should_run_periodic_action(i, 3, num_rollout=7)] == [2, 5, 6]
    assert [i for i in range(8) if should_run_periodic_action(i, 100, num_rollout_per_epoch=4)] == [3, 7]
    assert not should_run_periodic_action(6, None, num_rollout=7)


def test_free_port_skips_taken_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert get_free_port(port - 1, consecutive=2) > port
    assert get_free_port(port) >= port


def test_group_by_keeps_order() -> None:
    assert group_by([3, 1, 4, 2], key=lambda x: x % 2) == {1: [3, 1], 0: [4, 2]}
    assert list(group_by("baab")) == ["b", "a"]


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(1, 100))
def test_chunks_keep_order_and_size(sizes: list[int], limit: int) -> None:
    params = [(f"p{i}", torch.zeros(n, dtype=torch.int32)) for i, n in enumerate(sizes)]
    chunks = list(chunk_named_params_by_size(params, limit))
    assert [name for chunk in chunks for name, _ in chunk] == [name for name, _ in params]
    assert all(chunk for chunk in chunks)
    assert all(len(chunk) == 1 or sum(t.nbytes for _, t in chunk) <= limit for chunk in chunks)


def test_decode_int32_takes_first_present_key() -> None:
    expected = torch.tensor([1, -2], dtype=torch.int32)
    for value in (expected, [1, -2], expected.numpy().tobytes()):
        decoded = decode_int32_meta_array({"a": None, "b": value}, ("a", "b"))
        assert decoded is not None and decoded.dtype == torch.int32 and torch.equal(decoded, expected)
    assert decode_int32_meta_array({}, "a") is None


def test_box_holds_its_value() -> None:
    assert Box([1]).inner == [1]


def test_run_uses_one_background_loop() -> None:
    async def loop_id() -> int:
        await asyncio.sleep(0)
        return id(asyncio.get_running_loop())

    assert async_utils.run(loop_id()) == async_utils.run(loop_id()) == id(async_utils.get_async_loop().loop)


def test_run_passes_errors_on_and_refuses_its_own_thread() -> None:
    async def fail() -> None:
        raise KeyError("x")

    async def nested() -> None:
        async_utils.run(asyncio.sleep(0))

    with pytest.raises(KeyError):
        async_utils.run(fail())
    with pytest.raises(RuntimeError, match="await the coroutine"):
        async_utils.run(nested())


def test_singletons_are_forgotten_by_class_or_all() -> None:
    class One(metaclass=SingletonMeta):
        pass

    class Two(metaclass=SingletonMeta):
        pass

    one, two = One(), Two()
    SingletonMeta.clear_instances(One)
    assert One() is not one and Two() is two
    One.clear_instances()
    assert Two() is not two
