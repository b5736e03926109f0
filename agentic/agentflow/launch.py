"""From settings to running programs: training, servers of the frozen roles, evaluation.

    python -m agentic.agentflow.launch {train,serve,serve-eval,eval} [--SETTING VALUE ...] [--dry-run] [-- MORE FLAGS]

Settings, files and flags: `launch.yaml` beside this file. How they are read and run: `agentic.common.launching`. Here is
what training has around it: the servers of the frozen roles, unless they are started elsewhere.
"""

from __future__ import annotations

import sys
from pathlib import Path

from agentic.common.launching import Launcher, Plan, Service, Settings, check_servers, check_train, says, services


def check(command: str, plan: Plan) -> str:
    """Have the program's own parser read the plan; what there is to show of it. Raises ConfigError."""
    if command == "train":
        return check_train(plan)
    if command != "eval":
        return check_servers(plan)
    # Imported here: it loads the model libraries, which a launcher does not need.
    from agentic.agentflow import eval as evaluation

    args = evaluation.parse_args(plan.argv[2:])
    evaluation.check_args(args)
    evaluation.load_tables(args)
    return ""


class AgentFlowLauncher(Launcher):
    """Starts and ends the servers of the frozen roles with the training."""

    def execute(self, command: str, settings: Settings, plan: Plan) -> int:
        """Raises ConfigError when the servers do not become ready."""
        if command != "train" or not settings["start_roles"]:
            return super().execute(command, settings, plan)
        log = Path(settings["output"]) / "role_servers.log"
        frozen = Service("servers of the frozen roles", self.make_plan("serve", settings), log, says("ALL READY"))
        with services([frozen], settings["start_roles_timeout_s"]):
            return super().execute(command, settings, plan)


LAUNCHER = AgentFlowLauncher("agentic.agentflow.launch", Path(__file__).with_name("launch.yaml"), check)


if __name__ == "__main__":
    sys.exit(LAUNCHER.main(sys.argv[1:]))
