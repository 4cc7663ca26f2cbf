#!/usr/bin/env bash
# Runs the tests that compare with the installed processors, models and loader in fresh environments, one for each end of
# the bounds of the extra `vlm` in pyproject.toml, and prints a table.
#
#   bash scripts/exactness.sh                          the first release of each, then the newest of all
#   bash scripts/exactness.sh --pinned                 the first of all, then the newest of all, with all that they bring
#                                                      as in scripts/requirements/*-releases.txt: what .ci/run does
#   bash scripts/exactness.sh 'transformers==5.14.1'   one environment for each argument: requirements, space-separated
#
# An environment takes 6 GB and two minutes (`s`: installation and tests), and needs the network. FOLDER=DIR keeps the
# environments and their logs. The script exits with 1 if a test fails.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${PYTHON:-$root/.venv/bin/python}
uv=$(dirname "$python")/uv
[[ -x "$uv" ]] || { echo "exactness: $uv does not exist; run: bash scripts/setup.sh" >&2; exit 2; }
folder=${FOLDER:-$(mktemp -d)}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd -P)
[[ -n "${FOLDER:-}" ]] || trap 'rm -rf "$folder"' EXIT
cd "$root"
# uv takes the index and the certificates that pip is told, as in scripts/setup.sh.
index=${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null || true)}
[[ -n "$index" ]] && export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
[[ -n "${PIP_CERT:-}" ]] && export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
tests=(
  tests/families/test_families.py          # tokens, pixels and positions of each family: its processor and model
  tests/families/test_times_from_files.py  # frames and times of clips: the processors' own readers
  tests/families/test_short_clips.py
  # Energon's own states: each key once, and the same packs after any step
  tests/energon/test_loader.py::test_one_epoch_emits_every_key_exactly_once_or_drops_it_with_a_reason
  tests/energon/test_loader.py::test_a_state_saved_after_any_step_continues_bit_identically
  tests/energon/test_states.py::test_a_state_is_the_one_that_energon_saves_and_does_not_change_with_the_loader
)
shown=(torch torchvision transformers megatron-energon)

if (($# == 0)); then # the first releases, each beside the newest of the others, then the newest of all
  mapfile -t first < <("$python" - "$root/pyproject.toml" <<'END'
import re, sys, tomllib
requirements = tomllib.load(open(sys.argv[1], "rb"))["project"]["optional-dependencies"]["vlm"]
bounded = [re.match(r"([\w-]+)>=([\d.]+),<", text) for text in requirements]
print("\n".join(f"{found[1]}=={found[2]}" for found in bounded if found))
END
)
  set -- "${first[*]}" "${first[@]}" ""
elif [[ "$1" == --pinned ]]; then
  set -- "-c scripts/requirements/first-releases.txt" "-c scripts/requirements/newest-releases.txt"
fi

failed=0
row='%-60s %-10s %-12s %-13s %-17s %6s %5s  %s\n'
printf "$row" asked "${shown[@]}" MB s tests
for asked in "$@"; do
  started=$SECONDS
  place="$folder/${asked//[^A-Za-z0-9.]/_}_"
  log="$place.log"
  read -ra wanted <<<"$asked"
  made=1
  {
    rm -rf "$place"
    printf '%s\n' "${wanted[@]}" >"$place.txt"
    install=("$uv" pip install -q --python "$place/bin/python" "$root[vlm,video,offline]" pytest pytest-timeout hypothesis)
    # Releases outside of the bounds take their place. Others do not: torchvision's bound of torch would go with them.
    "$uv" venv -q --python "$python" "$place" &&
      { "${install[@]}" "${wanted[@]}" || { [[ "${wanted[0]:-}" != -c ]] && "${install[@]}" --override "$place.txt"; }; } || made=0
  } >"$log" 2>&1 </dev/null
  releases=()
  for name in "${shown[@]}"; do
    releases+=("$("$place/bin/python" -c 'import importlib.metadata as m, sys; print(m.version(sys.argv[1]))' "$name" 2>/dev/null || echo -)")
  done
  said="not installed, see above"
  if ((made)); then
    env -u PYTHONPATH HF_HUB_OFFLINE=1 "$place/bin/python" -m pytest -p no:cacheprovider "${tests[@]}" \
      >>"$log" 2>&1 </dev/null || made=0
    said=$(grep -E '(passed|failed|error)' "$log" | tail -n 1 || echo "no test ran, see above")
  fi
  ((made)) || { failed=1; cat "$log" >&2; }
  size=$(du -sm "$place"/lib/*/site-packages 2>/dev/null | cut -f1 || true)
  printf "$row" "${asked:-the newest}" "${releases[@]}" "${size:--}" "$((SECONDS - started))" "$said"
  [[ -n "${FOLDER:-}" ]] || rm -rf "$place"
done
exit "$failed"
