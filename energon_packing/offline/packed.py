"""A packed directory: the packs of a plan as arrays, in shards that are ranges of the plan.

::

    DIR/packed.json         what is stored, and every shard with its checksum
    DIR/plan.parquet        the plan, byte for byte, with its drops beside it
    DIR/shard-00000.bin     packs, see `energon_packing.offline.shard_file`
    DIR/media-00000.bin     compressed images and videos of that shard, if they were copied
    DIR/drops.jsonl         samples that could not be decoded, if pixels are stored

Nothing in the files depends on when, where or by how many processes they were written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from energon_packing.errors import UserError
from energon_packing.offline.checked_fields import count, counts, mapping
from energon_packing.offline.data_paths import PACKED_FILE
from energon_packing.offline.parquet import replacing
from energon_packing.offline.plan import Plan
from energon_packing.offline.sample_kind import SampleKind

FORMAT = 1
PLAN_FILE = "plan.parquet"
DROPS_FILE = "drops.jsonl"
MOST_MANIFEST = 1 << 30
"""Bytes of a manifest that is read."""

Progress = Callable[[str, int, int], None]
"""Called with the stage, the packs that are done, and all packs of the command."""
Store = Literal["tokens", "pixels"]
Media = Literal["reference", "copy"]
STORES: tuple[Store, ...] = ("tokens", "pixels")
MEDIA: tuple[Media, ...] = ("reference", "copy")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """What the manifest knows of a shard.

    Attributes:
        number: from 0; its name follows from it.
        first, packs: the packs of the plan that it holds.
        bytes, checksum: of the file; `ShardFile.checksum`.
        media_bytes, media_checksum: of the copied media; 0 and empty if there are none.
        samples: in all its packs.
        drops: number of samples that could not be decoded, by reason.
    """

    number: int
    first: int
    packs: int
    bytes: int
    checksum: str
    media_bytes: int
    media_checksum: str
    samples: int
    drops: Mapping[str, int]


def _entry(values: Mapping[str, Any]) -> ShardEntry:
    """An entry of a manifest.

    Raises:
        KeyError, TypeError, ValueError: a field is missing or has another form.
    """
    numbers = ("number", "first", "packs", "bytes", "media_bytes", "samples")
    return ShardEntry(
        **{**values, **{name: count(values, name) for name in numbers}, "drops": mapping(values, "drops")}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedFacts:
    """What ``packed.json`` says.

    Attributes:
        plan: id of the plan.
        store: ``tokens``, or ``pixels`` with the rendered media.
        media: where the media are that have to be rendered: in their data sets, or in ``DIR``.
        shard_packs: the setting by which packs were divided among shards.
        firsts: first pack of each shard.
        packs: of all shards.
        padded_rows: ``packing.pad_to_max_length`` of the rows that are stored finished.
        encoder: what tokens, targets and positions depend on, by name; with ``pixels``, what pixels depend on too.
        media_uuids: for each data set, the identifier of the index of its media; None if they are in ``DIR``.
        shards: the entry of every shard; empty while some are missing.
    """

    plan: str
    store: Store
    media: Media
    shard_packs: int
    firsts: tuple[int, ...]
    packs: int
    padded_rows: bool
    encoder: Mapping[str, str]
    media_uuids: tuple[str | None, ...]
    shards: tuple[ShardEntry, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """All but the shards: what another command has to have alike to continue this one."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "shards"}

    def packs_of(self, number: int) -> int:
        """Packs of a shard."""
        return (*self.firsts[1:], self.packs)[number] - self.firsts[number]

    def save(self, directory: Path) -> None:
        """Writes the manifest, whole or not at all.

        Raises:
            OSError: the disk is full or read-only.
        """
        content = {"format": FORMAT, **asdict(self)}
        with replacing(directory / PACKED_FILE) as aside:
            aside.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> PackedFacts:
        """Reads the manifest.

        Raises:
            UserError: it is missing, damaged, or of another version.
        """
        file = directory / PACKED_FILE
        try:
            if file.stat().st_size > MOST_MANIFEST:
                raise ValueError("it is too large")
            found = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise UserError(
                f"{directory} is not a packed directory (it has no {PACKED_FILE}); make one with 'energon-packing pack'"
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{file} cannot be read ({error}); run 'energon-packing pack' again") from error
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise UserError(f"{file} is not a manifest of format {FORMAT}; pack again with this version")
        try:
            facts = cls(
                **{
                    **found,
                    "firsts": counts(found, "firsts"),
                    "packs": count(found, "packs"),
                    "encoder": mapping(found, "encoder"),
                    "media_uuids": tuple(found["media_uuids"]),
                    "shards": tuple(_entry(each) for each in found["shards"]),
                }
            )
            ends = (*facts.firsts[1:], facts.packs)
            if facts.store not in STORES or facts.media not in MEDIA or facts.firsts[0] != 0:
                raise ValueError("it names a store or a first pack that cannot be")
            if any(first >= end for first, end in zip(facts.firsts, ends, strict=True)):
                raise ValueError("its shards are not in order")
            placed = [(each.number, each.first, each.first + each.packs) for each in facts.shards]
            if placed and placed != [(at, *span) for at, span in enumerate(zip(facts.firsts, ends, strict=True))]:
                raise ValueError("its shards do not hold its packs")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(f"{file} is damaged ({error}); run 'energon-packing pack' again") from error
        return facts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packed:
    """An open packed directory.

    Attributes:
        directory: holds it.
        facts: its manifest.
        plan: the plan in it.
    """

    directory: Path
    facts: PackedFacts
    plan: Plan

    @classmethod
    def open(cls, directory: str | Path) -> Packed:
        """Reads manifest and metadata of the plan; no shard is opened.

        Raises:
            UserError: something is missing or damaged, or shards are still to be packed.
        """
        path = Path(directory)
        facts = PackedFacts.read(path)
        if not facts.shards:
            raise UserError(f"{path} is not complete; run 'energon-packing pack' again with the same arguments")
        plan = Plan.open(path / PLAN_FILE)
        known = plan.facts.id, len(plan), len(plan.facts.datasets)
        if known != (facts.plan, facts.packs, len(facts.media_uuids)):
            raise UserError(f"{plan.path} is not the plan that {path} was packed from; pack again")
        return cls(directory=path, facts=facts, plan=plan)


def shard_path(directory: Path, number: int) -> Path:
    """The packs of a shard."""
    return directory / f"shard-{number:05}.bin"


def media_path(directory: Path, number: int) -> Path:
    """The copied media of a shard."""
    return directory / f"media-{number:05}.bin"


def stored_fingerprint(kind: SampleKind, encoder: Any, store: Store) -> dict[str, str]:
    """What the stored packs depend on, by name: all that a state depends on, but for what the loader still decides."""
    return kind.stored_settings(encoder.encoder.fingerprint(), store)
