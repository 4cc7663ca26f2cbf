#!/usr/bin/env bash
# Submits a training job to a Ray cluster: the data stage in the job, then one torchrun on each node. See --help.
set -euo pipefail
# shellcheck source=scripts/launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

gpus=8
nodes=1
address=${RAY_ADDRESS:-http://127.0.0.1:8265}
inside=0
all_words=("$@")

usage() {
  cat <<'TEXT'
Usage: ray.sh [--nodes N] [--gpus N] [--address URL] RUN [-- SECTION.KEY=VALUE...]

  ray.sh --nodes 4 --gpus 8 --data data/packed bridge_configs.qwen3_vl:qwen3_vl_8b_sft_long

  --nodes N           number of machines (1), each with the checkout and its data at the same path
  --gpus N            GPUs per machine (8); with --cpu, CPUs
  --address URL       address of the cluster's dashboard ($RAY_ADDRESS, else http://127.0.0.1:8265)
TEXT
}

own_option() {
  case "$1" in
    --gpus) need_value "$1" "$#" && need_number "$1" "$2" && gpus=$2 taken=2 ;;
    --nodes) need_value "$1" "$#" && need_number "$1" "$2" && nodes=$2 taken=2 ;;
    --address) need_value "$1" "$#" && address=$2 taken=2 ;;
    --inside-job) inside=1 taken=1 ;;
  esac
}

read_words "$@"
if ((!inside)); then
  kept=()
  for word in "${all_words[@]}"; do [[ "$word" == --dry-run ]] || kept+=("$word"); done
  run "$python" -m ray.scripts.scripts job submit --address "$address" -- \
    env PYTHON="$python" bash "$root/scripts/launch/ray.sh" --inside-job "${kept[@]}"
  ((dry)) || exit 0
  printf '# the job\n'
fi

data_stage "$((nodes * gpus))"
resource=GPU
((!cpu)) || resource=CPU
program --nnodes "$nodes" --nproc-per-node "$gpus" --node-rank '{rank}' --master-addr '{host}' --master-port '{port}'
run "$python" "$root/scripts/launch/ray_nodes.py" "$nodes" "$resource=$gpus" "${words[@]}"
