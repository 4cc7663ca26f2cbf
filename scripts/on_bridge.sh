#!/usr/bin/env bash
# Runs a command on a checkout of Megatron-Bridge and the Megatron-Core that it pins, instead of the installed ones.
#
#   git clone --recurse-submodules https://github.com/NVIDIA-NeMo/Megatron-Bridge bridge
#   bash scripts/on_bridge.sh bridge python -m pytest tests/conformance
#   bash scripts/on_bridge.sh bridge bash scripts/demo.sh
#   bash scripts/on_bridge.sh bridge bridges_packing_tests   # those of the checkout, with our package imported first
#
# Everything else comes from .venv (or the environment of PYTHON=/path/to/python). Nothing is installed or changed:
# `megatron` is a namespace package, so PYTHONPATH puts the checkout's `megatron/bridge` and `megatron/core` first, and
# Energon's part still comes from the environment.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

fail() {
  printf 'on_bridge: %s\n' "$1" >&2
  exit 2
}

(($# >= 2)) || fail "usage: bash scripts/on_bridge.sh CHECKOUT COMMAND [ARGUMENT ...]"
[[ -d "$1" ]] || fail "$1 is not a directory; clone Megatron-Bridge there."
checkout=$(cd "$1" && pwd -P)
shift
core="$checkout/3rdparty/Megatron-LM"
[[ -f "$checkout/src/megatron/bridge/package_info.py" ]] || fail "$checkout is not a checkout of Megatron-Bridge: it has no src/megatron/bridge."
[[ -f "$core/megatron/core/package_info.py" ]] || fail "$core is empty; run: git -C $checkout submodule update --init 3rdparty/Megatron-LM"
python=${PYTHON:-$root/.venv/bin/python}
[[ -x "$python" ]] || fail "$python does not exist; run: bash scripts/setup.sh"

# The metadata that installing the checkout would leave. Rules read the version from it.
metadata=$(mktemp -d)
trap 'rm -rf "$metadata"' EXIT
describe() { # NAME, the file with its version
  local version
  version=$(sed -n 's/^\(MAJOR\|MINOR\|PATCH\) = \([0-9][0-9]*\)$/\2/p' "$2" | paste -sd. -)
  mkdir "$metadata/${1//-/_}-$version.dist-info"
  printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' "$1" "$version" >"$metadata/${1//-/_}-$version.dist-info/METADATA"
}
describe megatron-bridge "$checkout/src/megatron/bridge/package_info.py"
describe megatron-core "$core/megatron/core/package_info.py"

# Bridge's tests of packed rows and of the settings of packing, with our stand-ins for CUDA and Transformer Engine where
# a machine has none.
bridges_packing_tests() {
  cd "$checkout"
  local run="import sys, pytest; from support.bridge_cpu import stand_ins; stand_ins.install()
import energon_packing.bridge.dataset, energon_packing.bridge.step
from energon_packing.validate.recipes import gpu_of_recipes
with gpu_of_recipes(): sys.exit(pytest.main(sys.argv[1:]))"
  PYTHONPATH="$PYTHONPATH:$root/tests" python -c "$run" -o addopts= -p no:cacheprovider --tb=short \
    -k "packed or packing or cu_seqlens" tests/unit_tests/training/{utils/test_packed_seq_utils,test_config,test_vlm_step}.py "$@"
}

export PYTHONPATH="$root:$metadata:$checkout/src:$core${PYTHONPATH:+:$PYTHONPATH}"
export ENERGON_PACKING_BRIDGE_MAIN=$checkout ENERGON_PACKING_BRIDGE_SOURCE=$checkout/src
PATH="$(dirname "$python"):$PATH"
"$@"
