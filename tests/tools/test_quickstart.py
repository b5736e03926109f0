"""The quickstart's own flags; what they make of a run is shown by `tests/e2e`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers_e2e import load_tool

from slime.utils.arguments import parse_args

QUESTION = {"prompt": [{"role": "user", "content": "1 + 1?"}], "label": "2"}


@pytest.mark.parametrize(
    "schedule, program", [("sync", "train"), ("async", "train_async"), ("fully-async", "train_async")]
)
def test_a_schedule_is_a_program_whose_parser_takes_the_command(tmp_path: Path, schedule: str, program: str) -> None:
    quickstart = load_tool("quickstart")
    run = quickstart.parse_args(["agentflow", "--schedule", schedule, "--output", str(tmp_path / "out")])
    for folder in (run.start_model, run.world):
        folder.mkdir()
    (run.start_model / "config.json").write_text("{}")
    for name in ("train", "heldout"):
        (run.world / f"{name}.jsonl").write_text(f"{json.dumps(QUESTION)}\n" * 20)
    plan = quickstart.method_of(run.method).plan(run, quickstart.server_port)
    command = quickstart.train_command(run, quickstart.write_documents(run, plan), plan)
    assert Path(command[1]).name == f"{program}.py"
    args = parse_args(argv=command[2:])
    assert ("fully_async" in args.rollout_function_path) == (schedule == "fully-async")
    assert "fully_async" not in args.eval_function_path


def test_a_folder_of_another_schedule_is_refused(tmp_path: Path) -> None:
    quickstart = load_tool("quickstart")
    folder = ["--output", str(tmp_path / "out")]
    quickstart.parse_args(["agentflow", *folder])
    with pytest.raises(ValueError, match="holds a run with other settings"):
        quickstart.parse_args(["agentflow", "--schedule", "async", *folder])
