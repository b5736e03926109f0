#!/usr/bin/env bash
# Clone to a policy that learned, on a laptop: installs .venv, builds a tiny model, warm-starts it, trains it with GRPO
# through the real parts and evaluates before and after.
#
#   bash scripts/quickstart.sh [agentflow|memagent|toolorchestra] [--model tiny|smollm2] [--data FILE.jsonl] [--num-rollout N] [--seed S] [--output DIR] [--setting NAME=VALUE]
#
# Ctrl-C stops everything it started; the same command goes on where it was. All flags: --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
setup_venv
exec "$PYTHON" "$ROOT/tools/quickstart.py" "$@"
