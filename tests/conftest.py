"""Shared test set-up: puts the repository and `tests/` on the import path, and marks engine tests as CPU-friendly."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent
for folder in (TESTS.parent, TESTS):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
