#!/usr/bin/env bash
# Starts experts, judge and user on their ports, and retrieval, and keeps them until Ctrl-C; `serve.sh eval` adds the
# policies of an evaluation.
#
#   bash agentic/toolorchestra/serve.sh [eval] [--SETTING VALUE ...] [--dry-run]
#
# Settings, their defaults and the commands made of them: launch.yaml. --help lists them.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
command=serve
if [ "${1:-}" = "eval" ]; then
    command=serve-eval
    shift
fi
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python}" -m agentic.toolorchestra.launch "$command" "$@"
