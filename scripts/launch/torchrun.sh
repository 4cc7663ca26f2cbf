#!/usr/bin/env bash
# Trains on this machine, or on several machines that each start this script with their --node-rank. See --help.
set -euo pipefail
# shellcheck source=scripts/launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

gpus=8
nodes=1
node_rank=0
master=127.0.0.1:29500

usage() {
  cat <<'TEXT'
Usage: torchrun.sh [--gpus N] [--nodes N --node-rank R --master HOST:PORT] RUN [-- SECTION.KEY=VALUE...]

  torchrun.sh --gpus 8 --source chats.jsonl --media-root images --data data/packed \
    bridge_configs.qwen3_vl:qwen3_vl_8b_sft -- train.train_iters=2000

  --gpus N            processes on this machine (8)
  --nodes N           number of machines (1); each starts this script
  --node-rank R       rank of this machine (0); machine 0 converts and validates, the others wait for it
  --master HOST:PORT  address of machine 0 (127.0.0.1:29500)
TEXT
}

own_option() {
  case "$1" in
    --gpus) need_value "$1" "$#" && need_number "$1" "$2" && gpus=$2 taken=2 ;;
    --nodes) need_value "$1" "$#" && need_number "$1" "$2" && nodes=$2 taken=2 ;;
    --node-rank) need_value "$1" "$#" && need_rank "$1" "$2" && node_rank=$2 taken=2 ;;
    --master) need_value "$1" "$#" && master=$2 taken=2 ;;
  esac
}

read_words "$@"
((node_rank < nodes)) || fail "--node-rank $node_rank does not exist with --nodes $nodes; ranks count from 0."
if ((node_rank == 0)); then data_stage "$((nodes * gpus))"; else wait_for "$master"; fi
if ((nodes == 1)); then
  program --standalone --nnodes 1 --nproc-per-node "$gpus"
else
  program --nnodes "$nodes" --node-rank "$node_rank" --nproc-per-node "$gpus" \
    --master-addr "${master%:*}" --master-port "${master##*:}"
fi
run "${words[@]}"
