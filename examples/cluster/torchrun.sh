#!/usr/bin/env bash
# Several nodes without a scheduler: the same command on each of them, in any order.
#
#   HEAD=node0 NODES=1:4 RANKS=8 examples/cluster/torchrun.sh examples/elastic_train.py
#
# HEAD is a node that all nodes can reach, itself included; NODES the minimum and maximum number of nodes.
# `lightning-dist launch --nnodes $NODES --rdzv-endpoint $HEAD:$PORT ...` does the same, except that
# a node that is stopped does not use up one of the others' --max-restarts.
set -euo pipefail
: "${HEAD:?the node at which the nodes meet}" "${1:?a script, and its arguments}"
NODES=${NODES:-1:2} RANKS=${RANKS:-1} PORT=${PORT:-29400}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Without it no node can join later (torch 2.13): docs/guide.md, "Under torchrun: restarts".
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --nnodes "$NODES" --nproc-per-node "$RANKS" --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --rdzv-id "${JOB:-train}" \
  --rdzv-conf last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=5 "$@"
