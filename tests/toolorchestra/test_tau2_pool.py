"""Official evaluation in other processes, and what many episodes at once cost in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers_tau2 import CONFIG, gold_run
from tau2.data_model.message import UserMessage

from agentic.common.errors import InfrastructureError
from agentic.toolorchestra.tau2 import pool
from agentic.toolorchestra.tau2.scoring import official_score
from agentic.toolorchestra.tau2.tasks import find_task

ROOT = Path(__file__).parents[2]
CREATE = find_task("mock", "create_task_1")


async def test_evaluation_judges_officially_in_another_process() -> None:
    episode = await gold_run("mock", CREATE, evaluation=True, config=replace(CONFIG, tau2_workers=1))
    try:
        outcome = await episode.outcome()
        assert pool._POOL is not None
        workers = list(pool._POOL._processes)
        assert len(workers) == 1 and os.getpid() not in workers
        assert (outcome.reward, outcome.breakdown) == (1.0, {"DB": 1.0, "COMMUNICATE": 1.0})
        assert episode.score == official_score("mock", CREATE, episode.messages, "user_stop")
        # What raises there is counted here; the end that needs no look is decided here.
        broken = [*episode.messages[:-1], episode.messages[2], UserMessage(role="user", content="x")]
        raised = await pool.score_in_pool("mock", CREATE, broken, "user_stop")
        assert raised.breakdown == {"tau2_eval_exception": 1.0}
        assert not (await pool.score_in_pool("mock", CREATE, broken, "max_steps")).evaluated
        os.kill(workers[0], 9)
        with pytest.raises(InfrastructureError, match="tau2_pool_broken"):
            await pool.score_in_pool("mock", CREATE, episode.messages, "user_stop")
        assert pool._POOL is None
    finally:
        pool.close_pool()
    pool.close_pool()


def test_the_package_is_quiet_and_needs_no_litellm() -> None:
    """In a process of its own: nothing on stderr, no model client, no environment read from disk twice."""
    code = (
        "import os, sys\n"
        "import agentic.toolorchestra.tau2.episode\n"
        "assert 'litellm' not in sys.modules and os.environ['LITELLM_LOCAL_MODEL_COST_MAP'] == 'True'\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LITELLM")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


MEMORY_PROGRAM = """
import asyncio, json, resource, sys
sys.path.insert(0, "tests")
from helpers_tau2 import gold_run
from agentic.toolorchestra.tau2.tasks import official_tasks

async def main():
    tasks = [("airline", t) for t in official_tasks("airline")[:32]] + [("retail", t) for t in official_tasks("retail")[:32]]
    episodes = await asyncio.gather(*(gold_run(domain, task) for domain, task in tasks))
    alive = sum(e._environment is not None for e in episodes)
    outcomes = await asyncio.gather(*(e.outcome() for e in episodes))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"peak_gib": peak, "alive": alive, "rewards": sum(o.reward for o in outcomes)}))

asyncio.run(main())
"""


@pytest.mark.slow
def test_64_episodes_at_once_within_4_gib() -> None:
    """All databases alive at the same time, in one process."""
    done = subprocess.run([sys.executable, "-c", MEMORY_PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    assert figures["alive"] == 64 and figures["rewards"] == 64.0
    assert figures["peak_gib"] < 4.0, figures
