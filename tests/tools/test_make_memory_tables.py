"""docs/en/reference/models.md is what tools/make_memory_tables.py writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "tools/make_memory_tables.py"), "--check"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    page = (ROOT / "docs/en/reference/models.md").read_text()
    # 20 bytes a parameter over 8 ranks and the rest; the 70-billion model needs more than 8 GPUs.
    assert "| `qwen2.5-7B` | - | - | 56.1 | 38.4 |" in page and "| `llama3.1-70B` | - | - | - | - | - | - |" in page
