"""The rollout side of a run: one actor that turns a rollout id into training data, and the engines it works with.

Inputs: `args`, the bundles of the engines. Output of `generate`: one `Box` per data-parallel rank, each holding a reference to
that rank's share.

Invariants: data and hooks are loaded before any server starts; what was generated is dumped (if asked) before it is
converted, so a conversion error does not lose it; engines and router started here are ended in `dispose`.
Left out: generation itself (rollout function), rewards and conversion (`slime.rollout`), servers (`slime.backends`).
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from typing import Any

import ray

from slime.observability.logging_utils import configure_logger, init_tracking, log
from slime.observability.metric_utils import compute_rollout_step
from slime.observability.rollout_data_utils import (
    load_debug_rollout_data,
    save_debug_rollout_data,
    validate_rollout_id_annotated,
)
from slime.observability.rollout_metrics import log_eval_rollout_data, log_rollout_data
from slime.ray.engines import RolloutServer, ServerGroup, start_rollout_servers
from slime.ray.utils import Lock, as_actor, wait_all
from slime.rollout import conversion
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.staleness import usual_version
from slime.rollout.trailing import TrailingRollouts
from slime.utils.arguments.hooks import ROLLOUT_HOOKS
from slime.utils.health_monitor import RolloutHealthMonitor
from slime.utils.http_utils import init_http_client
from slime.utils.misc import Box, load_function
from slime.utils.types import Sample

__all__ = ["RolloutManager", "RolloutServer", "ServerGroup", "start_rollout_servers"]

logger = logging.getLogger(__name__)

ROUTER_ATTRIBUTES = ("sglang_router_ip", "sglang_router_port", "sglang_model_routers")


class RolloutManager:
    """One per run, as a Ray actor. Call `load_inputs`, then `start_servers`, before anything else."""

    _monitors: list[RolloutHealthMonitor] = []
    _compare_next_sync = False
    _weight_version: int | None = None  # of the engines that generated the last rollout, for --keep-old-actor

    def __init__(self, args: Namespace, pg: Any) -> None:
        configure_logger()
        self.args = args
        self.pg = pg
        self.servers: dict[str, RolloutServer] = {}
        self.train_parallel_config: dict[str, int] = {"dp_size": 1, "cp_size": 1, "tp_size": 1, "pp_size": 1}
        self._lock: Any = None
        self._monitors = []
        self._latest: dict[str, float] = {}
        self._trailing = TrailingRollouts(args)

    def load_inputs(self) -> int | None:
        """Import hooks, read the data set; returns the number of rollouts in an epoch (None without a data set).

        Raises:
            ValueError, FileNotFoundError, ImportError: what is wrong with a data file or a hook's path.
        """
        args = self.args
        init_tracking(args, primary=False)
        self.generate_rollout = load_function(args.rollout_function_path)
        self.eval_generate_rollout = load_function(args.eval_function_path or args.rollout_function_path)
        for path in filter(None, (getattr(args, name) for name in ROLLOUT_HOOKS)):
            load_function(path)
        self.data_source = load_function(args.data_source_path)(args)
        return self.get_num_rollout_per_epoch()

    def start_servers(self) -> dict[str, Any]:
        """Start router and engines unless `--debug-train-only`; returns the `args` attributes that this settles."""
        if self.args.debug_train_only:
            return {}
        self.servers, starting = start_rollout_servers(self.args, self.pg)
        wait_all(starting)
        if self.args.check_weight_update_equal:
            # The engines loaded --hf-checkpoint, and so did the trainer: its first sync must bring the same back.
            self.check_weights("snapshot")
            self.check_weights("reset_tensors")
            self._compare_next_sync = True
        self._start_monitors()
        self._lock = as_actor(Lock, num_cpus=0).remote()
        init_http_client(self.args)
        return {name: getattr(self.args, name) for name in ROUTER_ATTRIBUTES}

    def _start_monitors(self) -> None:
        if not self.args.use_fault_tolerance:
            return
        for server in self.servers.values():
            for group in server.server_groups:
                group.note_urls()
                monitor = RolloutHealthMonitor(group, self.args)
                if monitor.start():
                    self._monitors.append(monitor)

    def health_monitoring_pause(self) -> None:
        """Stop looking for dead engines: they may be offloaded or updated now."""
        for monitor in self._monitors:
            monitor.pause()

    def health_monitoring_resume(self) -> None:
        """Look for dead engines again."""
        for monitor in self._monitors:
            monitor.resume()

    def recover_updatable_engines(self) -> tuple[list[Any], Any, int, list[int], list[int], list[dict[str, Any]]]:
        """Start dead engines of `server` again (`--use-fault-tolerance`); returns what `get_updatable_engines_and_lock` does."""
        self.health_monitoring_pause()
        if self.server is not None and self.args.use_fault_tolerance:
            self.server.recover()
        return self._updatable()

    def check_weights(self, action: str) -> list[Any]:
        """`snapshot`, `reset_tensors` or `compare` the weights of every engine; `compare` fails when they differ."""
        return wait_all([engine.check_weights.remote(action) for engine in self.rollout_engines])

    def dispose(self) -> None:
        """End the engines and the router that `start_servers` started."""
        for monitor in self._monitors:
            monitor.stop()
        self._monitors = []
        for server in self.servers.values():
            server.stop()
        self.servers = {}

    @property
    def server(self) -> RolloutServer | None:
        """The model whose weights follow the trainer; None without engines."""
        return next((server for server in self.servers.values() if server.update_weights), None)

    @property
    def rollout_engines(self) -> list[Any]:
        """Handles of the engines of `server`."""
        return self.server.engines if self.server else []

    def get_updatable_engines_and_lock(
        self,
    ) -> tuple[list[Any], Any, int, list[int], list[int], list[dict[str, Any]]]:
        """`(engines, lock, number of new ones, GPUs of each, first GPU of each, parallel sizes of each)`.

        With `--use-fault-tolerance` dead engines are replaced first: whoever asks is about to send weights.
        """
        return self.recover_updatable_engines() if self.args.use_fault_tolerance else self._updatable()

    def _updatable(self) -> tuple[list[Any], Any, int, list[int], list[int], list[dict[str, Any]]]:
        server = self.server
        if server is None:
            return [], self._lock, 0, [], [], []
        return (
            server.engines,
            self._lock,
            server.num_new_engines,
            server.engine_gpu_counts,
            server.engine_gpu_offsets,
            server.engine_parallel_configs,
        )

    def clear_updatable_num_new_engines(self) -> None:
        """The trainer has connected to all engines."""
        if self.server:
            self.server.num_new_engines = 0
        if self._compare_next_sync:
            self._compare_next_sync = False
            self.check_weights("compare")

    def set_train_parallel_config(self, config: dict[str, int]) -> None:
        """Tell into how many shares the training data are cut (`dp_size`, `cp_size`, ...)."""
        self.train_parallel_config = dict(config)

    def get_num_rollout_per_epoch(self) -> int | None:
        """Rollouts in one pass over the data set; None when it is smaller than one, as without a data set."""
        return len(self.data_source) // self.args.rollout_batch_size or None

    def generate(self, rollout_id: int) -> list[Box] | None:
        """Run one rollout; one box per data-parallel rank, None with `--debug-rollout-only`."""
        start = time.monotonic()
        self.health_monitoring_resume()
        samples, metrics = self._get_rollout_data(rollout_id)
        self.health_monitoring_pause()
        save_debug_rollout_data(self.args.save_debug_rollout_data, samples, rollout_id=rollout_id, evaluation=False)
        if not self.args.load_debug_rollout_data:
            logged = log_rollout_data(rollout_id, self.args, samples, metrics, time.monotonic() - start)
            self._latest = (
                {"reward": logged["rollout/raw_reward"]} if logged and "rollout/raw_reward" in logged else {}
            )
        if self.args.debug_rollout_only:
            return None
        data, counts = self._trailing.take(self._convert_samples_to_train_data(samples), self._is_last(rollout_id))
        self._weight_version = usual_version(samples) if getattr(self.args, "keep_old_actor", False) else None
        if counts:
            log(self.args, {**counts, "rollout/step": compute_rollout_step(self.args, rollout_id)}, "rollout/step")
        return self._split_train_data_by_dp(data)

    def _is_last(self, rollout_id: int) -> bool:
        total = self.args.num_rollout
        if total is None:  # as the driver derives it from --num-epoch
            total = (self.get_num_rollout_per_epoch() or 0) * (self.args.num_epoch or 0)
        return rollout_id + 1 >= total

    def eval(self, rollout_id: int) -> None:
        """Evaluate all evaluation sets and log the result; nothing to do without engines."""
        if self.args.debug_train_only:
            logger.warning("evaluation of rollout %d skipped: --debug-train-only has no engines", rollout_id)
            return
        output = call_rollout_fn(self.eval_generate_rollout, self.args, rollout_id, self.data_source, evaluation=True)
        if not isinstance(output, RolloutFnEvalOutput):
            raise TypeError(f"--eval-function-path returned {type(output).__name__} for evaluation")
        dump = self.args.save_debug_rollout_data
        save_debug_rollout_data(dump, output.data, rollout_id=rollout_id, evaluation=True)
        log_eval_rollout_data(rollout_id, self.args, output.data, output.metrics)

    def save(self, rollout_id: int) -> None:
        """Write what belongs to the checkpoint of `rollout_id`: the position in the data set, rollouts that wait."""
        self.data_source.save(rollout_id)
        self._trailing.save(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        """Go to the position saved for `rollout_id`, if there is one, and take up the rollouts that waited."""
        self.data_source.load(rollout_id)
        self._trailing.load(rollout_id)

    def latest(self) -> dict[str, float]:
        """Numbers of the last rollout for a progress bar."""
        return self._latest

    def offload(self) -> None:
        """Release the engines' device memory."""
        self.health_monitoring_pause()
        for server in self.servers.values():
            server.offload()

    def onload(self, tags: list[str] | None = None) -> None:
        """Take the engines' device memory back; `tags` limits it to a part (`weights`, `kv_cache`, `cuda_graph`)."""
        for server in self.servers.values():
            server.onload(tags)

    def onload_weights(self) -> None:
        """Take back the memory of the weights, which must be there before they are updated."""
        self.onload(["weights"])

    def onload_kv(self) -> None:
        """Take back the rest."""
        self.onload(["kv_cache", "cuda_graph"])

    def _get_rollout_data(self, rollout_id: int) -> tuple[list[Sample], dict[str, Any] | None]:
        if self.args.load_debug_rollout_data:
            samples = load_debug_rollout_data(
                self.args.load_debug_rollout_data,
                rollout_id=rollout_id,
                subsample_ratio=self.args.load_debug_rollout_data_subsample,
            )
            return samples, None
        output = call_rollout_fn(self.generate_rollout, self.args, rollout_id, self.data_source, evaluation=False)
        if not isinstance(output, RolloutFnTrainOutput):
            raise TypeError(f"--rollout-function-path returned {type(output).__name__} for training")
        validate_rollout_id_annotated(output.samples)
        return conversion.flatten_samples(output.samples), output.metrics

    def _post_process_rewards(self, samples: list[Sample]) -> tuple[list[Any], list[float]]:
        return conversion.post_process_rewards(self.args, samples)

    def _convert_samples_to_train_data(self, samples: list[Sample]) -> dict[str, Any]:
        return conversion.convert_samples_to_train_data(self.args, samples)

    def _split_train_data_by_dp(self, data: dict[str, Any]) -> list[Box]:
        dp_size = self.train_parallel_config["dp_size"]
        padded = conversion.pad_to_global_batch(self.args, data, dp_size)
        parts = conversion.split_train_data_by_dp(self.args, padded, dp_size)
        extra = {} if self._weight_version is None else {"weight_version": self._weight_version}
        return [Box(ray.put({**part, **extra})) for part in parts]
