"""Benchmarks of the offline road, part by part; see the modules ``bench.offline_PART``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

PARTS = ("measure", "plan", "pack", "loader", "resume", "ways", "kills", "peers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one part, or all of them with their default options: ``offline [PART [options]]``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] not in PARTS:
        print(f"usage: bench.py offline [{'|'.join(PARTS)} [options]]", file=sys.stderr)
        return 0 if given[0] in ("-h", "--help") else 2
    for part in given[:1] or PARTS:
        code = importlib.import_module(f"bench.offline_{part}").main(given[1:])
        if code:
            return int(code)
    return 0
