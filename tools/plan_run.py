"""Says whether a run fits before anything starts: files, ports, GPUs, parallel sizes, memory. Needs no GPU.

    python tools/plan_run.py [--roles FILE] [--gpus-per-node N] [--gpu-memory-gib G] [-- FLAGS OF train.py]

With `--` the rest is read as train.py reads it; with `--roles` the servers of a role file are placed beside it. Prints a
table: what every GPU holds in training, in generation and for the role servers. The first thing that cannot work is one
line `error: ...` and exit code 2. Every launcher asks this program before it starts anything, and with `--dry-run`. Who knows
better than an estimate of memory gives a larger `--gpu-memory-gib`.

What is counted: `slime.utils.memory_estimate`. A model folder that is not there yet is known by its name when
`scripts/models` has it. Without CUDA_VISIBLE_DEVICES the run takes the first GPUs of a machine.
Leaves out: host memory, disks, whether the GPUs of another machine exist.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentic.common.command_line import Parser
from agentic.common.errors import ConfigError
from agentic.common.roles import MODEL, RoleTable, ServerEntry
from slime.utils.memory_estimate import (
    GIB,
    OTHER_BYTES,
    EngineMemory,
    TrainMemory,
    engine_memory,
    fsdp_memory,
    megatron_memory,
)
from slime.utils.model_shape import (
    STANDS_FOR,
    ModelShape,
    config_of_model_args,
    find_script,
    find_shape,
    read_model_args,
)
from slime.utils.parallel_sizes import ParallelSizes, check_engine, check_training

LOCAL = ("127.0.0.1", "localhost", "0.0.0.0", "::1", "::")
# What SGLang takes when it is not told.
DEFAULT_FRACTION = 0.85
# Behind an estimate that is refused.
KNOW_BETTER = "; a GPU that holds more is planned with --gpu-memory-gib"
WEIGHT_BYTES = {"fp8": 1, "w8a8_fp8": 1, "w8a8_int8": 1}


def say(*cells: str) -> None:
    print("  ".join(cells).rstrip())


def gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def shape_of(what: str, folder: str) -> ModelShape | None:
    """The model's sizes, or None with a note when its family is not known. Raises FileNotFoundError without a model."""
    try:
        shape, source = find_shape(folder)
    except ValueError as error:
        say(f"note: {what}: memory and parallel sizes are not checked: {error}")
        return None
    say(f"{what}: {folder}, {shape.num_params / 1e9:.2f} billion parameters ({source})")
    return shape


# --------------------------------------------------------------------------------------------------------------------
# The run.


def complete_stand_in(argv: Sequence[str]) -> None:
    """Write the sizes of the model that a launcher's stand-in names into it: backends compare flags with them."""
    folders = [value for flag, value in zip(argv, argv[1:], strict=False) if flag in ("--hf-checkpoint", "--ref-load")]
    for file in {Path(folder) / "config.json" for folder in folders}:
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        script = find_script(config[STANDS_FOR]) if STANDS_FOR in config else None
        if script is not None:
            config |= config_of_model_args(read_model_args(script), script.name)
            file.write_text(json.dumps(config), encoding="utf-8")


def parse_train(argv: Sequence[str]) -> Namespace:
    complete_stand_in(argv)
    from slime.utils.arguments import parse_args  # reads the engine's flags, which takes seconds

    return parse_args(argv=argv, use_gpu=True)


def parallel_sizes(args: Namespace) -> ParallelSizes:
    world = args.actor_num_nodes * args.actor_num_gpus_per_node
    return ParallelSizes(
        world=world,
        tensor=getattr(args, "tensor_model_parallel_size", None) or 1,
        pipeline=getattr(args, "pipeline_model_parallel_size", None) or 1,
        context=getattr(args, "context_parallel_size", None) or 1,
        expert=getattr(args, "expert_model_parallel_size", None) or 1,
        expert_tensor=getattr(args, "expert_tensor_parallel_size", None)
        or getattr(args, "tensor_model_parallel_size", None)
        or 1,
        sequence_parallel=bool(getattr(args, "sequence_parallel", False)),
    )


