#!/usr/bin/env bash
# Trains AgentFlow on a machine with GPUs: 4 for the policy, 2 + 2 for the frozen roles by default.
#
#   bash agentic/agentflow/launch.sh [--SETTING VALUE ...] [--dry-run]
#
# Settings, their defaults and the commands made of them: launch.yaml. --help lists them.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python}" -m agentic.agentflow.launch train "$@"
