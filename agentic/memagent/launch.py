"""From settings to running programs: training, servers of an evaluation, evaluation.

    python -m agentic.memagent.launch {train,serve-eval,eval} [--SETTING VALUE ...] [--dry-run] [-- MORE FLAGS]

Settings, files and flags: `launch.yaml` beside this file. How they are read and run: `agentic.common.launching`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from agentic.common.launching import Launcher, Plan, check_train
from agentic.common.roles import load_servers


def check(command: str, plan: Plan) -> None:
    """Have the program's own parser read the plan. Raises ConfigError."""
    if command == "train":
        check_train(plan)
    elif command == "eval":
        # Imported here: it loads the model libraries, which a launcher does not need.
        from agentic.memagent import eval as evaluation

        evaluation.check_args(evaluation.parse_args(plan.argv[2:]))
    else:
        load_servers(next(path for path in plan.files if path.name == "roles.yaml"))


LAUNCHER = Launcher("agentic.memagent.launch", Path(__file__).with_name("launch.yaml"), check)


if __name__ == "__main__":
    sys.exit(LAUNCHER.main(sys.argv[1:]))
