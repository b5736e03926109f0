#!/usr/bin/env bash
# Format, lint, types, architecture and the fast tests; under three minutes. --fix rewrites formatting first,
# --static leaves out the tests.
# Left to scripts/test.sh: what starts servers (engine), several ranks (tests/fsdp, tests/megatron) or whole programs (tests/e2e).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
setup_venv
cd "$ROOT"
sources=(agentic slime slime_plugins tools tests benchmarks train.py train_async.py setup.py)
if [ "${1:-}" = "--fix" ]; then
    "$PYTHON" -m ruff check --fix "${sources[@]}"
    "$PYTHON" -m isort -q "${sources[@]}"
    "$PYTHON" -m black -q "${sources[@]}"
fi
"$PYTHON" -m ruff check "${sources[@]}"
"$PYTHON" -m isort --check-only -q "${sources[@]}"
"$PYTHON" -m black --check -q "${sources[@]}"
"$PYTHON" -m mypy
if [ "${1:-}" = "--static" ]; then exit; fi
"$PYTHON" -m pytest -q -n 2 --no-header -p no:warnings --durations=5 -m "not slow and not engine" \
    --ignore tests/fsdp --ignore tests/megatron --ignore tests/e2e
