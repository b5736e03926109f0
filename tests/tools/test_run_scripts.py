"""scripts/run-*.sh, scripts/ray and scripts/slurm: expanded commands, whether they fit their machines, what they start.

No GPU, Ray or Slurm is needed: programs on the path are replaced by small ones that write down how they were called.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers_planner import ask_planner

from agentic.agentflow.launch import LAUNCHER as AGENTFLOW
from agentic.common import launching
from agentic.common.launching import ROOT, Launcher, Settings, read_settings
from agentic.common.roles import RoleTable
from agentic.memagent.launch import LAUNCHER as MEMAGENT
from agentic.toolorchestra.launch import LAUNCHER as ORCHESTRA
from slime.backends.sglang_utils.sglang_config import SglangConfig

SCRIPTS = sorted((ROOT / "scripts").glob("run-*.sh"))
SNAPSHOT = Path(__file__).with_name("run_scripts_argv.txt")
LAUNCHERS: dict[str, Launcher] = {"agentflow": AGENTFLOW, "memagent": MEMAGENT, "toolorchestra": ORCHESTRA}
NODE = "10.0.0.9"


def launcher_of(script: Path) -> Launcher:
    return LAUNCHERS[script.name.split("-")[1]]


def write_program(path: Path, body: str) -> Path:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
    return path


def environment_of(script: Path, **variables: str) -> dict[str, str]:
    """The variables of the method with which the script calls its launcher."""
    prefix = launcher_of(script).prefix
    with tempfile.TemporaryDirectory() as folder:
        env = {
            "PATH": os.environ["PATH"],
            "PYTHON": str(write_program(Path(folder) / "dump", "printenv")),
            **variables,
        }
        ran = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in ran.stdout.splitlines() if line.startswith(prefix))


def settings_of(script: Path, environ: Mapping[str, str]) -> Settings:
    launcher = launcher_of(script)
    defaults = launcher.template["settings"]
    return read_settings(Namespace(**dict.fromkeys(defaults)), environ, launcher.prefix, defaults)


def role_node(script: Path) -> dict[str, str]:
    """What a script for several nodes asks for."""
    wanted = "_ROLES_NODE:?" in script.read_text()
    return {f"{launcher_of(script).prefix}ROLES_NODE": NODE} if wanted else {}


def lines_of(launcher: Launcher, settings: Settings) -> list[str]:
    """Command of the training and its files, in lines."""
    plan = launcher.make_plan("train", settings)
    words = [f"{key}={value}" for key, value in plan.env.items()]
    command = " ".join([*words, *plan.argv, "(limits)", *plan.limits]).replace(str(ROOT), "ROOT")
    return [*re.split(r" (?=--)", command), *"\n".join(plan.files.values()).splitlines()]


def expanded() -> str:
    """For each script the lines that differ from those of launch.yaml alone."""
    blocks = []
    for script in SCRIPTS:
        launcher = launcher_of(script)
        default = lines_of(launcher, launcher.template["settings"])
        lines = lines_of(launcher, settings_of(script, environment_of(script, **role_node(script))))
        blocks.append("\n".join([f"[{script.name}]", *(f"  {line}" for line in lines if line not in default)]))
    return "\n".join(blocks) + "\n"


def test_expanded_commands_are_as_recorded() -> None:
    """After a change: `PYTHONPATH=.:tests python tests/tools/test_run_scripts.py` records anew."""
    assert expanded() == SNAPSHOT.read_text()


def test_scripts_set_nothing_twice_and_everything_can_be_replaced() -> None:
    for script in SCRIPTS:
        launcher, given = launcher_of(script), environment_of(script, **role_node(script))
        defaults = launcher.template["settings"]
        names = {key.removeprefix(launcher.prefix).lower() for key in given}
        assert names <= set(defaults), script.name
        settings = settings_of(script, given)
        same = {name for name in names if settings[name] == defaults[name]}
        assert not same, f"{script.name}: {same} are as in launch.yaml"
        other = {key: "7" for key in given if not key.endswith("ROLES_NODE")}
        assert environment_of(script, **role_node(script), **other) == {**given, **other}
        assert os.access(script, os.X_OK) and len(script.read_text().splitlines()) < 30


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--dry-run` without a process of its own: train.py's parser, GPUs, sizes, memory of 80 GiB a GPU."""
    monkeypatch.setattr(launching, "_ask_planner", ask_planner)
    monkeypatch.chdir(launching.ROOT)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_flag_is_known_and_the_run_fits(script: Path, in_process: None) -> None:
    settings = settings_of(script, environment_of(script, **role_node(script)))
    shown = launcher_of(script).check_command("train", settings, ())
    assert f"policy: {settings['model']}, " in shown and "GiB of a GPU, training / generating:" in shown


@pytest.mark.parametrize("method", LAUNCHERS)
def test_megatron_is_one_flag_away(method: str, in_process: None) -> None:
    launcher = LAUNCHERS[method]
    extra = ["--train-backend", "megatron", "--tensor-model-parallel-size", "4"]
    shown = launcher.check_command("train", dict(launcher.template["settings"]), extra)
    assert ", megatron, colocated" in shown and "training: TP 4, DP " in shown


