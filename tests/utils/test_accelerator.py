"""The device facade on a CPU machine, and what it decides for other kinds of devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from slime.utils import accelerator
from slime.utils.accelerator.cpu import CPUAccelerator
from slime.utils.accelerator.cuda import CUDAAccelerator
from slime.utils.accelerator.musa import MUSAAccelerator, musa_module
from slime.utils.accelerator.torch_accelerator import TorchAccelerator


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    accelerator.set_accelerator(CPUAccelerator())
    yield
    accelerator.reset_accelerator()


class Imagined(CPUAccelerator):
    name = "imagined"


def test_the_best_available_kind_is_chosen() -> None:
    accelerator.reset_accelerator()
    expected = CUDAAccelerator if torch.cuda.is_available() else CPUAccelerator
    assert type(accelerator.get_accelerator()) is expected
    accelerator.reset_accelerator()
    accelerator.register_accelerator("imagined", Imagined, lambda: True, priority=1000)
    try:
        assert accelerator.initialize_accelerator() is accelerator.get_accelerator()
        assert accelerator.get_accelerator().name == "imagined"
    finally:
        accelerator._kinds.pop("imagined")


def test_the_cpu_is_one_device() -> None:
    assert accelerator.device_type() == "cpu" and accelerator.device(3) == torch.device("cpu")
    assert (accelerator.current_device(), accelerator.device_count()) == ("cpu", 1)
    accelerator.set_device(0)
    accelerator.synchronize()
    accelerator.empty_cache()
    accelerator.ipc_collect()
    with accelerator.stream(accelerator.new_stream()):
        assert torch.ones(2).sum() == 2
    assert accelerator.current_stream() == accelerator.default_stream()


def test_memory_is_that_of_the_machine() -> None:
    free, total = accelerator.mem_get_info()
    assert 0 < free <= total == accelerator.get_device_properties().total_memory
    assert (
        0 < accelerator.memory_allocated() == accelerator.memory_reserved() or accelerator.memory_allocated() < total
    )
    assert accelerator.memory_module() is None and not accelerator.set_allocator_expandable_segments()
    assert not accelerator.attach_oom_observer(print)


def test_time_between_events() -> None:
    start, end = accelerator.new_event(enable_timing=True), accelerator.new_event(enable_timing=True)
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    end.record()
    end.synchronize()
    assert end.query() and 0 <= start.elapsed_time(end) < 1000


def test_random_state_comes_back() -> None:
    accelerator.manual_seed(5)
    assert accelerator.initial_seed() == 5
    state = accelerator.get_rng_state()
    first = torch.rand(3)
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    accelerator.manual_seed_all(5)
    assert torch.equal(torch.rand(3), first)


def test_autocast_is_that_of_the_device() -> None:
    with accelerator.autocast(dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "default", "backend"),
    [
        (CPUAccelerator, "nccl", "gloo"),
        (CPUAccelerator, "gloo", "gloo"),
        (CUDAAccelerator, "nccl", "nccl"),
        (CUDAAccelerator, "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        (CUDAAccelerator, "gloo", "gloo"),
        (MUSAAccelerator, "nccl", "mccl"),
    ],
)
def test_back_end_of_collectives(kind: type[TorchAccelerator], default: str, backend: str) -> None:
    assert kind().communication_backend(default) == kind().weight_update_backend(default) == backend


def test_which_back_ends_need_a_gpu() -> None:
    assert accelerator.process_group_backend() == accelerator.weight_update_backend() == "gloo"
    assert accelerator.is_accelerator_backend("nccl") and accelerator.is_accelerator_backend("cpu:gloo,musa:mccl")
    assert not accelerator.is_accelerator_backend("gloo")
    assert accelerator.distributed_device_id() is None
    assert MUSAAccelerator().distributed_device_id(0) is None


def test_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert accelerator.resolve_visible_device_id(3) == 3
    monkeypatch.setenv(accelerator.visible_devices_env_key(), "4, 6,GPU-ab")
    assert [accelerator.resolve_visible_device_id(i) for i in (4, 6.0, "6", "GPU-ab")] == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="hidden by CUDA_VISIBLE_DEVICES"):
        accelerator.resolve_visible_device_id(5)
    assert MUSAAccelerator().visible_devices_env == "MUSA_VISIBLE_DEVICES"


def test_capabilities() -> None:
    assert CUDAAccelerator().supports("ipc") and not MUSAAccelerator().supports("ipc")
    assert not accelerator.supports("ipc") and not CUDAAccelerator().supports("anything else")


@pytest.mark.skipif(accelerator.is_musa_environment(), reason="torch_musa is installed")
def test_a_missing_vendor_is_named() -> None:
    assert not accelerator.is_musa_available() and not MUSAAccelerator().is_available()
    with pytest.raises(RuntimeError, match="torch_musa"):
        musa_module()
