"""What is in a pack, in a form that people and programs can read: segments, text, media, boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from energon_packing.energon.samples import Pack
from energon_packing.families.base import VisionFamily


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPiece:
    """A stretch of a segment's text: trained or not, runs of media tokens written as ``<token>*n``."""

    text: str
    trained: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One sample inside a pack.

    Attributes:
        key: of the sample; empty for the masked tail of a row of fixed width.
        start: first token in the row.
        tokens: real tokens.
        padding: tokens from the last real one to the physical end.
        trained: targets with a weight above 0.
        weight: sum of the loss weights.
        media: one entry a medium: kind, grid in patches, and (first axis of) its share of the pixel tensor.
        text: the sample as text.
    """

    key: str
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
        fill: ``real_tokens`` over the row width that was configured.
        boundaries, padded_boundaries: ``cu_seqlens`` and ``cu_seqlens_padded`` (None for a multiple of 1).
        max_seqlen: longest physical segment.
        positions: shape of ``position_ids``.
        segments: in row order.
        dropped: what the ledger noted since the pack before.
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
        """Plain values for ``json.dumps``."""
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
        length = batch.sample_lengths[number] if is_sample else 0
        span = slice(start, start + length)
        segments.append(
            Segment(
                key=batch.sample_keys[number] if is_sample else "",
                start=start,
                tokens=length,
                padding=stop - start - length,
                trained=int((weights[span] > 0).sum()),
                weight=float(weights[span].sum()),
                media=_media(pack, number) if is_sample else (),
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


def _media(pack: Pack, sample: int) -> tuple[Mapping[str, Any], ...]:
    found: list[Mapping[str, Any]] = []
    for kind, grids, pixels in (
        ("image", "image_grid_thw", "pixel_values"),
        ("video", "video_grid_thw", "pixel_values_videos"),
    ):
        counts = pack.batch.visual_counts.get(grids)
        if not counts or not pack.batch.visual_inputs:
            continue
        before = sum(counts[:sample])
        shape = list(pack.batch.visual_inputs[pixels].shape[1:])
        for grid in pack.batch.visual_inputs[grids][before : before + counts[sample]].tolist():
            patches = int(np.prod(grid))
            found.append({"kind": kind, "grid": grid, "patches": patches, "pixels": [patches, *shape]})
    return tuple(found)


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
