"""Shared by the FSDP tests: a tiny random Qwen2, plain rollout data, worker processes, and an engine that only stores weights."""

from __future__ import annotations

import multiprocessing
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from slime.utils.dp_schedule import build_dp_schedule
from slime.utils.misc import get_free_port

VOCAB = 96


def make_args(model_dir: Path | str, **overrides: Any) -> Namespace:
    """The flags that the back end reads, at their defaults."""
    args = dict(
        hf_checkpoint=str(model_dir), ref_load=None, load=None, save=None, save_hf=None, ckpt_step=None, no_save_optim=False,
        use_gpu=False, train_dtype=None, attn_implementation=None, gradient_checkpointing=False, seed=1234,
        distributed_backend=None, distributed_timeout_minutes=5, optimizer="adam", lr=1e-2, min_lr=0.0,
        lr_decay_style="constant", lr_warmup_iters=0, lr_decay_iters=None, lr_wsd_decay_iters=None, weight_decay=0.1,
        adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=1.0, log_probs_chunk_size=-1,
        only_train_params_name_list=None, freeze_params_name_list=None, loss_type="policy_loss", advantage_estimator="grpo",
        compute_advantages_and_returns=True, custom_advantage_function_path=None, custom_loss_function_path=None,
        custom_pg_loss_reducer_function_path=None, rollout_data_postprocess_path=None, calculate_per_token_loss=False,
        eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=None, use_kl_loss=True, kl_loss_coef=0.1,
        kl_loss_type="low_var_kl", use_unbiased_kl=False, entropy_coef=0.01,  use_rollout_logprobs=False,
        use_tis=False, tis_clip=2.0, tis_clip_low=0.0, custom_tis_function_path=None, get_mismatch_metrics=False,
        use_opsm=False, opsm_delta=1e-4, use_opd=False, opd_kl_coef=1.0, normalize_advantages=False, kl_coef=0.0,
        gamma=1.0, lambd=1.0, value_clip=0.2, use_rollout_entropy=False, use_critic=False,
        reset_optimizer_states=False, ref_update_interval=None, rollout_temperature=0.8, num_rollout=10,
        rollout_batch_size=4, n_samples_per_prompt=2, global_batch_size=4, micro_batch_size=2, use_dynamic_batch_size=False,
        balance_data=False, balance_by_flops=False, trailing_rollouts="carry", max_tokens_per_gpu=None, log_probs_max_tokens_per_gpu=None, keep_old_actor=False, update_weight_transport="nccl",
        update_weight_disk_dir=None, update_weight_disk_keep_files=False, update_weight_buffer_size=20_000,
        update_weight_mode="full", update_weight_delta_encoding="xor", update_weight_delta_checksum="xxh3-128",
        update_weight_local_checkpoint_dir=None,
        lora_rank=None, lora_alpha=None, lora_dropout=0.0, lora_target_modules=None, custom_update_weight_post_write_path=None, use_wandb=False, use_tensorboard=False, metrics_jsonl=None,
    )  # fmt: skip
    return Namespace(**{**args, **overrides})


def make_model(folder: Path) -> Path:
    """Save a random Qwen2 (hidden 64, 2 layers, tied embeddings) and a stand-in tokenizer file."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    return folder


def make_rollout(seed: int, rollouts: int = 8, turns: int = 2) -> dict[str, list[Any]]:
    """Whole-batch train data: rollouts of two turns with uneven lengths, holes in the masks and one fully masked row."""
    generator = torch.Generator().manual_seed(seed)
    data: dict[str, list[Any]] = {
        key: [] for key in ("tokens", "response_lengths", "loss_masks", "rewards", "rollout_ids")
    }
    data["rollout_log_probs"] = []
    for row in range(rollouts * turns):
        prompt, response = (int(torch.randint(low, 12, (1,), generator=generator)) for low in (1, 2))
        mask = torch.randint(0, 2, (response,), generator=generator)
        mask[0] = 1
        data["tokens"].append(torch.randint(0, VOCAB, (prompt + response,), generator=generator).tolist())
        data["response_lengths"].append(response)
        data["loss_masks"].append((mask * (row != 3)).tolist())
        data["rewards"].append(float(torch.randn(1, generator=generator)))
        data["rollout_ids"].append(row // turns)
        data["rollout_log_probs"].append((-torch.rand(response, generator=generator)).tolist())
    totals = [sum(data["loss_masks"][row]) for row in range(rollouts * turns)]
    data["rollout_mask_sums"] = [turns * total for total in totals]
    return data


def split(args: Namespace, data: dict[str, list[Any]], rank: int, dp_size: int) -> dict[str, Any]:
    """One rank's share, cut by the real schedule."""
    lengths = [len(row) for row in data["tokens"]]
    partitions, micro, counts, sizes = build_dp_schedule(
        args,
        {"dp_size": dp_size, "cp_size": 1},
        lengths,
        global_batch_size=args.global_batch_size,
        rollout_indices=data["rollout_ids"],
    )
    share = {key: [values[i] for i in partitions[rank]] for key, values in data.items()}
    return {
        **share, "partition": partitions[rank], "micro_batch_indices": micro[rank], "num_microbatches": counts,
        "global_batch_sizes": sizes, "total_lengths": lengths, "raw_reward": data["rewards"],
    }  # fmt: skip


