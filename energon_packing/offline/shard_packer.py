"""Packs one shard: makes each of its packs as the planned loader does, and writes it as arrays."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from energon_packing.drops import DroppedSample
from energon_packing.energon.packer import render_or_drop
from energon_packing.energon.samples import MeasuredSample, RenderedSample
from energon_packing.errors import UserError
from energon_packing.ledger import Ledger
from energon_packing.offline.kinds import KINDS
from energon_packing.offline.packed import PackedFacts, ShardEntry, media_path, shard_path
from energon_packing.offline.parquet import replacing
from energon_packing.offline.plan import Plan, PlannedPack, PlannedSample
from energon_packing.offline.planned_packs import PlannedPacks
from energon_packing.offline.shard_file import ShardFile, ShardWriter
from energon_packing.offline.stored_clips import StoredClips
from energon_packing.offline.stored_pack import StoredFile, StoredPack
from energon_packing.offline.tar_files import TarFiles, inside

AT_ONCE = 64
"""Packs whose rows of the plan are read together."""


class ShardPacker(ABC):
    """Packs shards of one directory; a subclass knows what a pack of its kind is stored as.

    Args:
        directory: with the plan in it.
        facts: its manifest, which may have no shards yet.
        plan: of the packs.
        encoder: see `SampleKind.packing_encoder`.

    Attributes:
        facts: as given.
    """

    def __init__(self, directory: Path, facts: PackedFacts, plan: Plan, encoder: Any) -> None:
        self._directory = directory
        self.facts = facts
        self._plan = plan
        self._encoder = encoder
        self.forget_open_files()

    def forget_open_files(self) -> None:
        """Opens everything anew when it is needed; for a fork, which may not use its parent's databases."""
        self._plan = copy.copy(self._plan)
        self._planned = PlannedPacks(self._plan, self._encoder)
        self._files = TarFiles()

    def found(self, number: int) -> ShardEntry | None:
        """What is known of a shard that is there already; None if it is not.

        Raises:
            UserError: it is damaged, or of another plan.
        """
        path = shard_path(self._directory, number)
        if not path.exists():
            return None
        shard = ShardFile(path)
        shard.close()
        found = shard.facts.get("plan"), shard.facts.get("settings")
        if found != (self.facts.plan, self._settings(number)):
            raise UserError(f"{path} was packed from another plan or with other settings; choose another --out")
        entry = entry_of(shard, number)
        copied = media_path(self._directory, number)
        if entry.media_bytes and not (copied.is_file() and copied.stat().st_size == entry.media_bytes):
            return None
        return entry

    def pack(self, number: int) -> ShardEntry:
        """Packs a shard, and its media if they are copied.

        Raises:
            UserError: a source shard is missing or changed, or the output cannot be written; nothing is left behind.
        """
        path = shard_path(self._directory, number)
        first, stop = self._span(number)
        try:
            with replacing(path) as aside, ShardWriter(aside) as writer:
                samples, drops = 0, list[tuple[str, str, str]]()
                with ExitStack() as stack:
                    media = None
                    if self.facts.media == "copy":
                        copied = stack.enter_context(replacing(media_path(self._directory, number)))
                        media = stack.enter_context(MediaCopy(copied, self._files))
                    for planned in self._planned_packs(first, stop):
                        stored = self._stored(planned, media)
                        samples += len(stored.order)
                        drops += [(each.key, *each.dropped) for each in stored.samples if each.dropped is not None]
                        writer.add(stored.to_bytes())
                # The media have their name before the shard that needs them.
                writer.finish(
                    {
                        "plan": self.facts.plan,
                        "settings": self._settings(number),
                        "packs": stop - first,
                        "samples": samples,
                        "drops": drops,
                        "media_bytes": media.bytes if media else 0,
                        "media_checksum": media.checksum if media else "",
                    }
                )
        except OSError as error:
            raise UserError(
                f"{path} cannot be written ({error.strerror or error}); free space or choose another --out, then run "
                "'energon-packing pack' again: it continues with the shards that are missing"
            ) from error
        entry = self.found(number)
        assert entry is not None, "the shard was renamed to its place"
        return entry

    def _span(self, number: int) -> tuple[int, int]:
        """The packs ``[first, stop)`` of a shard."""
        return self.facts.firsts[number], (*self.facts.firsts[1:], self.facts.packs)[number]

    def _settings(self, number: int) -> dict[str, Any]:
        first, stop = self._span(number)
        facts = self.facts
        return {
            "store": facts.store,
            "media": facts.media,
            "first": first,
            "stop": stop,
            "padded_rows": facts.padded_rows,
            **facts.encoder,
        }

    def _planned_packs(self, first: int, stop: int) -> Iterator[PlannedPack]:
        for start in range(first, stop, AT_ONCE):
            yield from self._plan.packs(start, min(start + AT_ONCE, stop))

    @abstractmethod
    def _stored(self, planned: PlannedPack, media: MediaCopy | None) -> StoredPack | StoredClips:
        """Makes one pack.

        Args:
            media: where compressed media are copied to; None leaves them where they are.
        """

    def _rendered(self, measured: Sequence[MeasuredSample]) -> list[RenderedSample | DroppedSample]:
        """Renders the samples of a pack; one that cannot be rendered is dropped."""
        # Nothing stops the packing of a shard but an error; how much may be dropped is a matter of all shards.
        ledger = Ledger(None, budget=1.0, name="", most_pending=len(measured) + 1)
        ledger.read = len(measured)
        found: list[RenderedSample | DroppedSample] = []
        for sample in measured:
            made = render_or_drop(self._encoder, sample, ledger)
            found.append(ledger.take_dropped()[0] if made is None else made)
        return found

    def _files_of(
        self, source: PlannedSample, sample: MeasuredSample, media: MediaCopy | None
    ) -> tuple[StoredFile, ...]:
        assert sample.measured is not None
        names = set(KINDS[self._plan.facts.kind].media_names(sample.measured))
        dataset = self._plan.facts.datasets[source.dataset]
        files = []
        for each in source.media:
            if each.name not in names:  # of another piece of a split sample
                continue
            if media is None:
                files.append(StoredFile(name=each.name, shard=each.shard, offset=each.offset, size=each.size))
                continue
            tar = inside(Path(dataset.media_root), dataset.media_shards[each.shard])
            files.append(
                StoredFile(name=each.name, shard=-1, offset=media.add(tar, each.offset, each.size), size=each.size)
            )
        return tuple(files)


