#!/usr/bin/env bash
# Installs everything (scripts/setup.sh) and runs every stage: conversations -> Energon data set -> packs -> training.
#
#   bash scripts/demo.sh                                              the project's own data and processor
#   bash scripts/demo.sh --data chats.json --processor path/or/name   yours
#   bash scripts/demo.sh --help
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/scripts/setup.sh"
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
export PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE # or each command compiles all that it imports
exec "$root/.venv/bin/python" "$root/scripts/demo.py" "$@"
