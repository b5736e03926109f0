#!/usr/bin/env bash
# Evaluates MemAgent against length, on servers that run already; `eval.sh serve` starts those and keeps them, `--serve`
# starts them for this evaluation.
#
#   bash agentic/memagent/eval.sh [serve] [--serve] [--SETTING VALUE ...] [--dry-run]
#
# Settings, their defaults and the commands made of them: launch.yaml. --help lists them.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
command=eval
if [ "${1:-}" = "serve" ]; then
    command=serve-eval
    shift
fi
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python}" -m agentic.memagent.launch "$command" "$@"
