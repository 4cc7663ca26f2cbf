#!/usr/bin/env bash
# Installs everything (scripts/setup.sh) and runs the tests:
#
#   bash scripts/test.sh                          the fast tier: one layout of each training run, no benchmarks or bugs put back
#   bash scripts/test.sh --all                    all tests, as .ci/run does
#   bash scripts/test.sh tests/packing -k window  some tests; all arguments go to pytest, including those after --all
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/scripts/setup.sh"
cd "$root"

tier=()
case "${1:-}" in
  "") tier=(--fast) ;;
  --all) shift ;;
esac

# Two more test processes than cores, because tests wait for what they start (ranks, commands, clusters) a third of their
# time; with one thread each, because the tests' models are small. A file stays in one process, for its fixtures;
# tests/conftest.py puts the longest files first. A test process that is killed, as for memory, ends the run with the name
# of its test; a new one in its place sometimes never ended.
cores=$("$root/.venv/bin/python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
# The tests need no hub. A test that asks for one should fail here, not only on a machine without a network.
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export PYTHONUNBUFFERED=1
# Where bytecode may not be written, as in many containers, each of the hundreds of interpreters compiles all it imports.
unset PYTHONDONTWRITEBYTECODE
# Memory of tensors stays with the process: giving it back to the kernel after each one was half of the kernel's time.
export MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_THRESHOLD_=33554432

exec "$root/.venv/bin/python" -m pytest --numprocesses "$((cores < 6 ? cores + 2 : 8))" --dist loadfile \
  --no-loadscope-reorder --max-worker-restart 0 ${tier[@]+"${tier[@]}"} "$@"
