"""Conversations, as offline commands see them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from energon_packing.config import PACK_LIMITS, EncoderConfig, PackingConfig, RunConfig
from energon_packing.convert.layouts.layout import SUBFLAVORS
from energon_packing.errors import UserError
from energon_packing.packing.constraints import PackLimits, shape_of
from energon_packing.packing.model_cost import CONSTANTS, SQUARES, ModelCost, squares_of
from energon_packing.sample_kind import NO_ROW, SampleKind
from energon_packing.thd.alignment import check_multiple

if TYPE_CHECKING:  # planning needs neither torch nor Energon
    from energon_packing.encoders.sample_encoder import AnyMeasured
    from energon_packing.energon.task_encoder import PackingTaskEncoder


def row_limits(packing: PackingConfig, seq_length: int, multiple: int, family: str = "") -> PackLimits:
    """Limits of packs of a family's samples, in rows of `seq_length` tokens, a multiple of `multiple`."""
    from energon_packing.families.geometry import MOST_PATCHES

    return PackLimits.of_settings(
        lambda name: getattr(packing, name),
        tokens=seq_length,
        multiple=multiple,
        patches=packing.max_patches_per_pack or MOST_PATCHES.get(family),
        padded_pixels=packing.max_padded_pixels_per_pack if family in MOST_PATCHES else None,
        lone_room=True,
    )


class Conversations(SampleKind):
    """Conversations with any number of images and videos, preference pairs among them; methods as in `SampleKind`."""

    name = title = "conversations"
    marks = SUBFLAVORS
    bridge_module = "energon_packing.bridge.dataset"
    classes = {  # noqa: RUF012
        "cooker": "energon_packing.energon.cookers:cook_record",
        "encoder": "energon_packing.energon.task_encoder:PackingTaskEncoder",
        "task_encoder": "energon_packing.energon.loader:build_task_encoder",
        "loader": "energon_packing.energon.loader:build_loader",
        "shard_packer": "energon_packing.offline.stored_pack:ConversationPacker",
        "stored_packs": "energon_packing.offline.stored_pack:PackedPacks",
    }
    run_class, encoder_config = RunConfig, EncoderConfig
    sizes = "tokens"

    def measuring_encoder(self, run: RunConfig) -> PackingTaskEncoder:
        return self.encoder_class(
            run.encoder, PackingConfig(seq_length=NO_ROW, max_patches_per_pack=NO_ROW, pairs=run.packing.pairs)
        )

    def packing_encoder(self, run: RunConfig) -> PackingTaskEncoder:
        """See `SampleKind.packing_encoder`; pixels are bytes wherever that is exact, and boundaries are those of
        `thd.assemble`, whatever the run makes of them."""
        return self.task_encoder(
            dataclasses.replace(
                run,
                encoder=dataclasses.replace(run.encoder, pixels="bytes"),
                packing=dataclasses.replace(
                    run.packing, ledger=None, pad_cu_seqlens=False, padding="between", cost_model="", cost_frozen=()
                ),
            )
        )

    def row(self, measured: AnyMeasured | None) -> dict[str, Any]:
        from energon_packing.encoders.sample_encoder import Measured, MeasuredPair
        from energon_packing.offline.index import COLUMNS, SHAPE

        if measured is None:
            return dict.fromkeys((*COLUMNS, *SHAPE, *SQUARES), 0)
        first, second = (*measured.segment_lengths, 0)[:2]
        # Both answers of a pair show the media of their common beginning.
        shown = measured.chosen if isinstance(measured, MeasuredPair) else measured
        media = list(zip(shown.media, shown.plans, strict=True)) if isinstance(shown, Measured) else []
        frames = [max(1, len(plan.frame_indices)) for _, plan in media]
        return {
            "length": first,
            "second": second,
            "targets": sum(getattr(segment, "targets", 0) for segment in measured.segments),
            **shape_of(measured),
            **squares_of(measured),
            "patches": measured.patches,
            "turns": shown.turns if isinstance(shown, Measured) else 0,
            "stills": sum(each.kind == "image" for each, _ in media),
            "videos": sum(each.kind == "video" for each, _ in media),
            "frames": sum(count for (each, _), count in zip(media, frames, strict=True) if each.kind == "video"),
            "pixels": sum(
                (each.width or 0) * (each.height or 0) * count for (each, _), count in zip(media, frames, strict=True)
            ),
        }

    def planned_sizes(self, measured: AnyMeasured) -> tuple[int, ...]:
        return tuple(measured.segment_lengths)

    def media_names(self, measured: AnyMeasured) -> Iterator[str]:
        for segment in measured.segments:
            for media in getattr(segment, "media", ()):
                yield from media.frame_names or (media.name,)

    def changes_samples(self, run: RunConfig) -> bool:
        limits, oversize = run.encoder.limits, run.packing.oversize
        limited = (limits.max_images, limits.max_frames, limits.max_visual_tokens, limits.max_tokens)
        lowered = oversize != "split" and any(limit is not None for limit in limited)
        return oversize in ("truncate", "split") or (lowered and bool({"resize", "truncate"} & set(limits.when_over)))

    def limits(self, run: RunConfig, family: str = "") -> PackLimits:
        packing = run.packing
        if packing.dummy_image:
            raise UserError(
                "packing.dummy_image reserves room that only the encoder knows; give the limits of its packs."
            )
        check_multiple("packing.seq_length", packing.seq_length, run.parallel.multiple)
        return row_limits(packing, packing.seq_length, run.parallel.multiple, family)

    def cost(self, run: RunConfig) -> ModelCost:
        if not run.packing.cost_model:
            return CONSTANTS
        from energon_packing.families.registry import cost_of

        return cost_of(run.packing.cost_model, run.packing.cost_frozen, indexed=True)

    def decided(self, run: RunConfig, limits: Any) -> dict[str, Any]:
        packing, cost = run.packing, self.cost(run)
        assert isinstance(limits, PackLimits)
        return {
            "reserved": packing.seq_length - limits.tokens,
            "dummy_image": packing.dummy_image,
            **{name: most for name in PACK_LIMITS if (most := getattr(packing, name)) or name in PACK_LIMITS[:4]},
            "max_patches_per_pack": limits.patches,
            "oversize_split": f"at a {packing.split_at}, positions {packing.split_positions}",
            **({} if cost is CONSTANTS else {"cost": dataclasses.asdict(cost)}),
        }

    def planned_limits(self, decided: Mapping[str, Any], encoder: PackingTaskEncoder) -> PackLimits:
        return PackLimits.of_settings(
            decided.get,
            tokens=decided["seq_length"] - decided["reserved"],
            multiple=int(decided["multiple"]),
            lone_room=decided["reserved"] == 0,
        )

    def free_when_stored(self, store: str) -> set[str]:
        # Limits count as configured, which the plan compares, because a run lowers them to those of its rows.
        return {"limits", "pixels", *(("jpeg_scaled_decoding",) if store == "tokens" else ())}


KIND = Conversations()
