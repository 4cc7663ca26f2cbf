"""``measure`` finds what the online loader finds, where Python's ``tarfile`` finds it, once."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from forking_python import quick_python
from PIL import Image
from ranks_environment import ranks_environment

from energon_packing.cli.measure import measure as command
from energon_packing.config import to_mapping
from energon_packing.convert import ConvertConfig, convert
from energon_packing.energon.loader import build_loader
from energon_packing.errors import ConfigError, UserError
from energon_packing.offline.files import HOST
from energon_packing.offline.index import Index, IndexedShard
from energon_packing.offline.measure import MeasureConfig, measure

pytest.importorskip("pyarrow", reason="pyarrow is not installed")


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
    assert len(lengths) > 40
    kept = {key: row for key, row in rows.items() if row["reason"] is None}
    assert {key: (row["length"], *([row["second"]] * (row["second"] > 0))) for key, row in kept.items()} == lengths
    assert {key: row["targets"] for key, row in kept.items()} == targets
    dropped = {entry.key: (entry.reason, entry.detail) for pack in packs for entry in pack.dropped}
    assert {key: (row["reason"], row["detail"]) for key, row in rows.items() if row["reason"]} == dropped
    assert {reason for reason, _ in dropped.values()} == {"reserved_token"}


@pytest.mark.both_layouts
def test_records_and_media_lie_where_tarfile_finds_them(index):
    seen = 0
    for key, (part, shard, row) in rows_of(index).items():
        with tarfile.open(Path(part.root) / shard) as tar:
            member = tar.getmember(f"{key}.json")
            assert (row["offset"], row["size"]) == (member.offset_data, member.size)
        for media in row["media"]:
            name = key + media["name"] if media["name"].startswith(".") else media["name"]
            with tarfile.open(Path(part.media_root) / part.media_shards[media["shard"]]) as tar:
                member = tar.getmember(name)
                assert (media["offset"], media["size"]) == (member.offset_data, member.size)
                seen += 1
    assert seen > 20


@pytest.mark.both_layouts
def test_images_and_patches_are_those_of_the_packs(index, dataset, run_of):
    patches = sum(
        int(pack.batch.visual_inputs[name].shape[0])
        for pack in build_loader(run_of(dataset, seq_length=16384, encoder={"pixels": "float32"}))
        if pack.batch.visual_inputs
        for name in ("pixel_values", "pixel_values_videos")
        if name in pack.batch.visual_inputs
    )
    assert sum(row["patches"] for _, _, row in rows_of(index).values()) == patches > 100


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
    steps = [
        int(pack.batch.visual_inputs["video_grid_thw"][:, 0].sum())
        for pack in build_loader(run_of(dataset, seq_length=16384))
        if pack.batch.visual_inputs and "video_grid_thw" in pack.batch.visual_inputs
    ]
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


@pytest.mark.both_layouts
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
        ({"max_source_pixels": 10_000}, "max_source_pixels"),
        ({"max_decoded_bytes": 10_000}, "max_decoded_bytes"),
        ({"limits": {"max_images": 1}}, "limits"),
    ],
)
def test_an_index_of_another_encoder_is_refused_with_the_setting_that_differs(index, dataset, run_of, change, named):
    from energon_packing.config import LimitsConfig

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


def test_ctrl_c_ends_all_processes_and_the_next_command_goes_on(sources, run_of, tmp_path):
    data, config, out = tmp_path / "data", tmp_path / "run.yaml", tmp_path / "index"
    convert(ConvertConfig(sources=sources, out=data, split={"train": 1.0}, samples_per_shard=1, workers=0))
    run = run_of(data)
    config.write_text(json.dumps(to_mapping(run)))
    words = ["-m", "energon_packing.cli.main", "measure", str(data), "--config", str(config), "--out", str(out)]
    command = [quick_python(), *words, "--workers", "2"]
    running = subprocess.Popen(command, env=ranks_environment(), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    written = None
    while written is None and time.monotonic() < deadline:
        written = next(iter(out.rglob(".*.parquet.*")), None)
        time.sleep(0 if written else 0.003)
    worker = int(written.name.rpartition(".")[2])
    os.killpg(os.getpgid(worker), signal.SIGINT)  # the command and its workers, as from a terminal
    _, stderr = running.communicate(timeout=200)
    assert running.returncode == 130
    assert "Traceback" not in stderr
    deadline = time.monotonic() + 20
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    leftover = written.with_name(f".x.parquet.{HOST}.{worker}")
    leftover.write_text("half a shard")
    report = measure(MeasureConfig(paths=(data,), out=out, workers=0), run)
    assert report.missing == 0
    assert report.measured > 20
    assert not leftover.exists()
    whole = measure(MeasureConfig(paths=(data,), out=tmp_path / "whole", workers=0), run).index
    assert rows_of(report.index) == rows_of(whole)


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
    assert (row["shards"], row["samples"], row["dropped"]) == (6, 43, 1)


def test_two_commands_that_begin_an_index_at_once_lose_no_data_set(sources, run_of, tmp_path):
    """The second begins and ends while the first measures, and both found no index."""
    first, second, out = tmp_path / "first", tmp_path / "second", tmp_path / "index"
    for data in (first, second):
        convert(ConvertConfig(sources=sources[1:], out=data, split={"train": 1.0}, workers=0))
    run = run_of(first)
    seen = []

    def meanwhile(stage, done, total):
        if not seen:
            seen.append(measure(MeasureConfig(paths=(second,), out=out, workers=0), run))

    measure(MeasureConfig(paths=(first,), out=out, workers=0), run, meanwhile)
    assert {each.path for each in Index.open(out).datasets} == {str(first), str(second)}
    seen.clear()
    other = run_of(first, encoder={"train_on": "last"})

    def with_another_encoder(stage, done, total):
        if not seen:
            seen.append(measure(MeasureConfig(paths=(second,), out=tmp_path / "new", workers=0), other))

    with pytest.raises(UserError, match=r"measured with another encoder: encoder\.train_on"):
        measure(MeasureConfig(paths=(first,), out=tmp_path / "new", workers=0), run, with_another_encoder)


def test_the_path_of_a_data_set_may_have_any_characters(sources, run_of, tmp_path):
    data = tmp_path / "100%25 #1?mode=rw"
    convert(ConvertConfig(sources=sources[1:], out=data, split={"train": 1.0}, workers=0))
    report = measure(MeasureConfig(paths=(data,), out=tmp_path / "index", workers=0), run_of(data))
    assert report.index.datasets[0].shards[0].samples == 7


def test_shards_of_like_names_have_files_of_their_own():
    names = ("a/b.tar", "a_b.tar", "a%2Fb.tar", "b.tar")
    shards = [IndexedShard(name=name, samples=0, dropped=0, tokens=0, identity={}) for name in names]
    assert len({shard.file for shard in shards}) == len(names)
    assert not any("/" in shard.file for shard in shards)
