"""Data-parallel ranks build and restore their loaders together: all go on with what they share, or all refuse."""

import copy
import dataclasses
import json
import os
import shutil

import bridge_here  # noqa: F401
import numpy as np
import pytest
from support.ranks_together import Job, run, state_file

from energon_packing.config import ParallelConfig, PlanConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import processor_path

KINDS = ("online", "planned", "clips")
if os.environ.get("ENERGON_PACKING_FORK_RANKS"):  # a mutation's test ends at its first failure
    KINDS = KINDS[:2]
RANKS = (0, 1)


def clips_of(folder):
    """Latents and embeddings of 24 clips, converted."""
    lines, draw = [], np.random.default_rng(0)
    folder.mkdir()
    for number in range(24):
        np.save(folder / f"{number}.npy", draw.normal(size=(4, 1, 4, 4)).astype("float32"))
        np.save(folder / f"{number}.text.npy", draw.normal(size=(5, 32)).astype("float32"))
        lines.append(json.dumps({"id": f"s{number}", "latents": f"{number}.npy", "context": f"{number}.text.npy"}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    convert(ConvertConfig(sources=(folder / "rows.jsonl",), out=folder / "data", format="text-to-video", workers=0))
    return folder / "data"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Kind -> the data set of a run on it, and one that another rank might have by mistake."""
    from support.bridge_cpu import stand_ins

    if stand_ins.needed():
        stand_ins.install()
    from energon_packing.bridge import PackedEnergonDatasetConfig
    from energon_packing.offline.measure import MeasureConfig, measure
    from energon_packing.offline.planner import make_plan
    from energon_packing.wan.bridge import PackedWanDatasetConfig

    folder = tmp_path_factory.mktemp("together")
    turns = [
        [{"from": "human", "value": f"What is {n}?"}, {"from": "gpt", "value": f"It is {n}. " * (3 + n % 9)}]
        for n in range(80)
    ]
    source = folder / "texts.jsonl"
    source.write_text(
        "".join(json.dumps({"id": f"t{n}", "conversations": each}) + "\n" for n, each in enumerate(turns))
    )
    convert(ConvertConfig(sources=(source,), out=folder / "data", split={"train": 0.7, "val": 0.3}, workers=0))

    def of(path, seed=0):
        dataset = PackedEnergonDatasetConfig(
            path=str(path), processor=str(processor_path("text")), seq_length=256, num_workers=0
        )
        dataset.encoder.modality, dataset.packing.drop_budget, dataset.packing.window = "text", 1.0, 8
        dataset.data.seed = seed
        return dataset

    sets = {"online": [of(folder / "data", seed) for seed in (0, 1)]}
    run = of(folder / "data").run_config(ParallelConfig())
    measure(MeasureConfig(paths=(folder / "data",), out=folder / "index", workers=0), run)
    for seed in (0, 1):
        seeded = dataclasses.replace(run, plan=PlanConfig(max_data_parallel=2, seed=seed))
        make_plan([folder / "index"], seeded, folder / f"plan{seed}.parquet")
    sets["planned"] = [of(folder / f"plan{seed}.parquet") for seed in (0, 1)]
    if "clips" not in KINDS:
        return sets
    clips = [PackedWanDatasetConfig(path=str(clips_of(folder / "clips")), seq_length=64, num_workers=0)]
    clips[0].encoder.latent_channels, clips[0].encoder.text_width, clips[0].packing.window = 4, 32, 4
    clips.append(copy.deepcopy(clips[0]))
    clips[1].data.seed = 1
    return sets | {"clips": clips}


@pytest.fixture(scope="module")
def said(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("together-ranks")
    first = []
    for kind, (dataset, _) in made.items():
        saved = {packs: folder / f"{kind}-after-{packs}" for packs in (2, 4)}
        first.append(Job(name=f"{kind}-whole", datasets=[dataset] * 2, packs=6, saved=saved))
    found = run(folder, first)
    again = []
    for kind, (dataset, other) in made.items():
        missing = dataclasses.replace(dataset, path=str(folder / "nowhere.parquet" if kind == "planned" else "nowhere"))
        after = folder / f"{kind}-after-4"
        for name in ("stale", "lost", "damaged"):
            shutil.copytree(after, folder / f"{kind}-{name}")
        shutil.copyfile(state_file(folder / f"{kind}-after-2", 1), state_file(folder / f"{kind}-stale", 1))
        state_file(folder / f"{kind}-lost", 1).unlink()
        state_file(folder / f"{kind}-damaged", 0).write_bytes(b"PK nothing")
        again += [
            Job(name=f"{kind}-restored", datasets=[dataset] * 2, folder=after, packs=2),
            *(
                Job(name=f"{kind}-{name}", datasets=[dataset] * 2, folder=folder / f"{kind}-{name}", packs=2)
                for name in ("stale", "lost", "damaged")
            ),
            Job(name=f"{kind}-other", datasets=[dataset, other]),
            Job(name=f"{kind}-missing", datasets=[dataset, missing]),
        ]
    online, other = made["online"]
    again.append(Job(name="online-validation", datasets=[online, other], validation=True))
    return found | run(folder, again), folder


def refused(ranks, *told):
    """Whether both ranks refused, and each told of it."""
    for rank in ranks:
        assert "error" in rank, rank
        kind, sentence = rank["error"]
        assert kind in ("ConfigError", "UserError"), sentence
        assert all(part in sentence for part in told), sentence
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_were_saved_together_go_on_together(said, kind):
    found, _ = said
    for rank in RANKS:
        assert found[f"{kind}-restored"][rank]["digests"] == found[f"{kind}-whole"][rank]["digests"][4:]
    assert found[f"{kind}-whole"][0]["digests"] != found[f"{kind}-whole"][1]["digests"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_an_earlier_attempt_is_never_restored_beside_those_of_this_one(said, kind):
    """A plan has one state, that of its first rank; elsewhere all ranks refuse."""
    found, folder = said
    stale = found[f"{kind}-stale"]
    if kind == "planned":
        for rank in RANKS:
            assert stale[rank]["digests"] == found[f"{kind}-whole"][rank]["digests"][4:]
            assert stale[rank]["position"] == 6 * len(RANKS)
        after = (state_file(folder / f"{kind}-{name}", 1).read_bytes() for name in ("stale", "after-2"))
        assert len(set(after)) == 1  # nobody has written to the checkpoint
    else:
        assert refused(stale, "rank 1 has packs taken before the restart=2, but rank 0 has 4")


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_a_state_stops_all_ranks_and_a_plan_needs_none_of_it(said, kind):
    found, folder = said
    if kind == "planned":
        for rank in RANKS:
            assert found[f"{kind}-lost"][rank]["digests"] == found[f"{kind}-whole"][rank]["digests"][4:]
        assert not state_file(folder / f"{kind}-lost", 1).exists()
    else:
        assert refused(found[f"{kind}-lost"], "there is no state of the loader at", "dprank001.pt")
        assert "Rank 1 cannot go on" in found[f"{kind}-lost"][0]["error"][1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_state_of_one_rank_stops_all_ranks(said, kind):
    assert refused(said[0][f"{kind}-damaged"], "dprank000.pt is not the state of a loader")


@pytest.mark.parametrize(
    ("job", "name"),
    [
        ("online-other", "data.seed"),
        ("clips-other", "data.seed"),
        ("planned-other", "plan"),
        ("online-validation", "data.seed"),
    ],
)
def test_ranks_that_would_read_different_things_all_refuse_and_name_the_rank_and_both_values(said, job, name):
    ranks = said[0][job]
    assert refused(ranks, f"rank 1 has {name}=", ", but rank 0 has ")
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_whose_node_lacks_the_data_stops_all_ranks(said, kind):
    ranks = said[0][f"{kind}-missing"]
    assert refused(ranks, "nowhere")
    assert "Rank 1 cannot go on, so all ranks stop: " in ranks[0]["error"][1]
