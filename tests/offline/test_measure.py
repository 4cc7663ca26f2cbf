"""``measure`` finds what the online loader finds, once."""

import functools
import json
import os
import pickle
import re
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import transformers
from click.testing import CliRunner
from PIL import Image
from support.made_index import before_splits_were_noted

from energon_packing.cli.main import cli
from energon_packing.cli.measure import measure as command
from energon_packing.config import LimitsConfig, PlanConfig, to_mapping
from energon_packing.config.run import PlannedDatasetConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.energon.loader import build_loader
from energon_packing.energon.replica import Replica
from energon_packing.errors import ConfigError, UserError
from energon_packing.offline import measure as measuring
from energon_packing.offline.explain import changes
from energon_packing.offline.files import read_metadata, write_table
from energon_packing.offline.index import Index, IndexedShard, rows_file
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.open_loader import open_loader, open_together
from energon_packing.offline.pack import PackConfig
from energon_packing.offline.pack import pack as pack_plan
from energon_packing.offline.packs import SampleRemeasurer
from energon_packing.offline.plan import Plan, rows_schema
from energon_packing.offline.planner import make_plan
from energon_packing.offline.shared_work import work_shared
from energon_packing.offline.verify import VerifyConfig, verify
from energon_packing.packing.model_cost import SQUARES, media_sums, model_cost
from energon_packing.report.stats import stats_report
from energon_packing.report.stats_samples import samples_of_index


@pytest.fixture(scope="module")
def index(dataset, run_of, tmp_path_factory):
    """The index of the data set, measured in this process."""
    out = tmp_path_factory.mktemp("index") / "index"
    report = measure(MeasureConfig(paths=(dataset,), out=out, workers=0), run_of(dataset))
    assert (report.measured, report.reused, report.missing) == (6, 0, 0)
    return report.index


def rows_of(index):
    """Key -> row of the index, and the data set's part it belongs to."""
    return {
        row["key"]: (part, shard.name, row)
        for part in index.datasets
        for shard in part.shards
        for row in index.rows(part, shard).to_pylist()
    }


@pytest.mark.both_layouts
def test_lengths_targets_and_refusals_are_those_of_the_online_loader(index, dataset, run_of):
    packs = list(build_loader(run_of(dataset, seq_length=16384)))
    rows = {key: row for key, (_, _, row) in rows_of(index).items()}
    lengths, targets = {}, {}
    for pack in packs:
        places = iter(zip(pack.batch.sample_lengths, pack.batch.cu_seqlens.tolist(), strict=False))
        for key in pack.keys:
            segments = [next(places) for _ in range(2 if key.startswith("pair") else 1)]
            lengths[key] = tuple(length for length, _ in segments)
            mask = pack.batch.loss_mask.reshape(-1)
            targets[key] = int(sum((mask[start : start + length] > 0).sum() for length, start in segments))
    assert len(lengths) > 20
    kept = {key: row for key, row in rows.items() if row["reason"] is None}
    assert {key: (row["length"], *([row["second"]] * (row["second"] > 0))) for key, row in kept.items()} == lengths
    assert {key: row["targets"] for key, row in kept.items()} == targets
    dropped = {entry.key: (entry.reason, entry.detail) for pack in packs for entry in pack.dropped}
    assert {key: (row["reason"], row["detail"]) for key, row in rows.items() if row["reason"]} == dropped
    assert {reason for reason, _ in dropped.values()} == {"reserved_token"}


