"""launch.sh, serve.sh and eval.sh: expanded commands, written files, services that are asked before a run begins."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from helpers_launch import LaunchKit
from helpers_planner import ask_planner

from agentic.common import launching
from agentic.common.errors import ConfigError
from agentic.common.roles import RoleTable
from agentic.toolorchestra.config import OrchestraConfig
from agentic.toolorchestra.experts import Experts
from agentic.toolorchestra.launch import LAUNCHER

KIT = LaunchKit(
    LAUNCHER,
    ("train", "serve", "serve-eval", "eval"),
    Path(__file__).with_name("orchestra_launch_argv.txt"),
    {
        "train with eval_data": ("train", {"eval_data": "data/dev.jsonl"}),
        "eval with trained_model": ("eval", {"trained_model": "hf"}),
    },
)
EXPERT_MODELS = {"qwen3-32b", "qwen2.5-coder-32b", "qwen3-30b-a3b", "qwen3-14b", "qwen2.5-math-7b"}


def test_expanded_commands_are_as_recorded() -> None:
    """After a change: `PYTHONPATH=.:tests python tests/toolorchestra/test_orchestra_launch.py` records anew."""
    assert KIT.expanded() == KIT.snapshot.read_text()


def test_dry_run_shows_plan_and_command_from_any_folder(tmp_path: Path) -> None:
    """The default aliases are those of the checkout, wherever the command is given."""
    done = KIT.run(
        "launch.sh", "--dry-run", "--output", "o", "--corpus", "p.jsonl", "--", "--lr", "2e-6", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "note: --model models/Qwen3-8B is not there yet" in done.stderr
    assert "policy: models/Qwen3-8B, 8.19 billion parameters (scripts/models/qwen3-8B.sh)" in done.stderr
    assert (
        "server retrieval: http://127.0.0.1:8000" in done.stderr and "http://127.0.0.1:30005, GPUs 7:" in done.stderr
    )
    assert "--save o/checkpoints" in done.stdout and done.stdout.endswith("--lr 2e-6\n")
    assert done.stdout.startswith("CUDA_VISIBLE_DEVICES=0,1,2,3 python ") and list(tmp_path.iterdir()) == []


def test_dry_run_refuses_what_the_programs_refuse(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_ask_planner", ask_planner)
    assert LAUNCHER.main(["train", "--dry-run", "--layout", "streams"]) == 2
    out = capsys.readouterr()
    last = out.err.splitlines()[-1]
    assert last.startswith("error: ") and "orchestra_layout is 'streams'" in last and out.out == ""
    assert LAUNCHER.main(["eval", "--dry-run", "--trials", "0"]) == 2
    assert LAUNCHER.main(["serve", "--dry-run", "--coder-port", "30001"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: outputs/toolorchestra/roles.yaml: servers.large: ") and "is used twice" in last


def test_servers_and_evaluation_have_a_dry_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_ask_planner", ask_planner)
    assert "command=serve-eval" in (KIT.folder / "serve.sh").read_text()
    assert "launch eval" in (KIT.folder / "eval.sh").read_text()
    assert LAUNCHER.main(["serve-eval", "--dry-run", "--trained-model", "Qwen3-8B"]) == 0
    assert LAUNCHER.main(["eval", "--dry-run", "--trained-model", "hf", "--benchmarks", "airline:base"]) == 0
    assert "--data airline:base --roles" in (shown := capsys.readouterr().out) and "--arms untrained,trained" in shown


def test_every_setting_changes_something() -> None:
    changed = {"trained_model": "t", "eval_data": "e", "corpus": "c", "index": "i"}
    assert KIT.settings_without_effect(**changed) == []


def test_written_files_are_what_the_programs_read(tmp_path: Path) -> None:
    KIT.write(tmp_path, "train", corpus="passages.jsonl", aliases=str(KIT.folder / "aliases.yaml"))
    config = OrchestraConfig.from_args(Namespace(**yaml.safe_load((tmp_path / "orchestra.yaml").read_text())))
    assert config == OrchestraConfig(roles=config.roles, aliases=config.aliases)
    table = RoleTable.load(config.roles, "http://router", known_roles=None)
    assert [role.name for role in table if role.trained] == ["orchestrator"]
    assert {role.name for role in table} == {"orchestrator", "user", "judge", "retrieval"} | EXPERT_MODELS
    assert table["retrieval"].url == "http://127.0.0.1:8000"
    experts = Experts.build(config.aliases, table)
    assert {alias.model for alias in experts.known.values()} == EXPERT_MODELS
    kinds = {name.split("-")[0] for name in experts.known}
    assert kinds == {"search", "reasoner", "answer", "expert"}
    for alias in experts.known.values():
        role = table[alias.model]
        assert (alias.price_in, alias.price_out) == (role.price_in, role.price_out) and alias.latency_s


def test_each_expert_model_has_its_own_port_and_price(tmp_path: Path) -> None:
    KIT.write(tmp_path, "train")
    table = RoleTable.load(tmp_path / "roles.yaml", "http://router", known_roles=None)
    experts = [table[name] for name in EXPERT_MODELS]
    assert len({role.url for role in experts}) == len(experts) and all(role.price_in > 0 for role in experts)
    assert "retrieval" not in table and table["user"].api == "chat"


def test_role_files_of_an_evaluation_differ_in_the_policy(tmp_path: Path) -> None:
    KIT.write(tmp_path, "eval", trained_model="hf")
    files = (yaml.safe_load((tmp_path / f"roles_{name}.yaml").read_text()) for name in ("untrained", "trained"))
    before, after = files
    assert before["roles"].pop("orchestrator") | {"server": "trained"} == after["roles"].pop("orchestrator")
    assert before == after
    assert "roles_trained.yaml" not in {path.name for path in LAUNCHER.make_plan("eval", KIT.settings()).files}


# --------------------------------------------------------------------------------------------------------------------
# Servers around a run.

ROLES = "import os, pathlib, time\n(here / 'roles.pid').write_text(str(os.getpid()))\nprint('ALL READY', flush=True)\n"


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> launching.Settings:
    """Servers and training replaced by small programs in a root of their own."""
    programs = {
        "tools/serve_roles.py": ROLES + "time.sleep(60)",
        "train.py": "assert (here / 'roles.pid').exists()\nsys.exit(7)",
    }
    for name, body in programs.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"import pathlib, sys\nhere = pathlib.Path({str(tmp_path)!r})\n{body}\n")
    monkeypatch.setattr(launching, "ROOT", tmp_path / "root")
    monkeypatch.setattr(launching, "POLL_S", 0.05)
    return KIT.settings(output=str(tmp_path / "o"), start_services_timeout_s=60)


def start(command: str, values: launching.Settings) -> int:
    plan = LAUNCHER.make_plan(command, values)
    launching.write_files(plan)
    return LAUNCHER.execute(command, values, plan)


def test_training_begins_when_the_servers_are_ready(stage: launching.Settings, tmp_path: Path) -> None:
    assert start("train", {**stage, "corpus": "passages.jsonl"}) == 7
    assert not Path(f"/proc/{(tmp_path / 'roles.pid').read_text()}").exists()


def test_servers_started_elsewhere_are_left_alone(stage: launching.Settings, tmp_path: Path) -> None:
    (tmp_path / "roles.pid").write_text("elsewhere")
    assert start("train", {**stage, "start_services": False}) == 7
    assert not (tmp_path / "o" / "role_servers.log").exists()


def test_servers_that_end_are_an_error_with_the_last_line(stage: launching.Settings, tmp_path: Path) -> None:
    broken = tmp_path / "root" / "tools/serve_roles.py"
    broken.write_text("raise SystemExit('error: servers.retrieval: port 8000 cannot be used')")
    with pytest.raises(ConfigError, match="ended with status 1: error: servers.retrieval: port 8000 .*; log: "):
        start("train", stage)
    assert start("serve", stage) == 1


def test_no_host_port_or_absolute_path_in_python() -> None:
    """Addresses belong to the role file and to launch.yaml; the retrieval service has its own flags."""
    found = [
        place
        for place in KIT.addresses_in_python("tiny_world.py", "quickstart.py")
        if not place.startswith("serve.py")
    ]
    assert found == []


def test_scripts_are_thin() -> None:
    assert KIT.scripts() == {"launch.sh", "serve.sh", "eval.sh"}


if __name__ == "__main__":
    KIT.record()
