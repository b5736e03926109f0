"""Problems that users of such code met: `known_problems.txt` names the tests of each, and those without another home are here."""

from __future__ import annotations

import ast
import json
from argparse import Namespace
from functools import cache
from pathlib import Path
from typing import Any

import helpers_rollout
import pytest
from helpers_ray import manager_args
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime.agent.trajectory import TrajectoryManager, TurnRecord
from slime.observability.rollout_metrics import log_rollout_data
from slime.ray import placement_group
from slime.ray.rollout import RolloutManager
from slime.rollout import sglang_rollout
from slime.utils.arguments import parse_args
from slime.utils.http_utils import init_http_client
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample

TESTS = Path(__file__).parent


# --- the list ---------------------------------------------------------------------------------------------------------


def rows() -> dict[str, list[str]]:
    """`number wording` -> its lines: tests, and reasons for what has none."""
    found: dict[str, list[str]] = {}
    for line in (TESTS / "known_problems.txt").read_text().splitlines():
        if line.startswith(" "):
            found[list(found)[-1]].append(line.strip())
        elif line and not line.startswith("#"):
            found[line] = []
    return found


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


@pytest.mark.parametrize("row", rows())
def test_every_problem_has_its_tests(row: str) -> None:
    number, _, wording = row.partition(" ")
    assert number.isdigit() and wording and rows()[row], row
    tests = [line for line in rows()[row] if not line.startswith("no test: ")]
    assert tests, f"{row}: not even a test of what happens instead"
    for line in tests:
        file, _, name = line.partition("::")
        assert name in names_in(file), line


# --- agents and generation --------------------------------------------------------------------------------------------


def test_a_dropped_session_is_gone_and_may_be_dropped_again() -> None:
    manager = TrajectoryManager()
    turn = TurnRecord(prompt_ids=[1], output_ids=[2], finish_reason="stop", output_log_probs=[-0.5])
    message = {"role": "assistant", "content": "a"}
    manager.record_turn("s", turn=turn, prompt_messages=[{"role": "user", "content": "q"}], response_message=message)
    manager.drop_session("s")
    manager.drop_session("s")
    assert not manager.has_session("s") and manager.get_trajectory("s", base_sample=Sample(index=0)) == []


