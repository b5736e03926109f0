#!/usr/bin/env bash
# What can only be proven on a GPU: numerics of trainer and engine, weight sync, step time and MFU, long rows. Writes JSON.
#
#   bash scripts/gpu_check.sh --model FOLDER [--gpus N] [--only CHECK ...] [--list]
#
# PYTHON names the interpreter. Without a GPU: one line and exit code 2; --cpu-smoke tries the programs there.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python}" -m benchmarks.gpu.run "$@"
