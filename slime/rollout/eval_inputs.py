"""What an evaluation asks for: the samples of a data set, their sampling parameters, and the reward of a result.

Input: `EvalDatasetConfig`. Invariants: a data set is read once per process, however often it is evaluated; samples are
independent copies, numbered in data set order. Left out: generation (`sglang_rollout`).
"""

from __future__ import annotations

import copy
import uuid
from argparse import Namespace
from typing import Any

from slime.rollout.base_types import iter_leaves
from slime.utils.data import Dataset
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.types import Sample

EVAL_PROMPT_DATASET: dict[tuple[Any, ...], Dataset] = {}


def eval_reward(result: Any, reward_key: str | None) -> Any:
    """The reward of a rollout: that of its first scored sample, 0.0 without one."""
    reward: Any = next((sample.reward for sample in iter_leaves(result) if sample.reward is not None), 0.0)
    return float(reward[reward_key]) if reward_key and isinstance(reward, dict) else reward


def eval_samples(args: Namespace, cfg: EvalDatasetConfig, tokenizer: Any, processor: Any) -> list[Sample]:
    """Independent copies of all prompts, repeated, numbered and marked with the dataset's functions."""
    samples: list[Sample] = []
    repeats = cfg.n_samples_per_eval_prompt or 1
    for group_index, prompt in enumerate(_eval_dataset(args, cfg, tokenizer, processor).samples):
        for _ in range(repeats):
            sample = copy.deepcopy(prompt)
            sample.group_index = group_index
            sample.index = len(samples)
            sample.session_id = uuid.uuid4().hex
            sample.metadata = cfg.inject_metadata(sample.metadata)
            sample.generate_function_path = cfg.custom_generate_function_path
            sample.custom_rm_path = cfg.custom_rm_path
            samples.append(sample)
    return samples


def _eval_dataset(args: Namespace, cfg: EvalDatasetConfig, tokenizer: Any, processor: Any) -> Dataset:
    key = (*cfg.cache_key, args.hf_checkpoint, args.eval_max_prompt_len)
    if key not in EVAL_PROMPT_DATASET:
        EVAL_PROMPT_DATASET[key] = Dataset(
            cfg.path,
            tokenizer=tokenizer,
            processor=processor,
            max_length=args.eval_max_prompt_len,
            prompt_key=cfg.input_key or args.input_key,
            multimodal_keys=cfg.multimodal_keys,
            label_key=cfg.label_key,
            tool_key=cfg.tool_key,
            metadata_key=cfg.metadata_key or args.metadata_key,
            apply_chat_template=bool(cfg.apply_chat_template),
            apply_chat_template_kwargs=cfg.apply_chat_template_kwargs,
        )
    return EVAL_PROMPT_DATASET[key]


def eval_sampling_params(cfg: EvalDatasetConfig) -> dict[str, Any]:
    """Sampling parameters of the data set; what is None is left to the engine."""
    params = {
        "temperature": cfg.temperature,
        "top_p": cfg.top_p,
        "top_k": cfg.top_k,
        "max_new_tokens": cfg.max_response_len,
        "stop": cfg.stop,
        "stop_token_ids": cfg.stop_token_ids,
        "min_new_tokens": cfg.min_new_tokens,
        "repetition_penalty": cfg.repetition_penalty,
        "skip_special_tokens": cfg.skip_special_tokens,
        "no_stop_trim": True if cfg.no_stop_trim is None else cfg.no_stop_trim,
        "spaces_between_special_tokens": False,
    }
    return {name: value for name, value in params.items() if value is not None}
