#!/usr/bin/env bash
# Makes this machine a node of a Ray cluster and stays until Ctrl-C, which takes the node down again.
#
#   export RAY_AUTH_TOKEN=...                            # the same secret on all nodes: who knows it can run programs there
#   bash scripts/ray/start_node.sh head [FLAGS OF ray start]
#   bash scripts/ray/start_node.sh HEAD_ADDRESS:6379 [FLAGS OF ray start]
#
# A node for frozen models only is started with --num-gpus 0, so that training takes none of its GPUs.
# Then, on the head: RAY_ADDRESS=HEAD_ADDRESS:6379 bash scripts/run-METHOD-MODEL.sh
set -euo pipefail
if [ $# -eq 0 ]; then
    echo "error: say \`head\` or the address of the head, such as 10.0.0.1:6379" >&2
    exit 2
fi
: "${RAY_AUTH_TOKEN:?a secret of your own, the same on all nodes}"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0
# Ray gives its workers a lower priority, and the engines inherit it.
export RAY_worker_niceness="${RAY_worker_niceness:-0}"
place=(--address="$1")
if [ "$1" = head ]; then
    place=(--head --port="${RAY_PORT:-6379}" --include-dashboard=false)
fi
shift
exec ray start "${place[@]}" --block --disable-usage-stats "$@"
