"""Describes a pack for people and programs: segments, text, media, boundaries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from energon_packing.energon.samples import Pack
from energon_packing.families.base import VisionFamily
from energon_packing.thd.batch import PackedBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPiece:
    """A stretch of a segment's text: trained or not, runs of media tokens written as ``<token>*n``."""

    text: str
    trained: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One sample inside a pack.

    Attributes:
        key: of the sample; empty for a filler and for the masked tail of a row of fixed width.
        filler: whether it is padding with an image: the dummy image of a pack without media.
        start: first token in the row.
        tokens: real tokens.
        padding: tokens from the last real one to the physical end.
        trained: targets with a weight above 0.
        weight: sum of the loss weights.
        media: what the segment gives the vision encoder. If the family keeps media in one piece, one entry per image or
            video: ``kind``, ``grid`` in patches, ``patches`` and the shape of its ``pixels``. If it cuts them up, one
            entry for all tiles and one for all clips: ``kind``, ``tiles`` or ``frames``, the ``sizes`` of the images
            (height, width; if the family passes them on) and ``pixels``. Both have ``tokens``, the lengths of their
            runs of placeholders, and ``label``, the entry in a few words.
        text: the sample as text.
    """

    key: str
    filler: bool = False
    start: int
    tokens: int
    padding: int
    trained: int
    weight: float
    media: tuple[Mapping[str, Any], ...]
    text: tuple[TextPiece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackView:
    """One packed row, described.

    Attributes:
        index: number of the pack in its worker.
        tokens: length of the row.
        real_tokens: tokens of samples.
        fill: ``real_tokens`` divided by the configured row width.
        boundaries, padded_boundaries: ``cu_seqlens`` and ``cu_seqlens_padded`` (None for a multiple of 1).
        max_seqlen: longest physical segment.
        positions: shape of ``position_ids``.
        segments: in row order.
        dropped: what the ledger noted since the previous pack.
    """

    index: int
    tokens: int
    real_tokens: int
    fill: float
    boundaries: tuple[int, ...]
    padded_boundaries: tuple[int, ...] | None
    max_seqlen: int
    positions: tuple[int, ...]
    segments: tuple[Segment, ...]
    dropped: tuple[Mapping[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for ``json.dumps``."""
        return asdict(self)


def describe(pack: Pack, family: VisionFamily, *, seq_length: int) -> PackView:
    """Describes one pack.

    Args:
        pack: what the loader yielded.
        family: decodes tokens and knows which ones stand for media.
        seq_length: configured row width, for the fill.
    """
    batch = pack.batch
    real = batch.cu_seqlens.tolist()
    physical = batch.boundaries.tolist()
    tokens, weights = batch.tokens[0].numpy(), batch.loss_mask[0].numpy()
    # loss_mask is shifted: the weight of predicting token i + 1 stands at i.
    target = np.concatenate(([0.0], weights[:-1]))
    segments = []
    for number in range(batch.num_segments):
        start, stop = physical[number], physical[number + 1]
        is_sample = number < batch.num_samples
        is_filler = batch.num_samples <= number < batch.num_samples + batch.fillers
        length = real[number + 1] - real[number] if is_filler else batch.sample_lengths[number] if is_sample else 0
        span = slice(start, start + length)
        segments.append(
            Segment(
                key=batch.sample_keys[number] if is_sample else "",
                filler=is_filler,
                start=start,
                tokens=length,
                padding=stop - start - length,
                trained=int((weights[span] > 0).sum()),
                weight=float(weights[span].sum()),
                media=_media(pack.batch, number, tokens[span], family) if is_sample or is_filler else (),
                text=_text(tokens[span], target[span] > 0, family),
            )
        )
    padded = batch.cu_seqlens_padded
    return PackView(
        index=pack.index,
        tokens=batch.total_tokens,
        real_tokens=batch.real_tokens,
        fill=batch.real_tokens / seq_length,
        boundaries=tuple(real),
        padded_boundaries=None if padded is None else tuple(padded.tolist()),
        max_seqlen=batch.max_seqlen,
        positions=tuple(batch.position_ids.shape),
        segments=tuple(segments),
        dropped=tuple(asdict(entry) for entry in pack.dropped),
    )


