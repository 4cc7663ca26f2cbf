"""The loader of text-to-video packs: `build_loader` for clips, with all features of a `PackLoader`."""

from __future__ import annotations

import functools
from typing import Any, cast

from energon_packing.config import PackingConfig, RunConfig
from energon_packing.energon.loader import PackLoader, build_loader, data_fingerprint
from energon_packing.wan.config import TextToVideoRunConfig
from energon_packing.wan.models import CaptionEncoder, LatentEncoder
from energon_packing.wan.task_encoder import TextToVideoTaskEncoder


def build_text_to_video_loader(
    config: TextToVideoRunConfig,
    *,
    latent_encoder: LatentEncoder | None = None,
    caption_encoder: CaptionEncoder | None = None,
    task_encoder: TextToVideoTaskEncoder | None = None,
    **arguments: Any,
) -> PackLoader:
    """A loader of packs of clips for one data-parallel rank; its packs are `ClipPack`.

    Args:
        config: of the run.
        latent_encoder, caption_encoder: models of your own; None takes those of ``config.encoder``.
        task_encoder: None builds one from the configuration and the two models.
        arguments: as for `energon_packing.energon.loader.build_loader`.

    Raises:
        UserError: there is no data set at ``data.path``, or it lacks the split.
        ConfigError: a model or a size cannot be used.
    """
    if task_encoder is None:
        task_encoder = build_text_to_video_task_encoder(
            config, latent_encoder=latent_encoder, caption_encoder=caption_encoder
        )
    return build_loader(_shared_settings(config), task_encoder=cast("Any", task_encoder), **arguments)


def build_text_to_video_task_encoder(config: TextToVideoRunConfig, **models: Any) -> TextToVideoTaskEncoder:
    """The task encoder of a configuration.

    Args:
        config: of the run.
        models: ``latent_encoder`` and ``caption_encoder``, as for `build_text_to_video_loader`.

    Raises:
        ConfigError: a model cannot be used.
    """
    data = functools.partial(data_fingerprint, _shared_settings(config))
    return TextToVideoTaskEncoder(config, fingerprint=data, **models)


def _shared_settings(config: TextToVideoRunConfig) -> RunConfig:
    """What a loader reads of a configuration of any kind."""
    packing = config.packing
    return RunConfig(
        data=config.data,
        packing=PackingConfig(seq_length=packing.seq_length, drop_budget=packing.drop_budget, ledger=packing.ledger),
    )
