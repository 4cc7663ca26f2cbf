"""Packs for people and programs: which ones to show, and what each holds: segments, text, media, boundaries."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from energon_packing.config import RunConfig
from energon_packing.conversation import PairCounts
from energon_packing.energon.data_identity import known_pairs
from energon_packing.energon.loader import build_task_encoder
from energon_packing.energon.samples import Pack
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import UserError, refuse
from energon_packing.executors.work import Progress
from energon_packing.families.base import VisionFamily
from energon_packing.ledger import without_ledger
from energon_packing.offline.data_paths import is_packed, is_plan
from energon_packing.offline.explain import explanation
from energon_packing.offline.index import pair_counts
from energon_packing.offline.loader import PlannedLoader
from energon_packing.offline.open_loader import open_pass
from energon_packing.offline.packed import Packed
from energon_packing.offline.plan import Plan
from energon_packing.report.sample_story import source_key
from energon_packing.thd.batch import PackedBatch

Tell = Callable[[str], None]  # called with each sentence about frequent drops


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """How many packs to show, from which number (from 0, in the order of one rank without workers, or of the plan), and
    whether only those with the ``key`` of a sample."""

    packs: int
    first: int = 0
    key: str | None = None

    def holds(self, pack: Pack) -> bool:
        """Whether the pack has the key; a piece or an answer of a sample has its sample's key too."""
        names = (*pack.keys, *pack.batch.sample_keys)
        return self.key is None or any(self.key in (name, source_key(name)) for name in names)


def described(config: RunConfig, wanted: Wanted, *, progress: Progress, tell: Tell) -> list[dict[str, Any]]:
    """The packs as plain values (`describe`). Raises `UserError`: the data cannot be read, or no pack has the key."""
    encoder: Any = build_task_encoder(without_ledger(config))
    return [
        describe(pack, encoder.encoder.family, seq_length=config.packing.seq_length)
        for pack, _ in wanted_packs(config, encoder, wanted, progress, tell)
    ]


def pairs_at(config: RunConfig) -> PairCounts:
    """Pairs and unwanted answers in the data of a run, as far as somebody counted them."""
    path = config.data.path
    if not is_plan(path) and not is_packed(path):
        return known_pairs(path, config.data.split)
    plan = Plan.open(path) if is_plan(path) else Packed.open(path).plan
    return pair_counts(plan.facts.datasets)


def wanted_packs(
    config: RunConfig, encoder: PackingTaskEncoder, wanted: Wanted, progress: Progress, tell: Tell
) -> Iterator[tuple[Pack, tuple[str, ...]]]:
    """The wanted packs, each with the source of every segment (shard and place); empty where it is unknown."""
    config = without_ledger(config)
    path = config.data.path
    loader = open_pass(config, must_end=wanted.key is not None, task_encoder=encoder)
    loader.tell = tell
    packs = (
        _planned(Plan.open(path), loader, wanted)
        if is_plan(path)
        else ((pack, _sources(pack)) for pack in _after(loader, wanted.first, progress) if wanted.holds(pack))
    )
    empty = True
    for pack in itertools.islice(packs, wanted.packs):
        empty = False
        yield pack
    loader.tell_of_drops(final=True)
    refuse(
        (
            empty and wanted.key is not None,
            f"No pack of this epoch has {wanted.key!r}; `energon-packing explain {wanted.key} {path}` says what became "
            "of it.",
        ),
        (empty and wanted.first, f"The epoch of {path} ends before pack {wanted.first}; packs are numbered from 0."),
    )


def _after(loader: Any, first: int, progress: Progress) -> Iterator[Pack]:
    """The packs from number `first` on; online packs have no number until those before them are made."""
    if isinstance(loader, PlannedLoader):
        loader.start_at(first)
        first = 0
    for number, pack in enumerate(loader):
        if number >= first:
            yield pack
        else:
            progress("skipped", number + 1, first)


def _sources(pack: Pack) -> tuple[str, ...]:
    """As Energon says; empty where it does not tell one sample from another."""
    sources = tuple(pack.__sources__ or ())
    if len(sources) != len(pack.keys):
        return ()
    places = (f"{source.shard_name or source.dataset_path}, sample {source.index}" for source in sources)
    return _of_segments(pack, dict(zip(pack.keys, places, strict=True)))


