#!/usr/bin/env bash
# Submits a training job to Slurm: the data stage on its first node, then one torchrun on each node. See --help.
set -euo pipefail
# shellcheck source=scripts/launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

gpus=8
nodes=1
port=29500
inside=0
cpus=()
sbatch_words=()
srun_words=()
all_words=("$@")

usage() {
  cat <<'TEXT'
Usage: slurm.sh [--nodes N] [--gpus N] [--sbatch WORD]... [--srun WORD]... RUN [-- SECTION.KEY=VALUE...]

  slurm.sh --nodes 4 --gpus 8 --sbatch --partition=gpu --sbatch --time=24:00:00 \
    --source chats.jsonl --data data/packed bridge_configs.qwen3_vl:qwen3_vl_8b_sft_long

  # In a container (pyxis), which has to see this checkout and the data; PYTHON is its interpreter.
  PYTHON=python3 slurm.sh --nodes 4 --sbatch --partition=gpu --srun --container-image=IMAGE \
    --srun --container-mounts=/lustre:/lustre --data /lustre/packed bridge_configs.qwen3_vl:qwen3_vl_8b_sft_long

  --nodes N           number of machines (1)
  --gpus N            GPUs per machine (8)
  --cpus-per-task N   CPUs per machine, for training and the loader's workers (all: the job is --exclusive)
  --sbatch WORD       argument for sbatch, such as --partition=gpu; may be repeated
  --srun WORD         argument for srun, such as --container-image=IMAGE; may be repeated. The data stage then runs in
                      srun too, on the first machine
  --port N            port of the first node for the rendezvous (29500)
TEXT
}

own_option() {
  case "$1" in
    --gpus) need_value "$1" "$#" && need_number "$1" "$2" && gpus=$2 taken=2 ;;
    --nodes) need_value "$1" "$#" && need_number "$1" "$2" && nodes=$2 taken=2 ;;
    --port) need_value "$1" "$#" && need_number "$1" "$2" && port=$2 taken=2 ;;
    --cpus-per-task) need_value "$1" "$#" && need_number "$1" "$2" && cpus=(--cpus-per-task "$2") taken=2 ;;
    --sbatch) need_value "$1" "$#" && sbatch_words+=("$2") taken=2 ;;
    --srun) need_value "$1" "$#" && srun_words+=("$2") taken=2 ;;
    --inside-job) inside=1 taken=1 ;;
  esac
}

read_words "$@"
if ((!inside)); then
  kept=()
  for word in "${all_words[@]}"; do [[ "$word" == --dry-run ]] || kept+=("$word"); done
  command=$(quoted bash "$root/scripts/launch/slurm.sh" --inside-job "${kept[@]}")
  run sbatch --job-name energon-packing --nodes "$nodes" --ntasks-per-node 1 --gpus-per-node "$gpus" \
    "${cpus[@]}" --exclusive "${sbatch_words[@]}" --wrap "$command"
  ((dry)) || exit 0
  printf '# the job, on its first node\n'
fi

head=${SLURMD_NODENAME:-$(hostname)} # a batch script runs on the first node of its job
# The one task of a machine starts a process per GPU and their workers: srun would bind them all to its first core, and
# takes no --cpus-per-task from sbatch since Slurm 22.05.
step=(srun --ntasks-per-node 1 --kill-on-bad-exit=1 --cpu-bind=none "${cpus[@]}" "${srun_words[@]}")
((${#srun_words[@]} == 0)) || first_node=("${step[@]}" --nodes 1 --ntasks 1)
data_stage "$((nodes * gpus))"
program --nnodes "$nodes" --nproc-per-node "$gpus" \
  --rdzv-id "${SLURM_JOB_ID:-0}" --rdzv-backend c10d --rdzv-endpoint "$head:$port"
run "${step[@]}" --nodes "$nodes" --ntasks "$nodes" "${words[@]}"
