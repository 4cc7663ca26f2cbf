#!/usr/bin/env bash
# Plays a new user: from a fresh clone and a directory of conversations to a falling loss, in eight commands.
#
#   bash scripts/new_user.sh DATA           DATA holds conversation files and their images and videos
#   bash scripts/new_user.sh DATA FOLDER    where data set, configuration and page go (default: new_user)
#
# Each command is printed before it runs, and its seconds after it; the script ends with the first that fails. The log of
# a run is docs/start.md. It needs Python 3.12, no GPU, and the network for the first command only. VENV=DIR takes
# an environment that is there in place of the first command.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
if (($# < 1 || $# > 2)) || [[ ! -d "$1" ]]; then
  echo "usage: bash scripts/new_user.sh DATA [FOLDER], where DATA is a directory of conversation files" >&2
  exit 2
fi
data=$(cd "$1" && pwd -P)
folder=${2:-new_user}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd -P)
if [[ -n "$(ls -A "$folder")" ]]; then
  echo "new_user: $folder is not empty; name another folder" >&2
  exit 2
fi
cd "$root"
bin=${VENV:-.venv}/bin
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} TOKENIZERS_PARALLELISM=false COLUMNS=${COLUMNS:-100}

number=0
step() { # prints a command as a user would type it, runs it, and prints how long it took
  number=$((number + 1))
  local shown="$*" began=$SECONDS
  shown=${shown//"$bin/"/} shown=${shown//"$folder"/new_user} shown=${shown//"$data"/DATA}
  printf '\n$ %s\n' "${shown//"$root/"/}"
  "$@" 2>&1 | sed -e "s#$folder#new_user#g" -e "s#$data#DATA#g" -e "s#$root/##g" -e 's/[[:space:]]*$//'
  printf '# command %d: %d s\n' "$number" $((SECONDS - began))
}

[[ -n "${VENV:-}" ]] || step bash scripts/setup.sh
processor=energon_packing/demo/processors/qwen2_5_vl
step "$bin/energon-packing" convert "$data" --dry-run
step "$bin/energon-packing" convert "$data" --out "$folder/data" --split train=0.95,val=0.05
step "$bin/energon-packing" stats "$folder/data" --set "encoder.processor=$processor"
step "$bin/energon-packing" init "$folder/data" --processor "$processor" --seq-length 4096 --out "$folder/run.yaml"
step "$bin/energon-packing" validate "$folder/run.yaml"
step "$bin/energon-packing" preview "$folder/data" --config "$folder/run.yaml" --packs 10 --html "$folder/packs.html"
step "$bin/python" scripts/train.py --cpu scripts.launch.tiny:vision --data "$folder/data"
printf '\n%d commands, %d s\n' "$number" "$SECONDS"