def test_turns_and_media_are_those_of_the_records_and_their_files(index, dataset, run_of):
    seen = {"stills": 0, "videos": 0}
    for key, (part, shard, row) in rows_of(index).items():
        if row["reason"] is not None:
            continue
        with tarfile.open(Path(part.root) / shard) as tar:
            record = json.load(tar.extractfile(f"{key}.json"))
        assert row["turns"] == len(record["turns"]) + len(record.get("chosen", ()))
        kinds = [media["kind"] for media in record.get("media", ())]
        assert (row["stills"], row["videos"]) == (kinds.count("image"), kinds.count("video"))
        seen = {name: count + row[name] for name, count in seen.items()}
        if kinds and not row["videos"]:
            areas = []
            for media in row["media"]:
                with tarfile.open(Path(part.media_root) / part.media_shards[media["shard"]]) as tar:
                    name = key + media["name"] if media["name"].startswith(".") else media["name"]
                    width, height = Image.open(tar.extractfile(name)).size
                    areas.append(width * height * [each["name"] for each in record["media"]].count(media["name"]))
            assert row["pixels"] == sum(areas)
    assert min(seen.values()) > 0
    inputs = [pack.batch.visual_inputs or {} for pack in build_loader(run_of(dataset, seq_length=16384))]
    grids = [each[name] for each in inputs for name in ("image_grid_thw", "video_grid_thw") if name in each]
    assert sum(row["patches"] for _, _, row in rows_of(index).values()) == sum(int(it.prod(1).sum()) for it in grids)
    steps = [int(each["video_grid_thw"][:, 0].sum()) for each in inputs if "video_grid_thw" in each]
    frames = [row["frames"] for _, _, row in rows_of(index).values() if row["videos"] == 1]
    assert sum(-(-count // 2) for count in frames) == sum(steps), "Qwen2.5-VL merges two frames into a step"


def test_processes_write_the_same_files_and_a_second_run_measures_nothing(index, dataset, run_of, tmp_path):
    run = run_of(dataset)
    for rank in (1, 0):
        asked = MeasureConfig(paths=(dataset,), out=tmp_path / "two", workers=2, rank=rank, world_size=2)
        report = measure(asked, run)
        assert (report.measured, report.missing) == (3, 3 if rank else 0)
    files = sorted(path.relative_to(index.directory) for path in index.directory.rglob("*.*") if path.is_file())
    assert len(files) == 8  # six shards, index.json and the lock
    for file in files:
        assert (tmp_path / "two" / file).read_bytes() == (index.directory / file).read_bytes()
    longer = run_of(dataset, seq_length=8192, window=64, encoder={"pixels": "float32"})
    report = measure(MeasureConfig(paths=(dataset,), out=tmp_path / "two", workers=2), longer)
    assert (report.measured, report.reused) == (0, 6)


def test_a_shard_that_is_given_to_a_worker_names_no_other_shard(dataset, run_of, tmp_path, monkeypatch):
    """Else 100,000 shards would send 10 billion names."""
    given = []

    def recorded(config, tasks, *rest, **named):
        given.extend(tasks)
        return work_shared(config, tasks, *rest, **named)

    monkeypatch.setattr(measuring, "work_shared", recorded)
    measure(MeasureConfig(paths=(dataset,), out=tmp_path / "index", workers=0), run_of(dataset))
    names = [task.shard for task in given]
    assert len(names) > 1
    for task in given:
        assert [name for name in names if name.encode() in pickle.dumps(task)] == [task.shard]


def test_only_what_is_new_or_changed_is_measured(dataset, run_of, tmp_path, sources):
    run, out = run_of(dataset), tmp_path / "index"
    measure(MeasureConfig(paths=(dataset,), out=out, workers=0), run)
    other = tmp_path / "other"
    convert(ConvertConfig(sources=sources[1:], out=other, split={"train": 1.0}, workers=0))
    report = measure(MeasureConfig(paths=(other,), out=out, workers=0), run)
    assert (report.measured, report.reused) == (1, 0)
    assert [Path(part.path) for part in report.index.datasets] == [dataset, other]
    shard = next(other.rglob("train-000000.tar"))
    os.utime(shard, ns=(1, 1))
    with pytest.raises(UserError, match="named twice"):
        measure(MeasureConfig(paths=(other, dataset, other), out=out, workers=0), run)
    report = measure(MeasureConfig(paths=(dataset, other), out=out, workers=0), run)
    assert (report.measured, report.reused) == (1, 6)
    (damaged,) = (out / report.index.datasets[1].name).glob("*.parquet")
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(UserError, match="damaged or of another shard; run 'energon-packing measure' again"):
        Index.open(out).rows(report.index.datasets[1], report.index.datasets[1].shards[0])
    assert measure(MeasureConfig(paths=(dataset, other), out=out, workers=0), run).measured == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"train_on": "all"}, "train_on"),
        ({"max_pixels": 50_000}, "max_pixels"),
        ({"limits": {"max_images": 1}}, "limits"),
    ],
)
def test_an_index_of_another_encoder_is_refused_with_the_setting_that_differs(index, dataset, run_of, change, named):
    encoder = {name: LimitsConfig(**value) if name == "limits" else value for name, value in change.items()}
    with pytest.raises(UserError, match=f"measured with another encoder: .*{named}"):
        measure(MeasureConfig(paths=(dataset,), out=index.directory, workers=0), run_of(dataset, encoder=encoder))


