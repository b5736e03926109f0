"""Stand-in for the compiled package `sgl_kernel`, for SGLang server processes on a machine without a GPU.

What it stands in for: SGLang imports its kernel package at start, and PyPI carries only the CUDA build of it, which does
not load without the CUDA libraries. On CPU with `--attention-backend torch_native` the models of the Qwen2 and Llama
families, and Qwen3 with experts, run on plain torch and call exactly one function of it, `assign_req_to_token_pool_cpu`,
written here in torch.

When it can go: when a CPU wheel of the kernel package is on PyPI, or SGLang has a torch path for that function.

Every other name resolves to a function that raises NotImplementedError with the kernel's name at the first call, so a
model that needs more fails loudly instead of computing something wrong. Never used on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Writes each request's newly allocated KV slots into its row of the request-to-token table, in place.

    Request i owns row `req_pool_indices[i]` of `req_to_token` [rows, pool_len] int32 and takes the next
    `end_offset[i] - start_offset[i]` entries of `out_cache_loc` for the columns start to end.
    """
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        if not 0 <= start <= end <= pool_len:
            raise ValueError(f"request row {row}: columns {start}:{end} do not fit a pool of {pool_len}")
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in here; this model or option needs a GPU")

    missing.__name__ = name
    return missing
