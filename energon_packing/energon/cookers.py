"""Cookers: turn the raw members of a converted data set into a conversation whose media are loaded later.

Nothing here raises for bad data. A sample that cannot be cooked carries a `Problem` instead, which the packing window
writes to the ledger. Energon would only print an exception raised in its map and count it against a tolerance.

Energon also ends a run where a tar breaks off, is damaged or cannot be read; `guard_shards` puts a sample in the place
of each one that cannot be read, so that it is in the ledger and the drop budget counts it.
"""

import dataclasses
import errno
import functools
import json
import os
import sqlite3
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from megatron.energon import Cooker, CrudeSample, basic_sample_keys, cooker, stateless
from megatron.energon.cache import FileStore
from megatron.energon.media import AVMetadata, ImageMetadata
from megatron.energon.source_info import SourceInfo

from energon_packing.conversation import Conversation, Media
from energon_packing.convert.layout import META_DIRECTORY
from energon_packing.energon import samples
from energon_packing.energon.internals import FilteredSample, ITarReader
from energon_packing.errors import SampleRejected, UserError, read_again
from energon_packing.stored_record import check_depth

REASON = "unreadable_shard"
_MARK = b"\0unreadable shard: "  # no JSON begins so


def guard_shards(dataset: Any, *, go_on: bool) -> None:
    """Watches the reading of all shards of a data set, before it is read; a read that fails is tried again. With
    ``go_on``, a sample of `REASON`, which our cookers understand, takes the place of one that cannot be read; else the
    run ends with the name of the shard."""
    for reader in {id(reader): reader for reader in _readers(dataset)}.values():
        reader._get_itar_sample_pointer = functools.partial(_find, reader, reader._get_itar_sample_pointer)
        read = reader._get_item_by_sample_pointer
        reader._get_item_by_sample_pointer = functools.partial(_read, reader, read, go_on=go_on)


def record_of(sample: CrudeSample) -> Any:
    """Returns the JSON in ``<key>.json`` of raw members. Raises `SampleRejected`: ``too_deep``; ``unreadable_shard``,
    with shard, byte and cause, of one that stands for a sample that could not be read; and whatever JSON raises."""
    text = sample["json"] if isinstance(sample["json"], bytes) else str(sample["json"]).encode()
    if text.startswith(_MARK):
        raise SampleRejected(REASON, text[len(_MARK) :].decode("utf-8", "replace"))
    record = json.loads(text)
    check_depth(text, record)
    return record


def _find(reader: Any, find: Any, index: Any) -> Any:
    def forget() -> None:
        for cache in (getattr(reader, "cached_offset_reader", None), reader):
            getattr(cache, "tar_index_reader_cache", getattr(cache, "index_reader_cache", {})).clear()

    return read_again(reader.base_path, lambda: find(index), forget)


def _read(reader: Any, read: Any, pointer: Any, restore_index: Any, *others: Any, go_on: bool, **named: Any) -> Any:
    place = reader.tar_filepaths[pointer.tar_file_id]

    def forget() -> None:  # the tar may stand anywhere
        reader.itar_files_cache.pop(pointer.tar_file_id, None)

    try:
        found = read_again(place, lambda: read(pointer, restore_index, *others, **named), forget)
        samples.forget_members(reader)
        return found
    except (OSError, ValueError, EOFError, tarfile.TarError) as error:
        forget()
        shard = reader.tar_filenames[pointer.tar_file_id]
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        where = f"{reader.base_path}/{shard} at byte {pointer.byte_offset} ({pointer.byte_size} bytes): {cause}"
        if not go_on:
            raise UserError(f"A shard cannot be read: {where}. Restore it, or convert the data again.") from error
        source = SourceInfo(dataset_path=reader.base_path, index=restore_index, shard_name=shard, file_names=())
        return FilteredSample(
            __key__=f"{shard.removesuffix('.tar')}@{pointer.byte_offset}",
            __shard__=shard,
            __restore_key__=("Webdataset", restore_index),
            __sources__=(source,),
            json=_MARK + where.encode(),
        )


def _readers(dataset: Any) -> Iterator[Any]:
    """Yields the readers of shards beneath a data set and its wrappers; of one that is there twice, twice."""
    yield from (reader for reader in getattr(dataset, "join_readers", ()) if isinstance(reader, ITarReader))
    for each in getattr(dataset, "datasets", ()):
        yield from _readers(each)


