#!/usr/bin/env bash
# ToolOrchestra, Qwen3 8B, two nodes of 8 GPUs on Ray: one trains and generates, the other has experts, judge, user
# and retrieval. TOOLORCHESTRA_ROLES_NODE is the address of the other.
#
#   bash scripts/run-toolorchestra-qwen3-8B-2nodes.sh [--SETTING VALUE ...] [--dry-run]
#
# Only what differs from agentic/toolorchestra/launch.yaml stands here; a variable or a flag replaces each.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
: "${TOOLORCHESTRA_ROLES_NODE:?address of the Ray node for the frozen models (started with --num-gpus 0)}"
export TOOLORCHESTRA_OUTPUT="${TOOLORCHESTRA_OUTPUT:-outputs/toolorchestra_2nodes}"
export TOOLORCHESTRA_POLICY_GPUS="${TOOLORCHESTRA_POLICY_GPUS:-8}"
export TOOLORCHESTRA_POLICY_DEVICES="${TOOLORCHESTRA_POLICY_DEVICES:-0,1,2,3,4,5,6,7}"
export TOOLORCHESTRA_LARGE_GPU="${TOOLORCHESTRA_LARGE_GPU:-0}"
export TOOLORCHESTRA_CODER_GPU="${TOOLORCHESTRA_CODER_GPU:-1}"
export TOOLORCHESTRA_SPARSE_GPU="${TOOLORCHESTRA_SPARSE_GPU:-2}"
export TOOLORCHESTRA_SMALL_GPU="${TOOLORCHESTRA_SMALL_GPU:-3}"
export TOOLORCHESTRA_SMALL_MEM_FRACTION="${TOOLORCHESTRA_SMALL_MEM_FRACTION:-0.85}"
export TOOLORCHESTRA_MATH_GPU="${TOOLORCHESTRA_MATH_GPU:-4}"
export TOOLORCHESTRA_MATH_MEM_FRACTION="${TOOLORCHESTRA_MATH_MEM_FRACTION:-0.85}"
exec bash "$root/agentic/toolorchestra/launch.sh" "$@"
