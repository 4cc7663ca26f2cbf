"""One pack as it is stored: its row without pixels, or with them, and what is known about its samples.

A pack is stored in one of two forms:

* *finished*: its row is the row of the planned pack, with pixels as bytes or without any media;
* *parts*: its media are still to be rendered, so its row holds the samples side by side without media, unaligned, and
  each sample says what to render and where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from energon_packing.conversation import Media
from energon_packing.families.base import MediaPlan
from energon_packing.offline.stored_arrays import DamagedBytes, from_bytes, to_bytes
from energon_packing.offline.stored_rows import decode_row, encode_row
from energon_packing.thd.batch import PackedBatch
from energon_packing.thd.checks import check_thd


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredMedia:
    """The media of one segment, as `energon_packing.encoders.decoding.HasMedia`."""

    media: tuple[Media, ...]
    plans: tuple[MediaPlan, ...]
    settings: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """Where a file that a sample shows lies.

    Attributes:
        name: as the record names it.
        shard: number of its tar in the data set's `IndexedDataset.media_shards`; -1 for the media that were copied
            beside the packs.
        offset: of its first byte.
        size: bytes.
    """

    name: str
    shard: int
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSample:
    """A sample of a pack.

    Attributes:
        key: as the online loader knows it.
        dataset: number in `PlanFacts.datasets`.
        segments: rows that it has in the pack: 1, or 2 for a preference pair; 0 if it was dropped.
        cost: by `energon_packing.packing.balance.pack_cost`.
        changes: how it differs from its record.
        media: of each segment; empty if nothing has to be rendered.
        files: that rendering reads.
        dropped: reason and detail if it could not be decoded when the pack was stored.
        modality: of its record, for counting; empty in directories of an older release.
    """

    key: str
    dataset: int
    segments: int = 1
    cost: int = 0
    changes: tuple[tuple[str, str], ...] = ()
    media: tuple[StoredMedia, ...] = ()
    files: tuple[StoredFile, ...] = ()
    dropped: tuple[str, str] | None = None
    modality: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPack:
    """A pack.

    Attributes:
        samples: in the order of the plan.
        order: the samples that are in the row, in the order of the row, as positions in ``samples``.
        finished: which of the two forms it has.
        batch: the row; None if no sample is in it.
    """

    samples: tuple[StoredSample, ...]
    order: tuple[int, ...]
    finished: bool
    batch: PackedBatch | None

    def sizes(self) -> list[tuple[int, ...]]:
        """Tokens of each segment of the samples of ``order``; see `PlannedSample.sizes`."""
        lengths = iter(() if self.batch is None else self.batch.sample_lengths)
        return [tuple(next(lengths) for _ in range(self.samples[at].segments)) for at in self.order]

    def broken(self, multiple: int) -> list[str]:
        """Invariants of the row that do not hold, with the alignment of the plan; see `check_thd`."""
        return [] if self.batch is None else check_thd(self.batch, multiple=multiple if self.finished else 1)

    def to_bytes(self) -> list[bytes | memoryview]:
        """Parts of a record; `from_bytes` reads it back."""
        values, arrays = ({}, {}) if self.batch is None else encode_row(self.batch)
        samples = [_sparse(asdict(sample)) for sample in self.samples]
        said = {"samples": samples, "order": self.order, "finished": self.finished, "row": values}
        return to_bytes(said, arrays)

    @classmethod
    def from_bytes(cls, buffer: memoryview) -> StoredPack:
        """A pack from its record.

        Raises:
            DamagedBytes: the bytes are no pack.
        """
        values, arrays = from_bytes(buffer)
        try:
            samples = tuple(_sample(each) for each in values["samples"])
            order = tuple(int(at) for at in values["order"])
            if sorted(order) != [at for at, sample in enumerate(samples) if sample.dropped is None]:
                raise DamagedBytes(f"its order {order} does not name each of its samples once")
            batch = decode_row(values["row"], arrays) if values["row"] else None
            if (batch is None) != (not order) or (
                batch is not None and batch.num_samples != sum(samples[at].segments for at in order)
            ):
                raise DamagedBytes("its row has another number of segments than its samples")
            return cls(samples=samples, order=order, finished=bool(values["finished"]), batch=batch)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            if isinstance(error, DamagedBytes):
                raise
            raise DamagedBytes(f"it is no stored pack ({type(error).__name__}: {error})") from error


def _sparse(value: Any) -> Any:
    """A mapping without what is empty, and so on inside."""
    if isinstance(value, dict):
        return {name: _sparse(each) for name, each in value.items() if each is not None and each != () and each != ""}
    if isinstance(value, list | tuple):
        return [_sparse(each) for each in value]
    return value


def _sample(values: Mapping[str, Any]) -> StoredSample:
    if not values.get("media"):
        made = StoredSample(**{**values, "changes": _pairs(values.get("changes", ()))})
        return replace(made, dropped=tuple(made.dropped)) if made.dropped is not None else made  # type: ignore[arg-type]
    media = tuple(
        StoredMedia(
            media=tuple(_media(each) for each in segment.get("media", ())),
            plans=tuple(_plan(each) for each in segment.get("plans", ())),
            settings=_pairs(segment.get("settings", ())),
        )
        for segment in values["media"]
    )
    files = tuple(StoredFile(**each) for each in values.get("files", ()))
    return StoredSample(**{**values, "media": media, "files": files, "changes": _pairs(values.get("changes", ()))})


def _pairs(values: Any) -> Any:
    return tuple((name, value) for name, value in values)


def _media(values: Mapping[str, Any]) -> Media:
    listed = {name: tuple(values.get(name, ())) for name in ("frame_names", "frame_times")}
    return Media(**{**values, **listed})


def _plan(values: Mapping[str, Any]) -> MediaPlan:
    listed = {name: tuple(values.get(name, ())) for name in ("grid", "runs", "frame_indices", "timestamps")}
    return MediaPlan(**{**values, **listed})
