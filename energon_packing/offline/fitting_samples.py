"""Which samples of an index fit a pack, what becomes of the others, and why a sample is dropped."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from energon_packing.errors import PackingError, UserError
from energon_packing.offline import array_limits
from energon_packing.offline.array_limits import AnyLimits, SizedRow, Sizes
from energon_packing.offline.kinds import kind_of_config
from energon_packing.offline.remeasured import Piece, Remeasure, Remeasured, changes_samples
from energon_packing.offline.sample_kind import AnyRun
from energon_packing.offline.sources import Sources


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """A sample, or a piece of one, that is in no pack.

    Attributes:
        source: its number in `Sources`.
        key: of the sample; of a piece, ``KEY#PIECE``.
        reason, detail: as in the ledger of an online run.
        setting: the setting that dropped it; None if it is dropped under every setting of a plan.
    """

    source: int
    key: str
    reason: str
    detail: str
    setting: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samples:
    """What can be packed: N samples and pieces, in the order of the sources.

    Attributes:
        source: ``[N]`` int64, ascending; pieces of one sample share it.
        piece: ``[N]`` int16, -1 for a whole sample.
        sizes: of each.
    """

    source: np.ndarray
    piece: np.ndarray
    sizes: Sizes

    def __len__(self) -> int:
        return int(self.source.size)


def fitting_samples(
    sources: Sources, limits: AnyLimits, config: AnyRun, remeasure: Remeasure | None = None
) -> tuple[Samples, list[Drop]]:
    """Reads the sizes of all samples and keeps those that fit a pack.

    Args:
        limits: of a pack.
        config: its oversize policy, and names for messages.
        remeasure: for samples that do not fit and that the configuration cuts, splits or resizes.

    Raises:
        UserError: a sample does not fit under ``oversize: raise`` (names the first), or has to be measured again and
            there is no `remeasure`.
    """
    sizes, dropped = _read(sources)
    kept = np.ones(len(sources), dtype=bool)
    kept[[drop.source for drop in dropped]] = False
    over = np.flatnonzero(kept & ~array_limits.holds(limits, sizes))
    kept[over] = False
    source = np.flatnonzero(kept)
    samples = Samples(source=source, piece=np.full(source.size, -1, dtype=np.int16), sizes=sizes.take(source))
    if over.size == 0:
        return samples, dropped
    if changes_samples(config):
        if remeasure is None:
            raise UserError(
                f"{over.size} samples fit no pack, and packing.oversize or encoder.limits.when_over asks to change "
                "them, which needs the samples themselves; set packing.oversize=drop and when_over=[drop]."
            )
        pieces, refused = _measured_again(sources, over, remeasure, limits, config)
        return _joined(samples, pieces), sorted([*dropped, *refused], key=lambda drop: drop.source)
    keys = _keys(sources, over)
    refused = [_refusal(source, key, SizedRow.of(sizes, source), limits, config) for source, key in keys.items()]
    return samples, sorted([*dropped, *refused], key=lambda drop: drop.source)


def _read(sources: Sources) -> tuple[Sizes, list[Drop]]:
    """Sizes of all sources, and those that are dropped at any row length."""
    count = len(sources)
    columns: dict[str, np.ndarray] = {
        "length": np.zeros(count, np.int32),
        "second": np.zeros(count, np.int32),
        "images": np.zeros(count, np.int32),
        "patches": np.zeros(count, np.int64),
    }
    if sources.kind == "clips":
        columns["text_tokens"] = np.zeros(count, np.int32)
    bad: list[int] = []
    for start, table in sources.tables([*columns, "reason"]):
        for name, column in columns.items():
            column[start : start + table.num_rows] = table.column(name).to_numpy()
        reasons = table.column("reason")
        if reasons.null_count < table.num_rows:
            bad.extend((np.flatnonzero(reasons.is_valid().to_numpy()) + start).tolist())
    drops = []
    for source, row in _rows(sources, np.array(bad, dtype=np.int64), ["key", "reason", "detail"]).items():
        drops.append(Drop(source=source, key=row["key"], reason=row["reason"], detail=row["detail"] or ""))
    return Sizes(**columns), drops


def _rows(sources: Sources, wanted: np.ndarray, columns: list[str]) -> dict[int, dict[str, str]]:
    """Some columns of some sources, by source; reads only the shards that hold them."""
    found: dict[int, dict[str, str]] = {}
    number = np.searchsorted(sources.starts, wanted, side="right") - 1
    for at in np.unique(number).tolist():
        here = wanted[number == at]
        dataset = int(sources.dataset[at])
        shard = sources.datasets[dataset].shards[int(sources.shard[at])]
        table = sources.indexes[dataset].rows(sources.datasets[dataset], shard, columns)
        found.update(zip(here.tolist(), table.take(here - sources.starts[at]).to_pylist(), strict=True))
    return found


def _keys(sources: Sources, wanted: np.ndarray) -> dict[int, str]:
    return {source: row["key"] for source, row in _rows(sources, wanted, ["key"]).items()}


def _refusal(source: int, key: str, size: SizedRow, limits: AnyLimits, config: AnyRun) -> Drop:
    """Why a sample fits no pack, in the words of the online loader.

    Raises:
        UserError: under ``oversize: raise``.
    """
    drop = Drop(source=source, key=key, **_why(size, limits, config))
    if config.packing.oversize == "raise":
        raise UserError(
            f"Sample {key} has {drop.detail}. Raise the limit, or drop such samples with packing.oversize=drop."
        )
    return drop


def _why(size: SizedRow, limits: AnyLimits, config: AnyRun) -> dict[str, str]:
    if not limits.too_long(size):
        exceeded = limits.exceeded(size)
        if exceeded is None:
            raise PackingError(f"a sample that fits a pack was refused: {size}")
        return {"reason": "over_limit", "detail": exceeded, "setting": exceeded.rpartition(" ")[2].partition("=")[0]}
    detail = kind_of_config(config).too_long(size, limits, config)
    return {"reason": "oversize", "detail": detail, "setting": "packing.seq_length"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _KeptPiece:
    source: int
    number: int
    piece: Piece


def _measured_again(
    sources: Sources, over: np.ndarray, remeasure: Remeasure, limits: AnyLimits, config: AnyRun
) -> tuple[list[_KeptPiece], list[Drop]]:
    by_shard: defaultdict[int, list[int]] = defaultdict(list)
    keys = _keys(sources, over)
    for source in over.tolist():
        by_shard[int(np.searchsorted(sources.starts, source, side="right")) - 1].append(source)
    kept: list[_KeptPiece] = []
    dropped: list[Drop] = []
    for at, wanted in by_shard.items():
        dataset = sources.datasets[int(sources.dataset[at])]
        shard = dataset.shards[int(sources.shard[at])]
        found = remeasure(dataset, shard, [source - int(sources.starts[at]) for source in wanted])
        if len(found) != len(wanted):
            raise PackingError(f"{len(wanted)} samples of {shard.name} were measured again, but {len(found)} came back")
        for source, result in zip(wanted, found, strict=True):
            for number, piece in enumerate(result.pieces):
                name = f"{keys[source]}#{number}" if result.split else keys[source]
                drop = _drop_of(source, name, piece, limits, config)
                if drop is None:
                    kept.append(_KeptPiece(source=source, number=_number(result, number), piece=piece))
                else:
                    dropped.append(drop)
    return kept, dropped


def _number(result: Remeasured, number: int) -> int:
    if not result.split and len(result.pieces) != 1:
        raise PackingError(f"a sample that is not split has {len(result.pieces)} pieces")
    return number if result.split else -1


def _drop_of(source: int, key: str, piece: Piece, limits: AnyLimits, config: AnyRun) -> Drop | None:
    """Why a piece is dropped; None if it is packed."""
    setting = f"packing.oversize={config.packing.oversize}"
    if piece.reason is not None:
        return Drop(source=source, key=key, reason=piece.reason, detail=piece.detail or "", setting=setting)
    lengths = (piece.length, piece.second) if piece.second else (piece.length,)
    size = SizedRow(segment_lengths=lengths, images=piece.images, patches=piece.patches)
    return None if limits.holds(size) else _refusal(source, key, size, limits, config)


def _joined(samples: Samples, pieces: list[_KeptPiece]) -> Samples:
    """Adds pieces, in the order of the sources."""
    source = np.concatenate([samples.source, np.array([each.source for each in pieces], np.int64)])
    piece = np.concatenate([samples.piece, np.array([each.number for each in pieces], np.int16)])
    columns = {
        name: np.concatenate(
            [own := getattr(samples.sizes, name), np.array([getattr(each.piece, name) for each in pieces], own.dtype)]
        )
        for name in ("length", "second", "images", "patches")
    }
    order = np.lexsort((piece, source))
    return replace(samples, source=source[order], piece=piece[order], sizes=Sizes(**columns).take(order))