@pytest.mark.parametrize("method", LAUNCHERS)
def test_engines_from_a_file_fit(method: str, in_process: None) -> None:
    """The commands of examples/sglang_config/README.md; every frozen role has an engine there, or a server."""
    folder, launcher = ROOT / "examples/sglang_config", LAUNCHERS[method]
    extra = ["--sglang-config", str(folder / f"{method}.yaml"), "--rollout-num-gpus", "8"]
    settings = dict(launcher.template["settings"])
    if method != "memagent":
        extra += ["--custom-config-path", str(folder / f"{method}_settings.yaml")]
        settings |= {"policy_devices": "0,1,2,3,4,5,6,7", "start_roles": False, "start_services": False}
    shown = launcher.check_command("train", settings, extra)
    assert shown.count("engines ") >= (1 if method == "memagent" else 3)
    if method != "memagent":
        models = [model.name for model in SglangConfig.from_yaml(extra[1]).models[1:]]
        table = RoleTable.load(
            folder / f"{method}_roles.yaml", "http://p", None, engines=dict.fromkeys(models, "http://e")
        )
        assert sum(role.trained for role in table) == 1 and len(table.roles) > 4


@pytest.mark.parametrize("name", ["run-agentflow-qwen2.5-7B-3nodes.sh", "run-toolorchestra-qwen3-8B-2nodes.sh"])
def test_a_script_says_which_node_it_needs(name: str) -> None:
    ran = subprocess.run(["bash", str(ROOT / "scripts" / name)], capture_output=True, text=True, env={"PATH": "/bin"})
    assert ran.returncode != 0 and "ROLES_NODE: address of the Ray node" in ran.stderr


# --------------------------------------------------------------------------------------------------------------------
# Ray and Slurm.


@pytest.fixture
def calls(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder of stand-ins for ray, srun and scontrol that append their arguments to `calls`, and its environment."""
    log = tmp_path / "calls"
    write_program(tmp_path / "ray", f'echo "ray $* token=${{#RAY_AUTH_TOKEN}}" >> {log}; exec sleep 60')
    write_program(tmp_path / "scontrol", "printf 'n1\\nn2\\nn3\\n'")
    # srun: --nodelist=NODE is the fourth argument; hostname answers for the node, anything else runs here.
    write_program(
        tmp_path / "srun",
        f"""node="${{4#--nodelist=}}"; shift 4
[ "$1" = hostname ] && {{ echo "10.0.0.${{node#n}} fe80::1"; exit; }}
echo "srun $node $*" >> {log}
exec "$@" """,
    )
    write_program(tmp_path / "python", f'echo "python $* $RAY_ADDRESS" >> {log}')
    return log, {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}


def test_a_job_starts_ray_everywhere_and_the_script_on_the_first_node(
    calls: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    log, env = calls
    script = write_program(tmp_path / "run.sh", f'echo "run $* $AGENTFLOW_ROLES_NODE $RAY_ADDRESS" >> {log}; exit 7')
    job = ["bash", "scripts/slurm/train.sbatch", str(script), "--seed", "1"]
    slurm = {"SLURM_JOB_NODELIST": "n[1-3]", "ROLE_NODES": "1"}
    ran = subprocess.run(job, cwd=ROOT, env={**env, **slurm}, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 7, ran.stderr
    lines = log.read_text()
    assert "srun n1 bash scripts/ray/start_node.sh head\n" in lines
    assert "srun n2 bash scripts/ray/start_node.sh 10.0.0.1:6379\n" in lines
    assert "srun n3 bash scripts/ray/start_node.sh 10.0.0.1:6379 --num-gpus=0\n" in lines
    assert "python scripts/ray/wait_for_nodes.py 3 10.0.0.1:6379" in lines
    assert "run --seed 1 10.0.0.3 10.0.0.1:6379\n" in lines


def test_a_node_joins_with_a_secret_only(calls: tuple[Path, dict[str, str]]) -> None:
    log, env = calls
    script = ["timeout", "5", "bash", "scripts/ray/start_node.sh"]

    def start(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*script, *arguments], cwd=ROOT, env={**env, **more}, capture_output=True, text=True)

    assert "error: say `head` or the address" in start().stderr
    assert "a secret of your own" in start("head").stderr and not log.exists()
    write_program(log.with_name("ray"), f'echo "ray $* token=${{#RAY_AUTH_TOKEN}} $RAY_AUTH_MODE" >> {log}')
    start("head", "--num-gpus", "8", RAY_AUTH_TOKEN="secret")
    start("10.0.0.1:6379", RAY_AUTH_TOKEN="secret")
    head, worker = log.read_text().splitlines()
    assert head.startswith("ray start --head --port=6379 --include-dashboard=false --block")
    assert head.endswith("--num-gpus 8 token=6 token")
    assert worker == "ray start --address=10.0.0.1:6379 --block --disable-usage-stats token=6 token"


if __name__ == "__main__":
    sys.exit(SNAPSHOT.write_text(expanded()) == 0)