def _of_segments(pack: Pack, places: dict[str, str]) -> tuple[str, ...]:
    return tuple(places.get(key) or places.get(source_key(key), "") for key in pack.batch.sample_keys)


def _planned(plan: Plan, loader: Any, wanted: Wanted) -> Iterator[tuple[Pack, tuple[str, ...]]]:
    if wanted.first >= len(plan):
        raise UserError(f"{plan.path} has {len(plan)} packs, numbered from 0; --pack {wanted.first} is not among them.")
    numbers: Sequence[int] = range(wanted.first, len(plan))
    if wanted.key is not None:
        numbers = sorted({each["pack"] for each in explanation(plan, wanted.key)["packed"]}.intersection(numbers))
    for number in numbers:
        loader.start_at(number)
        pack = next(iter(loader))
        (planned,) = plan.packs(number, number + 1)
        places = {
            each.name: f"{data.name}/{data.shards[each.shard].name}, sample {each.row}"
            for each in planned.samples
            for data in (plan.facts.datasets[each.dataset],)
        }
        yield pack, _of_segments(pack, places)


def describe(pack: Pack, family: VisionFamily, *, seq_length: int) -> dict[str, Any]:
    """Describes one pack of a loader, whose configured width is ``seq_length``.

    Returns:
        Plain values: ``index`` in its worker; ``tokens``, the length of the row; ``real_tokens`` of samples; ``fill``,
        their share of the configured width; ``boundaries`` and ``padded_boundaries``: ``cu_seqlens`` and
        ``cu_seqlens_padded`` (None: nothing lies between samples); ``max_seqlen``; ``positions``: shape of
        ``position_ids``; ``dropped``: what the ledger noted since the last pack; ``segments`` in row order, each with

        * ``key`` (empty for a filler and for the masked tail of a row of fixed width), ``filler``: whether it is the
          dummy image of a pack without media;
        * ``start`` in the row, real ``tokens``, ``padding`` after them, ``trained`` targets, their ``weight``;
        * ``media``: what it gives the vision encoder. If the family keeps media in one piece, one entry per image or
          video: ``kind``, ``grid`` in patches, ``patches`` and the shape of its ``pixels``. If it cuts them up, one
          entry for all tiles and one for all clips: ``kind``, ``tiles`` or ``frames``, the ``sizes`` of the images
          (height, width; if the family passes them on) and ``pixels``. Both have ``tokens``, the lengths of their
          runs of placeholders, and ``label``, the entry in a few words;
        * ``text``: pieces with ``text`` and ``trained``; runs of media tokens are written as ``<token>*n``.
    """
    batch = pack.batch
    real, physical = batch.cu_seqlens.tolist(), batch.boundaries.tolist()
    tokens, weights, trained = batch.tokens[0].numpy(), batch.loss_mask[0].numpy(), trained_tokens(batch)
    segments = []
    for number, (start, stop) in enumerate(pairwise(physical)):
        is_sample = number < batch.num_samples
        is_filler = batch.num_samples <= number < batch.num_samples + batch.fillers
        length = batch.sample_lengths[number] if is_sample else is_filler * (real[number + 1] - real[number])
        span = slice(start, start + length)
        segments.append(
            {
                "key": batch.sample_keys[number] if is_sample else "",
                "filler": is_filler,
                "start": start,
                "tokens": length,
                "padding": stop - start - length,
                "trained": int((weights[span] > 0).sum()),
                "weight": float(weights[span].sum()),
                "media": _media(batch, number, tokens[span], family) if is_sample or is_filler else (),
                "text": _text(tokens[span], trained[span], family),
            }
        )
    padded = batch.cu_seqlens_padded
    return {
        "index": pack.index,
        "tokens": batch.total_tokens,
        "real_tokens": batch.real_tokens,
        "fill": batch.real_tokens / seq_length,
        "boundaries": tuple(real),
        "padded_boundaries": None if padded is None else tuple(padded.tolist()),
        "max_seqlen": batch.max_seqlen,
        "positions": tuple(batch.position_ids.shape),
        "segments": tuple(segments),
        "dropped": tuple(asdict(entry) for entry in pack.dropped),
    }


