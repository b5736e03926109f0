#!/usr/bin/env bash
# Trains ToolOrchestra on a machine with 8 GPUs: 4 for the policy, 4 for experts, judge and user; retrieval on port 8000.
#
#   bash agentic/toolorchestra/launch.sh [--SETTING VALUE ...] [--dry-run]
#
# Settings, their defaults and the commands made of them: launch.yaml. --help lists them.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python}" -m agentic.toolorchestra.launch train "$@"