def test_another_machine_that_would_measure_something_else_is_refused(dataset, run_of, monkeypatch):
    from energon_packing.offline import measure as measuring

    sent = pickle.dumps(measuring.ShardMeasurer(run_of(dataset)))
    assert pickle.loads(sent).fingerprint == measuring.ShardMeasurer(run_of(dataset)).fingerprint
    own = measuring.measuring_fingerprint
    monkeypatch.setattr(measuring, "measuring_fingerprint", lambda *given: {**own(*given), "template": "another"})
    with pytest.raises(UserError, match=r"would measure something else: template is another there and .* here"):
        pickle.loads(sent)


def test_mistakes_are_one_sentence_each(dataset, run_of, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(to_mapping(run_of(dataset))))
    run = run_of(dataset)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for paths, out, split, sentence in (
        ((tmp_path / "nowhere",), tmp_path / "a", "train", "does not exist"),
        ((dataset,), tmp_path / "a", "trian", "has no split 'trian'; it has 'train'"),
        ((dataset,), tmp_path / "full", "train", "is there and is not an index; choose another --out"),
        ((dataset,), config, "train", "is there and is not an index; choose another --out"),
    ):
        with pytest.raises(UserError, match=sentence):
            measure(MeasureConfig(paths=paths, out=out, split=split, workers=0), run)
    with pytest.raises(ConfigError, match="--rank 2 does not exist with --world-size 2"):
        MeasureConfig(paths=(dataset,), out=tmp_path, rank=2, world_size=2)
    with pytest.raises(UserError, match="is not an index"):
        Index.open(tmp_path)
    done = CliRunner().invoke(
        command, [str(dataset), "--config", str(config), "--out", str(tmp_path / "b"), "--workers", "0", "--json"]
    )
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["datasets"]
    assert (row["shards"], row["samples"], row["dropped"]) == (6, 31, 1)


def test_two_commands_that_begin_an_index_at_once_lose_no_data_set(sources, run_of, tmp_path):
    """The second begins and ends while the first measures, and both found no index."""
    first, second, out = tmp_path / "100%25 #1?mode=rw", tmp_path / "second", tmp_path / "index"
    for data, records in ((first, sources[1:]), (second, sources)):
        convert(ConvertConfig(sources=records, out=data, split={"train": 1.0}, workers=0))
    run = run_of(first)
    seen = []

    def meanwhile(stage, done, total):
        if not seen:
            seen.append(measure(MeasureConfig(paths=(second,), out=out, workers=0), run))

    measure(MeasureConfig(paths=(first,), out=out, workers=0), run, meanwhile)
    assert {each.path for each in Index.open(out).datasets} == {str(first), str(second)}


@pytest.fixture(scope="module")
def halves(sources, tmp_path_factory):
    """A data set of two splits."""
    data = tmp_path_factory.mktemp("halves") / "data"
    convert(ConvertConfig(sources=sources, out=data, split={"train": 0.6, "val": 0.4}, workers=0))
    return data


