"""Memory that a process and its decoding child both map: files travel in it one way, and tensors the other.

A tensor is made where the parent reads it (`empty_result`), and the parent's tensors are that memory: nothing is
copied, and the same pages serve one sample after another, in the caches of both processes. A part of it is used again
when the last tensor in it is gone; until then the child can only read it. Small tensors, and those beyond `KEPT`, are
copied.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

ROOM = 768 << 20
"""Bytes for tensors; what is larger goes through the pipe. The kernel provides a page when it is used."""
KEPT = 256 << 20
"""Bytes of these, from the beginning, in which tensors of the parent may lie, and whose pages stay in use."""
FILES = 256 << 20
"""Bytes for the files of a sample."""
_KEPT_FILES = 64 << 20
_SMALL = 4096
"""Bytes: a smaller tensor is copied, which takes less time than to follow it."""
_ALIGN = 64
_GUARD = 1 << 20
"""Bytes before and after the rest that nobody may touch: a decoder that writes beyond the end of its memory may reach
the next mapping."""
_NONE, _READ, _WRITE = 0, 1, 2
"""Protections of mprotect(2)."""

_mprotect: Any = getattr(ctypes.CDLL(None), "mprotect", None)

Place = tuple[int, int]
"""Where a file lies in the memory, and its bytes."""


class Placed(NamedTuple):
    """Where a tensor lies in the memory; its bytes instead, if it does not fit."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    place: int
    data: bytes | None

    @property
    def bytes(self) -> int:
        """Its size in memory."""
        return math.prod(self.size) * self.dtype.itemsize


