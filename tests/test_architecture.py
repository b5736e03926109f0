"""Rooms and floors: who may import whom, read from the syntax trees, lazy imports inside functions included.

tools, train.py              may use everything; nothing imports them
agentic, slime.ray           agentic: only slime's public hook surface, so that it also runs on another slime
slime.rollout, slime.backends
slime.observability
slime.utils                  no engine, no cluster
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers_source import ROOT, Import, imports_of, is_under, module_name, python_files, tree_of

PACKAGES = ("agentic", "slime")
FILES = python_files(*PACKAGES)
# Stand-ins that SGLang's processes import by the name of another package; no modules of ours.
MODULES = {module_name(path): path for path in FILES if "cpu_shim" not in path.parts}
IMPORTS = [item for path in MODULES.values() for item in imports_of(path)]
OURS = [item for item in IMPORTS if is_under(item.target, *PACKAGES, "tools", "train")]
METHODS = sorted(p.parent.name for p in (ROOT / "agentic").glob("*/rollout.py"))
# `common` is no back end: the others stand on it, and it stands on none of them.
BACKENDS = sorted(p.parent.name for p in (ROOT / "slime/backends").glob("*/__init__.py") if p.parent.name != "common")

# What each room of slime may import of slime, besides itself.
FLOORS: dict[str, tuple[str, ...]] = {
    "slime.utils": (),
    "slime.observability": ("slime.utils",),
    "slime.rollout": ("slime.utils", "slime.observability"),
    "slime.agent": ("slime.utils", "slime.rollout"),
    "slime.backends": ("slime.utils", "slime.observability"),
    "slime.ray": ("slime.utils", "slime.observability", "slime.rollout", "slime.backends"),
}

# The hook surface of slime: a whole module, or single names of one.
HOOK_SURFACE: dict[str, tuple[str, ...]] = {
    "slime.utils.types": ("Sample",),
    "slime.utils.http_utils": ("post",),
    "slime.utils.misc": ("load_function", "SingletonMeta"),
    "slime.utils.processing_utils": ("load_tokenizer",),
    "slime.rollout.sglang_rollout": ("GenerateState", "get_model_url"),
    "slime.rollout.rm_hub": ("async_rm", "batched_async_rm"),
    "slime.rollout.filter_hub.base_types": ("DynamicFilterOutput",),
    "slime.rollout.base_types": ("RolloutFnTrainOutput", "RolloutFnEvalOutput"),
}

# Lazy upward imports, (importing module, imported module) -> why. An entry that is not used any more fails.
ALLOWED_UPWARD: dict[tuple[str, str], str] = {
    (
        "slime.utils.arguments",
        "slime.backends.sglang_utils.arguments",
    ): "the engine's flags live with the engine; only parse_args, the entry point of programs, needs them",
    (
        "slime.utils.arguments.validate_cluster",
        "slime.backends.sglang_utils.external",
    ): "how many GPUs external engines bring is only known to them, and sizes must be settled before anything starts",
    (
        "slime.utils.arguments.validate",
        "slime.backends.fsdp_utils.capabilities",
    ): "what a training backend cannot do is known to the backend, and must be refused before anything starts",
    (
        "slime.utils.arguments.validate",
        "slime.backends.megatron_utils.capabilities",
    ): "the same for the other backend",
}


# (module, package) that names an engine outside of its backend, lazily -> why.
ENGINE_NAMES = {
    ("slime.utils.http_utils", "sglang_router"): "run_router is a public name of http_utils",
    ("slime.agent.parsing", "sglang"): "its parsers of model text, when they can be imported; no backend stands below",
}


def imported_module(target: str) -> str:
    """The module of ours behind an import: the longest prefix that is one."""
    while target and target not in MODULES:
        target = target.rpartition(".")[0]
    return target


def room_of(module: str) -> str:
    """`slime.utils.misc` -> `slime.utils`; '' for the top package itself."""
    parts = module.split(".")
    return ".".join(parts[:2]) if len(parts) > 1 else ""


def report(items: list[Import]) -> str:
    return "\n".join(f"{item.where}: {item.source} imports {item.target}" for item in items)


def test_every_room_is_known() -> None:
    """A new room of slime gets a floor here before it gets code."""
    assert {room_of(module) for module in MODULES if is_under(module, "slime")} - {""} == set(FLOORS)
    assert METHODS and BACKENDS


@pytest.mark.parametrize("room", sorted(FLOORS))
def test_imports_run_downward(room: str) -> None:
    allowed = (room, *FLOORS[room])
    wrong = [
        item
        for item in OURS
        if is_under(item.source, room)
        and not is_under(item.target, *allowed)
        and not (item.lazy and (item.source, imported_module(item.target)) in ALLOWED_UPWARD)
    ]
    assert not wrong, report(wrong)


def test_allowed_exceptions_exist_and_are_lazy() -> None:
    found = {(item.source, imported_module(item.target)): item.lazy for item in OURS}
    assert {key: found.get(key) for key in ALLOWED_UPWARD} == dict.fromkeys(ALLOWED_UPWARD, True)


def test_backends_do_not_know_each_other() -> None:
    wrong = []
    for backend in BACKENDS:
        others = [f"slime.backends.{other}" for other in BACKENDS if other != backend]
        wrong += [i for i in OURS if is_under(i.source, f"slime.backends.{backend}") and is_under(i.target, *others)]
    wrong += [
        item
        for item in IMPORTS
        if is_under(item.source, "slime.backends.common")
        and is_under(item.target, *(f"slime.backends.{backend}" for backend in BACKENDS), "transformers", "megatron")
    ]
    assert not wrong, report(wrong)


def test_utils_starts_no_cluster_when_imported() -> None:
    wrong = [
        item
        for item in IMPORTS
        if is_under(item.source, "slime.utils") and not item.lazy and is_under(item.target, "ray", "torch.distributed")
    ]
    assert not wrong, report(wrong)


def test_engines_are_named_in_their_backend_only() -> None:
    wrong = [
        item
        for item in IMPORTS
        if is_under(item.target, "sglang", "sglang_router", "megatron")
        and not is_under(item.source, "slime.backends")
        and (item.source, item.target.partition(".")[0]) not in ENGINE_NAMES
    ]
    assert not wrong, report(wrong)


def test_ray_room_holds_no_mathematics() -> None:
    numeric = ("torch", "numpy", "math", "statistics", "slime.utils.ppo_utils", "slime.utils.loss_reducers")
    wrong = [item for item in IMPORTS if is_under(item.source, "slime.ray") and is_under(item.target, *numeric)]
    assert not wrong, report(wrong)


def test_programs_are_not_imported() -> None:
    wrong = [item for item in OURS if is_under(item.target, "tools", "train")]
    between_tools = [item for path in python_files("tools") for item in imports_of(path)]
    wrong += [item for item in between_tools if is_under(item.target, "tools", "train")]
    assert not wrong, report(wrong)


def test_slime_does_not_know_the_methods() -> None:
    wrong = [item for item in OURS if is_under(item.source, "slime") and is_under(item.target, "agentic")]
    assert not wrong, report(wrong)


def on_hook_surface(target: str) -> bool:
    module, _, name = target.rpartition(".")
    return name in HOOK_SURFACE.get(module, ())


def test_agentic_uses_only_the_hook_surface() -> None:
    """`import slime.x` gives every name of a module, so agentic names what it takes: `from slime.x import name`."""
    wrong = [
        item
        for item in OURS
        if is_under(item.source, "agentic") and is_under(item.target, "slime") and not on_hook_surface(item.target)
    ]
    assert not wrong, report(wrong)


def test_methods_do_not_know_each_other_and_common_knows_none() -> None:
    wrong = []
    for room in [*METHODS, "common"]:
        allowed = (f"agentic.{room}", "agentic.common")
        wrong += [
            item
            for item in OURS
            if is_under(item.source, f"agentic.{room}")
            and is_under(item.target, "agentic")
            and not is_under(item.target, *allowed)
        ]
    assert not wrong, report(wrong)


def test_no_cycles_at_module_level() -> None:
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for item in OURS:
        target = imported_module(item.target)
        if not item.lazy and target and target != item.source:
            graph[item.source].add(target)
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(error.args[1]))
    assert len(order) == len(MODULES)


@pytest.mark.parametrize("method", METHODS)
def test_methods_have_one_shape(method: str) -> None:
    folder = ROOT / "agentic" / method
    for name in ("README.md", "config.py", "rollout.py", "reward.py", "convert.py", "prompts"):
        assert (folder / name).exists(), f"agentic/{method}/{name} is missing"
    hooks = {"rollout.py": {"generate", "eval_log"}, "reward.py": {"reward_func"}, "convert.py": {"custom_convert"}}
    for name, wanted in hooks.items():
        body = tree_of(folder / name).body
        defined = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
        assert wanted <= defined, f"agentic/{method}/{name} lacks {sorted(wanted - defined)}"


def test_hook_surface_exists() -> None:
    """The names agentic may use are defined by our slime at the place where they are imported from."""
    for module, names in HOOK_SURFACE.items():
        body = tree_of(MODULES[module]).body
        defined = {n.name for n in body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
        assert set(names) <= defined, f"{module} lacks {sorted(set(names) - defined)}"


# Runs in a process of its own: `slime` is made of exactly the public names, everything else of it cannot be imported.
_LOAD_ON_STAND_IN = """
import enum, importlib, json, sys, types
surface, modules = json.loads(sys.argv[1]), json.loads(sys.argv[2])