def split_of(plan):
    """Splits of the shards whose samples a plan has."""
    names = {(s.dataset, s.shard) for pack in plan.packs(0, len(plan)) for s in pack.samples}
    return {plan.facts.datasets[at].shards[shard].name.partition("-")[0] for at, shard in names}


def test_a_plan_has_the_split_that_is_named_and_never_another_beside_it(halves, run_of, tmp_path):
    run, out, plan = run_of(halves), tmp_path / "index", tmp_path / "plan.parquet"
    for split in ("train", "val"):
        measure(MeasureConfig(paths=(halves,), out=out, split=split, workers=0), run)
        if split == "train":
            first = make_plan([out], run, plan)
    for old in (False, True):
        if old:
            before_splits_were_noted(out)
        with pytest.raises(UserError, match=r"hold the splits train \(.*\), val \(.*\); name the one .* --split"):
            make_plan([out], run, plan, force=True)
        with pytest.raises(UserError, match=r"hold the splits train \(.* or measure another one"):
            make_plan([out], run, plan, force=True, splits=["test"])
        assert make_plan([out], run, plan, force=True, splits=["train"]).id == first.id
        assert split_of(Plan.open(plan)) == {"train"}
    assert make_plan([out], run, plan, force=True, splits=["val", "train"]).splits == {"train", "val"}
    assert split_of(Plan.open(plan)) == {"train", "val"}
    assert list(open_loader(run_of(plan)))
    with pytest.raises(ConfigError, match=r"plan of the split train, val, not of 'val' alone; name a plan"):
        open_loader(run_of(plan), split="val", evaluation=2)
    make_plan([out], run, plan, force=True, splits=["val"])
    on_plan = run_of(plan)
    in_bridge = functools.partial(open_together, replica=Replica(), reads=True)
    for opened in (open_loader, build_loader, in_bridge, functools.partial(open_loader, evaluation=2)):
        with pytest.raises(
            ConfigError, match=r"plan of the split val, not of 'train'; .* or have the run ask for its split if"
        ):
            opened(on_plan)
    assert list(open_loader(on_plan, split="val"))
    assert list(open_loader(run_of(plan, data={"split": "val"})))


def test_a_plan_of_several_splits_from_before_they_were_noted_is_refused(halves, run_of, tmp_path):
    run, out, plan = run_of(halves), tmp_path / "index", tmp_path / "plan.parquet"
    for split in ("train", "val"):
        measure(MeasureConfig(paths=(halves,), out=out, split=split, workers=0), run)
    facts = make_plan([out], run, plan, splits=["train", "val"])
    older = tuple(replace(each, asked="") for each in facts.datasets)
    write_table(
        plan, rows_schema(facts.kind, facts.decided), [pq.read_table(plan)], replace(facts, datasets=older).to_json()
    )
    with pytest.raises(ConfigError, match="samples of several splits, of which its version did not note"):
        open_loader(run_of(plan))
    packed = pack_plan(PackConfig(plan=plan, out=tmp_path / "packed", workers=0))
    accepted = run_of(plan, data={"accept_changed": ("plan",)})
    for split in (None, "train"):  # of an add-on that always names one
        with pytest.warns(UserWarning, match="several splits, .* all are read"):
            assert packed.packs == len(list(open_loader(accepted, split=split)))
    with pytest.raises(ConfigError, match=r"the one asked for; measure and plan again, or train on all with"):
        open_loader(accepted, split="val", evaluation=2)
    assert replace(facts, datasets=older[:1]).splits == {"train"}


