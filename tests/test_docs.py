"""README and docs: links lead somewhere, commands and flags exist, the generated pages are those of the code."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from helpers_source import ROOT, project_files, relative

README = ROOT / "README.md"
PAGES = sorted(path for path in project_files() if path.suffix == ".md")
FIRST_COMMANDS = ["bash scripts/quickstart.sh", "bash scripts/test.sh"]
# What a command names -> the program whose flags follow.
PROGRAMS = {
    "quickstart": "tools/quickstart.py",
    "make_flag_docs": "tools/make_flag_docs.py",
    "make_requirements": "tools/make_requirements.py",
    "make_capability_docs": "tools/make_capability_docs.py",
    "make_memory_tables": "tools/make_memory_tables.py",
    "plan_run": "tools/plan_run.py",
    "serve_roles": "tools/serve_roles.py",
    "checkpoints.py": "tools/checkpoints.py",
    "gpu_check.sh": "benchmarks.gpu.run",
    "convert_hf_to_torch_dist": "tools/convert_hf_to_torch_dist.py",
    "convert_torch_dist_to_hf": "tools/convert_torch_dist_to_hf.py",
    "convert_to_hf": "tools/convert_to_hf.py",
    "convert_fsdp_to_hf": "tools/convert_fsdp_to_hf.py",
    "train.py": "train.py",
    "train_async.py": "train_async.py",
    "slime_plugins.rollout_buffer.buffer": "slime_plugins.rollout_buffer.buffer",
    "agentflow/launch.sh": "agentic.agentflow.launch",
    "agentflow/serve.sh": "agentic.agentflow.launch",
    "agentflow/eval.sh": "agentic.agentflow.launch",
    "agentic.agentflow.eval": "agentic.agentflow.eval",
    "agentic.agentflow.data": "agentic.agentflow.data convert",
    "memagent/launch.sh": "agentic.memagent.launch",
    "memagent/eval.sh": "agentic.memagent.launch",
    "long_document.py": "benchmarks/long_document.py",
    "yarn_config": "tools/yarn_config.py",
    "run-agentflow": "agentic.agentflow.launch",
    "run-memagent": "agentic.memagent.launch",
    "run-toolorchestra": "agentic.toolorchestra.launch",
    "toolorchestra/launch.sh": "agentic.toolorchestra.launch",
    "toolorchestra/serve.sh": "agentic.toolorchestra.launch",
    "toolorchestra/eval.sh": "agentic.toolorchestra.launch",
    "agentic.toolorchestra.eval": "agentic.toolorchestra.eval",
    "agentic.toolorchestra.retrieval.build": "agentic.toolorchestra.retrieval.build",
    "agentic.toolorchestra.retrieval.serve": "agentic.toolorchestra.retrieval.serve",
}
# A program with commands of its own; its page names their flags without the program.
COMMANDS = (
    *(f"agentic.toolorchestra.data {command}" for command in ("tau2", "toolscale", "qa", "inspect")),
    *(f"agentic.memagent.data {command}" for command in ("build", "filter", "ruler", "convert", "inspect")),
)
# Programs whose flags pages name without them.
SINGLE = ("quickstart", "gpu_check.sh", "serve_roles")
LAUNCHERS = tuple(f"agentic.{name}.launch" for name in ("agentflow", "memagent", "toolorchestra"))
# Switches of our shell scripts, which have no parser.
SCRIPT_FLAGS = {"--slow": "scripts/test.sh", "--fix": "scripts/check.sh", "--static": "scripts/check.sh"}

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
_PROJECT_PATH = re.compile(r"`((?:agentic|slime|tools|scripts|tests|docs|requirements)/[\w./-]+)`")
_DOTTED = re.compile(r"\b((?:agentic|slime)\.[\w.]+\w)")
# Programs that are not ours, whose flags are their own.
FOREIGN = re.compile(r"(?:\w+=\S+ )*(?:docker|pip|sbatch|bash scripts/ray/start_node.sh) ")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors that a renderer makes of the headings."""
    titles = _HEADING.findall(prose(page))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def commands(page: Path) -> list[str]:
    """Command lines of the bash blocks, continued lines joined, comments dropped."""
    blocks = [body for language, body in _FENCE.findall(page.read_text(encoding="utf-8")) if language == "bash"]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [stripped for line in lines if (stripped := re.sub(r"\s+#.*$", "", line).strip()) and stripped[0] != "#"]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{relative(page)}: link to {link}"
        assert not anchor or anchor in anchors(target), f"{relative(page)}: no heading for {link}"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_paths_and_names_in_the_text_exist(page: Path) -> None:
    """A path of the project in backticks exists; a dotted name begins with a module that exists."""
    text = page.read_text(encoding="utf-8")
    missing = [name for name in _PROJECT_PATH.findall(text) if not (ROOT / name).exists()]
    missing += [name for name in _DOTTED.findall(text) if not names_a_module(name)]
    assert not missing, f"{relative(page)}: {missing}"


def names_a_module(dotted: str) -> bool:
    """Whether the name, without at most two trailing parts (class, function), is a module or file of ours."""
    parts = dotted.split(".")
    candidates = [ROOT.joinpath(*parts[:end]) for end in range(len(parts), max(len(parts) - 3, 0), -1)]
    return any(path.is_dir() or path.with_suffix(".py").is_file() for path in candidates)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_tests_named_in_the_text_exist(page: Path) -> None:
    defined = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8"))
    assert not [name for name in named if f"def {name}(" not in defined]


