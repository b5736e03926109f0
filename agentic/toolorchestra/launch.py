"""From settings to running programs: training, experts and retrieval, evaluation.

    python -m agentic.toolorchestra.launch {train,serve,serve-eval,retrieval,eval} [--SETTING VALUE ...] [--dry-run]
        [-- MORE FLAGS]

Settings, files and flags: `launch.yaml` beside this file. How they are read and run: `agentic.common.launching`. Here is
what a run needs around it: the model servers of the role file and the retrieval service, each asked whether it answers
before anything else begins, and ended with the run.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from agentic.common.launching import (
    Launcher,
    Plan,
    Service,
    Settings,
    check_train,
    says,
    services,
    wait_for_first,
)
from agentic.common.roles import load_servers

PROBE_S = 5.0


def check(command: str, plan: Plan) -> None:
    """Have the program's own parser read the plan. Raises ConfigError."""
    if command == "train":
        check_train(plan)
    elif command == "eval":
        # Imported here: it loads the model libraries, which a launcher does not need.
        from agentic.toolorchestra import eval as evaluation

        args = evaluation.parse_args(plan.argv[2:])
        evaluation.check_args(args)
        evaluation.load_tables(args)
    elif command == "retrieval":
        from agentic.toolorchestra.retrieval import serve

        serve.parse_args(plan.argv[2:])
    else:
        load_servers(next(path for path in plan.files if path.name.startswith("roles")))


def answers(url: str) -> Callable[[Path], bool]:
    """Readiness of a service whose `url` answers with status 200."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ready(_log: Path) -> bool:
        try:
            with opener.open(url, timeout=PROBE_S) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    return ready


class OrchestraLauncher(Launcher):
    """Starts and ends experts and retrieval with the training, or keeps them by themselves (`serve`)."""

    def execute(self, command: str, settings: Settings, plan: Plan) -> int:
        """Raises ConfigError when a service does not become ready."""
        serving = command in ("serve", "serve-eval")
        if not serving and not (command == "train" and settings["start_services"]):
            return super().execute(command, settings, plan)
        needed = self.needed(command if serving else "serve", settings)
        with services(needed, settings["start_services_timeout_s"]) as processes:
            return wait_for_first(processes) if serving else super().execute(command, settings, plan)

    def eval_services(self, settings: Settings) -> list[Service]:
        """With retrieval, when there is something to search."""
        return self.needed("serve-eval", settings)

    def needed(self, command: str, settings: Settings) -> list[Service]:
        """The model servers of `serve` or `serve-eval`, and retrieval when there is something to search."""
        folder = Path(settings["output" if command == "serve" else "eval_output"])
        plan, log = self.make_plan(command, settings), folder / "role_servers.log"
        found = [Service("model servers", plan, log, says("ALL READY"))]
        if settings["corpus"] or settings["index"]:
            health = answers(f"http://{settings['host']}:{settings['retrieval_port']}/health")
            plan, log = self.make_plan("retrieval", settings), folder / "retrieval.log"
            found.append(Service("retrieval", plan, log, health))
        return found


LAUNCHER = OrchestraLauncher("agentic.toolorchestra.launch", Path(__file__).with_name("launch.yaml"), check)


if __name__ == "__main__":
    sys.exit(LAUNCHER.main(sys.argv[1:]))
