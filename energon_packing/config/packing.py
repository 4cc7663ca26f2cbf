"""The section ``packing`` of a configuration: how samples share a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from energon_packing.config.setting import check_bounds, setting
from energon_packing.conversation import Pairs

Oversize = Literal["drop", "raise", "truncate", "split"]

SplitAt = Literal["turn", "token"]

SplitPositions = Literal["restart", "continue"]

MAX_DROPS_WITHOUT_PACK = 20_000
"""Default for how many samples may be dropped since the last pack before the run stops."""

PACK_LIMITS = ("max_images_per_pack", "max_patches_per_pack", "max_segments_per_pack", "max_cost_per_pack")
"""The fields of `PackingConfig` that limit a pack in addition to its tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingConfig:
    """How samples share a row."""

    seq_length: int = setting(4096, unit="tokens", least=1)
    """Tokens of a row, alignment padding included: no pack is ever longer."""
    window: int = setting(256, unit="samples", changes="packs", least=1)
    """Measured samples held for selection. A larger window fills packs better but delays samples longer; each sample
    costs about 3 KB."""
    policy: str = setting("window", changes="packs")
    """How a pack is chosen from the window: ``window`` (best by far), ``best_fit``, ``next_fit``, ``first_fit``,
    ``balanced``, or a name registered with ``register_policy``; see docs/packing.md."""
    max_images_per_pack: int | None = setting(None, unit="images", changes="packs", least=1)
    """Images per pack; each tile counts if the family tiles images. None sets no limit. A sample that exceeds a limit
    by itself is handled according to ``oversize``, with the reason ``over_limit``."""
    max_patches_per_pack: int | None = setting(None, unit="rows of vision input", changes="packs", least=1)
    """Rows of vision input per pack; bounds the memory of the vision encoder."""
    max_segments_per_pack: int | None = setting(None, unit="samples", changes="packs", least=1)
    """Samples per pack, not counting the masked tail of a fixed-width row."""
    max_cost_per_pack: float | None = setting(None, unit="tokens without attention", changes="packs", least=1)
    """Cost per pack, in units of one token without attention: a segment of L tokens costs ``L + L**2 / 24576``, a patch
    0.098."""
    balance_window: int = setting(1, unit="packs", changes="packs", least=1)
    """Number of selected packs that are sorted by cost before they are emitted; 1 keeps the order of selection."""
    oversize: Oversize = setting("drop", changes="rows")
    """What happens to a sample that is longer than a row: ``drop`` enters it in the ledger, ``raise`` stops the run,
    ``truncate`` cuts it after the last turn that fits, ``split`` makes pieces ``KEY#0``, ``KEY#1`` and so on; see
    docs/packing.md."""
    split_at: SplitAt = setting("turn", changes="rows")
    """Where ``oversize: split`` cuts: ``turn`` cuts after the last answer that fits, and inside an exchange only if the
    exchange is longer than a row; ``token`` fills every piece."""
    split_positions: SplitPositions = setting("restart", changes="rows")
    """Positions of a piece: ``restart`` counts each piece from 0; ``continue`` continues from the end of the previous
    piece."""
    pairs: Pairs = setting("refuse", newer=True)
    """What is trained of preference pairs, and of answers with a label (KTO): ``refuse`` stops the run, ``chosen``
    trains chosen and wanted answers as ordinary conversations, ``drop`` leaves pairs and labelled answers out, ``both``
    trains all, for a loss that reads ``preference``; see docs/limits.md."""
    pad_to_max_length: bool = setting(False, changes="packs")
    """True makes every row ``seq_length`` long, which pipelines, experts and CUDA graphs need."""
    dummy_image: bool = setting(False, changes="rows")
    """True adds the family's smallest image, masked and with zero weight, to packs without media. Every micro-step then
    has media on all ranks, and collectives inside a vision tower cannot hang. Packs reserve room for it."""
    drop_budget: float = setting(0.1, unit="share, 0 to 1", changes="nothing", least=0.0, most=1.0)
    """Share of the samples read that may be dropped. The run stops once the share is above this beyond doubt; 1.0 never
    stops it."""
    max_drops_without_pack: int = setting(MAX_DROPS_WITHOUT_PACK, unit="samples", changes="nothing", least=1)
    """Samples that a worker may drop without making a pack in between before the run stops."""
    ledger: str | None = setting(None, changes="nothing")
    """Directory of the ledger files, one per worker; None keeps the ledger in the batches only."""

    def __post_init__(self) -> None:
        check_bounds("packing", self)
        if self.policy != "window":  # the registry needs numpy
            from energon_packing.packing.online import check_online_policy

            check_online_policy(self.policy)
