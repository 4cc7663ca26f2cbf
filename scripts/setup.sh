#!/usr/bin/env bash
# Makes .venv in the checkout and installs the pinned dependencies and the package itself (editable).
#
#   bash scripts/setup.sh          then use .venv/bin/python and .venv/bin/energon-packing
#
# It can be run again at any time. Each step leaves a stamp with the hash of what it installed, and runs again only when
# its requirement file has changed; with nothing to do, nothing is called. An installation that is cut off (Ctrl-C, power,
# a full disk) leaves a marker, and the next start rebuilds .venv, because pip takes a half-written package for installed.
# PYTHON=/path/to/python3.12 chooses the interpreter. The full output of the installers is in .venv/install.log.
#
# uv installs in half a minute what takes pip three, since it unpacks in parallel and leaves bytecode to the first import.
# Where imports may not write it (PYTHONDONTWRITEBYTECODE, as in many containers), it is compiled at once, in another half:
# else every command would compile all that it imports. Where uv cannot be had, or does not get what pip gets, pip installs.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv="$root/.venv"
requirements="$root/scripts/requirements"
log="$venv/install.log"
marker="$venv/.interrupted"
python="$venv/bin/python"

# A PYTHONPATH or a pip target of the user's would make pip take packages from elsewhere for installed ones.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_USER
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf '%s\n' "setup: $*" >&2; }
fail() {
  say "$1"
  exit 1
}

# -- steps: stamp name | what it says while it runs | files that its stamp hashes | pip arguments ---------------------
steps=(
  "torch|torch and torchvision (the largest download)|1-torch.txt|-r $requirements/1-torch.txt"
  "megatron|Megatron-Bridge and Megatron-Core|2-megatron.txt|--no-deps -r $requirements/2-megatron.txt"
  "stack|Energon, transformers and what Bridge imports|3-stack.txt|-r $requirements/3-stack.txt"
  "project|click, rich, orjson, pytest, ruff, mypy|4-project.txt|-r $requirements/4-project.txt"
  "package|energon-packing itself, editable|../../pyproject.toml|--no-deps --no-build-isolation -e $root"
)

works() { # is $1 a Python 3.12 that can make a virtual environment?
  "$1" -c 'import ensurepip, ssl, sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

find_python() {
  local candidate
  if [[ -n "${PYTHON:-}" ]]; then
    works "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.12 with the venv and ssl modules; point PYTHON at one, or unset it."
    printf '%s' "$PYTHON"
    return
  fi
  for candidate in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 \
    /usr/bin/python3.12 /usr/local/bin/python3.12 /opt/homebrew/bin/python3.12 python3 python; do
    if works "$candidate"; then
      printf '%s' "$candidate"
      return
    fi
  done
  if python3.12 -c 'import sys' >/dev/null 2>&1; then
    fail "$(command -v python3.12) cannot make a virtual environment; install its venv module (Debian and Ubuntu: apt-get install python3.12-venv)."
  fi
  fail "Python 3.12 was not found; install it (apt-get install python3.12 python3.12-venv, or pyenv install 3.12), or set PYTHON to its path."
}

hash_of() { # the content of files and the words of the pip command; sha256sum is GNU, shasum is macOS
  local tool=(sha256sum)
  command -v sha256sum >/dev/null || tool=(shasum -a 256)
  { printf '%s\n' "$root" "$@"; cat "${@:2}"; } | "${tool[@]}" | cut -d' ' -f1
}

cause() { # one sentence from the log of the step that failed
  local text
  text=$(tail -n 400 "$1")
  case "$text" in
    *"No space left on device"*) echo "the disk is full (the environment needs about 7 GB)" ;;
    *"Temporary failure in name resolution"* | *"Name or service not known"* | *"Failed to establish a new connection"* | \
      *"Network is unreachable"* | *"Read timed out"* | *"ProxyError"* | *"ConnectTimeout"* | *"Connection refused"*)
      echo "the package index cannot be reached; check the network and pip's proxy settings, then start again" ;;
    *"CERTIFICATE_VERIFY_FAILED"*) echo "the package index's certificate is not trusted; set PIP_CERT to your certificate bundle" ;;
    *"No matching distribution found for "*)
      echo "the package index cannot be reached or has no $(sed -n 's/.*No matching distribution found for //p' "$1" | tail -n 1 | cut -d' ' -f1) for this Python and platform" ;;
    *"ResolutionImpossible"*) echo "the versions in scripts/requirements contradict each other" ;;
    *"Permission denied"*) echo "a file in .venv cannot be written (permission denied)" ;;
    *) echo "the log says: $(grep -E '^ *(ERROR|error)' "$1" | tail -n 1 | sed 's/^ *//' || true)" ;;
  esac
}

