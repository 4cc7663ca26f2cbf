"""``measure`` finds what the online loader finds, once."""

import json
import os
import pickle
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from energon_packing.cli.measure import measure as command
from energon_packing.config import LimitsConfig, to_mapping
from energon_packing.convert import ConvertConfig, convert
from energon_packing.energon.loader import build_loader
from energon_packing.errors import ConfigError, UserError
from energon_packing.offline import measure as measuring
from energon_packing.offline.index import Index, IndexedShard
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.shared_work import work_shared


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
    for data in (first, second):
        convert(ConvertConfig(sources=sources[1:], out=data, split={"train": 1.0}, workers=0))
    run = run_of(first)
    seen = []

    def meanwhile(stage, done, total):
        if not seen:
            seen.append(measure(MeasureConfig(paths=(second,), out=out, workers=0), run))

    measure(MeasureConfig(paths=(first,), out=out, workers=0), run, meanwhile)
    assert {each.path for each in Index.open(out).datasets} == {str(first), str(second)}


def test_an_index_holds_one_split_so_that_no_plan_trains_on_another_one(sources, run_of, tmp_path):
    data, out = tmp_path / "data", tmp_path / "index"
    convert(ConvertConfig(sources=sources, out=data, split={"train": 0.6, "val": 0.4}, workers=0))
    run = run_of(data)
    measure(MeasureConfig(paths=(data,), out=out, workers=0), run)
    with pytest.raises(UserError, match=r"holds the split train, .* measure the split val into an index of its own"):
        measure(MeasureConfig(paths=(data,), out=out, split="val", workers=0), run)
    assert {each.split for each in Index.open(out).datasets} == {"train"}


def test_an_index_from_before_a_setting_is_not_measured_again(dataset, run_of, tmp_path, monkeypatch):
    from energon_packing.offline import measure as measuring

    run, config, own = run_of(dataset), MeasureConfig(paths=(dataset,), out=tmp_path / "a", workers=0), {}

    def older(*given):
        own.update(measuring_fingerprint(*given))
        return {name: value for name, value in own.items() if name != "encoder.template_date"}

    measuring_fingerprint = measuring.measuring_fingerprint
    with monkeypatch.context() as before:
        before.setattr(measuring, "measuring_fingerprint", older)
        measure(config, run)
    report = measure(config, run)
    assert (report.measured, report.reused) == (0, 6)
    assert report.index.fingerprint == {name: own[name] for name in own if name != "encoder.template_date"}
    sent = measuring.ShardMeasurer(run)
    sent.fingerprint = dict(report.index.fingerprint)
    assert pickle.loads(pickle.dumps(sent)).fingerprint == report.index.fingerprint


def test_an_index_that_cannot_be_locked_is_a_sentence(dataset, run_of, tmp_path):
    (tmp_path / "index" / ".lock").mkdir(parents=True)  # as in a directory of somebody else
    with pytest.raises(UserError, match=r"index cannot be written \(Is a directory\)"):
        measure(MeasureConfig(paths=(dataset,), out=tmp_path / "index", workers=0), run_of(dataset))


def test_shards_of_like_names_have_files_of_their_own():
    names = ("a/b.tar", "a_b.tar", "a%2Fb.tar", "b.tar")
    shards = [IndexedShard(name=name, samples=0, dropped=0, tokens=0, identity={}) for name in names]
    assert len({shard.file for shard in shards}) == len(names)
    assert not any("/" in shard.file for shard in shards)
