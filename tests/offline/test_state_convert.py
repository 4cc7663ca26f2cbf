"""``state convert``: what an online run gave before its state, and the plan after it, are the epoch exactly once."""

import json
import re
from collections import Counter

import pytest
import torch
from click.testing import CliRunner

from energon_packing.cli.main import cli
from energon_packing.config import to_mapping
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data
from energon_packing.energon.loader import build_loader
from energon_packing.energon.replica import Replica
from energon_packing.energon.replica_reader import OneReader
from energon_packing.offline.index import Index
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.plan import Plan, read_drops


@pytest.fixture(scope="module")
def index(dataset, run_of, tmp_path_factory):
    out = tmp_path_factory.mktemp("state-index") / "index"
    measure(MeasureConfig(paths=(dataset,), out=out, workers=0), run_of(dataset))
    return out


@pytest.fixture(scope="module")
def keys(index):
    """Keys of all samples of an epoch, those that are dropped included."""
    opened = Index.open(index)
    shards = [(part, shard) for part in opened.datasets for shard in part.shards]
    return {key for places in shards for key in opened.rows(*places, ["key"]).column("key").to_pylist()}


def saved_after(run, packs, ranks, folder):
    """Reads that many packs on every rank; saves the states as Bridge does. What was given or dropped, by key."""
    seen = Counter()
    folder.mkdir()
    for rank in range(ranks):
        loader = build_loader(run, rank=rank, world_size=ranks)
        for number, pack in enumerate(loader, 1):
            seen.update(pack.keys)
            seen.update(entry.key for entry in pack.dropped)
            if number == packs:
                break
        state = {"dataloader_state_dict": {"packs": packs, "source": loader.save_state()}}
        torch.save(state, folder / f"train_dataloader_dprank{rank:03d}.pt")
    return seen


def converted(run, states, index, folder, *more):
    config = folder / "run.yaml"
    config.write_text(json.dumps(to_mapping(run)))
    words = ["--index", str(index), "--config", str(config), "--out", str(folder / "rest.parquet"), "--json", *more]
    done = CliRunner().invoke(cli, ["state", "convert", *map(str, states), *words])
    return done, folder / "rest.parquet"


def planned(plan, epoch=0):
    """What an epoch of a plan gives, and what it drops, by key."""
    found = Plan.open(plan)
    ends = (0, *found.facts.epoch_ends)
    given = Counter(sample.name for pack in found.packs(ends[epoch], ends[epoch + 1]) for sample in pack.samples)
    return given, {entry["dropped"] for entry in read_drops(plan, found.facts.id)}


@pytest.mark.parametrize(
    ("ranks", "workers", "packs", "data"),
    [(3, 1, 1, {"shuffle_buffer": 7})],
)
def test_before_and_after_are_the_epoch_exactly_once(
    dataset, run_of, index, keys, tmp_path, ranks, workers, packs, data
):
    run = run_of(dataset, data={"repeat": True, "workers": workers, **data}, window=8)
    seen = saved_after(run, packs, ranks, tmp_path / "states")
    (tmp_path / "states" / "valid_dataloader_dprank007.pt").write_text("a state of something else")
    done, plan = converted(run, [tmp_path / "states"], index, tmp_path)
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)["from"]
    assert (said["ranks"], said["workers"], said["packs"]) == (ranks, workers, packs)
    after, dropped = planned(plan)
    assert {"reserved", "long"} <= dropped
    every = Counter(dict.fromkeys(keys - dropped, 1 + said["epoch"]))
    assert seen - Counter(dict.fromkeys(dropped, 9)) + after == every
    assert 0 < len(after) < len(keys)
    assert max(seen.values()) == 1 + said["epoch"]  # no epoch that was not begun is in the rest
    assert planned(plan, epoch=1)[0] == Counter(keys - dropped)
    run = run_of(plan, data={"workers": 0}, window=8)
    read = Counter(key for rank in range(4) for pack in open_loader(run, rank=rank, world_size=4) for key in pack.keys)
    assert read == after + planned(plan, epoch=1)[0]


def test_pieces_of_divided_samples_are_given_exactly_once_too(dataset, run_of, tmp_path):
    """At every pack of one pass a state is converted; some are saved between two pieces of a sample."""
    packing = {"seq_length": 256, "window": 4, "oversize": "split", "drop_budget": 1.0}
    run = run_of(dataset, data={"repeat": True, "shuffle_buffer": 2}, **packing)
    index = tmp_path / "index"
    measure(MeasureConfig(paths=(dataset,), out=index, workers=0), run)
    loader = build_loader(run)
    seen, between, whole = Counter(), 0, None
    for number, pack in enumerate(loader):
        seen.update(pack.keys)
        seen.update(entry.key for entry in pack.dropped)
        if number % 18 != 5:
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        torch.save(loader.save_state(), folder / "rank0.pt")
        done, plan = converted(run, [folder / "rank0.pt"], index, folder)
        assert done.exit_code == 0, done.output
        if json.loads(done.stdout)["from"]["epoch"]:
            break
        (after, dropped), whole = planned(plan), planned(plan, epoch=1)[0]
        assert seen - Counter(dict.fromkeys(dropped, 9)) + after == whole
        sources = [{key.partition("#")[0] for key in some if "#" in key} for some in (seen, after)]
        between += bool(sources[0] & sources[1])
    assert between > 0
    assert any("#" in key for key in whole)


