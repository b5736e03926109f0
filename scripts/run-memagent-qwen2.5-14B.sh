#!/usr/bin/env bash
# MemAgent, Qwen2.5 14B, one node of 8 GPUs.
#
#   bash scripts/run-memagent-qwen2.5-14B.sh [--SETTING VALUE ...] [--dry-run]
#
# Only what differs from agentic/memagent/launch.yaml stands here; a variable or a flag replaces each.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export MEMAGENT_MODEL="${MEMAGENT_MODEL:-models/Qwen2.5-14B-Instruct}"
export MEMAGENT_OUTPUT="${MEMAGENT_OUTPUT:-outputs/memagent_14B}"
export MEMAGENT_POLICY_MEM_FRACTION="${MEMAGENT_POLICY_MEM_FRACTION:-0.5}"
export MEMAGENT_TOKENS_PER_GPU="${MEMAGENT_TOKENS_PER_GPU:-8448}"
exec bash "$root/agentic/memagent/launch.sh" "$@"
