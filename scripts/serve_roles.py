"""`python scripts/serve_roles.py ROLES.yaml`: the door to tools/serve_roles.py, which see."""

from __future__ import annotations

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "tools/serve_roles.py"), run_name="__main__")
