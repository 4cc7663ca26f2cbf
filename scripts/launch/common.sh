# What all launchers share: the common options and the data stage. It is sourced, never run.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)

dry=0
skip_data=0
cpu=0
data=
megatron_lm=
media_root=
source_files=()
the_run=
after=()
first_node=() # what starts the commands of the data stage, if not this shell

say() { printf '%s\n' "launch: $*" >&2; }
fail() {
  say "$1"
  exit 2
}

# The interpreter of the checkout where scripts/setup.sh made one; PYTHON names another.
python=${PYTHON:-}
if [[ -z "$python" ]]; then
  if [[ -x "$root/.venv/bin/python" ]]; then python="$root/.venv/bin/python"; else python=python3; fi
fi

need_value() { # option, number of words left
  (($2 >= 2)) || fail "$1 needs a value; see --help."
}

need_number() { # option, value
  [[ "$2" =~ ^[1-9][0-9]*$ ]] || fail "$1 is '$2'; it must be a number of at least 1."
}

need_rank() { # option, value
  [[ "$2" =~ ^(0|[1-9][0-9]*)$ ]] || fail "$1 is '$2'; it must be a number of at least 0."
}

wait_for() { # HOST:PORT of the first node, which listens when its data stage is done
  ((!dry)) || {
    printf '# wait until %s listens\n' "$1"
    return 0
  }
  say "waiting for $1"
  until (exec 3<>"/dev/tcp/${1%:*}/${1##*:}") 2>/dev/null; do sleep 5; done
}

quoted() { # the words as one line that a shell reads back
  local word line=
  for word in "$@"; do line+="$(printf '%q' "$word") "; done
  printf '%s\n' "${line% }"
}

run() { # runs the words, or prints them with --dry-run
  if ((dry)); then quoted "$@"; else "$@"; fi
}

read_words() { # all words of the command line; options that only one launcher has go to its own_option
  while (($#)); do
    taken=0
    case "$1" in
      --help)
        usage
        common_help
        exit 0
        ;;
      --dry-run) dry=1 taken=1 ;;
      --skip-data) skip_data=1 taken=1 ;;
      --cpu) cpu=1 taken=1 ;;
      --source) need_value "$1" "$#" && source_files+=("$2") taken=2 ;;
      --media-root) need_value "$1" "$#" && media_root=$2 taken=2 ;;
      --data) need_value "$1" "$#" && data=$2 taken=2 ;;
      --megatron-lm) need_value "$1" "$#" && megatron_lm=$2 taken=2 ;;
      --)
        shift
        after=("$@")
        break
        ;;
      -*)
        own_option "$@"
        ((taken)) || fail "there is no option $1; see --help."
        ;;
      *)
        [[ -z "$the_run" ]] || fail "'$1' is one word too many; overrides go after --."
        the_run=$1 taken=1
        ;;
    esac
    shift "$taken"
  done
  if [[ -n "$megatron_lm" ]]; then
    [[ -z "$the_run" ]] || fail "'$the_run' is one word too many; arguments of Megatron-LM go after --."
    [[ -f "$megatron_lm" ]] || fail "there is no training script $megatron_lm."
    ((!cpu)) || fail "--cpu is for scripts/train.py."
    [[ -z "$data" ]] || after+=(--packing-set "data.path=$data")
  else
    [[ -n "$the_run" ]] || fail "name a run: a recipe module:function or a run_config.yaml; see --help."
  fi
}

common_help() {
  cat <<'TEXT'
What is trained, one of:
  RUN [-- SECTION.KEY=VALUE...]               scripts/train.py: a Bridge recipe module:function or a run_config.yaml
  --megatron-lm SCRIPT -- ARGUMENTS...        a training script of Megatron-LM (docs/megatron_lm.md)
Data stage, before training:
  --source FILE       conversations to convert into --data first; may be repeated; an interrupted conversion resumes
  --media-root DIR    directory of the media of these conversations
  --data DIR          data set (default: the one that the run names)
  --skip-data         neither convert nor validate
Other:
  --cpu               train a tiny model on the CPU, over gloo
  --dry-run           print the commands and run nothing
  --help              show this text
The interpreter is $PYTHON, else .venv/bin/python of the checkout, else python3.
TEXT
}

data_stage() { # convert where there are sources, then validate the run on so many ranks
  local ranks=$1 words=() media=() override
  if ((skip_data)); then
    ((${#source_files[@]} == 0)) || fail "--source and --skip-data contradict each other."
    return 0
  fi
  if ((${#source_files[@]})); then
    [[ -n "$data" ]] || fail "--source needs --data, the folder to convert into."
    [[ -z "$media_root" ]] || media=(--media-root "$media_root")
    run "${first_node[@]}" "$python" -m energon_packing.cli.main convert "${source_files[@]}" "${media[@]}" --out "$data" --resume
  fi
  if [[ -n "$megatron_lm" ]]; then
    run "${first_node[@]}" "$python" -m energon_packing.cli.main validate --world-size "$ranks" -- "${after[@]}"
    return
  fi
  for override in "${after[@]}"; do words+=(--set "$override"); done
  [[ -z "$data" ]] || words+=(--set "dataset.path=$data")
  words+=(--step energon_packing.bridge.step)
  run "${first_node[@]}" "$python" -m energon_packing.cli.main validate "$the_run" --world-size "$ranks" "${words[@]}"
}

program() { # sets the array $words to what every node runs: torchrun's words, the script and its own
  words=("$python" -m torch.distributed.run "$@")
  if [[ -n "$megatron_lm" ]]; then
    words+=("$megatron_lm" "${after[@]}")
    return
  fi
  words+=("$root/scripts/train.py")
  ((!cpu)) || words+=(--cpu)
  [[ -z "$data" ]] || words+=(--data "$data")
  words+=("$the_run" "${after[@]}")
}

# Recipes of the checkout (bridge_configs.MODULE:FUNCTION) are found wherever a launcher is started.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# Megatron-Core's sequence parallelism overlaps correctly only with one hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
# torchrun would set it to 1 and say so, for every node.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
