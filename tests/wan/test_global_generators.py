"""No call of a loader changes a global random generator: ranks of a replica would go on with different numbers."""

import importlib.util

import pytest
from support import generator_ranks

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, ParallelConfig, PlanConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path

pytest.importorskip("megatron.core", reason="Megatron-Bridge is not installed")
pytest.importorskip("pyarrow", reason="pyarrow is not installed")
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

SEQ_LENGTH = 512
SIDES = {"min_pixels": 32 * 32, "video_min_pixels": 32 * 32, "max_pixels": 64 * 64, "video_max_pixels": 64 * 64}
ROADS = {
    "clips": (("bridge", 0), ("bridge", 2), ("loop", 2)),
    "online": (("bridge", 0), ("bridge", 2), ("loop", 2), ("megatron_lm", 2)),
    "planned": (("bridge", 2), ("loop", 2)),
    "packed": (("bridge", 0), ("megatron_lm", 2)),
}
"""Of each way to read: who reads, with how many workers."""
RANKS = ("tensor 0, context 0", "tensor 1, context 0", "tensor 0, context 1", "tensor 1, context 1")


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """How the same conversations are read: online, from a plan, from packed pixels."""
    from energon_packing.offline.measure import MeasureConfig, measure
    from energon_packing.offline.pack import PackConfig, pack
    from energon_packing.offline.planner import make_plan

    folder = tmp_path_factory.mktemp("conversations")
    source = make_data(folder / "made", conversations=60, defects=False)
    convert(ConvertConfig(sources=(source,), out=folder / "data", split={"train": 0.8, "val": 0.2}, workers=0))
    run = RunConfig(
        data=DataConfig(path=str(folder / "data")),
        encoder=EncoderConfig(processor=str(processor_path("qwen2_5_vl")), **SIDES),
        packing=PackingConfig(seq_length=SEQ_LENGTH, drop_budget=1.0),
        parallel=ParallelConfig(context_parallel=2, tensor_parallel=2, sequence_parallel=True),
        plan=PlanConfig(),
    )
    measure(MeasureConfig(paths=(folder / "data",), out=folder / "index", workers=0), run)
    make_plan([folder / "index"], run, folder / "plan.parquet")
    pack(PackConfig(plan=folder / "plan.parquet", out=folder / "packed", workers=0, store="pixels"))
    paths = {"online": "data", "planned": "plan.parquet", "packed": "packed"}
    return {
        kind: {
            **{"path": str(folder / path), "validation_path": "" if kind == "online" else str(folder / "data")},
            **{"processor": run.encoder.processor, "seq_length": SEQ_LENGTH},
            **{f"encoder.{name}": value for name, value in SIDES.items()},
        }
        for kind, path in paths.items()
    }


@pytest.fixture(scope="module", params=["clips", "conversations"])
def found(request, dataset, pipeline, tmp_path_factory):
    """What the four ranks of a replica saw, by case."""
    clips = request.param == "clips"
    ways = (
        request.getfixturevalue("conversations")
        if not clips
        else {
            "clips": {
                **{"path": str(dataset), "validation_split": "train", "seq_length": 96},
                **{f"encoder.{name}": str(pipeline) for name in ("vae", "text_encoder")},
                **{"encoder.latent_channels": 4, "encoder.text_width": 32, "encoder.max_pixels": 64 * 48},
            }
        }
    )
    cases = [
        {
            **{"name": f"{way}, {road}, workers={workers}", "road": road, "data": request.param},
            **{"workers": workers, "fields": fields},
        }
        for way, fields in ways.items()
        for road, workers in ROADS[way]
    ]
    return generator_ranks.run(cases, tmp_path_factory.mktemp("generators"))


def test_no_call_of_a_loader_changes_a_global_generator_on_any_rank(found):
    changed = []
    for rank, report in zip(RANKS, found, strict=True):
        for case, calls in report["calls"].items():
            last = calls[0][1] if calls else {}
            for call, before, after in calls:
                # In the call, or in a thread since the last one.
                different = [name for name in last if after[name] != last[name]]
                told = ", ".join(f"{name} {last[name]} -> {after[name]}" for name in before)
                print(f"{case:31} {rank}  {call:14} {told}  {'CHANGED ' + ' '.join(different) if different else ''}")
                changed += [(case, rank, call, name) for name in different]
                last = after
    assert changed == []


@pytest.mark.parametrize("found", ["clips"], indirect=True)
def test_all_ranks_of_a_replica_draw_the_times_of_wan_from_the_same_distributions(found):
    for case in found[0]["times"]:
        first, *others = (report["times"][case] for report in found)
        assert len(first) == generator_ranks.MICRO_BATCHES * generator_ranks.DRAWS
        assert len(set(first)) == 2
        for rank, other in zip(RANKS[1:], others, strict=True):
            differ = sum(own != theirs for own, theirs in zip(first, other, strict=True))
            print(f"{case}: {differ} of {len(first)} differ between {RANKS[0]} and {rank}")
            assert differ == 0
