"""Packs of video latents with text conditioning, for diffusion transformers of the Wan kind.

Such a model attends twice: patches of a video to one another, and patches to the text tokens that describe the video.
So a pack has two kinds of boundaries: patches bound the queries, text tokens the keys of the second attention. Both
have real and physical lengths, and both rows are padded.

Megatron-Bridge's Wan data path (``megatron.bridge.diffusion.data.wan``, 0.6.2) pads every text to 512 tokens and calls
all 512 real, so that attention sees the padding; it aligns to ``2 * CP`` only, and not for sequence parallelism.
``compat="bridge"`` does the same, field by field; ``"texts"`` pads texts as it does, which the published weights and
Wan's inference know, and takes the alignment that `energon_packing.thd.alignment_multiple` computes; the default keeps
true text lengths.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch.nn import functional

from energon_packing.errors import ConfigError, PackingError, SampleRejected
from energon_packing.thd.assembly import hides_padding, visible_order
from energon_packing.wan.config import BRIDGE_TEXT_LENGTH, Compat

BRIDGE_LARGEST_LATENT = 1e3  # Bridge's Wan data path skips a video with a larger absolute value


def largest(values: torch.Tensor) -> float:
    """Returns the largest absolute value, infinite or NaN if one is; in one pass, a seventh of ``isfinite().all()``."""
    low, high = values.aminmax()
    return float(torch.maximum(-low, high))


@dataclass(frozen=True, kw_only=True, slots=True)
class WanSample:
    """One video and its text."""

    key: str
    latent: torch.Tensor  # ``[channels, frames, height, width]``, the encoded video
    text: torch.Tensor  # ``[tokens, width]``, embeddings of the text, without padding
    metadata: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WanPack:
    """Several videos in one row. Q patches and K text tokens, padding included; n videos."""

    # ``[Q, 1, channels * pF * pH * pW]``, patches in the order frame, row, column; padding is 0.
    video_latents: torch.Tensor
    context_embeddings: torch.Tensor  # ``[K, 1, width]``
    loss_mask: torch.Tensor  # ``[Q, 1]`` bfloat16, 1 at patches, 0 at padding
    # seq_len_q and seq_len_kv: int32 ``[n]``, patches and text tokens of each video; ``_padded`` is their place.
    seq_len_q: torch.Tensor
    seq_len_q_padded: torch.Tensor
    seq_len_kv: torch.Tensor
    seq_len_kv_padded: torch.Tensor
    grid_sizes: torch.Tensor  # int32 ``[n, 3]``, patches along time, height and width
    video_metadata: tuple[Any, ...]
    keys: tuple[str, ...]
    # Clips of zeros after the videos, counted in every field but these two. There is one if a video that is alone has
    # the only padding, which a kernel would take for none (see `pack_wan`).
    fillers: int = 0

    def to_bridge(self) -> dict[str, Any]:
        """Returns the batch that Bridge's ``wan_step`` reads."""
        names = ("video_latents", "context_embeddings", "loss_mask", *_LENGTH_FIELDS, "grid_sizes")
        metadata = [*self.video_metadata, *({} for _ in range(self.fillers))]
        return {name: getattr(self, name) for name in names} | {"video_metadata": metadata}

    @property
    def sample_keys(self) -> tuple[str, ...]:
        """`keys`, under the name that it has in a `PackedBatch`."""
        return self.keys

    @property
    def num_samples(self) -> int:
        """Clips of the pack."""
        return len(self.keys)

    @property
    def real_tokens(self) -> int:
        """Patches without padding."""
        return int(self.seq_len_q[: self.num_samples].sum())

    @property
    def total_tokens(self) -> int:
        """Patches of the row, padding included."""
        return len(self.video_latents)

    def sample_at(self, name: str, row: int) -> int:
        """Returns which clip a row of a tensor belongs to."""
        lengths = self.seq_len_kv_padded if name == "context_embeddings" else self.seq_len_q_padded
        if len(lengths) == len(getattr(self, name)):  # one number of each clip, not one of each patch or text token
            return row
        return int(torch.searchsorted(lengths.cumsum(0), row, right=True))

    def boundaries(self) -> dict[str, torch.Tensor]:
        """Returns ``cu_seq_len_q``, ``cu_seq_len_q_padded`` and the same of ``kv``: int32 ``[n + 1]``."""
        ends = {name: getattr(self, name).cumsum(0) for name in _LENGTH_FIELDS}
        return {f"cu_{name}": functional.pad(each, (1, 0)).to(torch.int32) for name, each in ends.items()}


