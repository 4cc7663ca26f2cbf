#!/usr/bin/env bash
# Trains with a training script of Megatron-LM on this machine: torchrun.sh with the script named first.
#
#   megatron_lm.sh pretrain_gpt.py --gpus 8 --data data/packed -- --tensor-model-parallel-size 2 ...
#   megatron_lm.sh --help
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
case "${1:---help}" in
  --help)
    printf '%s\n\n' 'Usage: megatron_lm.sh SCRIPT [options of torchrun.sh] -- ARGUMENTS OF MEGATRON-LM...'
    exec bash "$here/torchrun.sh" --help
    ;;
  -*)
    printf '%s\n' "launch: name the training script of Megatron-LM first; see --help." >&2
    exit 2
    ;;
esac
script=$1
shift
exec bash "$here/torchrun.sh" --megatron-lm "$script" "$@"
