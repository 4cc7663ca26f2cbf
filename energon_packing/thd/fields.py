"""The fields of a packed row, declared once.

What a user (``encoder.extra_fields``) and a family (``token_fields``) add per token are `TokenField` too: they travel
in `PackedBatch.extra`.
"""

from dataclasses import dataclass
from typing import Literal

import torch

IGNORE_INDEX = -100  # the label of a position without a target (PyTorch's and Bridge's ignore index)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenField:
    """One number per token: ``[1, T]`` in a batch, ``[L]`` in a sample's row; positions also ``[3, 1, T]``, ``[3, L]``.
    The last axis counts tokens, and context parallelism slices it. A further field of whole numbers is an input of the
    model under its own name; one of fractions is the loss's.

    Attributes:
        name: in `PackedBatch` or its ``extra``.
        dtype: in rows and batches.
        pad: value on padding; None counts on from the sample's last one.
        row: name in a sample's row, by default the same; empty if assembly makes the field.
        bridge: names in the mapping for Bridge, by default the same.
        stage: pipeline stages whose model reads it.
    """

    name: str
    dtype: torch.dtype = torch.int64
    pad: int | float | bool | None = 0
    row: str | None = None
    bridge: tuple[str, ...] = ()
    stage: Literal["first", "last", "every"] = "every"

    @property
    def of_row(self) -> str:
        """Its name in a sample's row."""
        return self.name if self.row is None else self.row

    @property
    def of_bridge(self) -> tuple[str, ...]:
        """Its names in the mapping for Bridge."""
        return self.bridge or (self.name,)

    def filled(self, length: int) -> torch.Tensor:
        """``[length]`` of padding."""
        return torch.full((length,), self.pad or 0, dtype=self.dtype)

    def padded(self, values: torch.Tensor, more: int) -> torch.Tensor:
        """``values`` ``[..., L]`` with ``more`` tokens of padding after them."""
        if self.pad is None:
            after = int(values[..., -1].max()) + 1
            tail = torch.arange(after, after + more, dtype=values.dtype).expand(*values.shape[:-1], -1)
            return torch.cat([values, tail], -1)
        return torch.nn.functional.pad(values, (0, more), value=self.pad)


TOKEN_FIELDS = (
    TokenField(name="tokens", row="input_ids", bridge=("tokens", "input_ids"), stage="first"),
    TokenField(name="labels", pad=IGNORE_INDEX, stage="last"),
    TokenField(name="loss_mask", dtype=torch.float32, pad=0.0, stage="last"),
    TokenField(name="position_ids", pad=None, stage="first"),
    TokenField(name="padding_mask", dtype=torch.bool, pad=True, row=""),
)
"""The fields that every row has. ``tokens`` are padded with 0, which every vocabulary has, or with the run's own."""
ROW_TENSORS = tuple(field.of_row for field in TOKEN_FIELDS if field.of_row)
"""Names of the tensors that every sample's row brings."""
BOUNDARY_FIELDS = {
    "cu_seqlens": ("cu_seqlens_q", "cu_seqlens_kv"),
    "cu_seqlens_padded": ("cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    "max_seqlen": ("max_seqlen_q", "max_seqlen_kv"),
    "total_tokens": ("total_tokens",),
}
"""Fields about the segments -> their names in the mapping for Bridge. No slice changes them, every stage reads them."""
BRIDGE_KEYS = (
    *(key for field in TOKEN_FIELDS for key in field.of_bridge),
    *("attention_mask", "visual_inputs"),
    *(key for keys in BOUNDARY_FIELDS.values() for key in keys),
)
"""Every key that `PackedBatch.to_bridge` may emit; no extra field may use one of these names."""
