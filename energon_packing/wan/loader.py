"""The loader of text-to-video packs: `build_loader` for clips, with all features of a `PackLoader`."""

from __future__ import annotations

import functools
from typing import Any, cast

from energon_packing.config import PackingConfig, RunConfig
from energon_packing.energon.epoch_end import Agree
from energon_packing.energon.loader import PackLoader, build_dataset, data_fingerprint
from energon_packing.ledger import LedgerLock
from energon_packing.wan.caption_encoder import CaptionEncoder
from energon_packing.wan.config import TextToVideoRunConfig
from energon_packing.wan.latent_encoder import LatentEncoder
from energon_packing.wan.task_encoder import TextToVideoTaskEncoder


def build_text_to_video_loader(
    config: TextToVideoRunConfig,
    *,
    latent_encoder: LatentEncoder | None = None,
    caption_encoder: CaptionEncoder | None = None,
    task_encoder: TextToVideoTaskEncoder | None = None,
    prefetch: int = 2,
    data_parallel_group: Any = None,
    agree: Agree | None = None,
    **arguments: Any,
) -> PackLoader:
    """A loader of packs of clips for one data-parallel rank; its packs are `ClipPack`.

    Args:
        config: of the run.
        latent_encoder, caption_encoder: models of your own; None takes those of ``config.encoder``.
        task_encoder: None builds one from the configuration and the two models.
        prefetch, agree: as `PackLoader`.
        data_parallel_group, arguments: ``rank``, ``world_size``, ``split``, ``workers``, as `build_dataset`.

    Raises:
        UserError: there is no data set at ``data.path``, or it lacks the split.
        ConfigError: a model or a size cannot be used.
    """
    if task_encoder is None:
        task_encoder = build_text_to_video_task_encoder(
            config, latent_encoder=latent_encoder, caption_encoder=caption_encoder
        )
    dataset = build_dataset(
        _data_of(config),
        task_encoder=cast("Any", task_encoder),
        data_parallel_group=data_parallel_group,
        tells_end=True,
        **arguments,
    )
    return PackLoader(
        dataset,
        prefetch=prefetch,
        epoch_end=config.data.epoch_end,
        padding=task_encoder.padding_pack,
        agree=agree,
        group=data_parallel_group,
        capacity=task_encoder.capacity,
        budget=config.packing.drop_budget,
        lock=LedgerLock(config.packing.ledger, dataset.worker_config.rank),
        keep_memory=config.data.keep_memory,
        ahead=config.data.depth,
        fingerprint=task_encoder.loader_fingerprint(dataset),
        accept_changed=config.data.accept_changed,
    )


def build_text_to_video_task_encoder(config: TextToVideoRunConfig, **models: Any) -> TextToVideoTaskEncoder:
    """The task encoder of a configuration.

    Args:
        config: of the run.
        models: ``latent_encoder`` and ``caption_encoder``, as for `build_text_to_video_loader`.

    Raises:
        ConfigError: a model cannot be used.
    """
    return TextToVideoTaskEncoder(config, fingerprint=functools.partial(data_fingerprint, _data_of(config)), **models)


def _data_of(config: TextToVideoRunConfig) -> RunConfig:
    """What a data set reads of the configuration: of the sections, only ``data``."""
    return RunConfig(data=config.data, packing=PackingConfig(seq_length=config.packing.seq_length))