def test_readme_begins_with_the_two_commands() -> None:
    assert commands(README)[:2] == FIRST_COMMANDS


def test_readme_keeps_the_place_of_the_results() -> None:
    assert README.read_text(encoding="utf-8").count("<!-- results -->") == 1


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_commands_start_files_that_exist(page: Path) -> None:
    for command in commands(page):
        words = [word for word in shlex.split(command) if "=" not in word.split("/")[0]]
        if words[:2] == ["python", "-m"]:
            assert names_a_module(words[2]), f"{relative(page)}: {command}"
        elif words[0] in ("bash", "python"):
            assert (ROOT / words[1]).is_file(), f"{relative(page)}: {command}"


def flags_of_program(page: Path) -> Iterator[tuple[str, str]]:
    """(program, flag) for every flag in the page's commands and `inline code`."""
    snippets = [*commands(page), *re.findall(r"`([^`\n]+)`", prose(page))]
    for language, body in _FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "":
            snippets.append(body)
    for snippet in snippets:
        words = snippet.split()
        if FOREIGN.match(snippet):
            continue
        program = next((name for name in PROGRAMS if any(name in word for word in words[:3])), "")
        # Behind a lone `--` of a launcher stand flags of train.py.
        own, _, rest = snippet.partition(" -- ")
        passes_on = program == "plan_run" or PROGRAMS.get(program) in LAUNCHERS
        yield from ((program, flag) for flag in _FLAG.findall(own if passes_on else snippet))
        yield from (("train.py", flag) for flag in _FLAG.findall(rest) if passes_on)


@cache
def accepted(program: str) -> frozenset[str]:
    """The flags in the program's own help text."""
    environment = {**os.environ, "COLUMNS": "200"}
    start = [str(ROOT / program)] if program.endswith(".py") else ["-m", *program.split()]
    command = [sys.executable, *start, "--help"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return frozenset(_FLAG.findall(ran.stdout))


@cache
def checkpoint_flags() -> frozenset[str]:
    """The flags of all commands of tools/checkpoints.py."""
    spec = importlib.util.spec_from_file_location("checkpoints_tool", ROOT / "tools/checkpoints.py")
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (commands,) = module.make_parser()._subparsers._group_actions
    return frozenset(flag for parser in commands.choices.values() for flag in parser._option_string_actions)


@cache
def train_flags() -> frozenset[str]:
    """The flags of train.py, from its parser: its help would start Ray's import."""
    from slime.backends.sglang_utils.arguments import add_sglang_arguments
    from slime.utils.arguments import get_slime_extra_args_provider
    from slime.utils.arguments.parser import SlimeArgumentParser

    parser = SlimeArgumentParser()
    get_slime_extra_args_provider()(parser)
    add_sglang_arguments(parser)
    return frozenset(parser._option_string_actions)


def test_script_switches_are_in_the_scripts() -> None:
    for flag, script in SCRIPT_FLAGS.items():
        assert flag in (ROOT / script).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_flags_in_the_text_are_accepted(page: Path) -> None:
    """A flag after a program's name is that program's; one that stands alone is a flag of any of our programs."""
    unknown = []
    for program, flag in flags_of_program(page):
        if program in ("train.py", "train_async.py"):
            known = train_flags()
        elif program == "checkpoints.py":  # whose `evaluate` takes settings of the launchers as well
            known = checkpoint_flags().union(*map(accepted, LAUNCHERS))
        elif program:
            known = accepted(PROGRAMS[program])
        else:
            methods = [*LAUNCHERS, *(f"agentic.{name}.eval" for name in ("agentflow", "toolorchestra"))]
            services = [f"agentic.toolorchestra.retrieval.{name}" for name in ("build", "serve")]
            tools = [PROGRAMS[name] for name in PROGRAMS if name in SINGLE or "convert" in name]
            programs = (*tools, *methods, *COMMANDS, *services)
            known = train_flags().union(checkpoint_flags(), SCRIPT_FLAGS, *map(accepted, programs))
        if flag not in known:
            unknown.append(f"{program} {flag}")
    assert not unknown, f"{relative(page)}: {unknown}"


@pytest.mark.parametrize("tool", ["make_flag_docs", "make_capability_docs"])
def test_generated_pages_are_up_to_date(tool: str) -> None:
    command = [sys.executable, str(ROOT / f"tools/{tool}.py"), "--check"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr + ran.stdout


def test_every_flag_is_documented() -> None:
    page = (ROOT / "docs/en/reference/flags.md").read_text(encoding="utf-8")
    rows = "\n".join(line for line in page.splitlines() if line.startswith("| `--"))
    documented = set(re.findall(r"`(--[\w-]+)`", rows))
    assert train_flags() - {"-h", "--help"} <= documented


def test_every_page_is_reachable_from_the_index() -> None:
    index = ROOT / "docs/en/index.md"
    found, open_pages = {index}, [index]
    while open_pages:
        page = open_pages.pop()
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in _LINK.findall(prose(page))}
        new = {target for target in targets if target.suffix == ".md" and target.is_file()} - found
        found |= new
        open_pages += new
    assert {page for page in PAGES if is_below(page, ROOT / "docs")} <= found


def is_below(path: Path, folder: Path) -> bool:
    return folder in path.parents
