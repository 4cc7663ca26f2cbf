"""Pickled lists of encoded files, as Bridge's ChatML data sets hold them, read without running anything in them.

A pickle is a program. This reader looks through its instructions first and takes only those that make lists, tuples,
bytes and texts; one that names a class or calls a function is refused, and so is one that asks for room that its own
size does not explain.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

from energon_packing.errors import SampleRejected

_ALLOWED = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE"),
        *("EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    )
)
_PUTS = ("BINPUT", "LONG_BINPUT")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # never reached: no allowed instruction names a class
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_files(content: bytes, where: str) -> list[bytes]:
    """A pickled list of files.

    Raises:
        SampleRejected: ``unsafe_pickle`` for one with other instructions, ``corrupt_media`` for one that is damaged or
            holds anything else.
    """
    return _files(_list(_read(content, where), where), where)


def read_frame_lists(content: bytes, where: str) -> list[list[bytes]]:
    """A pickled list of videos, each a list of frames; raises as `read_files` does."""
    videos = _list(_read(content, where), where)
    if sum(len(video) for video in videos if isinstance(video, list | tuple)) > len(content):
        raise SampleRejected("unsafe_pickle", f"{where}: the pickle repeats lists of frames beyond its own size")
    lists = [_list(video, where) for video in videos]
    files = iter(_files([frame for frames in lists for frame in frames], where))
    return [[next(files) for _ in frames] for frames in lists]


def _read(content: bytes, where: str) -> Any:
    count = 0
    try:
        for instruction, argument, _ in pickletools.genops(content):
            count += 1
            if instruction.name not in _ALLOWED:
                raise SampleRejected(
                    "unsafe_pickle",
                    f"{where}: the pickle has the instruction {instruction.name}; only lists of bytes are read, so "
                    "store encoded files",
                )
            if instruction.name in _PUTS and isinstance(argument, int) and argument > count:
                raise SampleRejected("unsafe_pickle", f"{where}: the pickle numbers its values up to {argument}")
        return _Unpickler(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise SampleRejected("corrupt_media", f"{where}: the pickle is damaged: {str(error)[:200]}") from error


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise SampleRejected("corrupt_media", f"{where}: the pickle holds {type(value).__name__}, expected a list")
    return list(value)


def _files(values: list[Any], where: str) -> list[bytes]:
    """Each of these as bytes. A pickle may name one value many times in two bytes each; it is copied once."""
    copied = {id(value): _bytes(value, where) for value in values}
    return [copied[id(value)] for value in values]


def _bytes(value: Any, where: str) -> bytes:
    if not isinstance(value, bytes | bytearray):
        raise SampleRejected("corrupt_media", f"{where}: the pickle holds {type(value).__name__}, expected bytes")
    return bytes(value)
