"""The stores for the samples of a conversion, one class per layout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.energon_index import prepare
from energon_packing.convert.layout import (
    MEDIA_DIRECTORY,
    TEXT_DIRECTORY,
    media_names,
    subflavors_of,
    write_metadataset,
)
from energon_packing.convert.media_files import MediaFile
from energon_packing.convert.shards import ShardWriter
from energon_packing.convert.tensor_files import TensorFile

Progress = Callable[[str, int, int], None]
"""Called as ``progress(stage, done, total)``; stages are ``read`` (bytes), ``write`` (samples), ``index`` (shards)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredShards:
    """The final size of a store: bytes of media and of records (without tar headers), and the number of tars."""

    media_bytes: int
    record_bytes: int
    shards: int


class SampleStore(Protocol):
    """Stores samples in one layout."""

    def add(self, split: str, key: str, record: bytes, names: list[str]) -> None:
        """Writes one sample; `names` are the content names of its media, one per mention."""

    def finish(self, splits: list[str], tell: Progress) -> StoredShards:
        """Lets Energon index the shards; called after the exit stack that the store was given has closed them."""


class PolylithicStore:
    """Records in ``text``, each distinct media file once in ``media``, in the order of first mention."""

    def __init__(
        self, config: ConvertConfig, media: dict[str, MediaFile | TensorFile], build: Path, stack: ExitStack
    ) -> None:
        self._config = config
        self._media = media
        self._build = build
        self._stored: set[str] = set()
        text = build / TEXT_DIRECTORY
        self._text = {
            split: stack.enter_context(ShardWriter(text, split, max_samples=config.samples_per_shard))
            for split in config.split
        }
        self._media_shards = stack.enter_context(
            ShardWriter(build / MEDIA_DIRECTORY, "media", max_bytes=config.media_shard_bytes)
        )

    def add(self, split: str, key: str, record: bytes, names: list[str]) -> None:
        """Writes the record and any of its media that no earlier sample had."""
        self._text[split].begin_sample()
        self._text[split].add_bytes(f"{key}.json", record)
        for name in names:
            if name not in self._stored:
                self._stored.add(name)
                self._media_shards.begin_sample()
                self._media_shards.add_media(name, self._media[name])

    def finish(self, splits: list[str], tell: Progress) -> StoredShards:
        """Indexes both data sets and writes the metadataset that joins them; without media there is no second one."""
        text_shards = {name: count for writer in self._text.values() for name, count in writer.shards.items()}
        media_shards = self._media_shards.shards
        total = len(text_shards) + len(media_shards)
        tell("index", 0, total)
        workers = max(1, self._config.workers)
        subflavors = subflavors_of(self._config.format)
        prepare(self._build / TEXT_DIRECTORY, text_shards, splits, (), workers=workers, subflavors=subflavors)
        tell("index", len(text_shards), total)
        if media_shards:
            entries = ((name, self._media[name]) for name in self._stored)
            prepare(self._build / MEDIA_DIRECTORY, media_shards, ["media"], entries, workers=workers)
        else:
            (self._build / MEDIA_DIRECTORY).rmdir()
        write_metadataset(self._build, splits, with_media=bool(media_shards), subflavors=subflavors)
        tell("index", total, total)
        return StoredShards(
            media_bytes=self._media_shards.bytes,
            record_bytes=sum(writer.bytes for writer in self._text.values()),
            shards=total,
        )


class MonolithicStore:
    """Each sample's record and media together in one WebDataset."""

    def __init__(
        self, config: ConvertConfig, media: dict[str, MediaFile | TensorFile], build: Path, stack: ExitStack
    ) -> None:
        self._config = config
        self._media = media
        self._build = build
        self._entries: list[tuple[str, MediaFile | TensorFile]] = []
        self._record_bytes = 0
        self._shards = {
            split: stack.enter_context(ShardWriter(build, split, max_samples=config.samples_per_shard))
            for split in config.split
        }

    def add(self, split: str, key: str, record: bytes, names: list[str]) -> None:
        """Writes the record and, next to it, each of its distinct media."""
        writer = self._shards[split]
        writer.begin_sample()
        writer.add_bytes(f"{key}.json", record)
        self._record_bytes += len(record)
        distinct = list(dict.fromkeys(names))
        for name, suffix in zip(distinct, media_names("monolithic", distinct), strict=True):
            writer.add_media(key + suffix, self._media[name])
            self._entries.append((key + suffix, self._media[name]))

    def finish(self, splits: list[str], tell: Progress) -> StoredShards:
        """Indexes the one data set."""
        shards = {name: count for writer in self._shards.values() for name, count in writer.shards.items()}
        tell("index", 0, len(shards))
        prepare(
            self._build,
            shards,
            splits,
            self._entries,
            workers=max(1, self._config.workers),
            subflavors=subflavors_of(self._config.format),
        )
        tell("index", len(shards), len(shards))
        written = sum(writer.bytes for writer in self._shards.values())
        return StoredShards(
            media_bytes=written - self._record_bytes, record_bytes=self._record_bytes, shards=len(shards)
        )
