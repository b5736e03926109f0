"""From settings to running programs: training, servers of an evaluation, evaluation.

    python -m agentic.memagent.launch {train,serve-eval,eval} [--SETTING VALUE ...] [--dry-run] [-- MORE FLAGS]

Settings, files and flags: `launch.yaml` beside this file. How they are read and run: `agentic.common.launching`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from agentic.common.launching import Launcher, Plan, check_servers, check_train


def check(command: str, plan: Plan) -> str:
    """Have the program's own parser read the plan; what there is to show of it. Raises ConfigError."""
    if command == "train":
        return check_train(plan)
    if command != "eval":
        return check_servers(plan)
    # Imported here: it loads the model libraries, which a launcher does not need.
    from agentic.memagent import eval as evaluation

    evaluation.check_args(evaluation.parse_args(plan.argv[2:]))
    return ""


LAUNCHER = Launcher("agentic.memagent.launch", Path(__file__).with_name("launch.yaml"), check)


if __name__ == "__main__":
    sys.exit(LAUNCHER.main(sys.argv[1:]))
