"""Shared test set-up: puts the repository and `tests/` on the import path, and marks engine tests as CPU-friendly."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent
for folder in (TESTS.parent, TESTS):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Without it an example that takes 200 ms fails, which on a loaded machine any of them may.
settings.register_profile("loaded_machine", deadline=None)
settings.load_profile("loaded_machine")


@pytest.fixture(autouse=True)
def no_log_handlers_left() -> Iterator[None]:
    """A program's `main` logs to the stream that was captured for its test, which is closed for the next one."""
    before = list(logging.root.handlers)
    yield
    for handler in list(logging.root.handlers):
        if type(handler) is logging.StreamHandler and handler not in before:
            logging.root.removeHandler(handler)
