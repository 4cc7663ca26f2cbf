"""Describes a pack of clips for people and programs: grids, patches, text tokens, boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from energon_packing.wan.task_encoder import ClipPack


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """One clip of a pack.

    Attributes:
        key: of the sample.
        start: first patch in the row.
        patches: real ones; ``grid`` along time, height and width.
        padding: patches from the last real one to the next clip.
        text_start, text_tokens, text_padding: the same for its text.
        weight: sum of the loss mask over its patches.
    """

    key: str
    start: int
    patches: int
    grid: tuple[int, ...]
    padding: int
    text_start: int
    text_tokens: int
    text_padding: int
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipPackView:
    """One pack of clips, described.

    Attributes:
        index: number of the pack in its worker.
        patches, text_tokens: lengths of the two rows.
        real_patches: patches of clips.
        fill: ``real_patches`` divided by the configured row width.
        latents, context: shape of the two tensors.
        clips: in row order.
        dropped: what the ledger noted since the previous pack.
    """

    index: int
    patches: int
    text_tokens: int
    real_patches: int
    fill: float
    latents: tuple[int, ...]
    context: tuple[int, ...]
    clips: tuple[Clip, ...]
    dropped: tuple[Mapping[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for ``json.dumps``."""
        return asdict(self)


def describe_clips(pack: ClipPack, *, seq_length: int) -> ClipPackView:
    """Describes one pack.

    Args:
        pack: what the loader yielded.
        seq_length: configured row width in patches, for the fill.
    """
    batch = pack.batch
    clips: list[Clip] = []
    start = text_start = 0
    for number, key in enumerate(batch.keys):
        patches, place = int(batch.seq_len_q[number]), int(batch.seq_len_q_padded[number])
        tokens, text_place = int(batch.seq_len_kv[number]), int(batch.seq_len_kv_padded[number])
        clips.append(
            Clip(
                key=key,
                start=start,
                patches=patches,
                grid=tuple(batch.grid_sizes[number].tolist()),
                padding=place - patches,
                text_start=text_start,
                text_tokens=tokens,
                text_padding=text_place - tokens,
                weight=float(batch.loss_mask[start : start + place].float().sum()),
            )
        )
        start, text_start = start + place, text_start + text_place
    real = sum(clip.patches for clip in clips)
    return ClipPackView(
        index=pack.index,
        patches=len(batch.video_latents),
        text_tokens=len(batch.context_embeddings),
        real_patches=real,
        fill=real / seq_length,
        latents=tuple(batch.video_latents.shape),
        context=tuple(batch.context_embeddings.shape),
        clips=tuple(clips),
        dropped=tuple(asdict(entry) for entry in pack.dropped),
    )
