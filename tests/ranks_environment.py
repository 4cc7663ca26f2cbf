"""The environment of programs that tests start: this checkout's package first, then whatever these tests run on."""

from __future__ import annotations

import os
from pathlib import Path

import energon_packing


def ranks_environment(**more: str) -> dict[str, str]:
    """``os.environ`` with one thread, ``more``, this package and `support`, before a ``PYTHONPATH`` that is there.

    What is there stays: it may name another Megatron-Bridge (``scripts/on_bridge.sh``).
    """
    package = str(Path(energon_packing.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (package, str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more
