"""The first difference between two packs that should be equal, by sample and field."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from energon_packing.energon.pack_bytes import tensors_of
from energon_packing.energon.samples import Pack
from energon_packing.thd.batch import PackedBatch
from energon_packing.wan.pack import WanPack

_OF_PACK = ("keys", "changed", "cost", "occupied", "dropped", "padding")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """What differs.

    Attributes:
        field: of the pack or its row.
        sample: key of the sample that it belongs to; None if it belongs to the whole pack.
        what: the values, in a few words.
    """

    field: str
    sample: str | None
    what: str

    def __str__(self) -> str:
        of = f" of sample {self.sample}" if self.sample else ""
        return f"{self.field}{of}: {self.what}"


def first_difference(expected: Pack, found: Pack) -> Difference | None:
    """Compares two packs, pixels as the processor's numbers; None if they are equal."""
    for name in _OF_PACK:
        ours, theirs = getattr(expected, name), getattr(found, name)
        if ours != theirs:
            return _of_values(name, ours, theirs)
    left, right = _finished(expected.batch), _finished(found.batch)
    for spec in dataclasses.fields(left):
        ours, theirs = getattr(left, spec.name), getattr(right, spec.name)
        plain = not isinstance(ours, torch.Tensor) and spec.name not in ("visual_inputs", "extra")
        if plain and ours != theirs:
            return _of_values(spec.name, ours, theirs)
    tensors, others = tensors_of(left), tensors_of(right)
    if tensors.keys() != others.keys():
        name = min(tensors.keys() ^ others.keys())
        return Difference(field=name, sample=None, what="only one of them has it")
    for name, tensor in tensors.items():
        other = others[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            both = f"{other.dtype} {list(other.shape)} instead of {tensor.dtype} {list(tensor.shape)}"
            return Difference(field=name, sample=None, what=both)
        if not torch.equal(tensor, other):
            return _of_tensors(name, tensor, other, left)
    return None


def _finished(batch: Any) -> Any:
    return batch.finished() if isinstance(batch, PackedBatch) else batch


def _of_values(name: str, ours: object, theirs: object) -> Difference:
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        for at, (left, right) in enumerate(zip(ours, theirs, strict=False)):
            if left != right:
                return Difference(field=name, sample=None, what=f"{right!r} instead of {left!r} at {at}")
        return Difference(field=name, sample=None, what=f"{len(theirs)} values instead of {len(ours)}")
    return Difference(field=name, sample=None, what=f"{theirs!r} instead of {ours!r}")


def _of_tensors(name: str, ours: torch.Tensor, theirs: torch.Tensor, batch: Any) -> Difference:
    at = np.argwhere((ours != theirs).numpy())[0].tolist()
    what = f"{theirs[tuple(at)].item()} instead of {ours[tuple(at)].item()} at {at}"
    _, _, visual = name.partition("visual_inputs/")
    if isinstance(batch, WanPack):
        lengths = batch.seq_len_kv_padded if name == "context_embeddings" else batch.seq_len_q_padded
        whole = len(lengths) == len(ours)  # one number of each clip, not one of each patch or text token
        place = at[0] if whole else int(np.searchsorted(lengths.cumsum(0).numpy(), at[0], side="right"))
    elif visual:
        ends = np.cumsum(batch.visual_counts.get(visual, ()))
        place = int(np.searchsorted(ends, at[0], side="right"))
    elif name.startswith("cu_seqlens"):
        place = at[0] - 1
    else:
        place = int(np.searchsorted(batch.boundaries.numpy(), at[-1], side="right")) - 1
    keys = batch.sample_keys
    return Difference(field=name, sample=keys[place] if 0 <= place < len(keys) else None, what=what)
