"""Assembly of THD rows: samples are joined into one row with boundaries, masks and positions.

The rules for boundaries:

* ``cu_seqlens`` sums real lengths, ``cu_seqlens_padded`` physical ones. An alignment multiple above 1 always emits
  both, even if they are equal; a multiple of 1 never does, because padded boundaries select a slower kernel.
* A row of fixed width leaves a tail, which becomes one last, fully masked segment: a segment, never a sample.
* No kernel has to guess whether a row is padded. With a multiple above 1, either the row is fully aligned and both
  boundaries are one tensor, or some padding precedes the start of its last segment. If only the last sample would be
  padded, a masked segment of one multiple follows it.
* ``max_seqlen`` is the longest *physical* segment, because kernels size their tiles by it.

Why kernels would guess: Transformer Engine 2.2 to 2.17.1 compares real and physical boundaries *without their last
entries* (``dot_product_attention.py``: ``torch.equal(cu_seqlens_q_padded[:-1],
cu_seqlens_q[:-1])``) and treats a row as unpadded if they are equal. They are also equal if only the last segment is
padded. Context parallelism then cuts the lengths as ``cu_seqlens // cp_size``, and real keys are silently lost
(TransformerEngine#3331). So another sample goes last (`visible_order`), and a sample that is alone gets the masked
segment, for which its row needs room (`PackLimits.lone_room`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from energon_packing.errors import ConfigError, PackingError
from energon_packing.thd.batch import PackedBatch
from energon_packing.thd.fields import BRIDGE_KEYS, IGNORE_INDEX, TokenField
from energon_packing.thd.rows import ROW_FIELDS, join_extra, join_visual, joined_forms, row_arrays, verify_targets


def hides_padding(lengths: Sequence[int], multiple: int) -> bool:
    """Whether a row of segments with these real lengths, in this order, is padded after its last segment only."""
    *before, last = lengths
    return last % multiple != 0 and all(length % multiple == 0 for length in before)


def visible_order(samples: Sequence[Sequence[int]], multiple: int) -> list[int]:
    """Positions of a pack's samples in an order that shows their padding; the given order if it already does. Otherwise
    the last two samples are swapped: only the last one has padding, so an unpadded sample then follows it. Applying the
    function to its own result changes nothing. Only a masked segment shows the padding of a single sample. Of each
    sample, ``samples`` has the real lengths of its segments: one, or two for a preference pair, which stay together and
    in order."""
    order = list(range(len(samples)))
    if len(order) > 1 and hides_padding([length for sample in samples for length in sample], multiple):
        order[-2:] = reversed(order[-2:])
    return order


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
    return int(value)


def assemble(
    rows: Sequence[Mapping[str, Any]],
    *,
    multiple: int = 1,
    width: int | None = None,
    pad_token_id: int = 0,
    total_multiple: int = 1,
    extra_fields: Mapping[str, int | float | bool] | Iterable[TokenField] | None = None,
) -> PackedBatch:
    """Places samples side by side in one row and computes its boundaries. Raises ConfigError: a multiple, width or
    extra field that cannot work; PackingError: a row that breaks the contract below, named by key; also a last token
    with a target (it would be the first token of the next sample), a weight on a position without a target, and a width
    that leaves no room for the masked segment after a last sample that is the only padded one (`visible_order` puts
    another one last). Each input row is a mapping of tensors (or arrays) of one common length L and related values:

    * ``input_ids`` ``[L]``, ``labels`` ``[L]`` (already shifted), ``loss_mask`` ``[L]``, ``position_ids`` ``[L]`` or
      ``[3, L]`` (all rows alike): required;
    * the names of ``extra_fields``, ``[L]``: required where declared;
    * ``visual_inputs``: name -> tensor whose first axis counts this sample's media or patches; joined in row order;
    * ``pixel_forms``: name -> `energon_packing.thd.pixels.PixelForm` of those that are bytes; alike in all rows;
    * ``attention_mask`` ``[L]``: rejected unless all true: a processor's padding would lie inside a segment;
    * ``key``: the sample's name, for messages and ``sample_keys`` (defaults to its index);
    * ``position_start``: position of the first token, if not 0 (a piece that continues counting);
    * ``expected_length``: the predicted length; any other length is an error, never a silent change of the plan.

    Args:
        multiple: every segment is padded to a multiple of this many tokens (see `alignment_multiple`).
        width: the row's length in tokens; None makes the row as long as its segments, and one multiple longer if only
            its last sample is padded.
        total_multiple: the row's length becomes a multiple of this, for kernels that require one (16 for FP8, 32 for
            MXFP8, times the ranks that share a row); the tail is a masked segment, as with ``width``.
        extra_fields: further token-aligned fields, each with dtype and padding value; or name -> padding value, and
            the first row decides about the dtype.

    Padding has label -100, weight 0, ``padding_mask`` True, and positions that continue from the sample's last one (as
    in Bridge's in-batch packer; for mRoPE all three axes continue from the largest, as for text). Positions of a masked
    tail segment count from 0.
    """
    multiple = _positive("multiple", multiple)
    total_multiple = _positive("total_multiple", total_multiple)
    if width is not None:
        width = _positive("width", width)
        if width % multiple or width % total_multiple:
            raise ConfigError(
                f"width {width} is not a multiple of {math.lcm(multiple, total_multiple)}, which alignment to "
                f"{multiple} and a total multiple of {total_multiple} require; choose the next larger multiple"
            )
    given = extra_fields or {}
    further: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {field.name: field for field in given}
    if clash := sorted(set(further) & {*ROW_FIELDS, *BRIDGE_KEYS}):
        raise ConfigError(f"extra_fields may not redefine {', '.join(clash)}")
    if not rows:
        raise PackingError("a pack without samples cannot be assembled")
    keys = tuple(str(index if row.get("key") is None else row["key"]) for index, row in enumerate(rows))
    arrays = [row_arrays(key, row, further) for key, row in zip(keys, rows, strict=True)]
    lengths = np.array([row["input_ids"].shape[0] for row in arrays], dtype=np.int64)
    physical = -(-lengths // multiple) * multiple
    occupied = int(physical.sum())
    hidden = hides_padding(lengths.tolist(), multiple)
    if width is None:
        step = math.lcm(multiple, total_multiple)
        width = -(-(occupied + hidden) // step) * step
    elif occupied > width:
        taken = f"{occupied} tokens after alignment to {multiple}, more than the row's {width}"
        raise PackingError(f"{len(rows)} samples ({keys[0]} to {keys[-1]}) occupy {taken}")
    tail = width - occupied
    if hidden and not tail:
        raise PackingError(
            f"sample {keys[-1]} ends the row of {width} tokens and is the only one followed by padding, which kernels "
            f"would overlook; put it before another sample, or leave {multiple} tokens for a masked segment"
        )
    starts = np.cumsum([0, *physical], dtype=np.int64)
    axes = arrays[0]["position_ids"].shape[:-1]
    tokens = np.full(width, pad_token_id, dtype=np.int64)
    labels = np.full(width, IGNORE_INDEX, dtype=np.int64)
    loss_mask = np.zeros(width, dtype=np.float32)
    padding = np.ones(width, dtype=np.bool_)
    positions = np.empty((*axes, width), dtype=np.int64)
    for key, row, start, length, stop in zip(keys, arrays, starts[:-1], lengths, starts[1:], strict=True):
        end = start + length
        tokens[start:end] = row["input_ids"]
        labels[start:end] = row["labels"]
        loss_mask[start:end] = row["loss_mask"]
        padding[start:end] = False
        if (own := row["position_ids"]).shape[:-1] != axes:
            raise PackingError(
                f"sample {key}: position_ids has shape {list(own.shape)}, but that of sample {keys[0]} has "
                f"{[*axes, int(lengths[0])]}; all samples of a pack need 1-D positions, or all [3, length]"
            )
        positions[..., start:end] = own
        if end < stop:
            first = int(own[..., -1].max()) + 1
            positions[..., end:stop] = np.arange(first, first + stop - end)
    if tail:
        positions[..., width - tail :] = np.arange(tail)
    verify_targets(keys, starts, lengths, labels, loss_mask)
    last = [tail] if tail else []
    real = np.cumsum([0, *lengths, *last], dtype=np.int32)
    places = np.cumsum([0, *physical, *last], dtype=np.int32)
    position_starts = tuple(int(row.get("position_start") or 0) for row in rows)
    visual_inputs, visual_counts = join_visual(keys, rows)
    return PackedBatch(
        tokens=torch.from_numpy(tokens)[None],
        labels=torch.from_numpy(labels)[None],
        loss_mask=torch.from_numpy(loss_mask)[None],
        position_ids=torch.from_numpy(positions)[..., None, :] if axes else torch.from_numpy(positions)[None],
        padding_mask=torch.from_numpy(padding)[None],
        cu_seqlens=torch.from_numpy(real),
        cu_seqlens_padded=torch.from_numpy(places) if multiple > 1 else None,
        max_seqlen=max(int(physical.max()), tail),
        total_tokens=width,
        visual_inputs=visual_inputs,
        visual_counts=visual_counts,
        pixel_forms=joined_forms(keys, rows),
        sample_keys=keys,
        sample_lengths=tuple(lengths.tolist()),
        position_starts=position_starts if any(position_starts) else (),
        extra=join_extra(keys, arrays, further, starts, width),
    )
