"""Versions stand in one place and fit together; images and the compose file are sound as far as reading can tell."""

from __future__ import annotations

import fnmatch
import importlib.util
import re
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers_source import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

TOOL = ROOT / "tools/make_requirements.py"
DOCKERFILES = ("docker/Dockerfile", "docker/Dockerfile.cpu")
INSTALLED_AT = "/opt/slime-agentic/"
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
PINS = yaml.safe_load((ROOT / "requirements/pins.yaml").read_text())


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, working on a copy of the files."""
    spec = importlib.util.spec_from_file_location("make_requirements_tool", TOOL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in (*PINS["sets"], *PINS["blocks"], "requirements/pins.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "PINS", tmp_path / "requirements/pins.yaml")
    return module


def pinned(name: str) -> dict[str, Requirement]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and line[0] != "#"]
    found = [Requirement(line) for line in lines]
    return {requirement.name: requirement for requirement in found}


# --------------------------------------------------------------------------------------------------------------------
# One pin file.


def test_all_files_are_those_of_the_pin_file() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_changed_version_goes_everywhere(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tool.PINS.write_text(tool.PINS.read_text().replace("sglang: 0.5.23", "sglang: 0.9.0").replace("0.28.0", "0.99.1"))
    assert tool.main(["--check"]) == 1
    named = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert named == [
        "requirements.txt",
        "requirements/cpu-nodeps.txt",
        "docker/Dockerfile.cpu",
        "scripts/setup_venv.sh",
    ]
    assert tool.main([]) == 0 and tool.main(["--check"]) == 0
    assert "sglang==0.9.0" in (tool.ROOT / "requirements.txt").read_text()
    assert "torchvision_version=0.99.1\n" in (tool.ROOT / "scripts/setup_venv.sh").read_text()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('pylatexenc: "2.11"', "pylatexenc: 2.10", "version of pylatexenc is 2.1; write it in quotes"),
        ('  wandb: ""\n', "", "wandb is in a set but has no version"),
        ("packages: [wandb]", "packages: []", "nothing uses the version of wandb"),
        ("docker/Dockerfile.cpu:", "requirements/cpu.txt:", "needs one block between"),
    ],
)
def test_a_broken_pin_file_is_refused(
    tool: Any, before: str, after: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tool.PINS.read_text()
    assert before in text
    tool.PINS.write_text(text.replace(before, after, 1))
    assert tool.main(["--check"]) == 2
    assert message in capsys.readouterr().err


def test_installed_versions_are_the_pinned_ones() -> None:
    """The tests run on what is pinned, for the packages with an exact pin."""
    exact = {**pinned("requirements/cpu.txt"), **pinned("requirements/cpu-nodeps.txt")}
    differing = {
        name: version(name)
        for name, requirement in exact.items()
        if str(requirement.specifier).startswith("==") and not requirement.specifier.contains(version(name))
    }
    assert not differing


@pytest.mark.parametrize("package", ["sglang", "megatron-core"])
def test_pins_are_what_the_large_packages_ask_for(package: str) -> None:
    """SGLang names exact versions of torch and transformers; megatron-core a range of TransformerEngine."""
    cluster = {**pinned("requirements.txt"), **pinned("requirements/gpu-build.txt")}
    asked = [Requirement(line) for line in requires(package) or []]
    asked = [r for r in asked if r.name in cluster and (r.marker is None or r.marker.evaluate({"extra": "dev"}))]
    assert len(asked) >= 2
    for requirement in asked:
        pin = str(cluster[requirement.name].specifier)
        if pin.startswith("=="):
            assert requirement.specifier.contains(pin.removeprefix("=="), prereleases=True), requirement


# --------------------------------------------------------------------------------------------------------------------
# Images.


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, rest) of a Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def values(name: str, kind: str) -> list[str]:
    return [rest for instruction, rest in instructions(name) if instruction == kind]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_copied_exists_and_is_sent_to_the_build(name: str) -> None:
    copied = [source for rest in values(name, "COPY") for source in rest.split()[:-1]]
    assert copied and not values(name, "ADD")
    for source in copied:
        assert (ROOT / source).exists(), source
        assert not [pattern for pattern in IGNORED if fnmatch.fnmatch(source, pattern)], source


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_base_is_pinned(name: str) -> None:
    assert values(name, "FROM") == ["${BASE_IMAGE}"]
    (base,) = [rest for rest in values(name, "ARG") if rest.startswith("BASE_IMAGE=")]
    image, _, tag = base.partition("=")[2].partition(":")
    assert image and re.match(r"\d+\.\d+\.\d+-", tag), base


@pytest.mark.parametrize("name", DOCKERFILES)
def test_layers_are_reproducible_and_small(name: str) -> None:
    runs = values(name, "RUN")
    for run in runs:
        if "apt-get install" in run:
            assert (
                "apt-get update" in run and "--no-install-recommends" in run and "rm -rf /var/lib/apt/lists/*" in run
            )
        for command in re.findall(r"pip install ([^&]*)", run):
            assert "-r requirements" in command or "==" in command, command
            for file in re.findall(r"-r (\S+)", command):
                assert (ROOT / file).is_file()
        assert "sudo" not in run and "curl" not in run and "latest" not in run
    assert any("pipefail" in rest for rest in values(name, "SHELL"))
    assert any("PIP_NO_CACHE_DIR=1" in rest for rest in values(name, "ENV"))


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_image_does_not_run_as_root_and_opens_no_port(name: str) -> None:
    kinds = [kind for kind, _ in instructions(name)]
    assert values(name, "USER") == ["slime"] and kinds.index("USER") > max(
        i for i, k in enumerate(kinds) if k == "RUN"
    )
    assert "EXPOSE" not in kinds and "VOLUME" not in kinds
    assert values(name, "ENTRYPOINT") == ['["tini", "--"]']
    assert not [
        rest for kind, rest in instructions(name) if "0.0.0.0" in rest or re.search("HF_TOKEN|SECRET|PASSWORD", rest)
    ]


def test_every_part_of_the_cluster_image_is_pinned_exactly() -> None:
    parts = {**pinned("requirements.txt"), **pinned("requirements/gpu-build.txt")}
    for name in ("torch", "sglang", "sglang-router", "megatron-core", "transformer-engine", "flash-attn", "ray"):
        assert re.fullmatch(r"==\d[\w.]*", str(parts[name].specifier)), name
    base = next(rest for rest in values("docker/Dockerfile", "ARG") if rest.startswith("BASE_IMAGE="))
    assert (
        Version(re.findall(r"cuda:([\d.]+)", base)[0]).major == 13
        and "core_cu13" in parts["transformer-engine"].extras
    )


# --------------------------------------------------------------------------------------------------------------------
# Compose.


def compose() -> dict[str, Any]:
    text = (ROOT / "docker/compose.yaml").read_text()
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


def test_services_are_open_to_this_machine_only() -> None:
    for name, service in compose()["services"].items():
        assert service["network_mode"] == "host" and "ports" not in service, name
        assert re.search(r":\d", service["image"]) and "privileged" not in service and service["cap_drop"] == ["ALL"]
        assert service["user"] != "0" and not [word for word in service["command"] if "0.0.0.0" in word]


def test_commands_are_understood_by_their_programs() -> None:
    services = compose()["services"]
    program, *flags = services["roles"]["command"][1:]
    spec = importlib.util.spec_from_file_location("serve_roles_tool", ROOT / program.removeprefix(INSTALLED_AT))
    assert spec and spec.loader and program.startswith(INSTALLED_AT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert str(module.parse_args(flags).roles) == "outputs/agentflow/roles.yaml"
    from agentic.toolorchestra.retrieval import serve

    interpreter, switch, name, *flags = services["retrieval"]["command"]
    assert (interpreter, switch, name) == ("python", "-m", serve.__name__)
    args = serve.parse_args(flags)
    assert (args.host, args.port) == ("127.0.0.1", 8000)


def test_the_image_names_agree() -> None:
    names = {service["image"] for service in compose()["services"].values()}
    assert len(names) == 1 and f"-t {names.pop()} " in (ROOT / "docker/Dockerfile").read_text()
