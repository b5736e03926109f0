"""Nothing of ours is left after success, failure, Ctrl-C or `kill -9`, with real engines: `train.py` and `tools/quickstart.py`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers_e2e import Census
from helpers_ray import TRAIN, make_world

from slime.observability.run_summary import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.engine]

START_LIMIT_S, STOP_LIMIT_S = 400, 60


def test_a_failing_reward_ends_everything(tmp_path: Path) -> None:
    """The engines are up when the first reward raises; the run ends with 1, its cause is told, no server is left."""
    world, log = make_world(tmp_path), tmp_path / "out.log"
    flags = [
        *world.common_flags("run"),
        *("--prompt-data", str(tmp_path / "prompts.jsonl"), "--label-key", "label", "--apply-chat-template"),
        *("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8"),
        *("--custom-rm-path", "helpers_e2e.raising_reward", "--num-rollout", "2"),
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
    ]
    with Census() as census:
        process = census.start([sys.executable, str(TRAIN), *flags], log)
        servers = ("sglang.launch_server", "router_main.py")
        census.wait_for(lambda: all(any(s in line for line in census.left()) for s in servers), process, START_LIMIT_S)
        assert census.end_of(process, START_LIMIT_S) == 1, log.read_text()
        census.assert_empty()
    assert "the reward is broken" in log.read_text()


class Quickstart:
    """A quickstart of test size that is started several times with the same command."""

    def __init__(self, folder: Path, census: Census) -> None:
        self.output, self.log, self.census = folder / "out", folder / "quickstart.log", census
        call = "import sys, helpers_e2e; sys.exit(helpers_e2e.small_quickstart())"
        self.command = [sys.executable, "-c", call, "--num-rollout", "8", "--output", str(self.output)]

    def rollouts_trained(self) -> int:
        lines = read_lines(self.output / "run" / "metrics_raw.jsonl")
        return len({line["train/rollout_id"] for line in lines if line["step_key"] == "train/step"})

    def start_until_it_trains(self) -> subprocess.Popen[bytes]:
        """Start, and wait until one more rollout was trained on than before; engines and role servers are up then."""
        before = self.rollouts_trained()
        process = self.census.start(self.command, self.log)
        self.census.wait_for(lambda: self.rollouts_trained() > before, process, START_LIMIT_S)
        assert sum("sglang.launch_server" in line for line in self.census.left()) >= 2
        return process

    def train_driver(self) -> psutil.Process:
        """The running `train.py`."""
        living = [process for process in self.census.seen if process.is_running()]
        (driver,) = [p for p in living if p.cmdline()[1:2] == [str(TRAIN)] and p.cmdline()[0] == sys.executable]
        return driver


def test_quickstart_leaves_nothing(tmp_path: Path) -> None:
    """Killed, stopped by Ctrl-C, failing because its trainer died, and at last successful: always with one command."""
    with Census() as census:
        run = Quickstart(tmp_path, census)
        process = run.start_until_it_trains()
        process.kill()
        process.wait()
        census.assert_empty()

        process = run.start_until_it_trains()
        process.send_signal(signal.SIGINT)
        assert census.end_of(process, STOP_LIMIT_S) == 130
        census.assert_empty()

        process = run.start_until_it_trains()
        run.train_driver().kill()
        assert census.end_of(process, STOP_LIMIT_S) == 1
        census.assert_empty()

        process = census.start(run.command, run.log)
        assert census.end_of(process, START_LIMIT_S) == 0, run.log.read_text()
        census.assert_empty()
    assert (run.output / "summary.json").exists() and (run.output / "checkpoint" / "config.json").exists()