def tokens_per_gpu(args: Namespace) -> int:
    """Tokens of a micro-batch on one GPU: the budget, or rows of the greatest length."""
    if args.use_dynamic_batch_size:
        return int(args.max_tokens_per_gpu)
    context = args.rollout_max_context_len or getattr(args, "sglang_context_length", None)
    return int(args.micro_batch_size * (context or args.rollout_max_response_len or 1))


def train_memory(args: Namespace, shape: ModelShape, sizes: ParallelSizes) -> TrainMemory:
    with_reference = bool(args.use_kl_loss or args.kl_coef)
    tokens = tokens_per_gpu(args)
    if args.train_backend == "fsdp":
        return fsdp_memory(shape, sizes, tokens, args.gradient_checkpointing, with_reference)
    recompute = getattr(args, "recompute_granularity", None) == "full" or args.gradient_checkpointing
    return megatron_memory(shape, sizes, tokens, recompute, with_reference)


class Run:
    """A parsed command line of train.py, and the machine it is planned for."""

    def __init__(self, args: Namespace, gpus_per_node: int, memory: int) -> None:
        self.args, self.gpus_per_node, self.memory = args, gpus_per_node, memory
        self.trains, self.generates = not args.debug_rollout_only, not args.debug_train_only
        self.sizes = parallel_sizes(args)

    @property
    def gpus(self) -> int:
        """GPUs of the run on all nodes."""
        train = self.sizes.world if self.trains else 0
        engines = self.args.rollout_num_gpus if self.generates and not self.args.rollout_external else 0
        return max(train, engines) if self.args.colocate else train + engines

    def devices(self) -> list[int]:
        """GPUs of this machine that the run takes. Raises ValueError when it has not as many."""
        wanted = self.args.actor_num_gpus_per_node if self.args.actor_num_nodes > 1 else self.gpus
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(number) for number in range(self.gpus_per_node)]
        if wanted > len(names):
            there = f"CUDA_VISIBLE_DEVICES={visible} names" if visible else "a node has"
            raise ValueError(
                f"the run needs {wanted} GPUs on a node, {there} {len(names)}; lower --actor-num-gpus-per-node or "
                "--rollout-num-gpus, use more nodes, or give more devices"
            )
        return [int(name) for name in names[:wanted] if name.isdigit()]

    def check(self) -> None:
        """Sizes and memory of training and generation. Raises ValueError, FileNotFoundError."""
        say(f"run: {self.gpus} GPUs, {self.args.train_backend}, {'colocated' if self.args.colocate else 'apart'}")
        shape = shape_of("policy", self.args.hf_checkpoint)
        training = self.check_training(shape) if self.trains and shape else None
        engines = list(self.check_engines()) if self.generates and not self.args.rollout_external else []
        first_gpus = self.sizes.world if self.args.colocate else 0
        if training:
            self.check_sum(training, max((engine.total for gpu, engine in engines if gpu < first_gpus), default=0))

    def check_training(self, shape: ModelShape) -> TrainMemory:
        uneven = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
        check_training(self.sizes, shape, not any(getattr(self.args, name, None) for name in uneven))
        memory = train_memory(self.args, shape, self.sizes)
        say(f"training: {self.sizes.describe()}, {tokens_per_gpu(self.args)} tokens per GPU and micro-batch")
        parts = {name: size for name, size in vars(memory).items() if size}
        say("  GiB per GPU:", ", ".join(f"{name} {gib(size)}" for name, size in parts.items()))
        say(f"  sum {gib(memory.total)} of {gib(self.memory)}; {gib(memory.state)} stay while engines generate")
        return memory

    def check_engines(self) -> Iterator[tuple[int, EngineMemory]]:
        """First GPU, among those of all engines, and memory of each group of engines."""
        from slime.backends.sglang_utils.sglang_config import resolve_sglang_config

        first = 0
        for model in resolve_sglang_config(self.args).models:
            what = f"engines {model.name}"
            shape = shape_of(what, str(model.model_path))
            for group in model.server_groups:
                if shape is not None and group.worker_type != "placeholder":
                    yield first, self.check_group(what, shape, group)
                first += group.num_gpus

    def check_group(self, what: str, shape: ModelShape, group: Any) -> EngineMemory:
        def option(name: str) -> Any:
            return group.overrides.get(name) or getattr(self.args, f"sglang_{name}", None)

        pipeline = int(option("pp_size") or 1)
        tensor = group.num_gpus_per_engine // pipeline
        check_engine(what, tensor, pipeline, shape)
        fraction = float(option("mem_fraction_static") or DEFAULT_FRACTION)
        engine = engine_memory(shape, self.memory, fraction, tensor, pipeline)
        context = option("context_length") or self.args.rollout_max_context_len
        say(f"  {group.num_gpus // group.num_gpus_per_engine} x {group.num_gpus_per_engine} GPUs:", kv_text(engine))
        check_kv(what, engine, self.memory, fraction, context)
        return engine

    def check_sum(self, training: TrainMemory, engine: int) -> None:
        """Both sides on one GPU, in turns. `engine`: bytes of its engine, 0 without one."""
        left = (OTHER_BYTES if self.args.offload_rollout else engine + OTHER_BYTES) if engine else 0
        phases = {"training": training.total + left}
        if engine:
            state = OTHER_BYTES if self.args.offload_train else training.state
            phases["generation"] = state + engine + OTHER_BYTES
            say("  GiB of a GPU, training / generating:", " / ".join(map(gib, phases.values())))
        for phase, needed in phases.items():
            if needed > self.memory:
                raise ValueError(
                    f"too little memory: {phase} needs about {gib(needed)} GiB of a GPU's {gib(self.memory)}; use more "
                    f"GPUs, lower --sglang-mem-fraction-static or --max-tokens-per-gpu, or recompute activations{KNOW_BETTER}"
                )


