"""Base of the Ray actors: what every actor can say about the node it runs on."""

from __future__ import annotations

import random

from slime.utils.misc import get_current_node_ip, get_free_port

RENDEZVOUS_PORTS = range(10000, 15000)


class RayActor:
    """A process on some node of the cluster."""

    def get_master_addr_and_port(self) -> tuple[str, int]:
        """Address of this node and a port that was free a moment ago, for a rendezvous hosted by this actor."""
        # Runs that start together on one machine must not find the same port free.
        return get_current_node_ip(), get_free_port(random.SystemRandom().choice(RENDEZVOUS_PORTS))