# -- nothing to do? ----------------------------------------------------------------------------------------------------
wanted=()
for step in "${steps[@]}"; do
  IFS='|' read -r name what files arguments <<<"$step"
  wanted+=("$(hash_of "$arguments" "$requirements/$files" "$requirements/constraints.txt")")
done

is_done() { [[ -f "$venv/.done-$1" && "$(<"$venv/.done-$1")" == "$2" ]]; }

usable() { # .venv was finished once, at this place, and its interpreter still starts
  [[ ! -e "$marker" && -f "$venv/.done-venv" && "$(<"$venv/.done-venv")" == "$root" ]] && "$python" -c 'import pip' >/dev/null 2>&1
}

everything_done() {
  local i name
  usable || return 1
  for i in "${!steps[@]}"; do
    name=${steps[$i]%%|*}
    is_done "$name" "${wanted[$i]}" || return 1
  done
}

everything_done && exit 0

# -- one installation at a time ----------------------------------------------------------------------------------------
mkdir -p "$venv" 2>/dev/null || fail "cannot create $venv; is the checkout writable?"
if command -v flock >/dev/null; then
  exec 9>"$venv/.setup-lock"
  if ! flock -n 9; then
    say "waiting for another setup of this checkout to finish"
    flock 9
  fi
  everything_done && exit 0
fi
trap 'say "interrupted; the next start repairs .venv"; exit 130' INT TERM

if ! usable; then
  base=$(find_python) || exit 1
  [[ -e "$marker" || -e "$venv/.done-venv" ]] && say "the environment in .venv is incomplete, broken or from another place; rebuilding it"
  # The lock stays: others wait on this very file.
  find "$venv" -mindepth 1 -maxdepth 1 ! -name .setup-lock -exec rm -rf {} +
  : >"$marker"
  say "creating .venv with $("$base" --version) ($base)"
  "$base" -m venv "$venv" >"$log" 2>&1 || fail "$base could not create .venv: $(tail -n 1 "$log"); the log is .venv/install.log."
  printf '%s' "$root" >"$venv/.done-venv"
  rm -f "$marker"
fi

with_pip() { "$python" -m pip install --progress-bar off -c "$requirements/constraints.txt" "$@" >>"$log.step" 2>&1 </dev/null 9>&-; }

install() { # pip's arguments; 128 if nobody knows what is installed
  local before
  before=$(ls "$venv"/lib/*/site-packages)
  if [[ -x "$venv/bin/uv" ]]; then
    "$venv/bin/uv" --no-config pip install --python "$python" -c "$requirements/constraints.txt" "$@" >>"$log.step" 2>&1 </dev/null 9>&- && return
    [[ "$(ls "$venv"/lib/*/site-packages)" == "$before" ]] || return 128
    printf '\nuv could not, so pip tries\n\n' >>"$log.step"
  fi
  with_pip "$@"
}

# uv takes the index and the certificates that pip is told; what else pip is told, pip alone knows.
if [[ ! -x "$venv/bin/uv" ]]; then
  : >"$marker"
  : >"$log.step"
  with_pip uv || say "uv cannot be installed; pip takes its place"
  cat "$log.step" >>"$log"
  rm -f "$marker"
fi
index=$("$python" -m pip config get global.index-url 2>/dev/null || true)
index=${PIP_INDEX_URL:-$index}
[[ -n "$index" ]] && export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
[[ -n "${PIP_CERT:-}" ]] && export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"
[[ -n "${PYTHONDONTWRITEBYTECODE:-}" ]] && export UV_COMPILE_BYTECODE="${UV_COMPILE_BYTECODE:-1}"

for i in "${!steps[@]}"; do
  IFS='|' read -r name what files arguments <<<"${steps[$i]}"
  is_done "$name" "${wanted[$i]}" && continue
  say "[$((i + 1))/${#steps[@]}] installing $what ..."
  started=$SECONDS
  read -ra words <<<"${arguments//"$root"/@ROOT@}" # a checkout path may hold spaces
  words=("${words[@]//@ROOT@/"$root"}")
  : >"$marker"
  : >"$log.step"
  status=0
  install "${words[@]}" || status=$?
  cat "$log.step" >>"$log"
  if ((status != 0)); then
    # Before this line pip has only resolved and downloaded, and .venv is as it was; after it, nobody knows.
    ((status < 128)) && ! grep -q '^Installing collected packages' "$log.step" && rm -f "$marker"
    fail "step '$name' failed: $(cause "$log.step"); the log is .venv/install.log."
  fi
  printf '%s' "${wanted[$i]}" >"$venv/.done-$name"
  rm -f "$marker" "$log.step"
  say "[$((i + 1))/${#steps[@]}] done in $((SECONDS - started)) s"
done
