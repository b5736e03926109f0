#!/usr/bin/env bash
# MemAgent, Qwen2.5 7B, four nodes of 8 GPUs on Ray, as many as the paper used.
#
#   bash scripts/run-memagent-qwen2.5-7B-4nodes.sh [--SETTING VALUE ...] [--dry-run]
#
# Only what differs from agentic/memagent/launch.yaml stands here; a variable or a flag replaces each.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export MEMAGENT_OUTPUT="${MEMAGENT_OUTPUT:-outputs/memagent_4nodes}"
export MEMAGENT_POLICY_NODES="${MEMAGENT_POLICY_NODES:-4}"
exec bash "$root/agentic/memagent/launch.sh" "$@"
