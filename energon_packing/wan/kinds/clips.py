"""Clips with captions, as offline commands see them: their length is the number of their latent patches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from energon_packing.config import PACK_LIMITS
from energon_packing.config.setting import length_free_of
from energon_packing.sample_kind import NO_ROW, SampleKind
from energon_packing.wan.config import (
    SUBFLAVORS,
    ClipLimits,
    TextToVideoConfig,
    TextToVideoPackingConfig,
    TextToVideoRunConfig,
)

if TYPE_CHECKING:  # planning needs neither torch nor Energon
    from megatron.energon import CrudeSample
    from megatron.energon.cache import FileStore

    from energon_packing.energon.loader import PackLoader
    from energon_packing.wan.encoder import MeasuredClip
    from energon_packing.wan.task_encoder import TextToVideoTaskEncoder

_SIZES = ("length", "second", "targets", "images", "patches", "turns", "stills", "videos", "frames", "pixels")


class Clips(SampleKind):
    """Clips or their latents, with captions or their embeddings."""

    name = "clips"
    title = "clips for text-to-video"
    marks = SUBFLAVORS
    record_format = "text-to-video"
    run_class, encoder_config = TextToVideoRunConfig, TextToVideoConfig
    extras = {"diffusers": "wan", "safetensors": "wan"}  # noqa: RUF012
    bridge_module = "energon_packing.wan.bridge"
    classes = {  # noqa: RUF012
        "encoder": "energon_packing.wan.task_encoder:TextToVideoTaskEncoder",
        "shard_packer": "energon_packing.wan.stored:ClipPacker",
        "stored_packs": "energon_packing.wan.stored:PackedClips",
    }
    more_columns = ("text_tokens",)
    sizes = "patches and text tokens"

    def preview(self, dataset: str, config: str | None, overrides: Iterable[str], packs: int, as_json: bool) -> None:
        """See `SampleKind.preview`."""
        from energon_packing.wan.preview import preview_clips

        preview_clips(dataset, config, overrides, packs, as_json)

    def cook(self, sample: CrudeSample, store: FileStore[bytes]) -> Any:
        """See `SampleKind.cook`."""
        from energon_packing.wan.task_encoder import cook_text_to_video

        return cook_text_to_video(sample, primary=store)

    def measuring_encoder(self, run: TextToVideoRunConfig) -> TextToVideoTaskEncoder:
        """See `SampleKind.measuring_encoder`."""
        own = TextToVideoRunConfig(
            encoder=dataclasses.replace(run.encoder, device="cpu"),
            packing=TextToVideoPackingConfig(seq_length=NO_ROW),
        )
        return self.encoder_class(own)

    def task_encoder(self, run: TextToVideoRunConfig, **models: Any) -> TextToVideoTaskEncoder:
        """See `SampleKind.task_encoder`."""
        from energon_packing.wan.task_encoder import build_text_to_video_task_encoder

        return build_text_to_video_task_encoder(run, **models)

    def packing_encoder(self, run: TextToVideoRunConfig) -> TextToVideoTaskEncoder:
        """See `SampleKind.packing_encoder`."""
        return self.encoder_class(dataclasses.replace(run, packing=dataclasses.replace(run.packing, ledger=None)))

    def build_loader(self, run: TextToVideoRunConfig, **arguments: Any) -> PackLoader:
        """See `SampleKind.build_loader`."""
        from energon_packing.wan.task_encoder import build_text_to_video_loader

        return build_text_to_video_loader(run, **arguments)

    def bridge_dataset(self, container: Any, processor: str | None, **fields: Any) -> Any:
        """See `SampleKind.bridge_dataset`."""
        if type(container.model).__name__ != "WanModelProvider":
            return None
        from energon_packing.wan.bridge import dataset_of

        return dataset_of(container, processor, **fields)

    def row(self, measured: MeasuredClip | None) -> dict[str, Any]:
        """See `SampleKind.row`."""
        sizes = dict.fromkeys((*_SIZES, "text_tokens"), 0)
        if measured is None:
            return sizes
        video = measured.sample.video
        return {
            **sizes,
            "length": measured.length,
            "targets": measured.length,
            "text_tokens": measured.text_tokens,
            "videos": 1,
            "frames": 0 if video is None else video.frames or 0,
            "pixels": 0 if video is None else (video.width or 0) * (video.height or 0) * (video.frames or 0),
        }

    def planned_sizes(self, measured: MeasuredClip) -> tuple[int, ...]:
        """See `SampleKind.planned_sizes`."""
        return measured.length, measured.text_tokens

    def media_names(self, measured: MeasuredClip) -> tuple[str, ...]:
        """See `SampleKind.media_names`."""
        return measured.sample.names

    def limits(self, run: TextToVideoRunConfig) -> ClipLimits:
        """See `SampleKind.limits`."""
        return ClipLimits.of(run)

    def decided(self, run: TextToVideoRunConfig, limits: Any) -> dict[str, Any]:
        """See `SampleKind.decided`."""
        packing = run.packing
        return {
            "reserved": 0,
            **{name: getattr(packing, name, None) for name in PACK_LIMITS},
            "max_text_tokens_per_pack": packing.max_text_tokens_per_pack,
        }

    def planned_limits(self, decided: Mapping[str, Any], encoder: TextToVideoTaskEncoder) -> ClipLimits:
        """See `SampleKind.planned_limits`."""
        limits: ClipLimits = dataclasses.replace(
            encoder.limits,
            tokens=decided["seq_length"],
            multiple=int(decided["multiple"]),
            text_tokens=decided["max_text_tokens_per_pack"],
            segments=decided["max_segments_per_pack"],
            cost=decided["max_cost_per_pack"],
        )
        return limits

    def too_long(self, size: Any, limits: ClipLimits, run: TextToVideoRunConfig) -> str:
        """See `SampleKind.too_long`."""
        return limits.overlong(size)

    def free_when_stored(self, store: str) -> set[str]:
        """See `SampleKind.free_when_stored`; where tensors are stored, so is their dtype."""
        return {f"encoder.{n}" for n in length_free_of(TextToVideoConfig) if store == "tokens" or n != "dtype"}


KIND = Clips()