def test_a_bridge_state_is_written_that_begins_at_the_plan(dataset, run_of, index, tmp_path):
    run = run_of(dataset, data={"repeat": True, "workers": 0}, window=8)
    saved_after(run, 2, 2, tmp_path / "states")
    new = tmp_path / "new" / "iter_0000002"
    done, plan = converted(run, [tmp_path / "states"], index, tmp_path, "--states-out", str(new))
    assert done.exit_code == 0, done.output
    state = torch.load(new / "train_dataloader_dprank000.pt", weights_only=False)["dataloader_state_dict"]
    restored, fresh = (open_loader(run_of(plan, window=8)) for _ in range(2))
    OneReader(restored, Replica()).restore_state(state)  # of Bridge's iterator
    assert next(iter(restored)).keys == next(iter(fresh)).keys


def test_a_state_is_never_replaced_unasked_and_those_that_are_read_never(dataset, run_of, index, tmp_path):
    run = run_of(dataset, data={"repeat": True, "workers": 0}, window=8)
    states, other = tmp_path / "states", tmp_path / "other"
    saved_after(run, 2, 1, states)
    saved_after(run, 3, 1, other)
    before = {file: file.read_bytes() for file in (*states.iterdir(), *other.iterdir())}
    (first,) = states.iterdir()
    for given in (states, first):
        done, plan = converted(run, [given], index, tmp_path, "--states-out", str(tmp_path / "." / "states"), "--force")
        assert done.exit_code == 2
        assert "holds the states that are converted" in done.output
        assert not plan.exists()
    done, plan = converted(run, [states], index, tmp_path, "--states-out", str(other))
    assert "train_dataloader_dprank000.pt exists already" in done.output
    assert not plan.exists()
    assert {file: file.read_bytes() for file in before} == before
    assert converted(run, [states], index, tmp_path, "--states-out", str(other), "--force")[0].exit_code == 0


def test_states_that_cannot_be_counted_are_refused_in_a_sentence(dataset, run_of, index, sources, tmp_path):
    run = run_of(dataset, data={"repeat": True, "workers": 0}, window=8)
    saved_after(run, 2, 2, tmp_path / "states")
    saved_after(run, 3, 2, tmp_path / "later")
    first, second = (tmp_path / "states" / f"train_dataloader_dprank00{rank}.pt" for rank in range(2))
    other = tmp_path / "other"
    convert(ConvertConfig(sources=sources[1:], out=other, split={"train": 1.0}, workers=0))
    source, like = make_data(tmp_path / "made", conversations=36, seed=6, defects=False), tmp_path / "like"
    # Shards of the same names, with as many samples.
    convert(ConvertConfig(sources=(source,), out=like, split={"train": 1.0}, samples_per_shard=6, workers=0))
    measure(MeasureConfig(paths=(like,), out=tmp_path / "of-like", workers=0), run)
    (tmp_path / "text.pt").write_text("no state")
    torch.save({"dataloader_state_dict": {"format": "energon_packing plan 1"}}, tmp_path / "plan.pt")
    torch.save(build_loader(run).save_state(), tmp_path / "beginning.pt")
    mixed = tmp_path / "mixed"
    measure(MeasureConfig(paths=(dataset, other), out=mixed, workers=0), run)
    blended = tmp_path / "blend.yaml"
    wholes = [path / "dataset.yaml" for path in (dataset, other)]
    parts = [{"path": str(whole if whole.exists() else whole.parent), "weight": 1} for whole in wholes]
    blended.write_text(
        json.dumps(
            {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": {"blend": parts}}}
        )
    )
    blend = run_of(blended, data={"repeat": True, "workers": 0}, window=8)
    saved_after(blend, 1, 1, tmp_path / "blended")
    for given, config, where, sentence in (
        ([first], run, index, "had 2 data-parallel ranks, but 1 states are given"),
        ([second, first], run, index, "give the states in the order of the ranks"),
        ([first, tmp_path / "later" / second.name], run, index, r"their ranks had \[2, 3\] packs"),
        ([tmp_path / "nowhere.pt"], run, index, "no state of the loader at .*nowhere.pt"),
        ([tmp_path / "text.pt"], run, index, "text.pt is not the state of a loader"),
        ([tmp_path / "plan.pt"], run, index, "that of a plan needs no conversion"),
        ([tmp_path / "beginning.pt"], run, index, "beginning.pt was saved before the first pack of its run"),
        ([tmp_path], run, index, "has no train_dataloader_dprank000.pt"),
        ([first, second], run_of(other, window=8), index, "was made with data set="),
        ([first, second], run, mixed, "the index has several data sets"),
        ([first, second], run, tmp_path / "of-like", "in the index is another data set than the run's"),
        ([tmp_path / "blended"], blend, mixed, "Energon's BlendDataset, as a blend does"),
        ([first, second], run_of(dataset, data={"shuffle_over_epochs": 3}), index, "shuffle_over_epochs is 3"),
    ):
        done, plan = converted(config, given, where, tmp_path)
        assert done.exit_code == 2, done.output
        assert re.search(sentence, json.loads(done.stdout)["error"])
        assert not plan.exists()
