"""What `run.py` checks: each check starts what it needs, and returns figures with their bounds.

Every bound stands where its figure is made, with its source. Two kinds: of correctness, judged everywhere, and of speed and
memory, judged on a GPU only. Invariants: a check uses the product's own `train.py`, trainers and engines; what cannot run here
says so as `Skip`, never as a pass.
"""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.bounds import Bound, copy_rate, peak_flops
from benchmarks.gpu.logprob_memory import measure
from benchmarks.gpu.probe import Failed, Flags, ProbeResult, plain_seconds, run_train, write_long_chats, write_prompts
from slime.utils.flops_utils import calculate_fwd_flops

GIB = 2**30
FIELD = "the field's limit for the distance of engine and trainer; the aim is 1e-4"
NO_FIGURE = "our expectation; nobody has measured it here"


class Skip(Exception):
    """The check cannot run on this machine; the text says why."""


@dataclass(frozen=True)
class Setting:
    """Where and how large. `smoke`: on the CPU, with a tiny model, to try the programs and not the figures."""

    model: Path
    folder: Path
    gpus: int
    smoke: bool
    limit_s: float
    long_tokens: int

    @property
    def row_tokens(self) -> int:
        return 256 if self.smoke else 4096

    def weight_bytes(self) -> int:
        """Bytes of the weight files, which is what a sync sends."""
        return sum(path.stat().st_size for path in self.model.glob("*.safetensors"))


Check = Callable[[Setting], list[Bound]]


# --------------------------------------------------------------------------------------------------------------------
# Trainer against engine, and weight sync.


def engine_check(backend: str, transport: str, setting: Setting) -> list[Bound]:
    """GRPO for two rollouts; the engine's weights are compared with the trainer's after the first sync.

    `transport`: `nccl` (GPUs of their own, broadcast), `ipc` (the same GPUs, tensors by handle) or `disk`.
    """
    trained = _gpus_to_train(transport, setting)
    flags = {**_common(backend, setting, trained), **_rollout_flags(setting), **_transport_flags(transport, setting)}
    result = _finished(run_train(setting.folder / f"engine_{backend}_{transport}", flags, setting.limit_s))
    sync_s = statistics.median(_metric(result, "perf/update_weights_time")[1:] or [math.nan])
    per_gb = sync_s / (setting.weight_bytes() / 1e9)
    limit, target = copy_rate(), {"ipc": "0.9 of a copy inside the GPU"}.get(transport, "")
    share = None if limit is None else 1e9 / per_gb / limit
    equal = None if setting.smoke else 1.0  # train.py ends with an error when they differ
    distance = max(map(abs, _metric(result, "train/engine_kl")))
    gap = max(_metric(result, "train/train_rollout_logprob_abs_diff"))
    return [
        Bound("KL of engine and trainer, nats a token", distance, FIELD, at_most=0.015, gpu_only=False),
        Bound("mean difference of log-probs, nats", gap, NO_FIGURE, at_most=0.05, gpu_only=False),
        Bound("weights equal after the sync", equal, "exact, by --check-weight-update-equal", at_least=1),
        Bound("seconds of a sync for a GB", per_gb, NO_FIGURE, at_most=1.0),
        Bound("share of a copy inside the GPU", share, "the physical limit of a sync", target=target),
    ]


def _gpus_to_train(transport: str, setting: Setting) -> int:
    if transport == "ipc":
        return setting.gpus
    if setting.gpus < 2:
        raise Skip(f"{transport} needs a GPU for the engine and one for the trainer, there is {setting.gpus}")
    return setting.gpus // 2


