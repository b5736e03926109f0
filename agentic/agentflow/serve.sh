#!/usr/bin/env bash
# Starts the servers of the frozen roles and keeps them until Ctrl-C; `serve.sh eval` starts those of an evaluation.
#
#   bash agentic/agentflow/serve.sh [eval] [--SETTING VALUE ...] [--dry-run]
#
# Settings, their defaults and the commands made of them: launch.yaml. --help lists them.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
command=serve
if [ "${1:-}" = "eval" ]; then
    command=serve-eval
    shift
fi
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python}" -m agentic.agentflow.launch "$command" "$@"
