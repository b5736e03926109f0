#!/usr/bin/env bash
# Evaluates AgentFlow: baseline, untrained and (with --trained-model) trained planner, on servers that run already; --serve
# starts and ends them with it.
#
#   bash agentic/agentflow/eval.sh [--serve] [--SETTING VALUE ...] [--dry-run]
#
# Settings, their defaults and the commands made of them: launch.yaml. --help lists them.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python}" -m agentic.agentflow.launch eval "$@"