@pytest.mark.parametrize("how", ["moved", "copied", "linked"])
def test_a_data_set_at_another_place_replaces_its_entry_and_takes_its_turn(halves, sources, run_of, tmp_path, how):
    here, there, other, out = (tmp_path / name for name in ("here", "there", "other", "index"))
    shutil.copytree(halves, here)
    convert(ConvertConfig(sources=sources[1:], out=other, split={"train": 1.0}, workers=0))
    run, plan, first = run_of(here), tmp_path / "plan.parquet", tmp_path / "first.parquet"

    def twice(path):
        return replace(run, plan=PlanConfig(datasets={str(path): PlannedDatasetConfig(epochs=2)}))

    measure(MeasureConfig(paths=(here, other), out=out, workers=0), run)
    before = make_plan([out], twice(here), first)
    {"moved": os.rename, "copied": shutil.copytree, "linked": lambda old, new: os.symlink(old, new)}[how](here, there)
    if how != "moved":
        measure(MeasureConfig(paths=(there, here), out=tmp_path / "both", workers=0), run)
        with pytest.raises(UserError, match=r"here.* and .*there.* hold the same samples, .* or twice in one"):
            make_plan([tmp_path / "both"], run, plan)
    report = measure(MeasureConfig(paths=(there,), out=out, workers=0), run)
    assert [Path(each.path).name for each in report.index.datasets] == ["there", "other"]
    (change,) = report.changes
    assert re.fullmatch(rf"{there}\S* replaces {here}\S* \(train\), which has the same samples", change)
    after = make_plan([out], twice(there), plan)
    assert (after.id, after.samples) == (before.id, before.samples)
    assert make_plan([out], twice(other), plan, force=True).id != before.id
    make_plan([out], replace(run, plan=PlanConfig(seed=7)), plan, force=True)
    told = changes(Plan.open(first), Plan.open(plan))
    assert told["entered"] == 0 < told["moved"] + told["kept"]
    assert told["left"] == before.samples - Plan.open(plan).facts.samples > 0
    measure(MeasureConfig(paths=(halves,), out=tmp_path / "second", workers=0), run)
    with pytest.raises(UserError, match="hold the same samples, in two of the indexes"):
        make_plan([out, tmp_path / "second"], run, plan, force=True)


def test_what_an_index_holds_is_listed_and_taken_out_by_name_split_or_because_it_is_gone(halves, run_of, tmp_path):
    data, copy, out, config = (tmp_path / name for name in ("data", "data2", "index", "run.yaml"))
    shutil.copytree(halves, data)
    processor = run_of(data).encoder.processor
    config.write_text(json.dumps({"encoder": {"processor": processor}, "packing": {"pairs": "both"}}))

    def told(*arguments):
        done = CliRunner().invoke(cli, ["measure", *map(str, arguments), "--out", str(out)])
        assert done.exit_code == (2 if "Error" in done.output else 0), done.output
        return " ".join(done.output.split())

    def held():
        said = json.loads(CliRunner().invoke(cli, ["measure", "--list", "--json", "--out", str(out)]).stdout)
        return [(Path(each["path"]).name, each["split"]) for each in said["datasets"]]

    for split in ("train", "val"):
        told(data, "--config", config, "--split", split, "--workers", 0)
    assert held() == [("data", "train"), ("data", "val")]
    assert "holds no nowhere of any split; --list shows" in told("--remove", "nowhere")
    assert "of test; --list shows" in told("--remove", data, "--split", "test")
    assert "Name the DATASET" in told("--remove")
    assert "leave out" in told("--prune", data)
    assert "Give --config" in told(data)
    assert "Give one of --list, --remove and --prune" in told("--list", "--remove", data)
    assert held() == [("data", "train"), ("data", "val")]
    assert told("--remove", data, data, "--split", "val").count("(val) is removed") == 1
    assert held() == [("data", "train")]
    assert "is removed" not in told("--prune")
    os.rename(data, copy)
    assert "(train) is removed" in told("--prune")
    assert held() == []
    assert "holds no data set" in told("--list")
    assert "holds no data set; measure one" in str(verify(VerifyConfig(directory=out)).findings[0])
    told(copy, "--config", config, "--workers", 0)
    assert held() == [("data2", "train")]
    assert "(train) is removed" in told("--remove", copy)
    assert held() == []


