"""`open_loader`: the loader of whatever ``data.path`` names, a data set, a plan, or a packed directory."""

from __future__ import annotations

from typing import Any

from energon_packing.energon.loader import build_loader
from energon_packing.energon.loader_base import LoaderBase
from energon_packing.offline.data_paths import is_packed, is_plan
from energon_packing.offline.sample_kind import AnyRun
from energon_packing.wan.config import TextToVideoRunConfig
from energon_packing.wan.loader import build_text_to_video_loader


def open_loader(config: AnyRun, **arguments: Any) -> LoaderBase:
    """The loader of a data set, a plan or a packed directory, by ``data.path``.

    Args:
        config: of the run; a `TextToVideoRunConfig` for clips.
        arguments: of `energon_packing.energon.loader.build_loader`, or of
            `energon_packing.wan.loader.build_text_to_video_loader`; of a plan, those of
            `energon_packing.offline.planned_loader.loader_of`.

    Raises:
        UserError: nothing is there, or it cannot be read.
        ConfigError: a setting that cannot work, or does not suit the plan.
    """
    if is_plan(config.data.path):
        from energon_packing.offline.planned_loader import planned_loader

        return planned_loader(config, **arguments)
    if is_packed(config.data.path):
        from energon_packing.offline.packed_loader import packed_loader

        return packed_loader(config, **arguments)
    if isinstance(config, TextToVideoRunConfig):
        return build_text_to_video_loader(config, **arguments)
    return build_loader(config, **arguments)
