#!/usr/bin/env bash
# AgentFlow, Qwen2.5 7B, one node of 8 GPUs: 4 for the policy, 2 + 2 for the frozen roles.
#
#   bash scripts/run-agentflow-qwen2.5-7B.sh [--SETTING VALUE ...] [--dry-run]
#
# Only what differs from agentic/agentflow/launch.yaml stands here; a variable or a flag replaces each.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
exec bash "$root/agentic/agentflow/launch.sh" "$@"
