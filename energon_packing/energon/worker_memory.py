"""Workers that keep freed memory for the pixels of later samples, and tokenize without threads.

glibc returns a large block to the kernel when it is freed, and requests it again for the next image. The kernel first
clears every page of it. For a worker that renders photographs, this takes between a twentieth of its CPU time, on an
idle machine, and a third, on a machine whose memory is busy.

A worker tokenizes one text at a time, which is quicker where the tokenizers library starts no threads
(`energon_packing.encoders.tokenized`).
"""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable
from typing import Any

from energon_packing.encoders.tokenized import use_one_thread

# Parameters of mallopt(3), from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_BLOCK = 1 << 30
"""Bytes: smaller blocks come from the heap, which is kept. Larger than a decoded sample may be by default."""
_OLD_BLOCK = 32 << 20
"""Bytes: the maximum that older versions of glibc allow."""
_HEAP = (1 << 31) - 1
"""Bytes: a heap is trimmed when more than this is free at its end; mallopt accepts no larger number."""
_STEP = 256 << 20
"""Bytes that the heap grows by; the kernel provides a page when it is first touched."""


def keep_freed_memory() -> bool:
    """Makes this process keep freed memory for its next allocations; it stays at its peak size.

    Returns:
        Whether the C library supports this; only glibc does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_MMAP_THRESHOLD, _BLOCK) or mallopt(_MMAP_THRESHOLD, _OLD_BLOCK)
    return bool(kept and mallopt(_TRIM_THRESHOLD, _HEAP) and mallopt(_TOP_PAD, _STEP))


def in_workers(loader: Any, *, keep_memory: bool = True) -> None:
    """Makes every worker that a ``torch.utils.data.DataLoader`` starts from now on tokenize without threads.

    Call it just before they start: what only a cycle holds ends here. A worker is a fork, whose first garbage
    collection would end a model's tensors or an open decoder without the threads they belong to, and crash.

    Args:
        keep_memory: whether it keeps its freed memory, too.
    """
    if loader.num_workers:
        # With what is frozen, which Energon unfreezes in the worker at the end of an epoch.
        frozen = gc.get_freeze_count()
        gc.unfreeze()
        gc.collect()
        if frozen:
            gc.freeze()
    loader.worker_init_fn = functools.partial(_start, loader.worker_init_fn, keep_memory)


def _start(own: Callable[[int], None] | None, keep_memory: bool, worker: int) -> None:
    use_one_thread()
    if keep_memory:
        keep_freed_memory()
    if own is not None:
        own(worker)
