"""One SGLang server process: `python -m sglang.launch_server` with our flags, its log, and its end.

Inputs: a `ServerSpec`. On CPU (`options["device"] == "cpu"`) the process also gets the environment it needs there and the
stand-ins of `cpu_shim/`; on a GPU nothing is added. Invariants of the process: see owned_process.py.

Leaves out: control calls (server_control.py), the router (router.py), command-line flags of ours (arguments.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils import server_control
from slime.backends.sglang_utils.owned_process import OwnedProcess, base_url, check_port_free, option_flags

CPU_SHIM = Path(__file__).with_name("cpu_shim")
# torchvision lives apart from site-packages: beside CPU torch it would break `import transformers` extras for everybody.
SGLANG_ONLY = Path(sys.prefix) / "sglang-only"
# Set for a training process; with them SGLang could not release device memory.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def default_cpu_options() -> dict[str, Any]:
    """SGLang flags for a machine without a GPU, each of which `ServerSpec.options` may replace.

    Without max-total-tokens SGLang would take half of the memory for its KV cache, without sleep-on-idle an idle
    scheduler burns most of a core.
    """
    return {
        "device": "cpu",
        "attention-backend": "torch_native",
        "dtype": "float32",
        "max-total-tokens": 65536,
        "max-running-requests": 64,
        "sleep-on-idle": True,
    }


@dataclass
class ServerSpec:
    """What to start.

    Attributes:
        model_path: folder with `config.json` (a name on a model hub is left to SGLang when it does not exist here).
        host, port: address to listen on; 127.0.0.1 unless other machines must reach it.
        options: SGLang flags by name, dashes or underscores; True is a switch, None and False leave it out.
        log_path: stdout and stderr of all its processes are appended to this file.
        seed: SGLang's random seed.
        env: additional environment variables; they win over ours.
    """

    model_path: str
    host: str
    port: int
    options: dict[str, Any]
    log_path: Path
    seed: int = 0
    env: dict[str, str] = field(default_factory=dict)

    def command(self) -> list[str]:
        """The argument vector. Raises ValueError for an option that the launcher sets itself."""
        forced = {"model-path": self.model_path, "host": self.host, "port": self.port, "random-seed": self.seed}
        flags = option_flags(forced) + option_flags(self.options, forced=list(forced))
        return [sys.executable, "-m", "sglang.launch_server", *flags]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The complete environment of the process, built on `inherited`."""
        env = {name: value for name, value in inherited.items() if name not in ALLOCATOR_VARIABLES}
        # Otherwise /health waits for a token, and a server with long prompts to read passes for a dead one. A scheduler
        # that hangs is ended by SGLang's own watchdog; /health_generate still generates.
        env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
        if self.options.get("device") == "cpu":
            # One thread: with shared cores a second one makes torch spin and fall to a fraction of the speed.
            env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            env["HF_HUB_OFFLINE"] = "1"
            folders = [str(CPU_SHIM), str(SGLANG_ONLY), inherited.get("PYTHONPATH", "")]
            env["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)
        return env | self.env

    def check(self) -> None:
        """Finds what can be found before a start: options, model folder, port. Raises ValueError, FileNotFoundError."""
        self.command()
        folder = Path(self.model_path)
        looks_local = folder.exists() or folder.is_absolute() or self.model_path.startswith(".")
        if looks_local and not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"model folder {self.model_path} has no config.json: give a Hugging Face model folder"
            )
        check_port_free(self.host, self.port)


class SGLangServer:
    """A server process by its spec: `start`, `wait_ready`, `stop`. Several can start at the same time."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.url = base_url(spec.host, spec.port)
        self.process = OwnedProcess(
            f"SGLang server {self.url}", spec.command(), spec.log_path, spec.environment(os.environ)
        )

    def start(self) -> None:
        """Starts the process and returns at once. Raises what `ServerSpec.check` raises."""
        self.spec.check()
        self.process.start()

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Blocks until the server has generated a token.

        Raises ServerStartError with the end of the log when it dies or the deadline passes; it is stopped then.
        """
        self.process.wait_until(lambda: server_control.health_generate(self.url), timeout_s)

    def is_alive(self) -> bool:
        """Whether the process runs (not whether it answers)."""
        return self.process.session is not None and self.process.poll() is None

    def stop(self) -> None:
        """Ends all processes of the server; may be called again."""
        self.process.stop()
