"""The packs of a plan, made from the source data sets: any pack by its position, on any rank, in any process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from energon_packing.energon.samples import MeasuredSample, Pack
from energon_packing.energon.window import attempt, piece_of
from energon_packing.errors import UserError
from energon_packing.ledger import Ledger
from energon_packing.offline.index import IndexedDataset, shard_status
from energon_packing.offline.kinds import KINDS
from energon_packing.offline.plan import Plan, PlannedSample
from energon_packing.offline.positioned_packs import Passes, PositionedPacks
from energon_packing.offline.shard_index import ShardIndex
from energon_packing.offline.source_part import PositionedMedia, SourcePart
from energon_packing.offline.tar_files import TarFiles, inside
from energon_packing.remote_files import shown

REMEDY = "bring the data set back as it was, or run 'energon-packing measure' and 'plan' again"


class PlannedSource:
    """A data set of a plan, whose shards are compared with what was measured when they are first read.

    Args:
        dataset: as the plan knows it.
        files: open tars.
    """

    def __init__(self, dataset: IndexedDataset, files: TarFiles) -> None:
        self._dataset = dataset
        self._files = files
        self._root, self._media_root = Path(dataset.root), Path(dataset.media_root)
        self._part = SourcePart(
            path=dataset.path,
            split=dataset.split,
            root=dataset.root,
            media_root=dataset.media_root,
            shards=tuple(shard.name for shard in dataset.shards),
            subflavors=dataset.subflavors,
        )
        self._compared: set[int] = set()
        self._media_compared = False
        self._media_index: ShardIndex | None = None

    def sample(self, planned: PlannedSample) -> Any:
        """The cooked sample, whose media are read when it is rendered.

        Raises:
            UserError: its shard is missing or is another than the one that was measured.
        """
        shard = self._dataset.shards[planned.shard]
        path = inside(self._root, shard.name)
        if planned.shard not in self._compared:
            self._compare(path, shard.identity)
            self._compared.add(planned.shard)
        if planned.media and not self._media_compared:
            self._compare_media(shard.identity)
            self._media_compared = True
        record = self._files.read(path, planned.offset, planned.size)
        media = {
            each.name: (inside(self._media_root, self._dataset.media_shards[each.shard]), each.offset, each.size)
            for each in planned.media
        }
        key = planned.key
        store = PositionedMedia(self._files, media, lambda name: self._metadata(key, name))
        return self._part.sample(key, record, store)

    def _compare(self, path: Path, identity: Mapping[str, Any]) -> None:
        """The time of the last change is left out: a copy of a data set is as good."""
        try:
            size, _ = shard_status(path)
        except OSError as error:
            raise UserError(f"{shown(path)}, a shard of the plan, is missing ({error.strerror}); {REMEDY}") from error
        uuid = ShardIndex.uuid_of(self._root) if not self._compared else identity["index_uuid"]
        if size != identity["bytes"] or uuid != identity["index_uuid"]:
            what = f"{size} bytes instead of {identity['bytes']}" if size != identity["bytes"] else "another index"
            raise UserError(f"{shown(path)} changed since it was measured ({what}); {REMEDY}")

    def _compare_media(self, identity: Mapping[str, Any]) -> None:
        known = identity.get("media_uuid")  # none where the media are among the records, or in an older plan
        if known is not None and ShardIndex.uuid_of(self._media_root) != known:
            raise UserError(
                f"{shown(self._media_root)}, the media of the plan, changed since they were measured (another index); "
                f"{REMEDY}"
            )

    def _metadata(self, key: str, name: str) -> Any:
        if self._media_index is None:
            self._media_index = ShardIndex(self._media_root)
        return self._media_index.media_metadata(key + name if name.startswith(".") else name)


class PlannedPacks(PositionedPacks):
    """The packs of a plan, each measured again and compared with the plan before it is rendered.

    Args:
        plan: of the packs.
        encoder: measures, renders and assembles, as online.
        rank: names the ledger's files.
    """

    def __init__(self, plan: Plan, encoder: Any, *, rank: int = 0) -> None:
        super().__init__(encoder, rank=rank, passes=Passes(plan.facts))
        self._plan = plan
        self._sources: list[PlannedSource] = []
        self._kind = KINDS[plan.facts.kind]
        self._measurer = _measuring_as(plan, encoder)

    def __len__(self) -> int:
        return len(self._plan)

    def _open(self) -> None:
        files = TarFiles()
        self._sources = [PlannedSource(each, files) for each in self._plan.facts.datasets]

    def _pack(self, number: int, ledger: Ledger) -> Pack | None:
        (planned,) = self._plan.packs(number, number + 1)
        samples = [self.measured(each) for each in planned.samples]
        rendered = []
        for each, sample in zip(planned.samples, samples, strict=True):
            place = {"data": self._plan.facts.datasets[each.dataset].root, "modality": sample.modality}
            ledger.count_read(**place)
            render = functools.partial(self._encoder.postencode_sample, sample)
            if (made := attempt(sample.__key__, render, ledger, **place)) is not None:
                rendered.append(made)
        if not rendered:
            return None
        return self._encoder.pack_selected_samples([rendered[at] for at in self._encoder.arrange(rendered)])

    def measured(self, planned: PlannedSample) -> MeasuredSample:
        """Measures a sample of the plan again, and compares it with the plan.

        Raises:
            UserError: its record or its length is another than the plan's.
        """
        self._opened()
        sample = self._measurer.preencode_sample(self._sources[planned.dataset].sample(planned))
        if planned.piece >= 0 and sample.split is not None and planned.piece < len(sample.split.pieces):
            sample = piece_of(sample, planned.piece)
        if sample.problem is not None and sample.problem.fatal is not None:
            raise sample.problem.fatal
        found = None if sample.measured is None else self._kind.planned_sizes(sample.measured)
        if found != planned.sizes:
            reason = sample.problem.detail if sample.problem else f"it has {found} {self._kind.sizes}"
            raise UserError(
                f"sample {planned.name} is planned with {planned.sizes} {self._kind.sizes} in {self._plan.path}, but "
                f"{reason}; {REMEDY}"
            )
        return sample


def _measuring_as(plan: Plan, encoder: Any) -> Any:
    """The encoder with the limits of the plan's packs, under which long samples were cut, split or resized.

    Those of the run may be wider: a smaller alignment multiple leaves more room in a row.
    """
    decided = plan.facts.decided
    measurer = copy.copy(encoder)
    measurer.multiple = int(decided["multiple"])
    measurer.limits = KINDS[plan.facts.kind].planned_limits(decided, encoder)
    return measurer
