"""Tensors of samples joined in one piece of memory, which a loader's worker shares with the training process."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch

from energon_packing.errors import PackingError

_MOST_PARTS = 512
"""Parts per write; Linux allows 1,024."""
_MOST_BYTES = 1 << 30
"""Bytes per write; Linux writes at most 2 GiB less a page."""


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins parts along their first axis in new memory, even one part, because a view would keep its storage alive.

    In a data loader's worker this memory is shared from the start, as in PyTorch's own collation. Otherwise, sending
    the tensor to the training process would copy 100 MB of pixels once more. The parts are written to its file: the
    kernel clears every page that is first touched through a mapping, which takes as long as writing it.

    Args:
        parts: at least one; equal in dtype and in all axes but the first.

    Raises:
        PackingError: shared memory is full.
    """
    first = parts[0]
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    if torch.utils.data.get_worker_info() is None or first.device.type != "cpu" or not math.prod(shape):
        return torch.cat(list(parts))
    storage = first._typed_storage()._new_shared(math.prod(shape), device=first.device)
    result = first.new(storage).resize_(shape)
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return torch.cat(list(parts), out=result)
    descriptor, _ = result.untyped_storage()._share_fd_cpu_()  # of the storage itself: not to be closed
    try:
        _write(descriptor, [part for part in parts if part.numel()])
    except OSError as error:
        size = result.numel() * result.element_size()
        raise PackingError(
            f"{size} bytes of pixels do not fit into shared memory ({error.strerror}); make /dev/shm larger, or lower "
            "data.num_workers."
        ) from error
    return result


def _write(descriptor: int, parts: Sequence[torch.Tensor]) -> None:
    left = [memoryview(part.contiguous().view(-1).view(torch.uint8).numpy()) for part in parts]
    at = 0
    while left:
        together = left[:_MOST_PARTS]
        if len(together[0]) > _MOST_BYTES:
            together = [together[0][:_MOST_BYTES]]
        written = os.pwritev(descriptor, together, at)
        at += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
