#!/usr/bin/env bash
# Trains MemAgent on a machine with 8 GPUs; --objective paper is the published objective.
#
#   bash agentic/memagent/launch.sh [--SETTING VALUE ...] [--dry-run]
#
# Settings, their defaults and the commands made of them: launch.yaml. --help lists them.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python}" -m agentic.memagent.launch train "$@"
