"""Processors of every family that a tiny model fits, and packs of each compared with their samples alone.

For each family: data of the demo, a processor made offline, `support.parity.run.compare_run` on a tiny random Hugging
Face model; then the same with a deliberate mistake, which must be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, ParallelConfig, RunConfig
from support import offline_processors
from support.parity.hugging_face_parity import Attention

BROKEN = "boundaries"
"""The mistake of the control: attention sees the whole row."""
BROKEN_LABELS = "labels"
"""The control if transformers finds the segments itself: a sample learns the first token of the next."""
PINPOINTS = [[28 * rows, 28 * columns] for rows in range(1, 4) for columns in range(1, 4)]


SMALL_SIZES = {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}
SMALL_FRAMES = {"shortest_edge": 4 * 28 * 28, "longest_edge": 16 * 28 * 28}
SMALL_CLIPS = {"shortest_edge": 4 * 28 * 28, "longest_edge": 256 * 28 * 28}

MADE: dict[str, Callable[[], Any]] = {
    "qwen2_vl": lambda: offline_processors.qwen2_vl(images=SMALL_SIZES, videos=SMALL_SIZES),
    "qwen3_5_vl": lambda: offline_processors.qwen3_5_vl(images=SMALL_SIZES, videos=SMALL_CLIPS),
    "internvl": lambda: offline_processors.internvl(28, 4, max_patches=6),
    "qianfan_vl": lambda: offline_processors.qianfan(28, 4, max_patches=6),
    "llava": lambda: offline_processors.llava(28),
    "llava_next": lambda: offline_processors.llava_next(28, PINPOINTS),
    "llava_onevision": lambda: offline_processors.llava_onevision(28, 9, PINPOINTS, 4),
    "gemma3": lambda: offline_processors.gemma3(56, 4),
    "pixtral": lambda: offline_processors.pixtral(128),
    "ministral3": lambda: offline_processors.pixtral(224, 14, 2),
    "glm4v": lambda: offline_processors.glm4v(SMALL_SIZES, SMALL_CLIPS),
    "ernie4_5_vl": lambda: offline_processors.ernie4_5_vl(SMALL_SIZES, SMALL_FRAMES, max_frames=8),
}
"""Families without a shipped processor; tiles and limits are small, so that a tiny model sees many in a row."""
SETTINGS: dict[str, dict[str, Any]] = {"qwen3_5_vl": {"family": "qwen3_5_vl"}, "gemma3": {"pan_and_scan": True}}
"""Settings of a family's encoder besides its processor."""
FAMILIES = ("qwen2_5_vl", "qwen3_vl", *MADE, "text")


def run(
    families: Sequence[str],
    work: Path,
    *,
    packs: int = 2,
    cp_size: int = 1,
    seed: int = 3,
    device: str = "cpu",
    attention: Attention = "mask",
    tolerance: float | None = None,
) -> Iterator[dict[str, Any]]:
    """Compares each of these `FAMILIES`, with data and processors in the directory ``work``.

    Yields:
        For each family ``family``, ``model``, ``packs``, ``segments``, the largest differences
        ``logits``, ``loss`` and ``gradient``, ``control`` (largest difference with the mistake), ``equal`` and
        ``control_found``.
    """
    from energon_packing.convert import ConvertConfig, convert
    from energon_packing.demo import make_data, processor_path
    from support.parity.run import compare_run

    source = make_data(work / "raw", conversations=40, seed=seed, defects=False)
    if not (work / "data").exists():
        convert(ConvertConfig(sources=(source,), out=work / "data", split={"train": 1.0}, workers=0))
    for family in families:
        place = work / f"{family}-processor"
        if family in MADE:
            MADE[family]().save_pretrained(place)
        config = RunConfig(
            data=DataConfig(path=str(work / "data"), shuffle_buffer=1, workers=0),
            encoder=EncoderConfig(
                processor=str(place if family in MADE else processor_path(family)), **SETTINGS.get(family, {})
            ),
            packing=PackingConfig(seq_length=1024, window=16, drop_budget=1.0),
            parallel=ParallelConfig(context_parallel=cp_size),
        )
        how: dict[str, Any] = {"packs": packs, "device": device, "attention": attention, "tolerance": tolerance}
        right = compare_run(config, **how)
        broken, shown = (BROKEN, "logits") if attention == "mask" else (BROKEN_LABELS, "gradient")
        wrong = compare_run(config, break_=broken, **how)
        segments = right["segments"]
        yield {
            "family": family,
            "model": right["model"].split(",")[0],
            "packs": packs,
            "segments": len(segments),
            "logits": max(row["logits"] for row in segments),
            "loss": max(abs(row["loss"] - row["loss_alone"]) for row in segments),
            "gradient": max(row["gradient"] for row in segments),
            "control": max(row[shown] for row in wrong["segments"]),
            "equal": not right["failures"],
            "control_found": bool(wrong["failures"]),
        }
