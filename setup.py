"""Package metadata. Runtime requirements: requirements.txt (GPU cluster) or requirements/cpu.txt (laptop)."""

from pathlib import Path

from setuptools import find_packages, setup


def requirements() -> list[str]:
    lines = (Path(__file__).parent / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


setup(
    name="slime",
    version="0.2.2",
    description="AgentFlow, MemAgent and ToolOrchestra on one agentic reinforcement-learning stack",
    packages=find_packages(include=["slime*", "slime_plugins*", "agentic*"]),
    include_package_data=True,
    package_data={"agentic": ["**/*.txt", "**/*.yaml", "**/*.md", "**/*.sh", "**/*.j2"], "slime": ["**/*.j2"]},
    python_requires=">=3.10",
    install_requires=requirements(),
    license="Apache-2.0",
    classifiers=[
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Environment :: GPU :: NVIDIA CUDA",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
