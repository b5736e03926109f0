"""Actor and critic of PPO behind the interface of one train group, so that the training loop does not see two.

Per rollout the critic trains first; each rank's values go to the actor's rank of the same number through the object store.
Rollouts below `--num-critic-only-steps` train the critic alone. Both groups have the same number of ranks and share the bundles.
Left out: what is learned (the backend).
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.ray.actor_group import RayTrainGroup


class ActorCriticGroup:
    """Calls both groups in the order that PPO needs. See `RayTrainGroup` for the methods."""

    def __init__(self, args: Namespace, actor: RayTrainGroup, critic: RayTrainGroup) -> None:
        self.actor, self.critic = actor, critic
        self._critic_only = args.num_critic_only_steps
        self._actor_has_trained = False

    def async_train(self, rollout_id: int, rollout_data_ref: Any) -> list[Any]:
        """Start critic and then actor on one rollout; references of the actor's ranks (of the critic's in its own rollouts)."""
        values = self.critic.async_train(rollout_id, rollout_data_ref)
        if rollout_id < self._critic_only:
            return values
        self._actor_has_trained = True
        return self.actor.async_train(rollout_id, rollout_data_ref, external_data=values)

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write both checkpoints; the critic's last, because a resumed run starts from its rollout id."""
        if self._actor_has_trained:
            self.actor.save_model(rollout_id, force_sync)
        self.critic.save_model(rollout_id, force_sync)

    def update_weights(self) -> None:
        """Send the actor's weights to the engines."""
        self.actor.update_weights()

    def clear_memory(self) -> None:
        """Return cached device memory of both."""
        self.actor.clear_memory()
        self.critic.clear_memory()

    def release(self) -> None:
        """End all ranks."""
        self.actor.release()
        self.critic.release()
