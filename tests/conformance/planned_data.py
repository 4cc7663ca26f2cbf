"""A small data set and its plan, on which the tests of planned and packed training run Bridge."""

from __future__ import annotations

from pathlib import Path

import bridge_ranks

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, ParallelConfig, PlanConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path


def planned_data(folder: Path) -> None:
    """Writes ``data`` with the splits ``train`` and ``val``, its index, and ``plan.parquet``, aligned for CP 2."""
    from energon_packing.offline.measure import MeasureConfig, measure
    from energon_packing.offline.planner import make_plan

    source = make_data(folder / "made", conversations=80, defects=False)
    convert(ConvertConfig(sources=(source,), out=folder / "data", split={"train": 0.8, "val": 0.2}, workers=0))
    encoder = EncoderConfig(
        processor=str(processor_path("qwen3_vl")),
        min_pixels=32 * 32,
        video_min_pixels=32 * 32,
        max_pixels=64 * 64,
        video_max_pixels=64 * 64,
    )
    run = RunConfig(
        data=DataConfig(path=str(folder / "data")),
        encoder=encoder,
        packing=PackingConfig(seq_length=bridge_ranks.SEQ_LENGTH, drop_budget=1.0),
        parallel=ParallelConfig(context_parallel=2),
        plan=PlanConfig(max_data_parallel=4, seed=1),
    )
    measure(MeasureConfig(paths=(folder / "data",), out=folder / "index", workers=0), run)
    make_plan([folder / "index"], run, folder / "plan.parquet")