@stateless
@cooker(need_primary=True)
def cook_record(sample: CrudeSample, primary: FileStore, media: FileStore | None = None) -> samples.ConversationSample:
    """Reads ``<key>.json``, alone of the raw members of ``sample``, as `Conversation.to_record` wrote it. ``primary``
    is the store of the data set itself, which holds the media of a monolithic data set."""
    store = primary if media is None else media
    keys = basic_sample_keys(sample)
    conversation = None
    try:
        conversation = Conversation.from_record(sample["__key__"], record_of(sample))
        conversation = complete(conversation, store)
        used = store if conversation.media else None
        return samples.ConversationSample(**keys, conversation=conversation, store=used)
    except (SampleRejected, UserError) as error:  # the second where the store is away
        problem = samples.Problem.of(error)
    except RecursionError:
        detail = "the record's JSON is nested too deeply for Python to read"
        conversation, problem = None, samples.Problem(reason="too_deep", detail=detail)
    except Exception as error:  # whatever a record does to its reader, only this sample is lost
        conversation, problem = None, samples.Problem(reason="bad_record", detail=repr(error))
    return samples.ConversationSample(**keys, conversation=conversation, problem=problem)


def complete(conversation: Conversation, store: FileStore) -> Conversation:
    """Fills in sizes that the record lacks from the media metadata of the data set. Raises SampleRejected:
    ``media_outside_root`` for a name that leaves the store, ``unmeasured_media`` if the data set has no media metadata,
    ``missing_media`` if it has none for this name."""
    for media in conversation.media:
        for name in (media.name, *media.frame_names):
            if name.startswith("/") or ".." in PurePosixPath(name).parts:
                raise SampleRejected("media_outside_root", f"{media.kind} {name!r} points outside the data set")
    if all(media.width is not None for media in conversation.media):
        return conversation
    return dataclasses.replace(conversation, media=tuple(measured(media, store) for media in conversation.media))


def _metadata(store: FileStore, name: str) -> Any:
    try:
        return store.get_media_metadata(name)
    except RuntimeError as error:
        if isinstance(error.__cause__, sqlite3.Error):
            raise error.__cause__ from None  # `read_again` knows which of them are the store's
        if os.path.isabs(root := str(store.get_path())) and (place := samples.lost_folder(root)):  # all that it sees
            raise FileNotFoundError(errno.ENOENT, f"{place} {samples.LOST}", f"{root}/{META_DIRECTORY}") from error
        raise


def _forget_metadata(store: Any) -> None:
    samples.forget_open_tars(store)
    if hasattr(store, "_media_metadata_available"):
        store._media_metadata_available = None  # else what could not be looked at once is never looked at again
    if hasattr(store, "_media_metadata_reader"):
        store._media_metadata_reader, store._media_metadata_checked = None, False


def measured(media: Media, store: FileStore) -> Media:
    """Returns an image or video with the sizes that ``energon prepare --media-metadata-by-extension`` stored."""
    if media.width is not None:
        return media
    try:
        place = f"{store.get_path()}: {media.name}"
        found = read_again(place, lambda: _metadata(store, media.name), lambda: _forget_metadata(store))
    except KeyError as error:
        raise SampleRejected("missing_media", f"{media.kind} {media.name!r} is not in the data set") from error
    except (RuntimeError, NotImplementedError, sqlite3.Error) as error:
        fix = "run: energon prepare-media --media-metadata-by-extension DIR"
        raise SampleRejected("unmeasured_media", f"the size of {media.name!r} is unknown; {fix}") from error
    if isinstance(found, ImageMetadata):
        known = media if media.frame_names else Media(kind=media.kind, name=media.name)
        return dataclasses.replace(known, width=found.width, height=found.height)
    if not isinstance(found, AVMetadata):
        raise SampleRejected("unmeasured_media", f"metadata of {media.name!r} is a {type(found).__name__}")
    return Media(
        kind=media.kind,
        name=media.name,
        width=found.video_width,
        height=found.video_height,
        frames=found.video_num_frames,
        fps=found.video_fps,
        duration=found.video_duration,
    )


RECORD_COOKER: Cooker[Any] = Cooker(cook_record, has_subflavors={"energon_packing": "v1"})
"""Reads data sets that ``energon-packing convert`` wrote."""
