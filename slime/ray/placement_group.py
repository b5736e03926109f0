"""Who runs where: bundles for training ranks and engines, and the creation of both sides.

Without a GPU a bundle is one logical CPU, so "N GPUs" simply means N ranks or engines; the code path is the same.
Invariants: bundles are ordered by (node, integer device number), so neighbours in the list are neighbours in the machine;
training takes the first bundles, engines follow (or share them in colocate mode).
Left out: choosing sizes. `args` carries them, already validated.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from argparse import Namespace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.ray.actor_critic import ActorCriticGroup
from slime.ray.actor_group import RayTrainGroup
from slime.ray.errors import BadInput
from slime.ray.rollout import RolloutManager
from slime.ray.utils import add_default_ray_env_vars, as_actor, get_physical_gpu_id
from slime.utils.arguments.roles import parse_megatron_role_args
from slime.utils.misc import get_current_node_ip

logger = logging.getLogger(__name__)

Bundles = tuple[PlacementGroup | None, list[int], list[int]]

PLACEMENT_TIMEOUT_S = 600
# Fractions, so that a training rank and an engine can share one device in colocate mode.
TRAIN_SHARE = 0.4


class InfoActor:
    """Tells which node and device a bundle landed on."""

    def get_ip_and_gpu_id(self) -> tuple[str, int | str]:
        """Node address and physical GPU id of the calling actor."""
        return get_current_node_ip(), get_physical_gpu_id()


def sort_key(x: tuple[int, str, int | str]) -> tuple[list[int], int, str]:
    """Order of a bundle `(index, node ip or name, gpu id)`: by node, then by device number (as an integer)."""
    _, node, gpu_id = x
    try:
        address = list(ipaddress.ip_address(node).packed)
    except ValueError:
        address = _resolve(node)
    number = int(gpu_id) if str(gpu_id).isdigit() else -1
    return address, number, str(gpu_id)


def _resolve(node: str) -> list[int]:
    try:
        return list(ipaddress.ip_address(socket.gethostbyname(node)).packed)
    except OSError:
        return [ord(letter) for letter in node]


def _get_placement_group_layout(args: Namespace) -> tuple[int, int]:
    """Number of bundles, and the position of the first one that belongs to the engines."""
    train = args.actor_num_nodes * args.actor_num_gpus_per_node
    rollout = args.rollout_num_gpus or 0
    if args.debug_train_only:
        return train, 0
    if getattr(args, "rollout_external", False):
        return (train, 0) if args.debug_rollout_only else (train, train)
    if args.debug_rollout_only:
        return rollout, 0
    if args.colocate:
        return max(train, rollout), 0
    return train + rollout, train


def get_num_bundles(args: Namespace) -> int:
    """How many bundles a run with these arguments reserves."""
    return _get_placement_group_layout(args)[0]


def _create_placement_group(num_gpus: int, use_gpu: bool = True) -> Bundles:
    """Reserve `num_gpus` bundles; returns the group, the bundle order and the device of each."""
    if num_gpus == 0:
        return None, [], []
    bundle = {"GPU": 1, "CPU": 1} if use_gpu else {"CPU": 1}
    group = placement_group([dict(bundle) for _ in range(num_gpus)], strategy="PACK")
    if not group.wait(PLACEMENT_TIMEOUT_S):
        kind = "GPUs" if use_gpu else "CPUs"
        raise BadInput(
            f"the cluster did not give {num_gpus} {kind} within {PLACEMENT_TIMEOUT_S} s (it has {ray.cluster_resources()}); "
            "lower --actor-num-gpus-per-node or --rollout-num-gpus"
        )
    if not use_gpu:
        return group, list(range(num_gpus)), list(range(num_gpus))
    return group, *_sorted_devices(group, num_gpus)


def _sorted_devices(group: PlacementGroup, num_gpus: int) -> tuple[list[int], list[int]]:
    probes = [
        as_actor(
            InfoActor, num_gpus=1, num_cpus=0, scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)
        ).remote()
        for index in range(num_gpus)
    ]
    places = ray.get([probe.get_ip_and_gpu_id.remote() for probe in probes], timeout=PLACEMENT_TIMEOUT_S)
    for probe in probes:
        ray.kill(probe)
    entries = sorted([(index, *place) for index, place in enumerate(places)], key=sort_key)
    return [entry[0] for entry in entries], [entry[2] for entry in entries]


def create_placement_groups(args: Namespace) -> dict[str, Bundles]:
    """Reserve what the run needs: keys `actor` and `rollout`, each `(group, bundle indices, device ids)`."""
    num_gpus, rollout_offset = _get_placement_group_layout(args)
    logger.info("reserving %d bundles, engines start at %d", num_gpus, rollout_offset)
    group, indices, devices = _create_placement_group(num_gpus, args.use_gpu)
    return {
        "actor": (group, indices, devices),
        "rollout": (group, indices[rollout_offset:], devices[rollout_offset:]),
    }


def create_rollout_manager(args: Namespace, pg: Bundles) -> tuple[Any, int | None]:
    """Start the rollout side; returns the manager's handle and the number of rollouts in an epoch (None: no dataset).

    Data are read before any server starts, so that a broken file is reported at once. Sets `args.num_rollout` from
    `args.num_epoch` when only the latter was given.

    Raises:
        BadInput: a data file is missing or broken, or hooks cannot be imported.
    """
    env = {"env_vars": add_default_ray_env_vars()}
    manager = as_actor(RolloutManager, num_cpus=1, num_gpus=0, runtime_env=env).remote(args, pg)
    num_rollout_per_epoch = _checked_input(manager.load_inputs.remote())
    if args.num_rollout is None:
        if num_rollout_per_epoch is None:
            raise BadInput(
                "--num-epoch: the data source has no length or holds fewer prompts than --rollout-batch-size"
            )
        args.num_rollout = num_rollout_per_epoch * args.num_epoch
    # The router's address is only known now; every other actor needs it.
    for name, value in ray.get(manager.start_servers.remote()).items():
        setattr(args, name, value)
    if args.offload_rollout:
        # The trainer loads its model now, and the first weight update takes back memory that must have been released.
        ray.get(manager.offload.remote())
    return manager, num_rollout_per_epoch


def _checked_input(ref: ray.ObjectRef) -> Any:
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, (ValueError, FileNotFoundError, ImportError)):
            raise BadInput(str(error.cause)) from None
        raise


def allocate_train_group(
    args: Namespace,
    num_nodes: int,
    num_gpus_per_node: int,
    pg: Bundles,
    role: str = "actor",
    with_ref: bool = False,
    with_opd_teacher: bool = False,
    actor_cls: type | None = None,
) -> RayTrainGroup:
    """A train group on the given bundles; its ranks start with `create`."""
    return RayTrainGroup(
        args,
        num_nodes,
        num_gpus_per_node,
        pg,
        num_gpus_per_actor=TRAIN_SHARE,
        role=role,
        with_ref=with_ref,
        with_opd_teacher=with_opd_teacher,
        actor_cls=actor_cls,
    )


def create_actor_model(
    args: Namespace, pgs: dict[str, Bundles], rollout_manager: Any, actor_cls: type | None = None
) -> RayTrainGroup:
    """Start the ranks of the policy; `args.start_rollout_id` is set from the checkpoint when it was not given.

    Raises:
        RuntimeError: the ranks disagree about the rollout to start with.
    """
    group, start_id = _create_actor(args, pgs, rollout_manager, actor_cls)
    _set_start(args, start_id)
    return group


def _create_actor(
    args: Namespace, pgs: dict[str, Bundles], rollout_manager: Any, actor_cls: type | None
) -> tuple[RayTrainGroup, int]:
    group = allocate_train_group(
        args,
        args.actor_num_nodes,
        args.actor_num_gpus_per_node,
        pgs["actor"],
        with_ref=args.kl_coef != 0 or args.use_kl_loss,
        actor_cls=actor_cls,
    )
    return group, _common_start(group.create(rollout_manager))


def _common_start(start_ids: list[int]) -> int:
    if len(set(start_ids)) > 1:
        raise RuntimeError(f"training ranks disagree about the first rollout: {sorted(set(start_ids))}")
    return start_ids[0] if start_ids else 0


def _set_start(args: Namespace, start_id: int) -> None:
    if args.start_rollout_id is None:
        args.start_rollout_id = start_id


def _create_actor_critic(
    args: Namespace, pgs: dict[str, Bundles], rollout_manager: Any, actor_cls: type | None
) -> ActorCriticGroup:
    """Both groups on the actor's bundles; the critic's checkpoint decides the first rollout, it is the one that always trains."""
    actor_args = parse_megatron_role_args(args, args.megatron_config_path, "actor")
    critic_args = parse_megatron_role_args(args, args.megatron_config_path, "critic")
    critic = allocate_train_group(
        critic_args,
        args.actor_num_nodes,
        args.actor_num_gpus_per_node,
        pgs["actor"],
        role="critic",
        actor_cls=actor_cls,
    )
    critic_start = _common_start(critic.create())
    actor, actor_start = _create_actor(actor_args, pgs, rollout_manager, actor_cls)
    if actor_start != critic_start and critic_start > args.num_critic_only_steps:
        raise RuntimeError(
            f"the actor's checkpoint continues with rollout {actor_start}, the critic's with {critic_start}; "
            "give --load and --ckpt-step of one run"
        )
    _set_start(args, critic_start)
    return ActorCriticGroup(args, actor, critic)


def create_training_models(
    args: Namespace, pgs: dict[str, Bundles], rollout_manager: Any, actor_cls: type | None = None
) -> RayTrainGroup | ActorCriticGroup:
    """Start training and move the data source to the position that belongs to the first rollout.

    With a critic the two groups come as one object with the interface of a train group.
    """
    with_critic = args.use_critic and args.num_rollout != 0
    create = _create_actor_critic if with_critic else create_actor_model
    models = create(args, pgs, rollout_manager, actor_cls)
    ray.get(rollout_manager.load.remote(args.start_rollout_id - 1))
    return models
