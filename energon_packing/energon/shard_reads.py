"""Text shards that cannot be read everywhere: the samples there are lost by name, and the run goes on.

Energon ends a run where a tar breaks off, a block of it is damaged or a read fails. A read that fails is tried again
(`energon_packing.read_again`), and what an open tar remembers of it is let go. `guard_shards` puts a sample in
the place of each one that cannot be read: its record says where and why, and our cookers make a `Problem` of it, so
that it is in the ledger and the drop budget counts it.
"""

from __future__ import annotations

import functools
import tarfile
from collections.abc import Iterator
from typing import Any

from megatron.energon.source_info import SourceInfo

from energon_packing.energon.internals import FilteredSample, ITarReader
from energon_packing.energon.samples import forget_members
from energon_packing.errors import SampleRejected, UserError
from energon_packing.read_again import read_again

REASON = "unreadable_shard"
_MARK = b"\0unreadable shard: "
"""No JSON begins so."""


def guard_shards(dataset: Any, *, go_on: bool) -> None:
    """Watches the reading of all shards of a data set.

    Args:
        dataset: of Energon, before it is read.
        go_on: whether a sample of `REASON` takes the place of one that cannot be read, which our cookers understand;
            else the run ends with the name of the shard.
    """
    for reader in _readers(dataset, set()):
        reader._get_item_by_sample_pointer = functools.partial(
            _read, reader, reader._get_item_by_sample_pointer, go_on=go_on
        )


def refuse_unreadable(record: bytes) -> None:
    """Raises what the record of a sample that could not be read says.

    Raises:
        SampleRejected: ``unreadable_shard``, with shard, byte and cause.
    """
    if record.startswith(_MARK):
        raise SampleRejected(REASON, record[len(_MARK) :].decode("utf-8", "replace"))


def _read(reader: Any, read: Any, pointer: Any, restore_index: Any, *others: Any, go_on: bool, **named: Any) -> Any:
    place = reader.tar_filepaths[pointer.tar_file_id]

    def forget() -> None:  # the tar may stand anywhere
        reader.itar_files_cache.pop(pointer.tar_file_id, None)

    try:
        found = read_again(str(place), lambda: read(pointer, restore_index, *others, **named), forget)
        forget_members(reader)
        return found
    except (OSError, ValueError, EOFError, tarfile.TarError) as error:
        forget()
        shard = reader.tar_filenames[pointer.tar_file_id]
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        where = f"{reader.base_path}/{shard} at byte {pointer.byte_offset} ({pointer.byte_size} bytes): {cause}"
        if not go_on:
            raise UserError(f"A shard cannot be read: {where}. Restore it, or convert the data again.") from error
        return FilteredSample(
            __key__=f"{shard.removesuffix('.tar')}@{pointer.byte_offset}",
            __shard__=shard,
            __restore_key__=("Webdataset", restore_index),
            __sources__=(
                SourceInfo(dataset_path=reader.base_path, index=restore_index, shard_name=shard, file_names=()),
            ),
            json=_MARK + where.encode(),
        )


def _readers(dataset: Any, seen: set[int]) -> Iterator[Any]:
    """The readers of shards beneath a data set and its wrappers."""
    if id(dataset) in seen:
        return
    seen.add(id(dataset))
    for reader in getattr(dataset, "join_readers", ()):
        if isinstance(reader, ITarReader) and id(reader) not in seen:
            seen.add(id(reader))
            yield reader
    for each in getattr(dataset, "datasets", ()):
        yield from _readers(each, seen)
