"""Packed compared with alone for every kind of tiny model, each with a control that must be found: one table.

For each family: data of the demo, a processor made offline, `energon_packing.report.parity.compare_run` on a tiny
random Hugging Face model and, if Megatron-Bridge is installed and has the model, on a tiny Bridge one; then the same
with a deliberate mistake (`BROKEN`), which must be found.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import offline_processors
from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, ParallelConfig, RunConfig
from energon_packing.errors import UserError
from energon_packing.report.hugging_face_parity import Attention

BROKEN = "boundaries"
"""The mistake of the control: attention sees the whole row."""
BROKEN_LABELS = "labels"
"""The control if transformers finds the segments itself: a sample learns the first token of the next."""
PINPOINTS = [[28 * rows, 28 * columns] for rows in range(1, 4) for columns in range(1, 4)]


def _internvl() -> Any:
    return offline_processors.internvl(28, 4, max_patches=6)


def _onevision() -> Any:
    return offline_processors.llava_onevision(28, 9, PINPOINTS, 4)


SMALL_SIZES = {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}
SMALL_FRAMES = {"shortest_edge": 4 * 28 * 28, "longest_edge": 16 * 28 * 28}
SMALL_CLIPS = {"shortest_edge": 4 * 28 * 28, "longest_edge": 256 * 28 * 28}

MADE: dict[str, Callable[[], Any]] = {
    "qwen2_vl": lambda: offline_processors.qwen2_vl(images=SMALL_SIZES, videos=SMALL_SIZES),
    "qwen3_5_vl": lambda: offline_processors.qwen3_5_vl(images=SMALL_SIZES, videos=SMALL_CLIPS),
    "internvl": _internvl,
    "qianfan_vl": lambda: offline_processors.qianfan(28, 4, max_patches=6),
    "llava": lambda: offline_processors.llava(28),
    "llava_next": lambda: offline_processors.llava_next(28, PINPOINTS),
    "llava_onevision": _onevision,
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
    bridge: bool = True,
) -> Iterator[dict[str, Any]]:
    """Compares each family.

    Args:
        families: of `FAMILIES`.
        work: directory for data and processors.
        packs: of each family.
        cp_size: context-parallel ranks that attention is split into.
        seed: of the data.
        device, attention, tolerance, bridge: see `energon_packing.report.parity.compare_run`.

    Yields:
        For each family and model ``family``, ``model``, ``on``, ``packs``, ``segments``, the largest differences
        ``logits``, ``loss`` and ``gradient``, ``control`` (largest difference with the mistake), ``equal`` and
        ``control_found``.
    """
    from energon_packing.convert import ConvertConfig, convert
    from energon_packing.demo import make_data, processor_path
    from energon_packing.report.parity import compare_run

    source = make_data(work / "raw", conversations=40, seed=seed, defects=False)
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
        right = compare_run(config, bridge=bridge, **how)
        broken, shown = (BROKEN, "logits") if attention == "mask" else (BROKEN_LABELS, "gradient")
        wrong = compare_run(config, bridge=False, break_=broken, **how)
        segments = right["segments"]
        yield {
            "family": family,
            "model": right["model"].split(",")[0],
            "on": "Hugging Face",
            "packs": packs,
            "segments": len(segments),
            "logits": max(row["logits"] for row in segments),
            "loss": max(abs(row["loss"] - row["loss_alone"]) for row in segments),
            "gradient": max(row["gradient"] for row in segments),
            "control": max(row[shown] for row in wrong["segments"]),
            "equal": not [sentence for sentence in right["failures"] if not sentence.startswith("Bridge")],
            "control_found": bool(wrong["failures"]),
        }
        if right["bridge"]:
            yield _on_bridge(family, right["bridge"])


def _on_bridge(family: str, packs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "family": family,
        "model": packs[0]["model"],
        "on": "Megatron-Bridge",
        "packs": len(packs),
        "segments": sum(pack["segments"] for pack in packs),
        **{name: max(pack[name] for pack in packs) for name in ("logits", "loss", "gradient")},
        "control": min(pack["boundaries_ignored"] for pack in packs),
        "equal": not any(pack["failures"] for pack in packs),
        # Bridge's comparison fails by itself if ignoring the boundaries makes no difference.
        "control_found": min(pack["boundaries_ignored"] for pack in packs) > 1e-3,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the results as a Markdown table."""
    names = ("family", "model", "on", "segments", "logits", "loss", "gradient", "control")
    lines = [f"| {' | '.join(names)} |", f"| {' | '.join(['---'] * len(names))} |"]
    for row in rows:
        cells = [f"{row[name]:.1e}" if isinstance(row[name], float) else str(row[name]) for name in names]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table, or one JSON line per result; 1 if packs differ or a control is not found, 2 on unusable input."""
    parser = argparse.ArgumentParser(prog="bench.py parity", description=__doc__)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="family; may be repeated; all by default")
    parser.add_argument("--packs", type=int, default=2, help="packs per family")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks to split attention into")
    parser.add_argument("--seed", type=int, default=3, help="seed of the data")
    parser.add_argument("--json", action="store_true", help="one JSON line per result instead of a table")
    given = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    try:
        if given.packs < 1 or given.cp < 1:
            raise UserError("--packs and --cp must be at least 1")
        with tempfile.TemporaryDirectory(prefix="bench-parity-") as work:
            for row in run(given.family or FAMILIES, Path(work), packs=given.packs, cp_size=given.cp, seed=given.seed):
                rows.append(row)
                if given.json:
                    print(json.dumps(row), flush=True)
                else:
                    print(f"{row['family']} on {row['on']}", file=sys.stderr)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not given.json:
        print(table(rows))
    return 0 if all(row["equal"] and row["control_found"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
