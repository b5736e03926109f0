"""Parts of launch scripts written in Python: convert a checkpoint, fetch a data set, start a training run.

Inputs: names and paths chosen by the script; nothing here reads a model's text. Commands run in the repository's root and raise
`subprocess.CalledProcessError` when they fail. What exists already is not made again, so a script can be repeated.
Environment: SLIME_SCRIPT_* for scripts (`typer_utils`), RAY_ADDRESS for a cluster that runs already, SLURM_JOB_NUM_NODES.
Left out: starting a cluster over several nodes, and ending other people's processes.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slime.utils.misc import exec_command

logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parents[3]
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "")


def convert_checkpoint(
    model_name: str,
    megatron_model_type: str,
    num_gpus_per_node: int,
    multinode: bool = False,
    extra_args: str = "",
    dir_dst: str = str(Path.home()),
    hf_checkpoint: str | None = None,
) -> str:
    """Convert a Hugging Face model to Megatron's format; returns the folder, `dir_dst/model_name_torch_dist`.

    `megatron_model_type` names `scripts/models/<type>.sh`, which defines MODEL_ARGS. With `multinode` every node of a Slurm job
    calls this. Raises FileNotFoundError for a missing model, script or converter.
    """
    target = Path(dir_dst) / f"{model_name}_torch_dist"
    if target.exists():
        logger.info("%s exists, nothing to convert", target)
        return str(target)
    source = Path(hf_checkpoint) if hf_checkpoint else Path.home() / "models" / model_name
    if not source.is_dir():
        raise FileNotFoundError(f"{source}: no such model; give hf_checkpoint")
    converter = REPOSITORY / "tools" / "convert_hf_to_torch_dist.py"
    if not converter.is_file():
        raise FileNotFoundError(f"{converter}: the converter of the megatron backend is missing")
    words = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_gpus_per_node}"]
    words += _slurm_rendezvous() if multinode else ["--standalone"]
    tail = ["--hf-checkpoint", str(source), "--save", str(target)]
    command = f'{shlex.join([*words, str(converter)])} "${{MODEL_ARGS[@]}}" {shlex.join(tail)} {extra_args}'
    _run(f"source {shlex.quote(str(_model_script(megatron_model_type)))} && {command}")
    return str(target)


def _model_script(megatron_model_type: str) -> Path:
    script = REPOSITORY / "scripts" / "models" / f"{megatron_model_type}.sh"
    if not script.is_file():
        known = ", ".join(sorted(path.stem for path in script.parent.glob("*.sh"))) or "none"
        raise FileNotFoundError(f"{script}: no such model script; known: {known}")
    return script


def _slurm_rendezvous() -> list[str]:
    """Where the nodes of a Slurm job meet. Raises RuntimeError outside of a job."""
    missing = [name for name in ("SLURM_JOB_NUM_NODES", "SLURM_NODEID", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise RuntimeError(f"multinode: {missing[0]} is not set; run this on every node of a Slurm job")
    nodes, node, address = (os.environ[name] for name in ("SLURM_JOB_NUM_NODES", "SLURM_NODEID", "MASTER_ADDR"))
    meeting = [f"--master-addr={address}", f"--master-port={os.environ.get('MASTER_PORT', '29500')}"]
    return [f"--nnodes={nodes}", f"--node-rank={node}", *meeting]


def rsync_simple(path_src: str, path_dst: str) -> None:
    """Copy the content of a folder into another one, which is made; only what changed is copied."""
    Path(path_dst).mkdir(parents=True, exist_ok=True)
    _run(shlex.join(["rsync", "-a", "--info=progress2", f"{path_src.rstrip('/')}/", path_dst]))


def hf_download_dataset(full_name: str) -> str:
    """Fetch a data set of the Hugging Face hub into `~/datasets/<name>`; returns the folder."""
    from huggingface_hub import snapshot_download

    target = Path.home() / "datasets" / full_name.rpartition("/")[2]
    return str(snapshot_download(full_name, repo_type="dataset", local_dir=target))


def fp8_cast_bf16(path_src: str, path_dst: str) -> None:
    """Dequantise an FP8 model folder into a bfloat16 one, unless that is complete already."""
    if (Path(path_dst) / "model.safetensors.index.json").exists():
        logger.info("%s exists, nothing to cast", path_dst)
        return
    tool = REPOSITORY / "tools" / "fp8_cast_bf16.py"
    if not tool.is_file():
        raise FileNotFoundError(f"{tool}: the tool that dequantises is missing")
    paths = ["--input-fp8-hf-path", path_src, "--output-bf16-hf-path", path_dst]
    _run(shlex.join([sys.executable, str(tool), *paths]))


@dataclass
class ExecuteTrainConfig:
    """What a launch script lets its user choose about a run.

    Attributes:
        cuda_core_dump: write a GPU core dump when a kernel fails.
        num_nodes: machines of the run; more than one needs a Ray cluster (RAY_ADDRESS).
        extra_env_vars: `NAME=value NAME=value`, for all processes of the run.
    """

    cuda_core_dump: bool = False
    num_nodes: int = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    extra_env_vars: str = ""


def execute_train(
    train_args: str,
    num_gpus_per_node: int,
    megatron_model_type: str | None,
    train_script: str = "train.py",
    before_ray_job_submit: Callable[[], object] | None = None,
    extra_env_vars: Mapping[str, str] | None = None,
    config: ExecuteTrainConfig | None = None,
) -> None:
    """Run `train_script` with `train_args` (as on a command line) and wait for its end.

    With RAY_ADDRESS the run is a job of that cluster, otherwise the script starts Ray on this machine. `megatron_model_type`
    puts MODEL_ARGS of `scripts/models/<type>.sh` before the other arguments. `before_ray_job_submit` is called first.
    Raises ValueError for several nodes without a cluster, `subprocess.CalledProcessError` when the run fails.
    """
    config = config or ExecuteTrainConfig()
    cluster = os.environ.get("RAY_ADDRESS")
    if config.num_nodes > 1 and not cluster:
        raise ValueError(f"num_nodes {config.num_nodes}: start a Ray cluster over the nodes and set RAY_ADDRESS")
    if before_ray_job_submit is not None:
        before_ray_job_submit()
    env = _train_environment(config, extra_env_vars or {})
    launch, prefix = shlex.join([sys.executable, train_script]), ""
    if megatron_model_type is not None:
        prefix = f"source {shlex.quote(str(_model_script(megatron_model_type)))} && "
        launch += ' "${MODEL_ARGS[@]}"'
    launch += f" --num-gpus-per-node {num_gpus_per_node} {train_args}"
    if cluster:
        runtime = json.dumps({"env_vars": env, "working_dir": str(REPOSITORY)})
        launch = (
            f"ray job submit --address {shlex.quote(cluster)} --runtime-env-json {shlex.quote(runtime)} -- {launch}"
        )
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
    _run(f"{prefix}env {exports} {launch}")


def _train_environment(config: ExecuteTrainConfig, extra: Mapping[str, str]) -> dict[str, str]:
    path = os.pathsep.join(part for part in (str(REPOSITORY), os.environ.get("PYTHONPATH", "")) if part)
    env = {"PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    env["NCCL_NVLS_ENABLE"] = "1" if check_has_nvlink() else "0"
    if config.cuda_core_dump:
        env |= {"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1", "CUDA_COREDUMP_SHOW_PROGRESS": "1"}
    for word in shlex.split(config.extra_env_vars):
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"extra_env_vars {config.extra_env_vars!r}: {word!r} is not NAME=value")
        env[name] = value
    return env | dict(extra)


def _run(command: str) -> None:
    logger.info("running: %s", command)
    exec_command(f"cd {shlex.quote(str(REPOSITORY))} && {command}")


def check_has_nvlink() -> bool:
    """Whether GPUs of this machine are joined by NVLink; False without a GPU."""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return False
    return any(word.startswith("NV") and word[2:].isdigit() for word in done.stdout.split())


def get_default_wandb_args(test_file: str, run_name_prefix: str | None = None, run_id: str | None = None) -> str:
    """Flags that send a run's metrics to W&B, named after the script; empty without WANDB_API_KEY."""
    if not os.environ.get("WANDB_API_KEY"):
        logger.info("WANDB_API_KEY is not set, so the run is not sent to W&B")
        return ""
    name = "-".join(part for part in (run_name_prefix, Path(test_file).stem, run_id or create_run_id()) if part)
    words = ["--use-wandb", "--wandb-project", "slime", "--wandb-group", name, "--disable-wandb-random-suffix"]
    return f"{shlex.join(words)} "


def create_run_id() -> str:
    """A name for a run: the time and three random digits."""
    return f"{time.strftime('%y%m%d-%H%M%S')}-{random.SystemRandom().randint(0, 999):03d}"


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """A switch in the environment. Raises ValueError for a word that is neither true nor false."""
    value = os.environ.get(name, default).strip().lower()
    if value not in (*_TRUE, *_FALSE):
        raise ValueError(f"{name}={value}: must be one of {', '.join((*_TRUE, *_FALSE[:-1]))}")
    return value in _TRUE


def get_env_enable_infinite_run() -> bool:
    """Whether a script should go on until it is stopped (SLIME_TEST_ENABLE_INFINITE_RUN)."""
    return get_bool_env_var("SLIME_TEST_ENABLE_INFINITE_RUN")


def save_to_temp_file(text: str, ext: str) -> str:
    """Write a text to a new file of that extension; returns its path. The caller removes it."""
    with tempfile.NamedTemporaryFile("w", suffix=f".{ext.lstrip('.')}", delete=False, encoding="utf-8") as file:
        file.write(text)
    return file.name