# --------------------------------------------------------------------------------------------------------------------
# Engines and servers.


def kv_text(engine: EngineMemory) -> str:
    return f"weights {gib(engine.weights)} GiB, KV cache {gib(engine.kv_cache)} GiB = {max(engine.tokens, 0):,} tokens"


def check_kv(what: str, engine: EngineMemory, free: int, fraction: float, context: Any) -> None:
    """The weights and one request of the greatest length fit. Raises ValueError."""
    wanted = int(context or 1)
    if engine.tokens < wanted:
        needed = engine.weights + wanted * engine.bytes_per_token
        raise ValueError(
            f"{what}: too little memory: weights and one context of {wanted} tokens need {gib(needed)} GiB, "
            f"mem-fraction-static {fraction} of the {gib(free)} GiB free gives {gib(engine.total)}; raise it, use more "
            f"GPUs (tp-size) or a shorter context{KNOW_BETTER}"
        )


class Servers:
    """The model servers of a role file, each on its GPUs."""

    def __init__(self, source: Path, gpus_per_node: int, memory: int) -> None:
        self.source, self.gpus_per_node, self.memory = source, gpus_per_node, memory
        # The policy's address is not known yet and does not matter here.
        self.table = RoleTable.load(source, "http://policy", known_roles=None)
        self.free: dict[tuple[str, int], int] = {}
        """Bytes left on a GPU of a machine by the servers so far."""

    def check(self, taken: Sequence[int]) -> None:
        """`taken`: GPUs of this machine that belong to the run. Raises ValueError, FileNotFoundError."""
        for name, entry in self.table.servers.items():
            where = f"{self.source}: servers.{name}"
            if entry.kind != MODEL:
                say(f"server {name}: {entry.url}, {entry.kind}")
                continue
            gpus = entry.device_ids()
            self.check_devices(where, entry, gpus, taken)
            shape = shape_of(f"server {name}", entry.model)
            if shape is not None:
                self.check_memory(where, entry, gpus, shape)

    def check_devices(self, where: str, entry: ServerEntry, gpus: Sequence[int], taken: Sequence[int]) -> None:
        if max(gpus) >= self.gpus_per_node:
            raise ValueError(
                f"{where}: needs GPU {max(gpus)}, a node has {self.gpus_per_node} (0 to {self.gpus_per_node - 1})"
            )
        both = sorted(set(gpus) & set(taken)) if entry.host in LOCAL and not entry.node else []
        if both:
            raise ValueError(f"{where}: GPU {both[0]} belongs to the policy; choose others with `gpus` or base-gpu-id")

    def check_memory(self, where: str, entry: ServerEntry, gpus: Sequence[int], shape: ModelShape) -> None:
        tensor, pipeline = entry.size("tp-size"), entry.size("pp-size")
        check_engine(where, tensor, pipeline, shape)
        places = [(entry.node or entry.host, gpu) for gpu in gpus]
        free = min(self.free.get(place, self.memory) for place in places)
        fraction = float(entry.option("mem-fraction-static") or DEFAULT_FRACTION)
        value_bytes = WEIGHT_BYTES.get(str(entry.option("quantization")), 2)
        engine = engine_memory(shape, free, fraction, tensor, pipeline, value_bytes)
        context = entry.option("context-length") or context_of(entry.model)
        say(f"  {entry.url}, GPUs {','.join(map(str, gpus))}: {kv_text(engine)}")
        check_kv(where, engine, free, fraction, context)
        for place in places:
            self.free[place] = free - engine.total - OTHER_BYTES


