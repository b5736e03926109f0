"""Flags: advantage, loss, KL and critic."""

from __future__ import annotations

import argparse

from slime.utils.arguments.parser import reset_arg

GROUP_ESTIMATORS = ("grpo", "gspo", "cispo")
ESTIMATORS = (*GROUP_ESTIMATORS, "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")


def add_algo_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the flags of this group."""
    add = parser.add_argument
    add("--eps-clip", type=float, default=0.2, help="lower clip of the probability ratio")
    add("--eps-clip-high", type=float, default=None, help="upper clip (default: --eps-clip)")
    add("--eps-clip-c", type=float, default=None, help="dual-clip constant (> 1)")
    add("--entropy-coef", type=float, default=0.0, help="weight of the entropy bonus")
    add("--use-rollout-entropy", action="store_true", help="report the entropy of the policy before the first step")
    reset_arg(parser, "--calculate-per-token-loss", action="store_true", help="mean over tokens, not over rollouts")
    add("--reset-optimizer-states", action="store_true", help="clear the optimizer state before each rollout's steps")
    _add_advantage_arguments(parser)
    _add_loss_arguments(parser)
    _add_critic_arguments(parser)


def _add_advantage_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--advantage-estimator", choices=ESTIMATORS, default="grpo", help="algorithm")
    add("--custom-advantage-function-path", default=None, help="fn(args, rollout_data): sets advantages and returns")
    add("--gamma", type=float, default=1.0, help="discount of reinforce_plus_plus and ppo")
    add("--lambd", type=float, default=1.0, help="lambda of generalised advantage estimation (ppo)")
    add("--normalize-advantages", action="store_true", help="whiten advantages over the trained tokens of all ranks")
    add(
        "--disable-compute-advantages-and-returns",
        dest="compute_advantages_and_returns",
        action="store_false",
        help="no advantages (supervised or custom loss)",
    )
    add(
        "--disable-grpo-std-normalization",
        dest="grpo_std_normalization",
        action="store_false",
        help="subtract the group mean, but do not divide by the group's standard deviation",
    )
    add(
        "--disable-rewards-normalization",
        dest="rewards_normalization",
        action="store_false",
        help="use rewards as they are",
    )


def _add_loss_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    losses = ["policy_loss", "sft_loss", "custom_loss"]
    add("--loss-type", choices=losses, default="policy_loss", help="what is minimised")
    add("--custom-loss-function-path", default=None, help="fn(args, batch, logits, sum_of_sample_mean)")
    add("--custom-pg-loss-reducer-function-path", default=None, help="makes the reducer of the policy-gradient loss")
    add("--kl-coef", type=float, default=0.0, help="weight of the KL in the reward (reinforce_plus_plus*, ppo)")
    add("--use-kl-loss", action="store_true", help="add the KL to the reference model to the loss")
    add("--kl-loss-coef", type=float, default=0.0, help="weight of the KL loss")
    add("--kl-loss-type", choices=["k1", "k2", "k3", "low_var_kl"], default="k1", help="KL estimator, of both places")
    add("--use-unbiased-kl", action="store_true", help="weight the KL loss with the importance ratio")
    add("--ref-update-interval", type=int, default=None, help="rollouts after which the reference becomes the actor")


def _add_critic_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--value-clip", type=float, default=0.2, help="clip of the critic's change of a value (ppo)")
    add("--num-critic-only-steps", type=int, default=0, help="first rollouts, which train the critic only (ppo)")
    add("--megatron-config-path", default=None, help="YAML with overrides for the roles actor and critic (ppo)")