_LENGTH_FIELDS = ("seq_len_q", "seq_len_q_padded", "seq_len_kv", "seq_len_kv_padded")


def clip_order(patches: Sequence[int], text_tokens: Sequence[int], multiple: int) -> list[int]:
    """Positions of clips in an order in which neither attention hides its padding; if possible the given one.
    ``patches`` and ``text_tokens`` are those of each clip; both are padded to a ``multiple``, clip by clip."""
    return visible_order([[length] for length in _deciding(patches, text_tokens, multiple)], multiple)


def _deciding(patches: Sequence[int], text_tokens: Sequence[int], multiple: int) -> Sequence[int]:
    """Lengths that decide whether a kernel that looks for padding before the last clip finds none although there is
    some. Keys of the second attention are text; padding that shows among the patches shows there as well."""
    return patches if any(length % multiple for length in patches) else text_tokens


def patch_grid(shape: Sequence[int], patch: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns patches along frames, height and width of a latent of ``shape`` ``(frames, height, width)``. Raises
    SampleRejected: ``wrong_shape``, the latent does not divide into patches."""
    if len(shape) != 3 or 0 in shape or any(side % size for side, size in zip(shape, patch, strict=True)):
        raise SampleRejected("wrong_shape", f"a latent of {list(shape)} does not divide into patches of {list(patch)}")
    frames, height, width = (side // size for side, size in zip(shape, patch, strict=True))
    return frames, height, width


def to_patches(latent: torch.Tensor, patch: tuple[int, ...]) -> torch.Tensor:
    """Returns ``[patches, pF * pH * pW * channels]``, channels fastest, of ``[channels, frames, height, width]``."""
    grid = patch_grid(latent.shape[1:], patch)
    sides = [side for pair in zip(grid, patch, strict=True) for side in pair]
    return latent.reshape(len(latent), *sides).permute(1, 3, 5, 2, 4, 6, 0).reshape(math.prod(grid), -1)


def pack_wan(
    samples: Sequence[WanSample],
    *,
    multiple: int = 1,
    patch: tuple[int, ...] = (1, 2, 2),
    capacity: int | None = None,
    compat: Compat = "none",
) -> WanPack:
    """Lays videos side by side in one row, and their texts in another. The samples are in the order of the row;
    `clip_order` tells one that needs no filler. Every video and every text is padded to a ``multiple``
    (`thd.alignment_multiple`); with ``compat="bridge"`` it is ``2 * CP`` for CP above 1, and 1 otherwise. That and
    ``"texts"`` pad every text to `BRIDGE_TEXT_LENGTH` and call all of it real. ``capacity`` limits the row's patches,
    padding included; None sets no limit. Raises ConfigError: a multiple below 1, an unknown ``compat``; PackingError:
    an empty pack, a latent or text of a wrong shape, values that are not finite, a text longer than
    `BRIDGE_TEXT_LENGTH` unless ``compat`` is ``"none"``, or a row above ``capacity``; by key.

    If only the last video has padding, kernels would take the row for unpadded (`energon_packing.thd.assembly`), so
    a filler of ``multiple`` patches and text tokens follows it. Rows of ``compat="bridge"`` have none."""
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise ConfigError(f"multiple must be a whole number of at least 1, not {multiple!r}")
    if compat not in get_args(Compat):
        raise ConfigError(f"compat is {compat!r}; it must be one of {', '.join(get_args(Compat))}")
    if not samples:
        raise PackingError("a pack without videos cannot be made")
    grids = [_checked_grid(sample, compat, patch) for sample in samples]
    videos, texts = [to_patches(sample.latent, patch) for sample in samples], [sample.text for sample in samples]
    if compat != "none":
        texts = [functional.pad(text, (0, 0, 0, BRIDGE_TEXT_LENGTH - len(text))) for text in texts]
    for name, parts in (("latent", videos), ("text", texts)):
        if len({(part.shape[1], part.dtype) for part in parts}) > 1:
            raise PackingError(f"samples {samples[0].key} to {samples[-1].key}: {name}s differ in width or dtype")
    masks = [torch.ones(len(video), dtype=torch.bfloat16) for video in videos]
    deciding = _deciding([len(video) for video in videos], [len(text) for text in texts], multiple)
    fillers = int(hides_padding(deciding, multiple) and compat != "bridge")
    if fillers:
        for parts in (videos, texts, masks):
            parts.append(parts[0].new_zeros(multiple, *parts[0].shape[1:]))
        grids.append((multiple, 1, 1))
    patches, tokens = [len(video) for video in videos], [len(text) for text in texts]
    rows, keys = ([-(-length // multiple) * multiple for length in each] for each in (patches, tokens))
    if capacity is not None and sum(rows) > capacity:
        raise PackingError(
            f"{len(samples)} videos ({samples[0].key} to {samples[-1].key}) occupy {sum(rows)} patches after "
            f"alignment to {multiple}{' and with a masked clip' if fillers else ''}, more than the row's {capacity}"
        )
    sizes = zip(_LENGTH_FIELDS, (patches, rows, tokens, keys), strict=True)
    return WanPack(
        video_latents=_join(videos, rows)[:, None],
        context_embeddings=_join(texts, keys)[:, None],
        loss_mask=_join(masks, rows)[:, None],
        grid_sizes=torch.tensor(grids, dtype=torch.int32),
        video_metadata=tuple(sample.metadata for sample in samples),
        keys=tuple(sample.key for sample in samples),
        fillers=fillers,
        **{name: torch.tensor(values, dtype=torch.int32) for name, values in sizes},
    )


def _join(parts: Sequence[torch.Tensor], places: Sequence[int]) -> torch.Tensor:
    row = parts[0].new_zeros((sum(places), *parts[0].shape[1:]))
    starts = itertools.accumulate(places, initial=0)
    for part, start in zip(parts, starts, strict=False):  # slices: a view of split() takes no gradient
        row[start : start + len(part)] = part
    return row


def _checked_grid(sample: WanSample, compat: Compat, patch: tuple[int, ...]) -> tuple[int, int, int]:
    latent, text, wrong = sample.latent, sample.text, ""
    for name, tensor, axes in (("text", text, 2), ("latent", latent, 4)):
        if tensor.dim() != axes or 0 in tensor.shape:
            wrong = f"its {name} has shape {list(tensor.shape)}, expected {axes} axes, none empty"
        elif not math.isfinite(size := largest(tensor)):
            wrong = f"its {name} holds NaN or infinite values"
        elif compat == "bridge" and name == "latent" and size > BRIDGE_LARGEST_LATENT:
            wrong = f"its latent has values above {BRIDGE_LARGEST_LATENT:g}, which Bridge skips"
    if compat != "none" and len(text) > BRIDGE_TEXT_LENGTH:
        most = f"the {BRIDGE_TEXT_LENGTH} of Bridge's data path; shorten it, or pack with compat='none'"
        wrong = wrong or f"its text has {len(text)} tokens, more than {most}"
    if wrong:
        raise PackingError(f"sample {sample.key}: {wrong}")
    try:
        return patch_grid(latent.shape[1:], patch)
    except SampleRejected as error:
        raise PackingError(f"sample {sample.key}: {error.detail}") from None