@pytest.mark.parametrize("at_once", [False, True])
def test_an_index_from_before_a_setting_is_not_measured_again(dataset, run_of, tmp_path, monkeypatch, at_once):
    from energon_packing.offline import measure as measuring

    run, config, own = run_of(dataset), MeasureConfig(paths=(dataset,), out=tmp_path / "a", workers=0), {}

    def older(*given):
        own.update(measuring_fingerprint(*given))
        return {name: value for name, value in own.items() if name != "encoder.template_date"}

    measuring_fingerprint, make_directory = measuring.measuring_fingerprint, measuring.make_directory

    def by_the_older_version(*_):
        monkeypatch.setattr(measuring, "make_directory", make_directory)
        with monkeypatch.context() as before:
            before.setattr(measuring, "measuring_fingerprint", older)
            measure(config, run)

    if at_once:  # both found no index
        monkeypatch.setattr(measuring, "make_directory", by_the_older_version)
    else:
        by_the_older_version()
    report = measure(config, run)
    assert (report.measured, report.reused) == (0, 6)
    assert report.index.fingerprint == {name: own[name] for name in own if name != "encoder.template_date"}
    sent = measuring.ShardMeasurer(run)
    sent.fingerprint = dict(report.index.fingerprint)
    assert pickle.loads(pickle.dumps(sent)).fingerprint == report.index.fingerprint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The directory of a model, and its configuration: the published Qwen2.5-VL's sizes, and fewer layers."""
    config = transformers.Qwen2_5_VLConfig(text_config={"num_hidden_layers": 4})
    config.save_pretrained(out := tmp_path_factory.mktemp("model"))
    return str(out), config


def test_a_plan_and_an_online_window_order_packs_by_the_operations_of_the_model(
    dataset, index, run_of, model, tmp_path
):
    settings = {"cost_model": model[0], "cost_frozen": ("vision_model",), "balance_window": 4}
    run = replace(run_of(dataset, **settings), plan=PlanConfig(max_data_parallel=4))
    make_plan([index.directory], run, tmp_path / "plan.parquet")
    plan = Plan.open(tmp_path / "plan.parquet")
    cost = model_cost(model[1], frozen=["vision_model"])
    expected = {}
    for pack in build_loader(run_of(dataset, seq_length=16384)):
        lengths = iter(np.array(pack.batch.sample_lengths))
        seen = pack.batch.visual_inputs or {}
        grids = {name: iter(seen[name].tolist()) for name in ("image_grid_thw", "video_grid_thw") if name in seen}
        for key, kinds in zip(pack.keys, kinds_of(index, pack.keys), strict=True):
            parts = [cost.segment_sums(next(lengths)) for _ in range(2 if key.startswith("pair") else 1)]
            parts += [media_sums(*next(grids[f"{kind}_grid_thw"])) for kind in kinds]
            sums = {name: sum(part.get(name, 0) for part in parts) for name in (*cost.vision, *cost.language)}
            expected[key] = [each / 1e6 for each in cost.of(sums)]
    packs = plan.packs(0, len(plan))
    told = {it.key: (it.vision_cost, it.cost - it.vision_cost) for pack in packs for it in pack.samples}
    assert len(told) > 20
    assert told.keys() <= expected.keys()
    for key, both in told.items():
        assert both == pytest.approx(expected[key], abs=0.51)
    sums = [[sum(told[it.key][at] for it in pack.samples) for at in range(2)] for pack in packs]
    assert plan.costs(0, len(plan)).tolist() == sums
    assert plan.facts.decided["cost"]["vision"] == cost.vision
    # Packs of a window ascend in turn, by the same costs, and say them.
    made = list(build_loader(run))
    of_packs = [np.sum([told[key] for key in pack.keys], axis=0) for pack in made]
    assert [(pack.vision_cost, pack.cost - pack.vision_cost) for pack in made] == [tuple(each) for each in of_packs]
    totals = [int(each.sum()) for each in of_packs]
    assert totals[:4] == sorted(totals[:4])
    assert totals[4:8] == sorted(totals[4:8], reverse=True)
    report = stats_report(samples_of_index(index, "index", run), run, seq_lengths=[2048], ranks=4)
    known = stats_report(samples_of_index(index, "index"), run_of(dataset), seq_lengths=[2048], ranks=4)
    assert report["packing"][0]["efficiency"] != known["packing"][0]["efficiency"]


