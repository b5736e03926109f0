#!/usr/bin/env bash
# ToolOrchestra, Qwen3 8B, one node of 8 GPUs: 4 for the policy, 4 for experts, judge and user.
#
#   bash scripts/run-toolorchestra-qwen3-8B.sh [--SETTING VALUE ...] [--dry-run]
#
# Only what differs from agentic/toolorchestra/launch.yaml stands here; a variable or a flag replaces each.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
exec bash "$root/agentic/toolorchestra/launch.sh" "$@"
