#!/usr/bin/env bash
# ToolOrchestra, Qwen3 4B, one node of 8 GPUs: 4 for the policy, 4 for experts, judge and user.
#
#   bash scripts/run-toolorchestra-qwen3-4B.sh [--SETTING VALUE ...] [--dry-run]
#
# Only what differs from agentic/toolorchestra/launch.yaml stands here; a variable or a flag replaces each.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export TOOLORCHESTRA_MODEL="${TOOLORCHESTRA_MODEL:-models/Qwen3-4B}"
export TOOLORCHESTRA_OUTPUT="${TOOLORCHESTRA_OUTPUT:-outputs/toolorchestra_4B}"
export TOOLORCHESTRA_POLICY_MEM_FRACTION="${TOOLORCHESTRA_POLICY_MEM_FRACTION:-0.6}"
exec bash "$root/agentic/toolorchestra/launch.sh" "$@"