def context_of(model: str) -> int | None:
    """The greatest length the model was made for, when its folder is there."""
    file = Path(model) / "config.json"
    return json.loads(file.read_text(encoding="utf-8")).get("max_position_embeddings") if file.is_file() else None


def check_router_port(args: Namespace, table: RoleTable) -> None:
    """The policy's own router must not sit on a server's port. Raises ValueError."""
    port = getattr(args, "sglang_router_port", None)
    for entry in table.servers.values():
        if port is not None and args.sglang_router_ip is None and entry.port == port and entry.host in LOCAL:
            raise ValueError(f"--sglang-router-port {port}: servers.{entry.name} listens there; choose another")


def parse_args(argv: Sequence[str]) -> tuple[Namespace, list[str] | None]:
    """Our own flags, and those behind `--` (None without it). Raises ConfigError."""
    parser = Parser(description="Check a run before it starts: files, ports, GPUs, parallel sizes, memory.")
    parser.add_argument("--roles", type=Path, help="role file whose servers run beside it")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs of a machine")
    parser.add_argument("--gpu-memory-gib", type=float, default=80.0, help="memory of a GPU")
    own, train = list(argv), None
    if "--" in own:
        cut = own.index("--")
        own, train = own[:cut], own[cut + 1 :]
    args = parser.parse_args(own)
    if args.roles is None and train is None:
        raise ConfigError("nothing to check: give --roles FILE or `-- FLAGS OF train.py`")
    return args, train


def plan(args: Namespace, train: list[str] | None) -> None:
    memory, taken = int(args.gpu_memory_gib * GIB), []
    servers = Servers(args.roles, args.gpus_per_node, memory) if args.roles else None
    if train is not None:
        parsed = parse_train(train)
        run = Run(parsed, args.gpus_per_node, memory)
        taken = run.devices()
        run.check()
        if servers:
            check_router_port(parsed, servers.table)
    if servers:
        servers.check(taken)


def main(argv: Sequence[str]) -> int:
    try:
        plan(*parse_args(argv))
    except (ValueError, FileNotFoundError, AssertionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
