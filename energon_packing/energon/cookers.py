"""Cookers: turn the raw members of a converted data set into a conversation whose media are loaded later.

Nothing here raises for bad data. A sample that cannot be cooked carries a `Problem` instead, which the packing window
writes to the ledger. Energon would only print an exception raised in its map and count it against a tolerance.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import PurePosixPath
from typing import Any

from megatron.energon import Cooker, CrudeSample, basic_sample_keys, cooker, stateless
from megatron.energon.cache import FileStore
from megatron.energon.media import AVMetadata, ImageMetadata

from energon_packing.conversation import Conversation, Media
from energon_packing.energon.samples import ConversationSample, Problem
from energon_packing.energon.shard_reads import refuse_unreadable
from energon_packing.errors import SampleRejected
from energon_packing.stored_record import check_depth

TOO_DEEP = "the record's JSON is nested too deeply for Python to read"
"""Detail of ``too_deep`` where not even the parser finishes."""


@stateless
@cooker(need_primary=True)
def cook_record(sample: CrudeSample, primary: FileStore, media: FileStore | None = None) -> ConversationSample:
    """Reads ``<key>.json`` as `Conversation.to_record` wrote it.

    Args:
        sample: raw members; only ``json`` is read.
        primary: store of the data set itself, which holds the media of a monolithic data set.
        media: store of the auxiliary data set ``media`` of a polylithic data set.
    """
    store = primary if media is None else media
    keys = basic_sample_keys(sample)
    conversation = None
    try:
        text = sample["json"] if isinstance(sample["json"], bytes) else str(sample["json"]).encode()
        refuse_unreadable(text)
        record = json.loads(text)
        check_depth(text, record)
        conversation = Conversation.from_record(sample["__key__"], record)
        conversation = complete(conversation, store)
    except SampleRejected as error:
        problem = Problem(reason=error.reason, detail=error.detail)
        return ConversationSample(**keys, conversation=conversation, problem=problem)
    except RecursionError:
        return ConversationSample(**keys, conversation=None, problem=Problem(reason="too_deep", detail=TOO_DEEP))
    except Exception as error:  # whatever a record does to its reader, only this sample is lost
        return ConversationSample(**keys, conversation=None, problem=Problem(reason="bad_record", detail=repr(error)))
    return ConversationSample(**keys, conversation=conversation, store=store if conversation.media else None)


def complete(conversation: Conversation, store: FileStore) -> Conversation:
    """Fills in sizes that the record lacks from the media metadata of the data set.

    Raises:
        SampleRejected: ``media_outside_root`` for a name that leaves the store, ``unmeasured_media`` if the data set
            has no media metadata, ``missing_media`` if it has none for this name.
    """
    for media in conversation.media:
        for name in (media.name, *media.frame_names):
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise SampleRejected("media_outside_root", f"{media.kind} {name!r} points outside the data set")
    if all(media.width is not None for media in conversation.media):
        return conversation
    return dataclasses.replace(conversation, media=tuple(measured(media, store) for media in conversation.media))


def measured(media: Media, store: FileStore) -> Media:
    """Returns an image or video with the sizes that ``energon prepare --media-metadata-by-extension`` stored."""
    if media.width is not None:
        return media
    try:
        found = store.get_media_metadata(media.name)
    except KeyError as error:
        raise SampleRejected("missing_media", f"{media.kind} {media.name!r} is not in the data set") from error
    except (RuntimeError, NotImplementedError) as error:
        raise SampleRejected(
            "unmeasured_media",
            f"the size of {media.name!r} is unknown; run: energon prepare-media --media-metadata-by-extension DIR",
        ) from error
    if isinstance(found, ImageMetadata) and media.frame_names:
        return dataclasses.replace(media, width=found.width, height=found.height)
    if isinstance(found, ImageMetadata):
        return Media(kind=media.kind, name=media.name, width=found.width, height=found.height)
    if isinstance(found, AVMetadata):
        return Media(
            kind=media.kind,
            name=media.name,
            width=found.video_width,
            height=found.video_height,
            frames=found.video_num_frames,
            fps=found.video_fps,
            duration=found.video_duration,
        )
    raise SampleRejected("unmeasured_media", f"metadata of {media.name!r} is a {type(found).__name__}")


RECORD_COOKER: Cooker[Any] = Cooker(cook_record, has_subflavors={"energon_packing": "v1"})
"""Reads data sets that ``energon-packing convert`` wrote."""