def trained_tokens(batch: PackedBatch) -> np.ndarray:
    """``[T]`` bool: the tokens that are targets. ``loss_mask`` is shifted: the weight of predicting token i + 1 stands
    at i, so a mask of ``0 1 1 0`` trains the tokens 2 and 3."""
    return np.concatenate(([0.0], batch.loss_mask[0].numpy()[:-1])) > 0


def _media(batch: PackedBatch, segment: int, tokens: np.ndarray, family: VisionFamily) -> tuple[dict[str, Any], ...]:
    """The media of a segment, whose own tokens are ``[L]``."""
    kinds = family.visual_kinds(tokens)
    media: list[dict[str, Any]] = []
    for number, (kind, grids, name) in enumerate(
        (("image", "image_grid_thw", "pixel_values"), ("video", "video_grid_thw", "pixel_values_videos")), start=1
    ):
        pixels = _share(batch, name, segment)
        if pixels is None:
            continue
        sizes = _share(batch, "image_sizes", segment)
        if pixels.dim() == 1:  # bytes without padding; the shape is the one that the model gets
            largest = (batch.visual_inputs or {})["image_sizes"].amax(0).tolist()
            pixels = torch.empty((0 if sizes is None else len(sizes), 3, *largest), device="meta")
        runs = [stop - start for own, start, stop in stretches(kinds) if own == number]
        grid_rows = _share(batch, grids, segment)
        if grid_rows is not None:
            media += _in_one_piece(kind, grid_rows.tolist(), list(pixels.shape[1:]), runs)
            continue
        size = "x".join(map(str, pixels.shape[-2:]))
        entry: dict[str, Any] = {"kind": kind, "pixels": list(pixels.shape), "tokens": runs}
        if pixels.dim() == 5:
            entry |= {"frames": pixels.shape[1]}
            what = f"video(s) of {pixels.shape[1]} frames {size}"
        else:
            entry |= {"tiles": pixels.shape[0], "sizes": [] if sizes is None else sizes.tolist()}
            of = "".join(f" {width}x{height}" for height, width in entry["sizes"])
            what = f"tile(s) {size}{' of' * bool(of)}{of}"
        media.append({**entry, "label": f"{pixels.shape[0]} {what}, {sum(runs)} tokens"})
    return tuple(media)


def _share(batch: PackedBatch, name: str, segment: int) -> torch.Tensor | None:
    """The rows of a visual input that belong to a segment; None if there are none."""
    counts = batch.visual_counts.get(name)
    if not counts or not batch.visual_inputs or not counts[segment]:
        return None
    before = sum(counts[:segment])
    return batch.visual_inputs[name][before : before + counts[segment]]


def _in_one_piece(
    kind: str, grids: Sequence[list[int]], shape: list[int], runs: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """One entry per grid; a video is one run in the text, or one run per time step."""
    waiting = iter(runs)
    for grid in grids:
        patches = int(np.prod(grid))
        yield {
            "kind": kind,
            "grid": grid,
            "patches": patches,
            "pixels": [patches, *shape],
            "tokens": [next(waiting, 0) for _ in range(grid[0] if len(runs) > len(grids) else 1)],
            "label": f"{kind} {'x'.join(map(str, grid))}",
        }


def stretches(kinds: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Kind, start and stop of each uninterrupted stretch: ``[7, 7, 9]`` is ``(7, 0, 2), (9, 2, 3)``."""
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), kinds.size]
    for start, stop in pairwise(edges if kinds.size else ()):
        yield int(kinds[start]), start, stop


def written_out(family: VisionFamily, tokens: np.ndarray) -> str:
    """A run of placeholders as ``<token>*n``."""
    return f"{family.tokenizer.decode(tokens[:1])}*{len(tokens)}"


def _text(tokens: np.ndarray, trained: np.ndarray, family: VisionFamily) -> tuple[dict[str, Any], ...]:
    visual = np.isin(tokens, list(family.placeholder_ids.values()))
    # A piece ends where training starts or stops; within it a run of media tokens is written for itself.
    written = (
        (
            kind >= 2,
            written_out(family, tokens[start:stop]) if kind & 1 else family.tokenizer.decode(tokens[start:stop]),
        )
        for kind, start, stop in stretches(visual + 2 * trained)
    )
    groups = itertools.groupby(written, key=lambda piece: piece[0])
    return tuple({"text": "".join(text for _, text in pieces), "trained": learned} for learned, pieces in groups)