class Sample:
    class Status(enum.Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

def stand_in(name):
    if name not in sys.modules:
        sys.modules[name] = module = types.ModuleType(name)
        module.__path__ = []  # a package without files: nothing below it can be found
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(stand_in(parent), child, module)
    return sys.modules[name]

for name, names in surface.items():
    module = stand_in(name)
    for public in names:
        setattr(module, public, Sample if public == "Sample" else type(public, (), {}))
loaded = {name: importlib.import_module(name) for name in modules}

try:
    importlib.import_module("slime.utils.arguments")
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("the real slime was reachable")

turn = {"tokens": [1, 2, 3], "response_length": 1, "loss_mask": [1], "rollout_log_probs": [-0.5], "role": "next_step",
        "finish_reason": "stop", "text": "x", "weight_version": "0", "trained": True}
samples = []
for index, reward in enumerate([1.0, 0.0]):
    sample = Sample()
    sample.__dict__.update(index=index, group_index=0, rollout_id=None, reward=reward, status=Sample.Status.COMPLETED,
                           remove_sample=False, metadata={}, train_metadata={"turns": [turn]})
    samples.append(sample)
args = types.SimpleNamespace(agentflow_roles="unused.yaml", rewards_normalization=True, grpo_std_normalization=False)
rows = loaded["agentic.agentflow.convert"].custom_convert(args, samples)
print(json.dumps({"rewards": rows["rewards"], "tokens": rows["tokens"]}))
"""


def test_agentflow_works_on_a_stand_in_of_the_hook_surface(tmp_path: Path) -> None:
    """The method loads, and converts two trajectories, where slime is nothing but the names of the surface."""
    modules = [f"agentic.agentflow.{name}" for name in ("rollout", "reward", "convert")]
    command = [sys.executable, "-c", _LOAD_ON_STAND_IN, json.dumps(HOOK_SURFACE), json.dumps(modules)]
    # Only agentic is put on the path; the folder that holds the real slime is not.
    (tmp_path / "agentic").symlink_to(ROOT / "agentic")
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {"rewards": [0.5, -0.5], "tokens": [[1, 2, 3], [1, 2, 3]]}
