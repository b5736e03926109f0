"""A CPU stand-in for the devices that megatron-core hard-codes. Imported only when there is no GPU.

megatron-core asks for `cuda` by name: in tensor factories, `.cuda()`, type names, streams, random number generators. On a machine
without a GPU all of this is mapped to the CPU, for the whole process, so that the same training code runs there over gloo: for tests
and laptops, with megatron-core's own layers and without TransformerEngine. It patches torch; nothing but training ranks installs it.

Left out: dropout (its generators are not separate per tensor-parallel rank here, and it is off in this project), CUDA graphs, FP8.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.split(":")[0] == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Every torch function sees the CPU where its caller wrote `cuda`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not named:
            return func(*args).replace("torch.", "torch.cuda.")
        if _is_cuda(named.get("device")):
            named["device"] = _CPU
        if func is torch.Tensor.to:
            args = tuple(_CPU if _is_cuda(value) else value for value in args)
        return func(*args, **named)


class _NoStream:
    """Work on a CPU is in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, *_: Any) -> _NoStream:
        return self


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _router_gemm(
    left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, layout: str, bias: Any = None, **_: Any
) -> tuple[torch.Tensor]:
    """TransformerEngine's product, with its column-major layouts: `right` x `left`, each transposed by its letter."""
    a, b = (x.to(dtype) for x in (left, right))
    product = (b.t() if layout[1] == "T" else b) @ (a.t() if layout[0] == "T" else a)
    return (product if bias is None else product + bias,)


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """The counts of tokens per expert for a collective; megatron-core converts them only when they come from a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


_STREAM = _NoStream()
_PATCHES: dict[str, Any] = {
    "current_device": lambda: _CPU,
    "synchronize": _nothing,
    "set_device": _nothing,
    "empty_cache": _nothing,
    "manual_seed": _nothing,
    "set_rng_state": _nothing,
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "Stream": _NoStream,
    "current_stream": lambda *_: _STREAM,
    "default_stream": lambda *_: _STREAM,
    "stream": lambda *_: contextlib.nullcontext(),
}
_installed: list[_CudaMeansCpu] = []


def install() -> None:
    """Map `cuda` to the CPU in this process, before any other part of megatron-core is imported. A second call does nothing."""
    if _installed:
        return
    assert not torch.cuda.is_available(), "the CPU stand-in must not be used beside a GPU"
    # The compiler lists torch's functions when it is imported (by the first optimizer), and must not meet ours there.
    importlib.import_module("torch._dynamo.polyfills.loader")
    for name, replacement in _PATCHES.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.random.get_rng_state = _PATCHES["get_rng_state"]
    _import_without_compiler()
    _patch_megatron()
    mode = _CudaMeansCpu()
    mode.__enter__()
    _installed.append(mode)


def _import_without_compiler() -> None:
    """megatron-core compiles small functions where it defines them; on a CPU that costs more than it saves."""
    compiler = torch.compile
    setattr(torch, "compile", lambda function, *_, **__: function)  # noqa: B010
    try:
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        importlib.import_module("megatron.core.transformer.moe.moe_layer")
    finally:
        setattr(torch, "compile", compiler)  # noqa: B010


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._set_cuda_rng_state = _nothing
    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    moe_utils.te_general_gemm = _router_gemm
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host
