#!/usr/bin/env bash
# The command of every pod of a training job: reads the environment that operators set for PyTorch jobs. See --help.
set -euo pipefail
# shellcheck source=scripts/launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Kubeflow's PyTorchJob sets WORLD_SIZE to pods and RANK to the pod; an indexed Job has its own name for the latter.
nodes=${PET_NNODES:-${WORLD_SIZE:-1}}
node_rank=${PET_NODE_RANK:-${RANK:-${JOB_COMPLETION_INDEX:-0}}}
gpus=${PET_NPROC_PER_NODE:-8}
master=${PET_MASTER_ADDR:-${MASTER_ADDR:-127.0.0.1}}:${PET_MASTER_PORT:-${MASTER_PORT:-29500}}

usage() {
  cat <<'TEXT'
Usage: kubernetes.sh [--gpus N] [--nodes N] RUN [-- SECTION.KEY=VALUE...]

The command of every pod. Pod 0 converts and validates, the others wait for it. Read from the environment:
  MASTER_ADDR MASTER_PORT     address of pod 0 (127.0.0.1:29500)
  WORLD_SIZE RANK             number of pods and rank of this pod, as Kubeflow's PyTorchJob sets them. An indexed Job's
                              JOB_COMPLETION_INDEX replaces RANK; PET_* variables take precedence
  --nodes N           number of pods, if the environment does not say
  --gpus N            GPUs per pod (8)
TEXT
}

own_option() {
  case "$1" in
    --gpus) need_value "$1" "$#" && need_number "$1" "$2" && gpus=$2 taken=2 ;;
    --nodes) need_value "$1" "$#" && need_number "$1" "$2" && nodes=$2 taken=2 ;;
  esac
}

read_words "$@"
need_number "the number of pods" "$nodes"
need_number "the number of GPUs of a pod" "$gpus"
need_rank "the number of this pod" "$node_rank"
((node_rank < nodes)) || fail "this is pod $node_rank of $nodes; pods count from 0."
# torchrun gives its processes these names with another meaning.
unset WORLD_SIZE RANK
if ((node_rank == 0)); then data_stage "$((nodes * gpus))"; else wait_for "$master"; fi
program --nnodes "$nodes" --node-rank "$node_rank" --nproc-per-node "$gpus" \
  --master-addr "${master%:*}" --master-port "${master##*:}"
run "${words[@]}"
