"""Workers that keep the memory of pixels which they are done with.

glibc gives a large block back to the kernel when it is freed, and asks for it again for the next image; the kernel
clears every page of it first. That takes a worker that renders photographs from a twentieth of its CPU time, on an idle
machine, to a third of it on one whose memory is busy.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

# Parameters of mallopt(3), from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_BLOCK = 1 << 30
"""Bytes: blocks below come from the heap, which is kept. More than a decoded sample may have by default."""
_OLD_BLOCK = 32 << 20
"""What older versions of glibc allow at most."""
_HEAP = (1 << 31) - 1
"""Bytes: a heap is trimmed when more than this is free at its end; mallopt takes no larger number."""
_STEP = 256 << 20
"""Bytes that the heap grows by; the kernel gives a page when it is first touched."""


def keep_freed_memory() -> bool:
    """Lets this process keep what it frees, for its next allocations; it stays as large as it once was.

    Returns:
        Whether the C library can be told so; only glibc can.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_MMAP_THRESHOLD, _BLOCK) or mallopt(_MMAP_THRESHOLD, _OLD_BLOCK)
    return bool(kept and mallopt(_TRIM_THRESHOLD, _HEAP) and mallopt(_TOP_PAD, _STEP))


def in_workers(loader: Any) -> None:
    """Every worker that a ``torch.utils.data.DataLoader`` starts from now on keeps its freed memory."""
    loader.worker_init_fn = functools.partial(_start, loader.worker_init_fn)


def _start(own: Callable[[int], None] | None, worker: int) -> None:
    keep_freed_memory()
    if own is not None:
        own(worker)
