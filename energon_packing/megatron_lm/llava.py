"""Rows for Megatron-Core's ``LLaVAModel``, which expects one token per image where our rows hold one per embedding.

The model finds the token ``image_token_index`` (-200), puts the embeddings of that image's tiles in its place, and
moves labels and loss mask along. So each run of placeholders is cut to its last token, and the model expands the row
again to its full length and the same boundaries.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from energon_packing.errors import ConfigError, PackingError
from energon_packing.megatron_lm.batch import StageBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class LlavaInputs:
    """What ``LLaVAModel.forward`` takes. S is T minus the placeholders that were cut.

    Attributes:
        images: ``[tiles, 3, H, W]``; zero tiles if the row has no image.
        tokens: ``[1, S]`` int64.
        position_ids: ``[1, S]`` int64, of the expanded row.
        labels: ``[1, S]`` int64.
        loss_mask: ``[1, S]`` float32.
        tiles: int ``[runs]``, tiles per run.
    """

    images: torch.Tensor
    tokens: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    tiles: torch.Tensor


def llava_inputs(batch: StageBatch, *, placeholder: int, image_token_index: int, tokens_per_tile: int) -> LlavaInputs:
    """Cuts every run of placeholders to one token.

    Args:
        batch: a whole row.
        placeholder: token id that stands for an embedding of an image.
        image_token_index: the model's token for an image.
        tokens_per_tile: the model's ``img_seq_len``.

    Raises:
        ConfigError: a run is not a whole number of tiles, or the row has visual inputs other than ``pixel_values``.
    """
    if batch.tokens is None or batch.labels is None or batch.loss_mask is None or batch.position_ids is None:
        raise PackingError("LLaVAModel needs the whole row on every stage; call get_batch with whole_row=True")
    row = batch.tokens[0]
    media = row == placeholder
    after = torch.cat([media[1:], media.new_zeros(1)])
    last = media & ~after
    ends = torch.cumsum(media, 0)[last]
    runs = torch.diff(ends, prepend=ends.new_zeros(1))
    if (runs % tokens_per_tile).any():
        wrong = int(runs[runs % tokens_per_tile > 0][0])
        raise ConfigError(
            f"An image has {wrong} placeholders, but the model makes {tokens_per_tile} embeddings per tile; use the "
            "processor that belongs to the vision model (its size, patch size and class token)."
        )
    kept = ~media | last
    visual = dict(batch.visual_inputs or {})
    images = visual.pop("pixel_values", None)
    if visual:
        raise ConfigError(f"LLaVAModel supports only images, but the row has {', '.join(sorted(visual))}.")
    if images is None:
        images = torch.zeros(0, 3, 1, 1, device=row.device)
    return LlavaInputs(
        images=images,
        tokens=torch.where(media, image_token_index, row)[kept][None],
        position_ids=batch.position_ids[..., kept],
        labels=batch.labels[:, kept],
        loss_mask=batch.loss_mask[:, kept],
        tiles=(runs // tokens_per_tile).to(torch.int),
    )


@functools.cache
def image_placeholder() -> int:
    """Token id of image placeholders, read once from the run's processor.

    Raises:
        ConfigError: the processor has no image placeholder.
    """
    from megatron.training import get_args

    from energon_packing.families.registry import build_family, load_processor
    from energon_packing.megatron_lm.arguments import run_config_of

    config = run_config_of(get_args()).encoder
    ids = build_family(load_processor(config), config).placeholder_ids
    if "image" not in ids:
        raise ConfigError(f"encoder.processor {config.processor} has no placeholder for images; LLaVAModel needs one.")
    return ids["image"]


def check_pipeline_width(model: Any, batch: StageBatch) -> None:
    """Checks that the language model's length, to which ``LLaVAModel`` pads in pipelines, is the row's.

    Raises:
        ConfigError: it is not.
    """
    if not getattr(model, "_language_is_pipeline_parallel", False) or batch.tokens is None:
        return
    width = model._language_max_sequence_length
    if width != batch.tokens.size(1):
        raise ConfigError(
            f"LLaVAModel has language_max_sequence_length {width}, but the rows have {batch.tokens.size(1)} tokens; "
            "between pipeline stages both must be equal: build the model with the length of a row."
        )
