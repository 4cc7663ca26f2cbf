"""Memory that processes of one host share by a file descriptor, for the large tensors of a pack.

A block has no name in any file system: it is the memory that a loader's worker allocated for its tensor, or an
anonymous file (``memfd_create``). The kernel frees it when the last process has closed it, however that process ended,
so nothing remains in ``/dev/shm``.

Every reader of a block, the rank that wrote it included, maps it privately: a page that a training step writes to
becomes a copy of its own, and no other rank sees the change.
"""

from __future__ import annotations

import mmap
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

LARGE = 1 << 20
"""Bytes from which a tensor gets a block; smaller ones travel inside the message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedBlock:
    """Bytes of a file in memory.

    Attributes:
        descriptor: of the file; open as long as the block exists.
        start: first byte.
        size: number of bytes.
    """

    descriptor: int
    start: int
    size: int
    _keeper: Any = field(repr=False, compare=False)

    @classmethod
    def new(cls, size: int) -> SharedBlock:
        """A block of zeros."""
        descriptor = os.memfd_create("energon-packing", os.MFD_CLOEXEC)
        keeper = _Descriptor(descriptor)
        os.ftruncate(descriptor, size)
        return cls(descriptor=descriptor, start=0, size=size, _keeper=keeper)

    @classmethod
    def received(cls, descriptor: int, start: int, size: int) -> SharedBlock:
        """The block of a descriptor that is this process's own; closes it in the end."""
        return cls(descriptor=descriptor, start=start, size=size, _keeper=_Descriptor(descriptor))

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SharedBlock:
        """A block with the bytes of a tensor on the host.

        Takes the memory in which a loader's worker sent the tensor, and copies it if there is none: a tensor that was
        made in this process, was moved to page-locked memory, or is not contiguous.
        """
        storage = tensor.untyped_storage()
        by_descriptor = multiprocessing.get_sharing_strategy() == "file_descriptor"
        if by_descriptor and tensor.is_contiguous() and storage.is_shared():
            descriptor, _ = storage._share_fd_cpu_()
            if descriptor >= 0:  # it belongs to the storage, which need not be kept
                start = int(tensor.storage_offset()) * tensor.itemsize
                return cls.received(os.dup(descriptor), start, tensor.nbytes)
        block = cls.new(tensor.nbytes)
        left = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        while left:  # writing clears no page beforehand, unlike a mapping
            left = left[os.pwrite(block.descriptor, left, block.size - len(left)) :]
        return block

    def view(self, *, private: bool = True) -> torch.Tensor:
        """The bytes, uint8 ``[size]``; they outlive the descriptor.

        Args:
            private: whether what is written to the tensor stays in it; False writes to the block.
        """
        if not self.size:
            return torch.empty(0, dtype=torch.uint8)
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        memory = mmap.mmap(self.descriptor, self.start + self.size, flags=flags)
        return torch.frombuffer(memory, dtype=torch.uint8, count=self.size, offset=self.start)


class _Descriptor:
    """Closes a file descriptor with its last reference."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __del__(self) -> None:
        os.close(self._number)


def host_identity() -> tuple[Any, ...]:
    """Equal for two processes that can pass descriptors to each other; unique where that is not supported.

    They need one kernel and one network name space, in which addresses of Unix sockets are visible.
    """
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if sys.platform != "linux" or not boot.exists() or not network.exists():
        return ("process", os.urandom(16).hex())
    name_space = network.stat()
    return ("host", boot.read_text().strip(), name_space.st_dev, name_space.st_ino)