def entry_of(shard: ShardFile, number: int) -> ShardEntry:
    """What the manifest says about a shard.

    Raises:
        UserError: the shard does not say it.
    """
    facts = shard.facts
    try:
        return ShardEntry(
            number=number,
            first=int(facts["settings"]["first"]),
            packs=shard.packs,
            bytes=shard.bytes,
            checksum=shard.checksum,
            media_bytes=int(facts["media_bytes"]),
            media_checksum=str(facts["media_checksum"]),
            samples=int(facts["samples"]),
            drops=dict(sorted(Counter(reason for _, reason, _ in facts["drops"]).items())),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{shard.path} is damaged ({error!r}); delete it and run 'energon-packing pack' again"
        ) from error


class MediaCopy:
    """Compressed media copied into one file, each once.

    Args:
        path: of the file.
        files: open tars.
    """

    def __init__(self, path: Path, files: TarFiles) -> None:
        self._file = path.open("wb", buffering=0)
        self._files = files
        self._digest = hashlib.sha256()
        self._places: dict[tuple[Path, int], int] = {}
        self.bytes = 0

    def __enter__(self) -> MediaCopy:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def checksum(self) -> str:
        """SHA-256 of the file."""
        return self._digest.hexdigest()

    def add(self, tar: Path, offset: int, size: int) -> int:
        """Copies a file of a tar; returns its offset in the copy.

        Raises:
            UserError: it cannot be read.
            OSError: it cannot be written.
        """
        place = self._places.get((tar, offset))
        if place is None:
            data = memoryview(self._files.read(tar, offset, size))
            self._digest.update(data)
            place = self._places[tar, offset] = self.bytes
            self.bytes += size
            while data:
                data = data[self._file.write(data) :]
        return place
