"""A pack as values that a page draws: every token of the row by kind, to scale, and each sample in full."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from energon_packing.energon.samples import Pack
from energon_packing.families.base import VisionFamily
from energon_packing.report.excerpt import Piece, excerpt, visible
from energon_packing.report.preview import Segment, describe
from energon_packing.report.watched_packs import ShownMedia
from energon_packing.thd.context_parallel import context_parallel_indices_numpy

KINDS = ("text", "trained", "image", "video")
"""What a token of a sample is; the number of a run's kind is its place here."""


def drawn_pack(
    pack: Pack,
    family: VisionFamily,
    *,
    seq_length: int,
    context_parallel: int = 1,
    media: Callable[[str], Sequence[ShownMedia]] = lambda _: (),
    sources: Sequence[str] = (),
    most: int = 4000,
) -> dict[str, Any]:
    """Describes one pack for a page.

    Args:
        pack: what the loader yielded.
        family: decodes tokens, and knows which of them stand for media.
        seq_length: configured width of a row.
        context_parallel: ranks among which segments are cut.
        media: gives the images and videos of a segment by its key.
        sources: where each sample comes from; empty if unknown.
        most: characters of text per sample.

    Returns:
        Plain values. Of a segment, ``runs`` are ``[kind, tokens]`` of its real tokens (see `KINDS`), ``pieces`` are
        ``[text, kind]`` or ``[number of the media]``, ``positions`` the first and last on each axis, and ``slices``
        ``[rank, start, stop]`` in the row.
    """
    batch = pack.batch
    view = describe(pack, family, seq_length=seq_length)
    tokens = batch.tokens[0].numpy()
    weights = batch.loss_mask[0].numpy()
    target = np.concatenate(([0.0], weights[:-1])) > 0
    positions = batch.position_ids.reshape(-1, batch.total_tokens).numpy()
    boundaries = batch.boundaries.numpy()
    slices = list(_slices(boundaries, context_parallel)) if context_parallel > 1 else []
    segments = []
    for number, (segment, (start, stop)) in enumerate(zip(view.segments, pairwise(boundaries.tolist()), strict=True)):
        span = slice(start, start + segment.tokens)
        shown = media(segment.key) if segment.key else ()
        segments.append(
            {
                "key": visible(segment.key),
                "name": visible(segment.key) or ("dummy image" if segment.filler else "masked tail"),
                "kind": "sample" if segment.key else "dummy" if segment.filler else "tail",
                "start": start,
                "tokens": segment.tokens,
                "padding": segment.padding,
                "trained": segment.trained,
                "weight": round(segment.weight, 4),
                "source": visible(sources[number]) if segment.key and number < len(sources) else "",
                "positions": [[int(axis.min()), int(axis.max())] for axis in positions[:, start:stop]],
                "runs": _runs(tokens[span], target[span], family),
                "media": _media(segment, shown),
                "pieces": _pieces(tokens[span], target[span], family, shown, most),
                "slices": [each for each in slices if start <= each[1] < stop],
            }
        )
    return {
        "index": view.index,
        "tokens": view.tokens,
        "real": view.real_tokens,
        "fill": round(view.fill, 6),
        "boundaries": list(view.boundaries),
        "padded": None if view.padded_boundaries is None else list(view.padded_boundaries),
        "max_seqlen": view.max_seqlen,
        "shape": list(view.positions),
        "segments": segments,
        "dropped": [{name: visible(str(value)) for name, value in each.items()} for each in view.dropped],
        "changed": [
            {"key": visible(each.key), "how": visible(each.how), "detail": visible(each.detail)}
            for each in pack.changed
        ],
    }


def source_names(pack: Pack) -> tuple[str, ...]:
    """Shard and place of each segment's sample, as Energon says; empty where it does not tell one from another."""
    sources = tuple(pack.__sources__ or ())
    if len(sources) != len(pack.keys):
        return ()
    names = {
        key: f"{source.shard_name or source.dataset_path}, sample {source.index}"
        for key, source in zip(pack.keys, sources, strict=True)
    }
    # The segments of a pair continue the key of their sample.
    return tuple(names.get(key) or names.get(key.rpartition("/")[0], "") for key in pack.batch.sample_keys)


def _kinds(tokens: np.ndarray, trained: np.ndarray, family: VisionFamily) -> np.ndarray:
    """``[L]``: the kind of each token, a place in `KINDS`."""
    visual = family.visual_kinds(tokens)
    return np.where(visual > 0, visual + 1, trained.astype(np.int64))


def _stretches(kinds: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Kind, start and stop of each uninterrupted stretch."""
    if not kinds.size:
        return
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), kinds.size]
    for start, stop in pairwise(edges):
        yield int(kinds[start]), start, stop


def _runs(tokens: np.ndarray, trained: np.ndarray, family: VisionFamily) -> list[list[int]]:
    return [[kind, stop - start] for kind, start, stop in _stretches(_kinds(tokens, trained, family))]


def _media(segment: Segment, shown: Sequence[ShownMedia]) -> list[dict[str, Any]]:
    if shown:
        return [
            {"label": visible(each.label), "name": visible(each.name), "pictures": list(each.pictures)}
            for each in shown
        ]
    return [{"label": visible(str(entry["label"])), "name": "", "pictures": []} for entry in segment.media]


def _pieces(
    tokens: np.ndarray, trained: np.ndarray, family: VisionFamily, shown: Sequence[ShownMedia], most: int
) -> list[list[Any]]:
    """Text as ``[text, kind]``, and an image or video as ``[number]`` where its placeholders begin."""
    found: list[Piece] = []
    # Placeholders of neighbours may touch, so media are told apart by how many each has.
    ends = np.cumsum([each.tokens for each in shown]) if shown else np.zeros(0, dtype=np.int64)
    seen, number = 0, -1
    for kind, start, stop in _stretches(_kinds(tokens, trained, family)):
        if kind < 2:
            found.append(Piece(text=family.tokenizer.decode(tokens[start:stop]), trained=kind == 1))
            continue
        if not shown:
            name = family.tokenizer.decode(tokens[start : start + 1])
            found.append(Piece(text=f"{name}*{stop - start}", media=-1))
            continue
        last = int(np.searchsorted(ends, seen + stop - start, side="left"))
        for each in range(number + 1, min(last, len(shown) - 1) + 1):
            found.append(Piece(text="", media=each))
        number = max(number, min(last, len(shown) - 1))
        seen += stop - start
    pieces: list[list[Any]] = []
    for piece in excerpt(found, most):
        if piece.media is not None and piece.media >= 0:
            pieces.append([piece.media])
        else:
            pieces.append([visible(piece.text, line_break="\n"), int(piece.trained)])
    return pieces


def _slices(boundaries: np.ndarray, ranks: int) -> Iterator[list[int]]:
    """``[rank, start, stop]`` of each piece of the row, in the order of the row."""
    owner = np.empty(int(boundaries[-1]), dtype=np.int64)
    for rank in range(ranks):
        owner[context_parallel_indices_numpy(boundaries, ranks, rank)] = rank
    inner = np.zeros(owner.size, dtype=bool)
    inner[boundaries[1:-1]] = True
    edges = np.flatnonzero((np.diff(owner) != 0) | inner[1:]) + 1
    for start, stop in pairwise([0, *edges.tolist(), owner.size]):
        yield [int(owner[start]), start, stop]