def _enter(rank: int, function: Callable[..., Any], world_size: int, port: int, arguments: tuple[Any, ...]) -> None:
    from slime.backends.common.distributed import exit_worker

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1"
    )
    torch.set_num_threads(1)
    function(*arguments)
    exit_worker(0)


def run_workers(function: Callable[..., Any], world_size: int, *arguments: Any) -> None:
    """Run `function(*arguments)` in `world_size` fresh processes that find each other; raises when one fails.

    They are forked from a server that has imported the trainer once, and has never run anything.
    """
    port = get_free_port(21000 + os.getpid() % 5000)
    multiprocessing.set_forkserver_preload(
        ["slime.backends.fsdp_utils.critic", "transformers.models.qwen2.modeling_qwen2"]
    )
    mp.start_processes(_enter, (function, world_size, port, arguments), nprocs=world_size, start_method="forkserver")


# ---- an engine that joins the update group and keeps what it is sent ----


def engine_main(commands: Any, answers: Any, backend: str = "gloo") -> None:
    """Body of the engine process: runs (method, args, kwargs) in order, answers with ("ok", call log or weights)."""
    from datetime import timedelta

    import torch.distributed as dist

    from slime.backends.common.distributed import exit_worker, new_external_group

    groups: dict[str, Any] = {}
    weights: dict[str, torch.Tensor] = {}
    log: list[str] = []
    versions: list[str] = []
    while True:
        method, args, kwargs = commands.get()
        log.append(method)
        if method == "init_weights_update_group":
            address, port, offset, world_size, name, backend = args
            groups[name] = new_external_group(backend, address, port, offset, world_size, name, timedelta(minutes=5))
        elif method == "update_weights_from_distributed":
            names, dtypes, shapes, group = args
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
                weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                dist.broadcast(weights[name], src=0, group=groups[group])
            versions.append(kwargs["weight_version"])
        elif method == "update_weights_from_disk":
            from safetensors.torch import load_file

            weights = load_file(Path(args[0]) / "model.safetensors")
            versions.append(kwargs["weight_version"])
        elif method == "report":
            torch.save({"weights": weights, "log": log[:-1], "versions": versions}, args[0])
        answers.put("ok")
        if method == "stop":
            answers.close()
            answers.join_thread()
            exit_worker(0)


class _Method:
    def __init__(self, engine: EngineHandle, name: str) -> None:
        self.engine, self.name = engine, name

    def remote(self, *args: Any, **kwargs: Any) -> EngineHandle:
        self.engine.commands.put((self.name, args, kwargs))
        return self.engine


class EngineHandle:
    """Looks like a Ray actor handle; calls run in order in a process of their own."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.commands, self.answers = context.Queue(), context.Queue()
        self.process = context.Process(target=engine_main, args=(self.commands, self.answers), daemon=True)
        self.process.start()

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)


def wait_for(handles: list[EngineHandle]) -> list[str]:
    """The `wait` of this fake: one answer per call that was started."""
    return [handle.answers.get(timeout=180) for handle in handles]


# ---- hooks, named by path in the tests ----


def forget_advantages(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """A custom advantage function that does nothing."""


def mask_everything(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """A postprocess hook that switches off every token."""
    rollout_data["loss_masks"] = [torch.zeros_like(mask) for mask in rollout_data["loss_masks"]]


def drop_first_token(**call: Any) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """A correction that takes the first token of every row out of the loss."""
    assert set(call) == {
        "args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths",
    }  # fmt: skip
    masks = [mask * (torch.arange(len(mask)) > 0) for mask in call["loss_masks"]]
    return call["pg_loss"], masks, {"seen": torch.ones_like(call["pg_loss"])}


def sum_of_everything(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[torch.Tensor], per_token: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A reducer that ignores masks and denominators."""
    return lambda x: x.sum()


def sft_from_logits(
    args: Namespace,
    batch: dict[str, Any],
    logits: torch.Tensor,
    sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A custom loss written against the documented interface only."""
    rows, start = [], 0
    for tokens, length in zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True):
        end = start + len(tokens)
        log_probs = logits[0, start : end - 1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        rows.append(log_probs[-length:])
        start = end
    loss = -sum_of_sample_mean(torch.cat(rows))
    return loss, {"twice": 2 * loss}
