"""Orders a pack so that no kernel has to guess whether there is padding between its samples.

If every segment is padded to a multiple, a row has real and physical boundaries. Transformer Engine 2.2 to 2.17.1
compares them *without their last entries* (``dot_product_attention.py``: ``torch.equal(cu_seqlens_q_padded[:-1],
cu_seqlens_q[:-1])``) and treats a row as unpadded if they are equal. They are also equal if only the last segment is
padded. Context parallelism then cuts the lengths as ``cu_seqlens // cp_size``, and real keys are silently lost
(TransformerEngine#3331). So a row must be fully aligned, or have padding before the start of its last segment.

Two measures ensure this when packs are ordered: another sample goes last (`visible_order`), and a sample that is alone
gets a last, fully masked segment of one multiple, for which its row needs room (`PackLimits.lone_room`).
"""

from __future__ import annotations

from collections.abc import Sequence


def hides_padding(lengths: Sequence[int], multiple: int) -> bool:
    """Whether a row of segments with these real lengths, in this order, is padded after its last segment only.

    Args:
        lengths: tokens of each segment, at least one.
        multiple: every segment is padded to a multiple of this many tokens.
    """
    *before, last = lengths
    return last % multiple != 0 and all(length % multiple == 0 for length in before)


def visible_order(samples: Sequence[Sequence[int]], multiple: int) -> list[int]:
    """Positions of a pack's samples in an order that shows their padding; the given order if it already does.

    Otherwise the last two samples are swapped: only the last one has padding, so an unpadded sample then follows it.
    The order depends on the lengths alone, and applying the function to its own result changes nothing. A single sample
    stays as it is; only a masked segment after it shows its padding.

    Args:
        samples: for each sample, the real lengths of its segments: one, or two for a preference pair, which stay
            together and in order.
        multiple: every segment is padded to a multiple of this many tokens.
    """
    order = list(range(len(samples)))
    if len(order) > 1 and hides_padding([length for sample in samples for length in sample], multiple):
        order[-2:] = reversed(order[-2:])
    return order