async def test_a_trimmed_stop_string_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine reports three ids, the last two of which made the stop string, and a text without it."""
    SingletonMeta.clear_instances()
    whole = helpers_rollout.engine_answer
    monkeypatch.setattr(helpers_rollout, "engine_answer", lambda *answer: {**whole(*answer), "text": "A"})
    with helpers_rollout.fake_engine() as engine:
        engine.respond = lambda payload, number: [65, 66, 67]
        tokenizer = helpers_rollout.save_tiny_tokenizer(tmp_path)
        args = helpers_rollout.rollout_args(tokenizer, sglang_router_port=engine.port, rollout_stop=["BC"])
        init_http_client(args)
        sample = await sglang_rollout.generate(args, Sample(prompt="p"), {"max_new_tokens": 3})
    assert sample.response == "A" and sample.tokens[-3:] == [65, 66, 67]
    assert sample.response_length == len(sample.loss_mask or []) == len(sample.rollout_log_probs or []) == 3
    SingletonMeta.clear_instances()


# --- templates --------------------------------------------------------------------------------------------------------

GLM = (
    "[gMASK]{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|system|>\nbe kind{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def tokenizer_with(template: str) -> Any:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|user|>", "<|assistant|>", "<|system|>", "[gMASK]", "<eos>"]
    core.train_from_iterator([], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    made.chat_template = template
    return made


def test_the_token_that_ends_a_turn_can_be_trained() -> None:
    tokenizer = tokenizer_with(GLM)
    chat = [("user", "q"), ("assistant", "ab"), ("user", "r"), ("assistant", "cd")]
    messages = [{"role": role, "content": content} for role, content in chat]
    ids, mask = MultiTurnLossMaskGenerator(tokenizer).get_loss_mask(messages)
    plain = MultiTurnLossMaskGenerator(tokenizer).get_text_from_loss_mask(ids, mask)
    assert plain == ["ab", "cd"]
    stopping = MultiTurnLossMaskGenerator(tokenizer, train_boundary_token=True)
    longer, longer_mask = stopping.get_loss_mask(messages)
    assert stopping.get_text_from_loss_mask(longer, longer_mask) == ["ab<|user|>", "cd<|user|>"]
    assert longer[:-1] == ids and len(longer_mask) == len(longer)


@pytest.mark.parametrize(("template", "own"), [(GLM, "[gMASK]"), (DEFAULT_SYSTEM, "<|system|>\nbe kind")])
def test_system_text_is_measured_with_and_without_a_default(template: str, own: str) -> None:
    tokenizer = tokenizer_with(template)
    generator = MultiTurnLossMaskGenerator(tokenizer)
    count = len(tokenizer(own, add_special_tokens=False)["input_ids"])
    assert generator.get_system_message_length() == (count, len(tokenizer("<|assistant|>\n")["input_ids"]))
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    ids, mask = generator.get_loss_mask([*messages, {"role": "assistant", "content": "a"}])
    assert generator.get_text_from_loss_mask(ids, mask) == ["a"]


# --- command line -----------------------------------------------------------------------------------------------------


@pytest.fixture
def parse(tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text("{}")
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"input": "q"}) + "\n")
    required = ["--train-backend", "fsdp", "--hf-checkpoint", str(tmp_path), "--prompt-data", str(data)]
    required += ["--rollout-batch-size", "2", "--num-rollout", "1", "--rollout-max-response-len", "4"]
    return lambda *flags: parse_args(argv=[*required, "--actor-num-gpus-per-node", "1", *flags])


def test_supervised_training_needs_no_engine(parse: Any) -> None:
    args = parse(
        *("--debug-train-only", "--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout"),
        *("--loss-type", "sft_loss", "--disable-compute-advantages-and-returns"),
    )
    assert args.rollout_num_gpus == 0 and placement_group._get_placement_group_layout(args) == (1, 0)


def test_flags_are_never_abbreviated(parse: Any, capsys: pytest.CaptureFixture[str]) -> None:
    args = parse("--rollout-num-gpus", "1", "--load", "somewhere")
    assert args.load == "somewhere" and args.load_debug_rollout_data is None
    with pytest.raises(SystemExit):
        parse("--rollout-num-gpus", "1", "--load-debug", "x.pt")
    assert "unknown flag --load-debug;" in capsys.readouterr().err


@pytest.mark.parametrize("mode", [["--debug-train-only"], ["--debug-rollout-only", "--rollout-num-gpus", "1"]])
def test_engine_settings_exist_without_engines(parse: Any, mode: list[str]) -> None:
    args = parse(*mode)
    assert args.sglang_server_concurrency == 512 and args.sglang_router_ip is None


# --- around a run -----------------------------------------------------------------------------------------------------


def test_a_given_first_rollout_wins_over_the_checkpoint() -> None:
    for given, stored, first in ((None, 3, 3), (None, 0, 0), (7, 3, 7), (0, 3, 0)):
        args = Namespace(start_rollout_id=given)
        placement_group._set_start(args, stored)
        assert args.start_rollout_id == first


def toy_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    raise AssertionError("no engine may be asked")


def test_a_skipped_evaluation_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{__name__}.toy_rollout"
    args = manager_args(rollout_function_path=path, rollout_global_dataset=False, debug_train_only=True)
    manager = RolloutManager(args, None)
    manager.load_inputs()
    manager.eval(4)
    assert "evaluation of rollout 4 skipped: --debug-train-only" in capsys.readouterr().err


def test_raw_rewards_are_logged_without_training(tmp_path: Path) -> None:
    args = manager_args(metrics_jsonl=str(tmp_path / "m.jsonl"), debug_rollout_only=True)
    samples = [Sample(index=i, group_index=0, reward=float(i), status=Sample.Status.COMPLETED) for i in range(2)]
    log_rollout_data(0, args, samples, None, 1.0)
    line = json.loads((tmp_path / "m.jsonl").read_text())
    assert line["rollout/raw_reward"] == 0.5
