#!/usr/bin/env bash
# Sets everything up (scripts/setup.sh) and runs the tests. Arguments go to pytest:
#
#   bash scripts/test.sh                          all tests
#   bash scripts/test.sh tests/packing -k window  some
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/scripts/setup.sh"
cd "$root"

# The tests' models are small: more threads than this cost more in waiting than they save. Data loader workers use one.
cores=$("$root/.venv/bin/python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores < 4 ? cores : 4))}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
# The tests need no hub; a test that asks one should fail here, not only on a machine without a network.
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export PYTHONUNBUFFERED=1

exec "$root/.venv/bin/python" -m pytest "$@"
