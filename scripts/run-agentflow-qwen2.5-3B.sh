#!/usr/bin/env bash
# AgentFlow, Qwen2.5 3B, one node of 4 GPUs: 2 for the policy, 1 + 1 for the frozen roles.
#
#   bash scripts/run-agentflow-qwen2.5-3B.sh [--SETTING VALUE ...] [--dry-run]
#
# Only what differs from agentic/agentflow/launch.yaml stands here; a variable or a flag replaces each.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export AGENTFLOW_MODEL="${AGENTFLOW_MODEL:-models/Qwen2.5-3B-Instruct}"
export AGENTFLOW_CODER_MODEL="${AGENTFLOW_CODER_MODEL:-models/Qwen2.5-Coder-3B-Instruct}"
export AGENTFLOW_OUTPUT="${AGENTFLOW_OUTPUT:-outputs/agentflow_3B}"
export AGENTFLOW_NODE_GPUS="${AGENTFLOW_NODE_GPUS:-4}"
export AGENTFLOW_POLICY_DEVICES="${AGENTFLOW_POLICY_DEVICES:-0,1}"
export AGENTFLOW_POLICY_GPUS="${AGENTFLOW_POLICY_GPUS:-2}"
export AGENTFLOW_FROZEN_FIRST_GPU="${AGENTFLOW_FROZEN_FIRST_GPU:-2}"
export AGENTFLOW_FROZEN_GPUS="${AGENTFLOW_FROZEN_GPUS:-1}"
export AGENTFLOW_CODER_FIRST_GPU="${AGENTFLOW_CODER_FIRST_GPU:-3}"
export AGENTFLOW_CODER_GPUS="${AGENTFLOW_CODER_GPUS:-1}"
exec bash "$root/agentic/agentflow/launch.sh" "$@"