def _media(batch: PackedBatch, segment: int, tokens: np.ndarray, family: VisionFamily) -> tuple[Mapping[str, Any], ...]:
    """Returns the entries of `Segment.media`; ``tokens`` ``[L]`` are the segment's own."""
    kinds = family.visual_kinds(tokens)
    runs = {
        kind: _runs(kinds, number) for number, kind in ((1, "image"), (2, "video")) if kind in family.placeholder_ids
    }
    found: list[Mapping[str, Any]] = []
    for kind, grids, pixels in (
        ("image", "image_grid_thw", "pixel_values"),
        ("video", "video_grid_thw", "pixel_values_videos"),
    ):
        own = _share(batch, pixels, segment)
        if own is None:
            continue
        known = runs.get(kind, [])
        grid_rows = _share(batch, grids, segment)
        if grid_rows is not None:
            found += _in_one_piece(kind, grid_rows.tolist(), list(own.shape[1:]), known)
            continue
        entry: dict[str, Any] = {"kind": kind, "pixels": list(own.shape), "tokens": known}
        size = "x".join(map(str, own.shape[-2:]))
        if own.dim() == 5:
            entry |= {"frames": own.shape[1]}
            entry["label"] = f"{own.shape[0]} video(s) of {own.shape[1]} frames {size}, {sum(known)} tokens"
        else:
            sizes = _share(batch, "image_sizes", segment)
            entry |= {"tiles": own.shape[0], "sizes": [] if sizes is None else sizes.tolist()}
            of = "".join(f" {width}x{height}" for height, width in entry["sizes"])
            entry["label"] = f"{own.shape[0]} tile(s) {size}{' of' + of if of else ''}, {sum(known)} tokens"
        found.append(entry)
    return tuple(found)


def _share(batch: PackedBatch, name: str, segment: int) -> torch.Tensor | None:
    """Returns the rows of a visual input that belong to a segment; None if there are none."""
    counts = batch.visual_counts.get(name)
    if not counts or not batch.visual_inputs or not counts[segment]:
        return None
    before = sum(counts[:segment])
    return batch.visual_inputs[name][before : before + counts[segment]]


def _in_one_piece(
    kind: str, grids: Sequence[list[int]], shape: list[int], runs: Sequence[int]
) -> Iterator[Mapping[str, Any]]:
    """Yields one entry per grid; a video is one run in the text, or one run per time step."""
    waiting = iter(runs)
    split = len(runs) > len(grids)
    for grid in grids:
        patches = int(np.prod(grid))
        own = [next(waiting, 0) for _ in range(grid[0] if split else 1)]
        label = f"{kind} {'x'.join(map(str, grid))}"
        yield {
            "kind": kind,
            "grid": grid,
            "patches": patches,
            "pixels": [patches, *shape],
            "tokens": own,
            "label": label,
        }


def _runs(tokens: np.ndarray, token_id: int) -> list[int]:
    """Returns the lengths of the uninterrupted runs of a token."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (tokens == token_id).view(np.int8), [0]))))
    return (edges[1::2] - edges[::2]).tolist()


def _text(tokens: np.ndarray, trained: np.ndarray, family: VisionFamily) -> tuple[TextPiece, ...]:
    visual = np.isin(tokens, list(family.placeholder_ids.values()))
    pieces: list[TextPiece] = []
    # A piece ends where training starts or stops, or where a run of media tokens starts or stops.
    edges = np.flatnonzero((np.diff(trained) != 0) | (np.diff(visual) != 0)) + 1
    for begin, end in zip([0, *edges], [*edges, len(tokens)], strict=True):
        if begin == end:
            continue
        if visual[begin]:
            name = family.tokenizer.decode(tokens[begin : begin + 1])
            text = f"{name}*{end - begin}"
        else:
            text = family.tokenizer.decode(tokens[begin:end])
        if pieces and pieces[-1].trained == bool(trained[begin]):
            pieces[-1] = TextPiece(text=pieces[-1].text + text, trained=pieces[-1].trained)
        else:
            pieces.append(TextPiece(text=text, trained=bool(trained[begin])))
    return tuple(pieces)
