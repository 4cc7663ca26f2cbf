"""Measures samples again for a plan, under the limits of its rows: what ``oversize`` and ``when_over`` make of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from energon_packing.encoders.sample_encoder import AnyMeasured
from energon_packing.energon.samples import MeasuredSample
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.energon.window import piece_of
from energon_packing.offline.index import Index, IndexedDataset, IndexedShard
from energon_packing.offline.plan import PlannedMedia, PlannedSample
from energon_packing.offline.planned_packs import PlannedSource
from energon_packing.offline.remeasured import Piece, Remeasured
from energon_packing.offline.tar_files import TarFiles


class SampleRemeasurer:
    """A `energon_packing.offline.remeasured.Remeasure`: reads the samples at their positions and measures them as the
    run will.

    Args:
        encoder: of the run.
        directories: indexes that the plan is made of.
    """

    def __init__(self, encoder: PackingTaskEncoder, directories: Sequence[str | Path]) -> None:
        self._encoder = encoder
        self._indexes = [Index.open(directory) for directory in directories]
        self._files = TarFiles()
        self._sources: dict[tuple[str, str], PlannedSource] = {}

    def __call__(self, dataset: IndexedDataset, shard: IndexedShard, rows: list[int]) -> list[Remeasured]:
        """One result per row.

        Raises:
            UserError: the shard is not the one that was measured, or a sample shows that the configuration cannot work.
        """
        name = dataset.root, dataset.split
        source = self._sources.setdefault(name, PlannedSource(dataset, self._files))
        (index,) = [each for each in self._indexes if dataset in each.datasets][:1]
        table = index.rows(dataset, shard, ("key", "offset", "size", "media")).take(rows).to_pylist()
        number = dataset.shards.index(shard)
        found = []
        for row, values in zip(rows, table, strict=True):
            media = tuple(PlannedMedia(**each) for each in values.pop("media") or ())
            planned = PlannedSample(
                dataset=0, shard=number, row=row, media=media, length=0, second=0, piece=-1, **values
            )
            sample = self._encoder.preencode_sample(source.sample(planned))
            if sample.problem is not None and sample.problem.fatal is not None:
                raise sample.problem.fatal
            if sample.split is None:
                found.append(Remeasured(pieces=(_piece(sample),)))
                continue
            pieces = tuple(_piece(piece_of(sample, piece)) for piece in range(len(sample.split.pieces)))
            found.append(Remeasured(pieces=pieces, split=True))
        return found


def _piece(sample: MeasuredSample) -> Piece:
    measured: AnyMeasured | None = sample.measured
    if measured is None:
        problem = sample.problem
        return Piece(
            reason=problem.reason if problem else "unmeasured", detail=problem.detail if problem else "no length"
        )
    first, second = (*measured.segment_lengths, 0)[:2]
    return Piece(length=first, second=second, images=measured.images, patches=measured.patches)
