#!/usr/bin/env bash
# Sets up .venv and runs the tests; --slow runs the long end-to-end runs instead. Further arguments go to pytest
# (-n 0: one process, for a debugger).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
setup_venv
cd "$ROOT"
marks="not slow"
if [ "${1:-}" = "--slow" ]; then
    marks="slow"
    shift
fi
exec "$PYTHON" -m pytest -n 2 --dist loadgroup -m "$marks" "$@"