def _transport_flags(transport: str, setting: Setting) -> Flags:
    if transport == "ipc":
        return {"colocate": None, "rollout-num-gpus-per-engine": 1}
    flags = {"rollout-num-gpus": setting.gpus - setting.gpus // 2, "update-weight-transport": transport}
    return flags | ({"update-weight-disk-dir": setting.folder / "sync"} if transport == "disk" else {})


def _rollout_flags(setting: Setting) -> Flags:
    prompts, samples = (2, 2) if setting.smoke else (16, 8)
    response = 16 if setting.smoke else 1024
    flags = {
        "prompt-data": write_prompts(setting.folder / "prompts.jsonl", 4 * prompts),
        "apply-chat-template": None,
        "num-rollout": 2,
        "rollout-batch-size": prompts,
        "n-samples-per-prompt": samples,
        "global-batch-size": prompts * samples,
        "rollout-max-response-len": response,
        "rollout-temperature": 1.0,
        "advantage-estimator": "grpo",
        "custom-rm-path": "benchmarks.gpu.hooks.even_tokens",
        "get-mismatch-metrics": None,
        "custom-tis-function-path": "benchmarks.gpu.hooks.engine_distance",
    }
    # SGLang compares weights on a GPU only.
    return flags if setting.smoke else flags | {"check-weight-update-equal": None, "sglang-mem-fraction-static": 0.6}


# --------------------------------------------------------------------------------------------------------------------
# Step time and long rows.


def train_check(backend: str, setting: Setting) -> list[Bound]:
    """Supervised steps on rows of one length, without engines: seconds, tokens and model FLOPs."""
    rows = 4 * setting.gpus
    result = _train_rows(f"train_{backend}", backend, setting, setting.row_tokens, rows, rollouts=4)
    seconds = statistics.median(_metric(result, "perf/actor_train_time")[1:])
    tokens = rows * setting.row_tokens
    least = {"fsdp": 0.25, "megatron": 0.30}[backend]
    return [
        Bound("seconds of a step", seconds, "reported"),
        Bound("tokens a second and GPU", tokens / seconds / setting.gpus, "reported"),
        Bound("MFU", _mfu(setting, [setting.row_tokens] * rows, seconds), NO_FIGURE, at_least=least),
        _finite_loss(result),
    ]


def overhead_check(setting: Setting) -> list[Bound]:
    """A supervised step on one GPU against a plain loop that does the same work, in the same minute."""
    one = replace(setting, gpus=1)
    _check_fits(one)
    rows = 4
    plain = plain_seconds(one.model, rows, one.row_tokens, setting.folder / "plain_loop.log")
    result = _train_rows("overhead_fsdp", "fsdp", one, one.row_tokens, rows, rollouts=4)
    seconds = statistics.median(_metric(result, "perf/actor_train_time")[1:])
    return [
        Bound("seconds of a step, plain loop", plain, "the limit"),
        Bound("speed against the plain loop", plain / seconds, "row 5: at least 0.97", at_least=0.97),
    ]


def _check_fits(setting: Setting) -> None:
    """Weights, gradients and Adam's state in float32, and a bf16 copy: 18 bytes a weight. Raises Skip."""
    if setting.smoke:
        return
    import torch

    config = json.loads((setting.model / "config.json").read_text(encoding="utf-8"))
    size = 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2
    needed, there = setting.weight_bytes() / size * 18, torch.cuda.get_device_properties(0).total_memory
    if needed > 0.9 * there:
        raise Skip(
            f"a step needs {needed / GIB:.0f} GiB on one GPU, which has {there / GIB:.0f}; take a smaller --model"
        )


def long_check(backend: str, setting: Setting) -> list[Bound]:
    """One long row a GPU, with recomputation: it ends, the loss is finite, and memory is left."""
    tokens = 512 if setting.smoke else setting.long_tokens
    result = _train_rows(f"long_{backend}", backend, setting, tokens, setting.gpus, rollouts=2)
    seconds = _metric(result, "perf/actor_train_time")[-1]
    share = _peak_share(result)
    return [
        Bound("tokens of a row", float(tokens), "asked for"),
        Bound("seconds of a step", seconds, "reported"),
        Bound("MFU", _mfu(setting, [tokens] * setting.gpus, seconds), "reported"),
        Bound("peak of GPU memory, share", share, "room for fragments", at_most=0.95),
        _finite_loss(result),
    ]


def _train_rows(name: str, backend: str, setting: Setting, tokens: int, rows: int, rollouts: int) -> ProbeResult:
    flags = {
        **_common(backend, setting, setting.gpus),
        "debug-train-only": None,
        "rollout-function-path": "slime.rollout.sft_rollout.generate_rollout",
        "loss-type": "sft_loss",
        "disable-compute-advantages-and-returns": None,
        "prompt-data": write_long_chats(setting.folder / f"{name}.jsonl", rows, tokens),
        "rollout-max-context-len": tokens,
        "num-rollout": rollouts,
        "rollout-batch-size": rows,
        "global-batch-size": rows,
        "max-tokens-per-gpu": tokens,
        **(_recompute(backend) if name.startswith("long") else {}),
    }
    return _finished(run_train(setting.folder / name, flags, setting.limit_s))


def _recompute(backend: str) -> Flags:
    if backend == "fsdp":
        return {"gradient-checkpointing": None}
    return {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}


def _mfu(setting: Setting, lengths: list[int], seconds: float) -> float | None:
    """Model FLOPs of forward and backward (3 x forward; recomputation does no useful work) against the peak."""
    peak = peak_flops()
    if peak is None:
        return None
    return 3 * calculate_fwd_flops(lengths, _sizes(setting.model)) / seconds / peak / setting.gpus


def _sizes(model: Path) -> Namespace:
    """The model's sizes as Megatron names them."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    sizes = {
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config.get("num_key_value_heads"),
        "kv_channels": config.get("head_dim"),
        "ffn_hidden_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "num_experts": config.get("num_experts"),
        "moe_ffn_hidden_size": config.get("moe_intermediate_size"),
        "moe_router_topk": config.get("num_experts_per_tok", 1),
    }
    return Namespace(**sizes)


def _finite_loss(result: ProbeResult) -> Bound:
    losses = _metric(result, "train/loss")
    return Bound("finite losses, share", sum(map(math.isfinite, losses)) / len(losses), "exact", 1, gpu_only=False)


def _peak_share(result: ProbeResult) -> float | None:
    import torch

    if not result.peak_gpu_bytes:
        return None
    return result.peak_gpu_bytes / torch.cuda.get_device_properties(0).total_memory


# --------------------------------------------------------------------------------------------------------------------
# Log-prob head.


def logprob_check(setting: Setting) -> list[Bound]:
    """The trained positions' log-probs against the whole logits, T = 1024, D = 512, V = 151936 (smoke: smaller)."""
    sizes = (64, 32, 1000) if setting.smoke else (1024, 512, 151_936)
    found = measure(*sizes)
    beyond = None if found["peak"] is None else (found["peak"] - (found["weight_gradient"] or 0)) / GIB
    return [
        Bound(
            "gradient against whole logits, relative", found["gap"], "equal to rounding", at_most=1e-5, gpu_only=False
        ),
        Bound("GiB beyond the weight's gradient", beyond, "row 6: at most 0.4", at_most=0.4),
        Bound("GiB with whole logits", None if found["peak_whole"] is None else found["peak_whole"] / GIB, "reported"),
    ]


# --------------------------------------------------------------------------------------------------------------------
# Shared.


def _common(backend: str, setting: Setting, gpus: int) -> Flags:
    if backend == "megatron":
        for package in ("megatron.core", "transformer_engine"):
            if not setting.smoke and importlib.util.find_spec(package.partition(".")[0]) is None:
                raise Skip(f"{package} is not installed: pip install -r requirements/gpu-build.txt")
    return {
        "train-backend": backend,
        "hf-checkpoint": setting.model,
        "input-key": "prompt",
        "lr": 1e-3 if setting.smoke else 1e-6,
        "actor-num-gpus-per-node": gpus,
        "use-dynamic-batch-size": None,
        "max-tokens-per-gpu": setting.row_tokens,
    }


def _finished(result: ProbeResult) -> ProbeResult:
    if problem := result.problem():
        raise Failed(problem)
    return result


def _metric(result: ProbeResult, name: str) -> list[float]:
    if name not in result.metrics:
        raise Failed(f"the run wrote no {name} (log: {result.log})")
    return result.metrics[name]


CHECKS: dict[str, Check] = {
    "logprob_memory": logprob_check,
    **{f"train_{backend}": partial(train_check, backend) for backend in ("fsdp", "megatron")},
    "overhead_fsdp": overhead_check,
    **{
        f"engine_{backend}_{transport}": partial(engine_check, backend, transport)
        for backend in ("fsdp", "megatron")
        for transport in ("nccl", "ipc", "disk")
    },
    **{f"long_{backend}": partial(long_check, backend) for backend in ("fsdp", "megatron")},
}


def describe(check: Any) -> str:
    """First line of a check's docstring."""
    function = check.func if isinstance(check, partial) else check
    return (function.__doc__ or "").strip().splitlines()[0]
