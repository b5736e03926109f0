"""Shared test set-up: puts the repository and `tests/` on the import path, and keeps heavy tests apart."""

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


ONE_AFTER_THE_OTHER = {"e2e", "fsdp", "megatron"}
"""Folders of `tests/` whose tests start several ranks or whole programs."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under `-n N --dist loadgroup` one worker has all tests that start servers, ranks or programs; the others have the rest."""
    for item in items:
        marked = item.get_closest_marker("engine") or item.get_closest_marker("slow")
        if marked or ONE_AFTER_THE_OTHER & set(item.path.relative_to(TESTS).parts):
            item.add_marker(pytest.mark.xdist_group("heavy"))


@pytest.fixture(autouse=True)
def no_log_handlers_left() -> Iterator[None]:
    """A program's `main` logs to the stream that was captured for its test, which is closed for the next one."""
    before = list(logging.root.handlers)
    yield
    for handler in list(logging.root.handlers):
        if type(handler) is logging.StreamHandler and handler not in before:
            logging.root.removeHandler(handler)
