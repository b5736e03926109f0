"""What is trained is what the engine saw and said: AgentFlow's rows against the recorded traffic of a real engine."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers_e2e import make_small_world, recording_proxy
from helpers_sglang import free_port, ids_and_log_probs, running_server

from slime.utils.misc import SingletonMeta

PROMPTS, SAMPLES = 3, 2
HOOKS = {
    "--custom-generate-function-path": "agentic.agentflow.rollout.generate",
    "--custom-rm-path": "agentic.agentflow.reward.reward_func",
    "--custom-convert-samples-to-train-data-path": "agentic.agentflow.convert.custom_convert",
}


@pytest.fixture
def router(tmp_path: Path) -> Iterator[tuple[str, str, Path]]:
    """A real router before a real engine that serves the tiny model: (url of the engine, of the router, model)."""
    from slime.backends.sglang_utils.router import Router

    model = make_small_world(tmp_path)
    options = {"max_total_tokens": 32768, "context_length": 1024, "max_running_requests": 16}
    with running_server(model, tmp_path, **options) as server:
        front = Router("127.0.0.1", free_port(), tmp_path / "router.log")
        front.start()
        try:
            front.wait_ready()
            front.add_worker(server.url)
            yield server.url, front.url, model
        finally:
            front.stop()


def parse(folder: Path, engine_url: str, router_port: int, model: Path) -> Namespace:
    """Flags of a rollout on the running router; the frozen roles ask the same engine directly."""
    from slime.utils.arguments import parse_args

    frozen: dict[str, Any] = {"url": engine_url, "tokenizer": str(model), "max_new_tokens": 24}
    names = ("executor", "verifier", "base_generator", "python_coder", "generator")
    planner: dict[str, Any] = {"url": "policy", "max_new_tokens": 24}
    roles = {"planner": planner, **{name: frozen for name in names}}
    (folder / "roles.yaml").write_text(yaml.safe_dump({"roles": roles}))
    settings: dict[str, Any] = {"roles": str(folder / "roles.yaml"), "prompt_set": "compact", "judge": "rule_only"}
    settings |= {"max_context_len": 1024, "turn_weighting": "token_mean"}
    config = folder / "agentflow.yaml"
    config.write_text(yaml.safe_dump({f"agentflow_{name}": value for name, value in settings.items()}))
    flags: dict[str, Any] = {
        "--train-backend": "fsdp",
        "--hf-checkpoint": model,
        "--prompt-data": folder / "world" / "train.jsonl",
        "--input-key": "prompt",
        "--label-key": "label",
        "--rollout-batch-size": PROMPTS,
        "--n-samples-per-prompt": SAMPLES,
        "--num-rollout": 1,
        "--rollout-max-response-len": 24,
        "--actor-num-gpus-per-node": 1,
        "--rollout-num-gpus": 1,
        "--sglang-router-ip": "127.0.0.1",
        "--sglang-router-port": router_port,
        "--custom-config-path": config,
        **HOOKS,
    }
    return parse_args(argv=[str(word) for pair in flags.items() for word in pair])


def roll_out(args: Namespace) -> tuple[list[Any], dict[str, list[Any]]]:
    """Samples and train data of one rollout, by the functions that the rollout manager calls."""
    from slime.rollout import conversion
    from slime.rollout.base_types import RolloutFnTrainOutput
    from slime.rollout.data_source import RolloutDataSourceWithBuffer
    from slime.rollout.sglang_rollout import generate_rollout
    from slime.utils.http_utils import init_http_client

    SingletonMeta.clear_instances()
    init_http_client(args)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert isinstance(output, RolloutFnTrainOutput)
    samples = conversion.flatten_samples(output.samples)
    return samples, conversion.convert_samples_to_train_data(args, samples)


@torch.no_grad()
def forced_log_probs(model: Any, tokens: list[int], response_length: int) -> list[float]:
    """Log-probs (nats) that the model gives the last `response_length` tokens, in one forward pass."""
    logits = model(torch.tensor([tokens])).logits[0, -response_length - 1 : -1].float()
    rows = torch.log_softmax(logits, dim=-1)
    return rows.gather(1, torch.tensor(tokens[-response_length:])[:, None])[:, 0].tolist()


@pytest.mark.engine
def test_trained_rows_are_what_the_engine_saw_and_said(tmp_path: Path, router: tuple[str, str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    engine_url, router_url, path = router
    with recording_proxy(router_url) as (port, traffic):
        samples, data = roll_out(parse(tmp_path, engine_url, port, path))
    assert [sample.metadata["failure_reason"] for sample in samples] == [None] * (PROMPTS * SAMPLES)

    said: Counter[tuple[Any, ...]] = Counter()
    for request, answer in traffic:
        ids, log_probs = ids_and_log_probs(answer)
        assert ids == answer["output_ids"] and "text" not in request
        assert answer["meta_info"]["prompt_tokens"] == len(request["input_ids"])
        said[(*request["input_ids"],), (*ids,), (*log_probs,)] += 1

    assert {len(values) for values in data.values()} == {len(traffic)} and len(traffic) > PROMPTS * SAMPLES
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    rows = zip(data["tokens"], data["response_lengths"], data["loss_masks"], data["rollout_log_probs"], strict=True)
    for tokens, length, mask, log_probs in rows:
        assert len(mask) == len(log_probs) == length and mask == [1] * length
        call = (*tokens[:-length],), (*tokens[-length:],), (*log_probs,)
        said[call] -= 1
        assert said[call] >= 0, "this row was never sent and answered"
        assert forced_log_probs(model, tokens, length) == pytest.approx(log_probs, abs=1e-3)
    assert said.total() == 0, "an answer of the policy is missing among the rows"
