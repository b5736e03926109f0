"""The stand-in for SGLang's kernel package: the one function it has, and what it says about the others."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from slime.backends.sglang_utils.server import CPU_SHIM


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_stand_in", CPU_SHIM / "sgl_kernel" / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_slots_go_to_their_rows(kernels: ModuleType) -> None:
    table = torch.full((4, 6), -1, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0, 3]), torch.tensor([1, 0, 6]), torch.tensor([3, 4, 6])
    kernels.assign_req_to_token_pool_cpu(rows, table, start, end, torch.arange(10, 16), 6)
    expected = torch.full((4, 6), -1, dtype=torch.int32)
    expected[2, 1:3] = torch.tensor([10, 11], dtype=torch.int32)
    expected[0, 0:4] = torch.tensor([12, 13, 14, 15], dtype=torch.int32)
    assert torch.equal(table, expected)


def test_slots_outside_of_the_pool_are_an_error(kernels: ModuleType) -> None:
    with pytest.raises(ValueError, match="columns 4:7"):
        kernels.assign_req_to_token_pool_cpu(
            torch.tensor([0]), torch.zeros(1, 6), torch.tensor([4]), torch.tensor([7]), torch.arange(3), 6
        )


def test_other_kernels_fail_by_name(kernels: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match="sgl_kernel.moe_sum"):
        kernels.moe_sum(1, out=2)
    with pytest.raises(AttributeError):
        kernels.__wrapped__  # noqa: B018


def test_our_processes_do_not_see_the_stand_ins() -> None:
    code = "import slime.backends.sglang_utils.sglang_engine, sys; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CPU_SHIM.parents[3])
    assert done.returncode == 0, done.stderr
    loaded = done.stdout
    assert "'slime.backends.sglang_utils.server'" in loaded
    assert not any(
        f"'{name}'" in loaded for name in ("sgl_kernel", "sglang", "torchvision._meta_registrations", "ray")
    )
