"""What the parts say to each other: rollouts of `generate` become rows, records of the data tool reach desk and policy."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers_orchestra import FINISH, SEARCH, QwenTokenizer, ScriptedTask, script, stage
from helpers_tau2 import FakeDesk

from agentic.common.ledger import CostLedger
from agentic.common.roles import Role, RoleTable
from agentic.toolorchestra import data
from agentic.toolorchestra.config import OrchestraConfig
from agentic.toolorchestra.convert import custom_convert
from agentic.toolorchestra.data_offers import load_catalogue
from agentic.toolorchestra.data_sources import official_source
from agentic.toolorchestra.environment import Outcome
from agentic.toolorchestra.experts import Experts, load_aliases
from agentic.toolorchestra.reward import reward_func

THOUGHT = "<think>\nhm\n</think>\n\n"
# Every tool turn of the first rollout is doubled by a malformed one.
TURNS = (THOUGHT + SEARCH, "nonsense", THOUGHT + FINISH, THOUGHT + SEARCH, THOUGHT + FINISH)


class Graded(ScriptedTask):
    """Ends like a question, with the outcome that it is given."""

    def __init__(self, reward: float) -> None:
        super().__init__(["a result"])
        self.reward = reward

    async def outcome(self, termination: str | None = None) -> Outcome:
        return Outcome(self.reward, termination is None, termination or "answer", {})


@pytest.mark.parametrize("layout", ["stream", "turns"])
async def test_rollouts_of_generate_become_rows(tmp_path, monkeypatch, layout):
    tasks = Graded(1.0), Graded(0.0)
    with stage(tmp_path, monkeypatch, script(*TURNS), *tasks, layout=layout) as s:
        rollouts = [await s.run(s.sample(index)) for index in range(2)]
        samples = [sample for rollout in rollouts for sample in (rollout if layout == "turns" else [rollout])]
        scores = [await reward_func(s.args, sample) for sample in samples]
        out = custom_convert(s.args, [samples])
    assert set(scores) == {1.0, 0.0}
    tokenizer = QwenTokenizer()
    trained: dict[int, list[int]] = {0: [], 1: []}
    for position, index in enumerate(out["sample_indices"]):
        response = out["tokens"][position][-out["response_lengths"][position] :]
        trained[index] += [id_ for id_, bit in zip(response, out["loss_masks"][position], strict=True) if bit]
    end = "<|im_end|>"
    wanted = {0: f"{THOUGHT}{SEARCH}{end}{THOUGHT}{FINISH}{end}", 1: f"{THOUGHT}{SEARCH}{end}{THOUGHT}{FINISH}{end}"}
    assert {index: tokenizer.decode(ids) for index, ids in trained.items()} == wanted, "the malformed turn is masked"
    by_index = dict(zip(out["sample_indices"], out["rewards"], strict=True))
    assert by_index == pytest.approx({0: 0.7071, 1: -0.7071}, abs=1e-3)
    assert set(out["rollout_mask_sums"]) == {float(len(trained[0]))}, "both layouts weigh every token alike"


def role(name: str, **more: Any) -> Role:
    fields = {"url": "http://127.0.0.1:1", "api": "chat", "tokenizer": None, "model": name, "temperature": 0.0}
    fields |= {"top_p": 1.0, "max_new_tokens": 8, "timeout_s": 1.0, "retries": 0, "max_concurrency": 1}
    return Role(name=name, **(fields | more))


def test_desk_offers_prices_and_describes_what_a_record_says(tmp_path):
    aliases = {
        "expert-1": {"model": "big", "price_in": 1.25, "price_out": 10, "description": "Strong.", "latency_s": 20},
        "expert-2": {"model": "small", "price_in": 0.3, "price_out": 0.3, "description": "Weak.", "latency_s": 2},
    }
    path = tmp_path / "aliases.yaml"
    path.write_text(json.dumps(aliases))
    args = data.parse_args(["tau2", "--aliases", str(path), "--output", "o.jsonl", "--availability", "1"])
    task = next(iter(official_source(["mock"], "train")))
    catalogue, seen = load_catalogue(path), set()
    table = RoleTable({name: role(name) for name in ("big", "small")}, {}, "roles.yaml")
    experts = Experts(load_aliases(str(path)), table, {})
    for variant in range(20):
        metadata = data.make_record(task, variant, args, catalogue, [])["metadata"]
        desk = experts.desk(metadata, CostLedger(), 0.0)
        assert list(desk.aliases("expert-")) == metadata["tools"]
        for line, (alias, model) in zip(
            desk.describe("").splitlines(), metadata["model_mapping"].items(), strict=True
        ):
            price = metadata["tool_pricing"][model]
            assert desk.price(alias) == (price["input"], price["output"])
            assert line.startswith(
                f"{alias}: {'Strong.' if model == 'big' else 'Weak.'} $"
            ), "of the model, not the alias"
            assert line.endswith(f"about {20 if model == 'big' else 2} s a call")
        seen.add(tuple(metadata["model_mapping"].values()))
    assert len(seen) == 4
    unpriced = {"model_mapping": {"expert-1": "small"}}
    assert experts.desk(unpriced, CostLedger(), 0.0).price("expert-1") == pytest.approx((0.3e-6, 0.3e-6))


async def test_policy_reads_the_preference_of_a_tau2_record():
    from agentic.toolorchestra.tau2.episode import make_episode

    config = OrchestraConfig(roles="unused.yaml", user="scripted")
    wish = "Please keep the cost of the tools low."
    metadata = {"domain": "mock", "task_id": "create_task_1"}
    prompts = []
    for preference in (wish, ""):
        desk: Any = FakeDesk(["expert-1"])
        episode = make_episode({**metadata, "preference": preference}, None, desk, config)
        prompts.append((await episode.start())[0]["content"])
        episode.close()
    assert wish in prompts[0]
    assert prompts[1] in prompts[0] or len(prompts[1]) < len(prompts[0])
    assert "prefers" not in prompts[1]


@pytest.mark.parametrize("vector", [None, {"cost": -0.3}])
async def test_record_without_a_usable_vector_costs_nothing(tmp_path, monkeypatch, vector):
    with stage(tmp_path, monkeypatch, script(FINISH), ScriptedTask()) as s:
        sample = await s.run(s.sample(pref_vec=vector))
        assert not s.engine.requests
        s.args.orchestra_reward = "outcome"
        again = await s.run(s.sample(pref_vec=vector))
    assert sample.metadata["failure_reason"] == "bad_preference"
    assert sample.remove_sample
    assert "orchestra_reward: outcome" in sample.metadata["failure_detail"]
    assert again.metadata["failure_reason"] is None