def kinds_of(index, keys):
    """The kinds of the media of samples, images before videos, of both answers of a pair."""
    rows = {key: row for key, (_, _, row) in rows_of(index).items()}
    return [["image"] * rows[key]["stills"] + ["video"] * rows[key]["videos"] for key in keys]


def test_an_index_from_before_squares_is_measured_again_only_for_the_cost_of_a_model(dataset, run_of, model, tmp_path):
    out, run = tmp_path / "index", run_of(dataset)
    index = measure(MeasureConfig(paths=(dataset,), out=out, workers=0), run).index
    before = [each for _, _, each in rows_of(index).values()]
    for file in out.glob("*/*.parquet"):
        table, known = pq.read_table(file).drop_columns([*SQUARES]), read_metadata(file)
        write_table(file, table.schema, [table], {name: each for name, each in known.items() if name != "columns"})
    again = MeasureConfig(paths=(dataset,), out=out, workers=0)
    report = measure(again, run)
    assert report.reused == 6
    make_plan([out], run, tmp_path / "plan.parquet")
    stats_report(samples_of_index(report.index, "index", run), run, seq_lengths=[2048])
    wanted = run_of(dataset, cost_model=model[0])
    told = r"has no squares of patches; run 'energon-packing measure' again with packing.cost_model set"
    with pytest.raises(UserError, match=told):
        make_plan([out], wanted, tmp_path / "model.parquet")
    with pytest.raises(UserError, match=told):
        samples_of_index(report.index, "index", wanted)
    assert measure(again, wanted).measured == 6
    assert [each for _, _, each in rows_of(Index.open(out)).values()] == before
    make_plan([out], wanted, tmp_path / "model.parquet")


def test_pieces_of_split_samples_cost_what_the_model_does_with_them(dataset, index, run_of, model, tmp_path):
    run = run_of(dataset, cost_model=model[0], oversize="split", seq_length=512)
    remeasure = SampleRemeasurer(None, [index.directory], run=run)
    make_plan([index.directory], run, tmp_path / "plan.parquet", remeasure=remeasure)
    plan, made = Plan.open(tmp_path / "plan.parquet"), list(open_loader(run_of(tmp_path / "plan.parquet", **{
        "cost_model": model[0], "oversize": "split", "seq_length": 512})))  # fmt: skip
    assert any(it.piece > 0 and it.vision_cost for pack in plan.packs(0, len(plan)) for it in pack.samples)
    assert plan.costs(0, len(plan)).tolist() == [[pack.vision_cost, pack.cost - pack.vision_cost] for pack in made]


def test_a_model_that_cannot_be_counted_is_said_in_a_sentence(dataset, index, run_of, tmp_path):
    def planned(config, **settings):
        config.save_pretrained(directory := tmp_path / type(config).__name__)
        run = run_of(dataset, cost_model=str(directory), **settings)
        make_plan([index.directory], run, tmp_path / "plan.parquet", force=True)

    with pytest.warns(UserWarning, match="the layers of .*Mamba2Config are not known here; packs cost what they do"):
        planned(transformers.Mamba2Config())
    with pytest.raises(ConfigError, match="attention windows of 4 x 4 patches, and an index counts those of 8 x 8"):
        planned(transformers.Qwen2_5_VLConfig(vision_config={"window_size": 56}))
    with pytest.raises(ConfigError, match=r"packing\.cost_model: .*nowhere has no config\.json"):
        make_plan([index.directory], run_of(dataset, cost_model=str(tmp_path / "nowhere")), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match=r"packing\.cost_frozen is read for a directory in packing\.cost_model"):
        run_of(dataset, cost_frozen=("vision_model",))


