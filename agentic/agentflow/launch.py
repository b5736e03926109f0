"""From settings to running programs: training, servers of the frozen roles, evaluation.

    python -m agentic.agentflow.launch {train,serve,serve-eval,eval} [--SETTING VALUE ...] [--dry-run] [-- MORE FLAGS]

Settings, files and flags: `launch.yaml` beside this file. How they are read and run: `agentic.common.launching`. Here is
what training has around it: the servers of the frozen roles, unless they are started elsewhere.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

from agentic.common.errors import ConfigError
from agentic.common.launching import Launcher, Plan, Settings, check_train, running
from agentic.common.roles import load_servers

logger = logging.getLogger(__name__)

READY = "ALL READY"
POLL_S = 0.5


def check(command: str, plan: Plan) -> None:
    """Have the program's own parser read the plan. Raises ConfigError."""
    if command == "train":
        check_train(plan)
    elif command == "eval":
        # Imported here: it loads the model libraries, which a launcher does not need.
        from agentic.agentflow import eval as evaluation

        args = evaluation.parse_args(plan.argv[2:])
        evaluation.check_args(args)
        evaluation.load_tables(args)
    else:
        load_servers(next(iter(plan.files)))


class AgentFlowLauncher(Launcher):
    """Starts and ends the servers of the frozen roles with the training."""

    def execute(self, command: str, settings: Settings, plan: Plan) -> int:
        """Raises ConfigError when the servers do not become ready."""
        if command != "train" or not settings["start_roles"]:
            return super().execute(command, settings, plan)
        log = Path(settings["output"]) / "role_servers.log"
        with running(self.make_plan("serve", settings), log) as servers:
            logger.info("starting the servers of the frozen roles; log: %s", log)
            wait_for_roles(servers, log, settings["start_roles_timeout_s"])
            return super().execute(command, settings, plan)


def wait_for_roles(process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    """Return when the frozen servers are ready. Raises ConfigError when they end or take too long."""
    deadline = time.monotonic() + timeout_s
    while READY not in (text := log.read_text(encoding="utf-8", errors="replace")):
        if process.poll() is not None or time.monotonic() > deadline:
            state = "did not become ready" if process.poll() is None else f"ended with status {process.returncode}"
            last = text.strip().splitlines()[-1:] or ["no output"]
            raise ConfigError(f"the servers of the frozen roles {state}: {last[0]}; log: {log}")
        time.sleep(POLL_S)


LAUNCHER = AgentFlowLauncher("agentic.agentflow.launch", Path(__file__).with_name("launch.yaml"), check)


if __name__ == "__main__":
    sys.exit(LAUNCHER.main(sys.argv[1:]))
