"""The order of a pack in which no kernel has to guess whether there is padding between its samples.

Where every segment is padded to a multiple, a row has real and physical boundaries. Transformer Engine 2.2 to 2.17.1
compares them *without their last entries* (``dot_product_attention.py``: ``torch.equal(cu_seqlens_q_padded[:-1],
cu_seqlens_q[:-1])``) and takes a row as unpadded where they agree. A row whose last segment alone is padded agrees,
and context parallelism then cuts its lengths as ``cu_seqlens // cp_size``: real keys are lost in silence
(TransformerEngine#3331). So a row is wholly aligned, or some padding stands before the start of its last segment.

Two means, both used where packs are put in order: another sample goes last (`visible_order`), and a sample that is
alone gets a last, fully masked segment of one multiple, for which its row needs room (`PackLimits.lone_room`).
"""

from __future__ import annotations

from collections.abc import Sequence


def hides_padding(lengths: Sequence[int], multiple: int) -> bool:
    """Whether a row of segments of these real lengths, in this order, is padded behind its last segment only.

    Args:
        lengths: tokens of each segment, at least one.
        multiple: tokens that every segment is padded to a multiple of.
    """
    *before, last = lengths
    return last % multiple != 0 and all(length % multiple == 0 for length in before)


def visible_order(samples: Sequence[Sequence[int]], multiple: int) -> list[int]:
    """Positions of a pack's samples in an order that shows their padding; the given order wherever that does.

    Otherwise the last two samples change places: the last is the only one with padding, so that it is followed by a
    sample without. A function of the lengths alone, and of its own result the identity. A sample by itself stays as it
    is; only a masked segment behind it shows its padding.

    Args:
        samples: for each sample the real lengths of its segments: one, or two of a preference pair, which stay together
            and in order.
        multiple: tokens that every segment is padded to a multiple of.
    """
    order = list(range(len(samples)))
    if len(order) > 1 and hides_padding([length for sample in samples for length in sample], multiple):
        order[-2:] = reversed(order[-2:])
    return order
