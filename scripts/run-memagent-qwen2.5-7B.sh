#!/usr/bin/env bash
# MemAgent, Qwen2.5 7B, one node of 8 GPUs.
#
#   bash scripts/run-memagent-qwen2.5-7B.sh [--SETTING VALUE ...] [--dry-run]
#
# Only what differs from agentic/memagent/launch.yaml stands here; a variable or a flag replaces each.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
exec bash "$root/agentic/memagent/launch.sh" "$@"
