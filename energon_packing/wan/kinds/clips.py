"""Clips with captions, as offline commands see them: their length is the number of their latent patches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from energon_packing.config import PACK_LIMITS
from energon_packing.config.setting import length_free_of
from energon_packing.sample_kind import NO_ROW, SampleKind
from energon_packing.wan.config import ClipLimits, TextToVideoConfig, TextToVideoPackingConfig, TextToVideoRunConfig
from energon_packing.wan.record import SUBFLAVORS

if TYPE_CHECKING:  # planning needs neither torch nor Energon
    from energon_packing.wan.encoder import MeasuredClip
    from energon_packing.wan.task_encoder import TextToVideoTaskEncoder


class Clips(SampleKind):
    """Clips or their latents, with captions or their embeddings; see `SampleKind` for each method."""

    name = "clips"
    title = "clips for text-to-video"
    marks = SUBFLAVORS
    record_format = "text-to-video"
    run_class, encoder_config = TextToVideoRunConfig, TextToVideoConfig
    extras = {"diffusers": "wan", "safetensors": "wan"}  # noqa: RUF012
    bridge_module = "energon_packing.wan.bridge"
    classes = {  # noqa: RUF012
        "encoder": "energon_packing.wan.task_encoder:TextToVideoTaskEncoder",
        "cooker": "energon_packing.wan.task_encoder:cook_text_to_video",
        "task_encoder": "energon_packing.wan.task_encoder:build_text_to_video_task_encoder",
        "loader": "energon_packing.wan.task_encoder:build_text_to_video_loader",
        "preview": "energon_packing.wan.preview:preview_clips",
        "bridge_dataset": "energon_packing.wan.bridge:dataset_of",
        "shard_packer": "energon_packing.wan.stored:ClipPacker",
        "stored_packs": "energon_packing.wan.stored:PackedClips",
    }
    more_columns = ("text_tokens",)
    sizes = "patches and text tokens"

    def measuring_encoder(self, run: TextToVideoRunConfig) -> TextToVideoTaskEncoder:
        encoder, packing = dataclasses.replace(run.encoder, device="cpu"), TextToVideoPackingConfig(seq_length=NO_ROW)
        return self.encoder_class(TextToVideoRunConfig(encoder=encoder, packing=packing))

    def packing_encoder(self, run: TextToVideoRunConfig) -> TextToVideoTaskEncoder:
        return self.encoder_class(dataclasses.replace(run, packing=dataclasses.replace(run.packing, ledger=None)))

    def bridge_dataset(self, container: Any, processor: str | None, **fields: Any) -> Any:
        if type(container.model).__name__ != "WanModelProvider":
            return None
        return self._resolved("bridge_dataset")(container, processor, **fields)

    def row(self, measured: MeasuredClip | None) -> dict[str, Any]:
        from energon_packing.offline.index import COLUMNS

        sizes = dict.fromkeys((*COLUMNS, *self.more_columns), 0)
        if measured is None:
            return sizes
        video: Any = measured.sample.video  # all sizes are known, see `TextToVideo`
        still = video is not None and video.kind == "image"
        return {
            **sizes,
            "length": measured.length,
            "targets": measured.length,
            "text_tokens": measured.text_tokens,
            "stills": int(still),
            "videos": int(not still),
            "frames": measured.frames,
            "pixels": video.width * video.height * measured.frames if video else 0,
        }

    def planned_sizes(self, measured: MeasuredClip) -> tuple[int, ...]:
        return measured.length, measured.text_tokens

    def media_names(self, measured: MeasuredClip) -> tuple[str, ...]:
        return measured.sample.names

    def limits(self, run: TextToVideoRunConfig, family: str = "") -> ClipLimits:
        return ClipLimits.of(run)

    def decided(self, run: TextToVideoRunConfig, limits: Any) -> dict[str, Any]:
        names = (*PACK_LIMITS[:4], "max_text_tokens_per_pack")
        return {"reserved": 0, **{name: getattr(run.packing, name, None) for name in names}}

    def planned_limits(self, decided: Mapping[str, Any], encoder: TextToVideoTaskEncoder) -> ClipLimits:
        return ClipLimits.of_settings(
            decided.get,
            tokens=decided["seq_length"],
            multiple=int(decided["multiple"]),
            text_tokens=decided["max_text_tokens_per_pack"],
            lone_room=encoder.limits.lone_room,
        )

    def free_when_stored(self, store: str) -> set[str]:
        # Where tensors are stored, so is their dtype, and no caption is read.
        free = {f"encoder.{name}" for name in length_free_of(TextToVideoConfig)}
        return free if store == "tokens" else free - {"encoder.dtype"} | {"ftfy"}


KIND = Clips()
