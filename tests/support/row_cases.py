"""Random rows through the cut of context parallelism: ours, and as a control the layout that hides padding.

The control's last place takes all the remaining space (ours until November 2026; Megatron-Bridge's packers). The oracle
is `support.p2p_cut`, compared with the attention of each sample alone.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from energon_packing import thd
from energon_packing.thd.assembly import hides_padding, visible_order
from support.p2p_cut import RELEASES, attention_over_ranks, infers_padding, masked_attention

MULTIPLES = tuple(range(2, 33))
EXACT = 1e-9
"""Largest difference that counts as equal, in float64."""
WIDTH = 4
"""Width of a head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCase:
    """Samples of one row, in the order in which a policy chose them.

    Attributes:
        lengths: real tokens of each.
        multiple: alignment of the run.
        width: of the row in tokens; None for a row as long as its samples.
        ranks: context-parallel size; 1 if the multiple is of another kind (sequence parallelism).
    """

    lengths: tuple[int, ...]
    multiple: int
    width: int | None
    ranks: int

    @property
    def occupied(self) -> int:
        """Tokens that the samples occupy, alignment included."""
        return sum(-(-length // self.multiple) * self.multiple for length in self.lengths)


def random_case(random: np.random.Generator) -> RowCase:
    """Draws a row of 1 to 6 samples; half have a fixed width, and many samples are aligned, as in full packs."""
    multiple = int(random.choice(MULTIPLES))
    longest = min(3 * multiple, 64)
    lengths = random.integers(1, longest + 1, int(random.integers(1, 7)))
    aligned = random.random(lengths.size) < random.choice([0.0, 0.5, 0.9])
    lengths = np.where(aligned, -(-lengths // multiple) * multiple, lengths)
    sizes = [ranks for ranks in range(2, 17) if multiple % (2 * ranks) == 0]
    case = RowCase(
        lengths=tuple(lengths.tolist()),
        multiple=multiple,
        width=None,
        ranks=int(random.choice(sizes)) if sizes else 1,
    )
    if random.random() < 0.5:
        return case
    spare = int(random.choice([0, 0, 1, 3]))
    if spare == 0 and len(lengths) == 1 and hides_padding(case.lengths, multiple):
        spare = 1  # a pack's capacity leaves this room
    width = case.occupied + spare * multiple
    return RowCase(lengths=case.lengths, multiple=multiple, width=width, ranks=case.ranks)


@functools.cache
def _row(length: int) -> dict[str, Any]:
    labels = torch.full((length,), thd.IGNORE_INDEX)
    return {
        "input_ids": torch.ones(length, dtype=torch.int64),
        "labels": labels,
        "loss_mask": torch.zeros(length),
        "position_ids": torch.arange(length),
    }


def our_boundaries(case: RowCase) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Returns real and physical boundaries of our row, and the lengths of its samples in row order."""
    order = visible_order([(length,) for length in case.lengths], case.multiple)
    lengths = tuple(case.lengths[at] for at in order)
    batch = thd.assemble([_row(length) for length in lengths], multiple=case.multiple, width=case.width)
    if batch.cu_seqlens_padded is None:
        raise AssertionError("a multiple above 1 gives two boundaries")
    return batch.cu_seqlens, batch.cu_seqlens_padded, lengths


def former_boundaries(case: RowCase) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Returns the same for a row whose last sample's place takes the rest, as Bridge's packers make it."""
    real = np.concatenate([[0], np.cumsum(case.lengths)])
    physical = np.concatenate([[0], np.cumsum([-(-n // case.multiple) * case.multiple for n in case.lengths])])
    if case.width is not None:
        physical[-1] = case.width
    made = (torch.from_numpy(array.astype(np.int32)) for array in (real, physical))
    return next(made), next(made), case.lengths


def largest_error(
    real: torch.Tensor, physical: torch.Tensor, lengths: Sequence[int], *, ranks: int, padded: bool, seed: int
) -> float:
    """Returns the largest difference between a sample's attention in the row and alone."""
    places = physical.numpy().astype(np.int64)
    random = np.random.default_rng(seed)
    query, key, value = random.standard_normal((3, int(places[-1]), WIDTH))
    out = attention_over_ranks(query, key, value, real.numpy().astype(np.int64), places, ranks=ranks, padded=padded)
    worst = 0.0
    for start, length in zip(places.tolist(), lengths, strict=False):
        here = slice(start, start + length)
        causal = np.tri(length, dtype=bool)
        alone = masked_attention(query[here], key[here], value[here], causal)
        worst = max(worst, float(np.abs(out[here] - alone).max()))
    return worst


def measure(count: int, seed: int) -> Iterator[Counter[str]]:
    """Counts for our rows, then for the control: what hides padding, what is misread, and what is computed wrongly."""
    for boundaries_of in (our_boundaries, former_boundaries):
        random, found = np.random.default_rng(seed), Counter[str]()
        for number in range(count):
            case = random_case(random)
            real, physical, lengths = boundaries_of(case)
            has_padding = not torch.equal(real, physical)
            found["hide padding"] += has_padding and torch.equal(real[:-1], physical[:-1])
            found["misread"] += any(infers_padding(real, physical, each) != has_padding for each in RELEASES)
            if case.ranks == 1:
                continue
            cut = functools.partial(largest_error, real, physical, lengths, ranks=case.ranks, seed=number)
            if cut(padded=infers_padding(real, physical, "2.16")) > EXACT:
                found["wrong"] += 1
                found["wrong when told"] += cut(padded=has_padding) > EXACT
        yield found