class SharedRoom:
    """The memory; made by the parent, before it forks.

    Args:
        room: bytes for tensors.
    """

    def __init__(self, room: int = ROOM) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, room + FILES + 2 * _GUARD, flags=flags)
        self._view = memoryview(self._memory)[_GUARD:-_GUARD]
        self._address = torch.frombuffer(self._view, dtype=torch.uint8, count=1).data_ptr()
        self._protect(-_GUARD, 0, _NONE)
        self._protect(room + FILES, room + FILES + _GUARD, _NONE)
        self.room, self._kept = room, min(KEPT, room // 3)
        self._held: dict[int, int] = {}  # first byte -> last one of each part that tensors of the parent lie in
        self._gone: deque[int] = deque()  # first bytes of those that no tensor lies in any more
        self._used, self._used_files = self._kept, _KEPT_FILES

    def free(self) -> int:
        """Returns the first byte that the next tensors may take; the parent calls it before it asks for them."""
        while self._gone:
            self._held.pop(self._gone.popleft())
        self._used = self._given_back(self._kept, self._used)
        return _whole_pages(max(self._held.values(), default=0))

    def put_files(self, files: Mapping[str, bytes]) -> dict[str, Place]:
        """Writes files; the next call overwrites them.

        Returns:
            Where each lies, by name, without those that do not fit.
        """
        self._used_files = self._given_back(self.room + _KEPT_FILES, self.room + self._used_files) - self.room
        places: dict[str, Place] = {}
        at = 0
        for name, data in files.items():
            if at + len(data) <= FILES:
                places[name] = self.room + at, len(data)
                self._view[self.room + at : self.room + at + len(data)] = data
                at += len(data)
        self._used_files = max(self._used_files, at)
        return places

    def file(self, place: Place) -> bytes:
        """Returns a copy of a file."""
        return bytes(self._view[place[0] : place[0] + place[1]])

    def taken(self, made: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
        """Returns what a child described, with its tensors.

        Args:
            made: what `Results.put` returned there.
            start, end: the part of the memory that its tensors lie in.
        """
        self._used = max(self._used, end)
        held = None
        if start < end <= self._kept:
            held = self._view[start:end]
            self._held[start] = end
            weakref.finalize(held, self._gone.append, start).atexit = False
        return {name: self._taken(value, held, start) for name, value in made.items()}

    def _taken(self, value: Any, held: memoryview | None, start: int) -> Any:
        if isinstance(value, Mapping):
            return {name: self._taken(inner, held, start) for name, inner in value.items()}
        if not isinstance(value, Placed):
            return value
        if value.data is not None:
            flat = torch.frombuffer(bytearray(value.data), dtype=value.dtype) if value.data else torch.empty(0)
            return flat.to(value.dtype).as_strided(value.size, value.stride)
        if held is None or value.bytes < _SMALL:
            return self.tensor(value).clone()
        # The tensor keeps `held`, whose end frees this part.
        return _tensor(held, value, value.place - start)

    def tensor(self, placed: Placed) -> torch.Tensor:
        """Returns the memory of a tensor, as a tensor."""
        return _tensor(self._view, placed, placed.place)

    def place_of(self, tensor: torch.Tensor) -> int:
        """Returns where the first byte of a tensor lies, if it lies in this memory."""
        return tensor.data_ptr() - self._address

    def leave_alone(self, start: int) -> None:
        """Lets this process, the child, write nowhere but from byte `start` on, and not to files.

        A decoder that writes where it should not then ends its process, and changes no tensor of another sample.
        """
        self._protect(0, start, _READ)
        self._protect(start, self.room, _READ | _WRITE)
        self._protect(self.room, self.room + FILES, _READ)

    def _protect(self, first: int, last: int, allowed: int) -> None:
        if last > first and _mprotect is not None:
            _mprotect(ctypes.c_void_p(self._address + first), ctypes.c_size_t(last - first), allowed)

    def _given_back(self, first: int, last: int) -> int:
        """Returns pages to the kernel, from byte `first` on; returns `first`."""
        whole = _whole_pages(first)
        if last > whole and hasattr(mmap, "MADV_REMOVE"):
            self._memory.madvise(mmap.MADV_REMOVE, _GUARD + whole, last - whole)
        return first


class Results:
    """The part of the memory that a child makes the tensors of one sample in.

    Args:
        room: the memory.
        start: its first free byte.
    """

    def __init__(self, room: SharedRoom, start: int) -> None:
        self._room, self.start, self.end = room, start, start

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Returns a tensor in the memory, with any values; None if it does not fit."""
        size = tuple(shape)
        placed = self._place(dtype, size, torch.empty(size, device="meta").stride())
        return None if placed is None else self._room.tensor(placed)

    def put(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a mapping with its tensors, in mappings in it too, as `Placed`; those elsewhere are copied."""
        return {name: self._put(value) for name, value in made.items()}

    def _put(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: self._put(inner) for name, inner in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        size, stride = tuple(value.shape), tuple(torch.empty_like(value, device="meta").stride())
        count = value.numel() * value.element_size()
        place = self._room.place_of(value)
        if self.start <= place and place + count <= self.end and value.stride() == stride:
            return Placed(value.dtype, size, stride, place, None)
        placed = self._place(value.dtype, size, stride)
        if placed is not None:
            self._room.tensor(placed).copy_(value)
            return placed
        dense = torch.empty_like(value).copy_(value)
        data = bytes(dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()) if count else b""
        return Placed(value.dtype, size, stride, 0, data)

    def _place(self, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> Placed | None:
        placed = Placed(dtype, size, stride, self.end, None)
        if not placed.bytes or self.end + placed.bytes > self._room.room:
            return None
        self.end += -(-placed.bytes // _ALIGN) * _ALIGN
        return placed


_results: Results | None = None


def make_results_in(results: Results | None) -> None:
    """Sets where `empty_result` takes memory in this process."""
    global _results
    _results = results


def empty_result(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor with any values, for pixels of a sample: in a decoding child, in the parent's memory."""
    made = None if _results is None else _results.empty(shape, dtype)
    return torch.empty(tuple(shape), dtype=dtype) if made is None else made


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _tensor(memory: Any, placed: Placed, offset: int) -> torch.Tensor:
    flat = torch.frombuffer(memory, dtype=placed.dtype, count=math.prod(placed.size), offset=offset)
    return flat.as_strided(placed.size, placed.stride)
