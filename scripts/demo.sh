#!/usr/bin/env bash
# Sets everything up (scripts/setup.sh) and shows the whole road: conversations -> Energon data set -> packs -> training.
#
#   bash scripts/demo.sh                                              data and processor of the project
#   bash scripts/demo.sh --data chats.json --processor path/or/name   yours
#   bash scripts/demo.sh --help
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/scripts/setup.sh"
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
export PYTHONUNBUFFERED=1
exec "$root/.venv/bin/python" "$root/scripts/demo.py" "$@"
