"""A role server on another node of a Ray cluster.

Inputs: a spec (`slime.backends.sglang_utils.role_server`) and the node's address; the checkout lies at the same path there.
Invariants: the server belongs to an actor on that node and ends with it, and the actor with the program that made it, however
that ends. Ray counts no GPU for it: start Ray on that node with as many GPUs as training may have.
Left out: servers that span nodes.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import ray

from slime.backends.sglang_utils.owned_process import base_url
from slime.backends.sglang_utils.role_server import RoleServer, Spec
from slime.ray.ray_actor import RayActor
from slime.ray.utils import add_default_ray_env_vars, as_actor

# Placing an actor needs a share of the node's own resource, however small.
NODE_SHARE = 0.001
START_S = 120.0
UNREACHABLE = (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError)


class RoleServerActor(RayActor, RoleServer):
    """A `RoleServer` on the node of this actor."""


class RemoteServer:
    """The same methods as `RoleServer`, carried out on `node`. A node that is gone counts as a server that died."""

    def __init__(self, spec: Spec, node: str) -> None:
        self.spec, self.node, self.url = spec, node, base_url(spec.host, spec.port)
        self._actor: Any = None

    def start(self) -> None:
        """Places the actor and starts the server. Raises ValueError or FileNotFoundError when it cannot run there."""
        self.spec.command()  # a mistake in it is better said by this process than by an actor that ends
        env = {"env_vars": add_default_ray_env_vars()}
        place = {f"node:{self.node}": NODE_SHARE}
        self._actor = as_actor(RoleServerActor, num_cpus=0, resources=place, runtime_env=env).remote(self.spec)
        try:
            ray.get(self._actor.start.remote(), timeout=START_S)
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from error
        except UNREACHABLE:
            return  # not alive, as whoever asks will see

    def _ask(self, method: str, otherwise: Any) -> Any:
        if self._actor is None:
            return otherwise
        try:
            return ray.get(getattr(self._actor, method).remote(), timeout=START_S)
        except UNREACHABLE:
            return otherwise

    def is_alive(self) -> bool:
        """Whether actor and process run."""
        return bool(self._ask("is_alive", False))

    def is_ready(self) -> bool:
        """As seen from its own node."""
        return bool(self._ask("is_ready", False))

    def answers(self) -> bool:
        """As seen from its own node."""
        return bool(self._ask("answers", False))

    def log_tail(self) -> str:
        """The last lines of its log, which lies on its own node."""
        return str(self._ask("log_tail", f"(node {self.node} does not answer)"))

    def stop(self) -> None:
        """Ends the server and its actor; may be called again."""
        self._ask("stop", None)
        if self._actor is not None:
            ray.kill(self._actor)
            self._actor = None


def join_cluster(nodes: Collection[str]) -> None:
    """Connect to the running cluster. Raises ValueError when there is none, or when it lacks one of `nodes`."""
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False)
    except ConnectionError as error:
        raise ValueError(f"`node` in a role file needs a running Ray cluster: {error}") from error
    there = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    missing = sorted(set(nodes) - there)
    if missing:
        raise ValueError(f"node {missing[0]} is not in the Ray cluster; its nodes: {', '.join(sorted(there))}")


def leave_cluster() -> None:
    """Disconnect; actors of this program end."""
    ray.shutdown()