def test_an_index_that_cannot_be_locked_is_a_sentence(dataset, run_of, tmp_path):
    (tmp_path / "index" / ".lock").mkdir(parents=True)  # as in a directory of somebody else
    with pytest.raises(UserError, match=r"index cannot be written \(Is a directory\)"):
        measure(MeasureConfig(paths=(dataset,), out=tmp_path / "index", workers=0), run_of(dataset))


def test_shards_of_like_names_have_files_of_their_own():
    names = ("a/b.tar", "a_b.tar", "a%2Fb.tar", "b.tar")
    shards = [IndexedShard(name=name, samples=0, dropped=0, tokens=0, identity={}) for name in names]
    assert len({rows_file(shard.name) for shard in shards}) == len(names)
    assert not any("/" in rows_file(shard.name) for shard in shards)


def test_media_that_changed_are_measured_again_and_an_older_index_is_not(dataset, run_of, tmp_path, monkeypatch):
    data, run = tmp_path / "data", run_of(dataset)
    shutil.copytree(dataset, data)
    config = MeasureConfig(paths=(data,), out=tmp_path / "index", workers=0)
    (part,) = measure(config, run).index.datasets
    shown = {
        (part.media_shards[file["shard"]], rows_file(shard.name))
        for shard in part.shards
        for row in Index.open(config.out).rows(part, shard).to_pylist()
        for file in row["media"] or ()
    }
    name = sorted(shown)[0][0]
    touched = [each for each in shown if each[0] == name]
    os.utime(Path(part.media_root) / name, ns=(5, 5))
    report = measure(config, run)
    assert (report.measured, report.reused) == (len(touched), 6 - len(touched))

    def without_states():
        older = json.loads((config.out / "index.json").read_text())
        for each in older["datasets"]:
            del each["media_states"]
        (config.out / "index.json").write_text(json.dumps(older))
        for file in (config.out / part.name).glob("*.parquet"):
            table, facts = pq.read_table(file), read_metadata(file)
            write_table(file, table.schema, [table], {name: facts[name] for name in facts if name != "media"})

    without_states()
    assert Index.open(config.out).datasets[0].media_states == ()
    looked, states_of = [], measuring.ShardMeasurer.states_of

    def looking(self, root, names):
        looked.extend(names)
        return states_of(self, root, names)

    monkeypatch.setattr(measuring.ShardMeasurer, "states_of", looking)
    for _ in range(2):  # from the second time on there are states to compare, of the whole data set
        looked.clear()
        report = measure(config, run)
        assert (report.measured, report.reused) == (0, 6)
        assert report.index.datasets[0].media_states == part.media_states
        assert len(looked) <= 2 * len(part.media_shards), "not all media for every shard"
    with (Path(part.media_root) / name).open("ab") as file:
        file.write(b"\0" * 512)
    assert measure(config, run).measured == 6
    assert measure(config, run).measured == 0
    without_states()
    measuring.edit_index(config.out, remove=[data])
    assert measure(config, run).measured == 6, "nothing says of which media these rows are"


def test_a_command_of_another_encoder_that_begins_the_same_index_is_refused_before_it_measures(
    sources, run_of, tmp_path
):
    data, out = tmp_path / "data", tmp_path / "index"
    convert(ConvertConfig(sources=sources[1:], out=data, split={"train": 1.0}, workers=0))
    config, run, refused = MeasureConfig(paths=(data,), out=out, workers=0), run_of(data), []

    def meanwhile(stage, done, total):
        if not refused:
            with pytest.raises(UserError, match=r"measured with another encoder: encoder\.train_on") as caught:
                measure(config, run_of(data, encoder={"train_on": "all"}))
            refused.append(caught.value)

    index = measure(config, run, meanwhile).index
    assert refused
    kept = {row["key"]: row["targets"] for _, _, row in rows_of(index).values()}
    alone = measure(MeasureConfig(paths=(data,), out=tmp_path / "alone", workers=0), run).index
    assert kept == {row["key"]: row["targets"] for _, _, row in rows_of(alone).values()}
