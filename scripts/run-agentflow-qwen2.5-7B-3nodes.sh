#!/usr/bin/env bash
# AgentFlow, Qwen2.5 7B, three nodes of 8 GPUs on Ray: two train and generate, the third has the frozen roles.
# AGENTFLOW_ROLES_NODE is the address of the third.
#
#   bash scripts/run-agentflow-qwen2.5-7B-3nodes.sh [--SETTING VALUE ...] [--dry-run]
#
# Only what differs from agentic/agentflow/launch.yaml stands here; a variable or a flag replaces each.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
: "${AGENTFLOW_ROLES_NODE:?address of the Ray node for the frozen models (started with --num-gpus 0)}"
export AGENTFLOW_OUTPUT="${AGENTFLOW_OUTPUT:-outputs/agentflow_3nodes}"
export AGENTFLOW_POLICY_NODES="${AGENTFLOW_POLICY_NODES:-2}"
export AGENTFLOW_POLICY_GPUS="${AGENTFLOW_POLICY_GPUS:-8}"
export AGENTFLOW_POLICY_DEVICES="${AGENTFLOW_POLICY_DEVICES:-0,1,2,3,4,5,6,7}"
export AGENTFLOW_FROZEN_FIRST_GPU="${AGENTFLOW_FROZEN_FIRST_GPU:-0}"
export AGENTFLOW_FROZEN_GPUS="${AGENTFLOW_FROZEN_GPUS:-4}"
export AGENTFLOW_CODER_FIRST_GPU="${AGENTFLOW_CODER_FIRST_GPU:-4}"
export AGENTFLOW_CODER_GPUS="${AGENTFLOW_CODER_GPUS:-4}"
exec bash "$root/agentic/agentflow/launch.sh" "$@"
