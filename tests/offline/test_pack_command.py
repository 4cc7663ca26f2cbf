"""``pack`` and ``verify`` as commands: nothing half written, whoever kills, shares or damages what."""

import dataclasses
import errno
import fcntl
import functools
import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from forking_python import quick_python
from support.ranks import ranks_environment
from test_planned_loader import planned

from energon_packing.cli.main import cli
from energon_packing.convert import ConvertConfig, convert
from energon_packing.errors import UserError
from energon_packing.offline.files import read_metadata, write_table
from energon_packing.offline.formats.bridge_parquet import BridgeParquet
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.pack import PACK_FORMATS, PackConfig, PackFormat, pack, register_pack_format
from energon_packing.offline.packed import Packed, PackedFacts
from energon_packing.offline.plan import Plan, drops_path
from energon_packing.offline.planner import make_plan
from energon_packing.offline.shards import ShardFile, ShardWriter
from energon_packing.offline.stored_pack import StoredPack
from energon_packing.offline.verify import VerifyConfig, verify
from energon_packing.validate.looks.data import look_at_data

KILLED_RUNS = int(os.environ.get("ENERGON_PACKING_KILLED_RUNS", "1"))


@pytest.fixture(scope="module")
def plan_of(dataset, run_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pack")
    return planned(run_of(dataset), dataset, folder)


def options(run, out, **more):
    return PackConfig(**({"plan": Path(run.data.path), "out": out, "workers": 0, "shard_packs": 2} | more))


@pytest.fixture(scope="module")
def whole(plan_of, tmp_path_factory):
    """Two packs in a shard, with copied media, packed by one command that nobody stopped."""
    out = tmp_path_factory.mktemp("whole") / "packed"
    report = pack(options(plan_of, out, media="copy"))
    assert report.packed == len(report.facts.firsts) > 3
    return out


@pytest.fixture
def copied(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "copied")
    return tmp_path / "copied"


def contents(directory):
    """Name -> digest of every file, leftovers included; the lock holds nothing."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
        if path.name != ".lock"
    }


def command(run, out, *more):
    words = ["-m", "energon_packing.cli.main", "pack", str(run.data.path), "--out", str(out), "--media", "copy"]
    return [quick_python(), *words, "--shard-packs", "2", "--json", *more]


def invoke(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


def test_a_second_pack_does_nothing_and_ranks_share_the_shards(plan_of, whole, tmp_path):
    before = contents(whole)
    report = pack(options(plan_of, whole, media="copy"))
    assert (report.packed, report.missing) == (0, 0)
    assert report.reused == len(report.facts.shards)
    assert contents(whole) == before
    out = tmp_path / "packed"
    reports = [pack(options(plan_of, out, media="copy", rank=rank, world_size=3)) for rank in (2, 0, 1)]
    assert [bool(each.missing) for each in reports] == [True, True, False]
    assert sum(each.packed for each in reports) == len(reports[-1].facts.shards)
    assert contents(out) == before


def test_a_command_of_many_looks_at_its_own_part_and_compares_no_plan_byte_by_byte(plan_of, tmp_path, monkeypatch):
    out, seen = tmp_path / "packed", []
    pack(options(plan_of, out, rank=0, world_size=4))
    opened, read = ShardFile.__init__, Plan._read

    def open_recorded(self, path, *more):
        seen.append(path.name)
        opened(self, path, *more)

    def read_recorded(self, number, columns):
        seen.append("the whole plan" if columns else "rows")
        return read(self, number, columns)

    monkeypatch.setattr(ShardFile, "__init__", open_recorded)
    monkeypatch.setattr(Plan, "_read", read_recorded)
    copied = (out / "plan.parquet").stat().st_ino
    report = pack(options(plan_of, out, rank=1, world_size=4))
    assert report.missing > 0
    shards = {name for name in seen if name.startswith("shard")}
    assert shards == {f"shard-{number:05}.bin" for number in range(1, len(report.facts.firsts), 4)}
    assert "the whole plan" not in seen
    assert (out / "plan.parquet").stat().st_ino == copied
    for rank in (2, 3):
        report = pack(options(plan_of, out, rank=rank, world_size=4))
    assert report.missing == 0
    assert not verify(VerifyConfig(directory=out, share=0.0)).findings


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, KILLED_RUNS))])
def test_a_pack_that_is_killed_anywhere_continues_and_ends_as_if_it_had_not_been(seed, plan_of, whole, tmp_path):
    drawn = random.Random(seed)
    out = tmp_path / "packed"
    kills = 0
    for _ in range(50):
        process = subprocess.Popen(
            command(plan_of, out, "--workers", "2"),
            env=ranks_environment(),
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        # Counted from the first file, so that the kill meets the packing and not the start of the program.
        while process.poll() is None and not (out / "packed.json").exists():
            time.sleep(0.01)
        if kills < 4:
            time.sleep(drawn.uniform(0, 0.4) if kills else 0)
            kills += process.poll() is None
            process.kill()
        output, _ = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, output
    assert process.returncode == 0
    assert kills
    assert contents(out) == contents(whole)
    assert json.loads(output)["shards"]["missing"] == 0


def test_the_directory_answers_what_became_of_a_sample_without_the_plan_it_was_made_from(whole):
    done = invoke("explain", "long", whole / "plan.parquet")
    assert done.exit_code == 0, done.output
    assert " dropped   long: oversize: " in done.output


def test_validate_does_not_take_a_packed_directory_for_a_broken_data_set(whole):
    looks = look_at_data(str(whole), "train", {"data.path": "data.path", "data.split": "data.split"}, {}).looks
    assert {look.outcome for look in looks} == {"not looked at"}
    assert "it is packed, and compared with the run when it is read" in looks[0].why


def test_two_commands_at_once_share_the_shards(plan_of, whole, tmp_path):
    out = tmp_path / "packed"
    both = [
        subprocess.Popen(command(plan_of, out, "--workers", "0"), env=ranks_environment(), stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    reports = [json.loads(process.communicate()[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(each["shards"]["missing"] == 0 for each in reports)
    assert contents(out) == contents(whole)


def test_another_plan_or_other_settings_are_refused_by_name_and_nothing_changes(
    plan_of, whole, dataset, run_of, tmp_path
):
    before = contents(whole)
    other = planned(run_of(dataset), dataset, tmp_path, seed=5)
    for arguments, said in (
        ((other.data.path, "--media", "copy", "--shard-packs", 2), "holds other packs: plan is"),
        ((plan_of.data.path, "--shard-packs", 2), "holds other packs: media is 'copy', now it would be 'reference'"),
        ((plan_of.data.path, "--media", "copy"), "holds other packs: "),
    ):
        done = invoke("pack", *arguments, "--out", whole, "--workers", 0)
        assert done.exit_code == 2
        assert said in done.output
        assert "choose another --out, or delete the directory" in done.output
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    done = invoke("pack", plan_of.data.path, "--out", tmp_path / "other", "--workers", 0)
    assert (done.exit_code, "is no packed directory (it has thesis.tex)" in done.output) == (2, True)
    done = invoke("pack", plan_of.data.path, "--out", tmp_path / "p", "--store", "pixels", "--media", "copy")
    assert (done.exit_code, "--store pixels holds the rendered media" in done.output) == (2, True)
    assert contents(whole) == before


def test_a_source_that_is_missing_or_changed_is_refused_by_name_and_no_half_shard_is_left(dataset, run_of, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(dataset, data)
    run = planned(run_of(data), data, tmp_path)
    tar = next(data.rglob("train-000001.tar"))
    content = tar.read_bytes()
    tar.unlink()
    out = tmp_path / "packed"
    with pytest.raises(UserError, match=r"train-000001\.tar, a shard of the plan, is missing"):
        pack(options(run, out))
    assert not [name for name in contents(out) if name.startswith(".")]
    with pytest.raises(UserError, match="is not complete; run 'energon-packing pack' again"):
        open_loader(_on(run, out))
    tar.write_bytes(content + b"\0" * 512)
    with pytest.raises(UserError, match=r"train-000001\.tar changed since it was measured"):
        pack(options(run, out))
    tar.write_bytes(content)
    report = pack(options(run, out))
    assert report.missing == 0
    fresh = tmp_path / "fresh"
    pack(options(run, fresh))
    assert contents(out) == contents(fresh)


def _on(run, path):
    return dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(path)))


def test_a_full_disk_and_a_read_only_place_are_one_sentence_and_nothing_half_written(plan_of, whole, tmp_path):
    out = tmp_path / "packed"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(path.stat().st_size for path in whole.glob("*.bin"))
    assert largest > max((whole / name).stat().st_size for name in ("packed.json", "plan.parquet"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, before[1]))  # no file may be as large as the largest shard
    try:
        done = invoke("pack", plan_of.data.path, "--out", out, "--media", "copy", "--shard-packs", 2, "--workers", 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.exit_code == 2
    assert "cannot be written (File too large)" in done.output
    assert "it continues with the shards that are missing" in done.output
    there = contents(out)
    assert not [name for name in there if name.startswith(".")]
    expected = contents(whole)
    assert {name: there[name] for name in there if name.startswith("shard")}.items() <= expected.items()
    assert (
        invoke("pack", plan_of.data.path, "--out", out, "--media", "copy", "--shard-packs", 2, "--workers", 0).exit_code
        == 0
    )
    assert contents(out) == expected
    done = invoke("pack", plan_of.data.path, "--out", "/proc/packed", "--workers", 0)
    assert (done.exit_code, "/proc/packed cannot be written" in done.output) == (2, True)


def test_what_is_whole_is_verified_and_every_flipped_byte_is_found(copied):
    done = invoke("verify", copied, "--share", 0.3)
    assert done.exit_code == 0, done.output
    assert "all as planned" in done.output
    drawn = random.Random(1)
    for path in sorted(copied.glob("*.bin")):
        content = path.read_bytes()
        if not content:
            continue
        at = drawn.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << drawn.randrange(8))]) + content[at + 1 :])
        findings = verify(VerifyConfig(directory=copied, share=0)).findings
        assert [finding.shard for finding in findings] == [int(path.stem[-5:])], f"byte {at} of {path.name}"
        assert path.name in findings[0].what
        path.write_bytes(content)
    assert not verify(VerifyConfig(directory=copied, share=0)).findings


def test_training_stops_at_a_pack_whose_bytes_changed_and_names_it(plan_of, copied):
    path = copied / "shard-00001.bin"
    content, shard = path.read_bytes(), ShardFile(path)
    records = [bytes(shard.record(number)) for number in range(shard.packs)]
    run, drawn = _on(plan_of, copied), random.Random(2)
    for number in range(shard.packs):
        at = content.index(records[number]) + drawn.randrange(len(records[number]))
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << drawn.randrange(8))]) + content[at + 1 :])
        with pytest.raises(UserError, match=r"pack \d+ in .*shard-00001\.bin is damaged: its bytes are not those that"):
            list(open_loader(run))
    path.write_bytes(content)
    assert list(open_loader(run))


def test_a_shard_that_is_cut_off_or_gone_is_named_and_packed_again_after_it_is_deleted(plan_of, whole, copied):
    first, second = copied / "shard-00001.bin", copied / "media-00003.bin"
    first.write_bytes(first.read_bytes()[:-100])
    second.unlink()
    done = invoke("verify", copied, "--share", 0, "--json")
    assert done.exit_code == 1
    found = json.loads(done.output)["findings"]
    assert [(each["shard"], each["pack"]) for each in found] == [(1, None), (3, None)]
    assert "delete it and run 'energon-packing pack' again" in found[0]["what"]
    run = _on(plan_of, copied)
    with pytest.raises(UserError, match=r"shard-00001\.bin is damaged"):
        list(open_loader(run))
    with pytest.raises(UserError, match=r"shard-00001\.bin is damaged"):
        pack(options(plan_of, copied, media="copy"))
    first.unlink()
    with pytest.raises(UserError, match=r"shard-00001\.bin cannot be opened"):
        list(open_loader(run))
    report = pack(options(plan_of, copied, media="copy"))
    assert report.packed == 2
    assert contents(copied) == contents(whole)


def changed(directory, number, change):
    """Writes a shard anew with a record changed, so that all checksums are right."""
    path = directory / f"shard-{number:05}.bin"
    shard = ShardFile(path)
    records = [StoredPack.from_bytes(shard.record(at)) for at in range(shard.packs)]
    path.unlink()
    with path.open("wb") as file:
        writer = ShardWriter(file)
        for at, record in enumerate(records):
            writer.add((change(record) if at == 1 else record).to_bytes())
        writer.finish(shard.facts)
    entry = ShardFile(path)
    manifest = json.loads((directory / "packed.json").read_text())
    manifest["shards"][number] |= {"checksum": entry.checksum, "bytes": entry.bytes}
    (directory / "packed.json").write_text(json.dumps(manifest))


def test_a_pack_that_differs_from_its_source_is_named_with_sample_and_field(copied):
    first = PackedFacts.read(copied).firsts[2]
    keys = []

    def other_token(record):
        keys.extend(record.batch.sample_keys)
        tokens = record.batch.tokens.clone()
        tokens[0, 0] += 1
        return dataclasses.replace(record, batch=dataclasses.replace(record.batch, tokens=tokens))

    changed(copied, 2, other_token)
    assert not verify(VerifyConfig(directory=copied, share=0)).findings
    (finding,) = verify(VerifyConfig(directory=copied, share=1)).findings
    assert (finding.shard, finding.pack) == (2, first + 1)
    assert f"tokens of sample {keys[0]}: " in finding.what

    def other_boundary(record):
        padding = torch.zeros_like(record.batch.padding_mask)
        padding[0, -1] = True
        return dataclasses.replace(record, batch=dataclasses.replace(record.batch, padding_mask=padding))

    changed(copied, 2, other_boundary)
    (finding,) = verify(VerifyConfig(directory=copied, share=0)).findings
    assert finding.pack == first + 1
    assert finding.what.startswith("padding_")

    # A record of another sample of the same length: checksums, lengths and boundaries are as they were.
    def other_sample(record):
        first, *others = record.samples
        return dataclasses.replace(record, samples=(dataclasses.replace(first, key="another"), *others))

    changed(copied, 2, other_sample)
    (finding,) = verify(VerifyConfig(directory=copied, share=0)).findings
    assert (finding.pack, finding.what.partition(",")[0]) == (first + 1, "its sample 0 is another")


def test_a_manifest_that_cannot_be_is_refused_by_verify_and_by_the_loader(plan_of, copied):
    file = copied / "packed.json"
    text = file.read_text()
    for change, said in (
        ({"format": 2}, "is not a packed directory of format 1"),
        ({"plan": "another"}, "is not the plan that"),
        ({"firsts": [0, 9999]}, "is damaged"),
        ({"firsts": []}, "is damaged"),
        ({"store": "floats"}, "is damaged"),
        ({"encoder": None}, "is damaged"),
        ({"shards": [{"number": 0}]}, "is damaged"),
        (None, "cannot be read"),
    ):
        file.write_text(text[:-50] if change is None else json.dumps(json.loads(text) | change))
        done = invoke("verify", copied)
        assert (done.exit_code, said in done.output) == (2, True), done.output
        with pytest.raises(UserError, match=said):
            open_loader(_on(plan_of, copied))


def test_a_format_of_ones_own_is_written_by_the_same_command_and_an_unknown_one_is_a_sentence(plan_of, tmp_path):
    class Counts(PackFormat):
        def path(self, number):
            return self.config.out / f"{number}.txt"

        def prepare(self):
            self.config.out.mkdir(exist_ok=True)

        def found(self, number):
            return self.path(number).exists() or None

        def do(self, task):
            return self.path(task.number).write_text(f"{len(list(self.planned_packs(task.number)))}")

    register_pack_format("counts", Counts)
    words = ("pack", plan_of.data.path, "--out", tmp_path / "out", "--workers", 0, "--json", "--format")
    done = invoke(*words, "counts")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["packs"] == sum(int(path.read_text()) for path in (tmp_path / "out").iterdir())
    done = invoke(*words, "count")
    assert (done.exit_code, "--format is 'count', an unknown pack format" in done.output) == (2, True)


@pytest.fixture(scope="module")
def texts_of(run_of, tmp_path_factory):
    """The run on a plan of conversations without media, made by a policy."""
    folder = tmp_path_factory.mktemp("texts")
    turns = [[{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So. " * at}] for at in range(1, 61)]
    (folder / "texts.json").write_text(json.dumps([{"conversations": each} for each in turns]))
    convert(ConvertConfig(sources=(folder / "texts.json",), out=folder / "data", split={"train": 1.0}, workers=0))

    def made(policy):
        (folder / policy).mkdir()
        run = run_of(folder / "data", family="text", seq_length=256, policy=policy)
        return planned(run, folder / "data", folder / policy)

    return functools.cache(made)


@pytest.mark.parametrize("name", PACK_FORMATS.names())
def test_packs_of_every_format_are_made_once_by_any_ranks_and_go_on_where_they_stopped(name, texts_of, tmp_path):
    def packed(out, policy="window", **more):
        return pack(options(texts_of(policy), tmp_path / out, format=name, **more))

    whole = packed("whole")
    before = contents(tmp_path / "whole")
    assert (whole.packed > 3, whole.reused, whole.missing) == (True, 0, 0)
    assert (packed("whole").packed, packed("whole").reused) == (0, whole.packed)
    for rank in (1, 0):
        shared = packed("shared", rank=rank, world_size=2)
    assert (shared.missing, contents(tmp_path / "shared")) == (0, before)
    shards = sorted((tmp_path / "shared").glob("*0001*"))
    for file in shards:
        file.unlink()
    assert (packed("shared").packed, contents(tmp_path / "shared")) == (1, before)
    with pytest.raises(UserError, match="choose another --out"):
        packed("shared", "next_fit")  # as many files or more
    assert contents(tmp_path / "shared") == before


@pytest.mark.parametrize("method", ["do", "complete"])
def test_parquet_files_of_a_plan_that_is_packed_at_once_are_refused(texts_of, tmp_path, monkeypatch, method):
    name = "packs-00001.idx.parquet"
    for policy in ("next_fit", "window"):
        pack(options(texts_of(policy), tmp_path / policy, format="bridge-parquet"))
    own, copied = getattr(BridgeParquet, method), []

    def meanwhile(self, *given):
        if not copied:
            copied.append(shutil.copy(tmp_path / "next_fit" / name, tmp_path / "both" / name))
        return own(self, *given)

    monkeypatch.setattr(BridgeParquet, method, meanwhile)
    with pytest.raises(UserError, match=f"{name} was packed from another plan"):
        pack(options(texts_of("window"), tmp_path / "both", format="bridge-parquet"))
    assert (tmp_path / "both" / name).read_bytes() == (tmp_path / "next_fit" / name).read_bytes()


@pytest.fixture
def without_locks(monkeypatch):
    numbers = itertools.cycle([errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])

    def refused(*_):
        raise OSError(number := next(numbers), os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(fcntl, "lockf", refused)


def test_convert_measure_plan_and_pack_go_on_without_locks_and_say_so_before_they_work(
    without_locks, sources, run_of, tmp_path
):
    told = "has no file locks .* do not run two commands"
    with pytest.warns(UserWarning, match=told):
        convert(ConvertConfig(sources=sources, out=tmp_path / "data", split={"train": 1.0}, workers=0))
    run = run_of(tmp_path / "data")
    steps: list[str] = []
    with pytest.warns(UserWarning, match=told) as warned:
        report = measure(
            MeasureConfig(paths=(tmp_path / "data",), out=tmp_path / "index", workers=0),
            run,
            lambda name, *_: steps.append(f"{name} after {len(warned)}"),
        )
    assert report.missing == 0
    assert steps[0] == "measure after 1"
    make_plan([tmp_path / "index"], run, tmp_path / "plan.parquet")
    with pytest.warns(UserWarning, match=told):
        pack(PackConfig(plan=tmp_path / "plan.parquet", out=tmp_path / "packed", workers=0))
    assert len(Packed.open(str(tmp_path / "packed")).plan) > 0


def test_a_lock_that_another_process_has_still_counts(sources, tmp_path, monkeypatch):
    def held(*_):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(fcntl, "flock", held)
    with pytest.raises(UserError, match="another conversion is writing"):
        convert(ConvertConfig(sources=sources, out=tmp_path / "data", split={"train": 1.0}, workers=0))


def test_an_address_without_a_cluster_is_a_sentence(plan_of, tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    done = invoke("pack", plan_of.data.path, "--out", tmp_path / "p", "--executor", "ray", "--address", "127.0.0.1:1")
    assert (done.exit_code, "there is no Ray cluster that this machine can join" in done.stderr) == (2, True)


def test_a_row_of_a_plan_that_is_a_copy_of_another_is_found_wherever_the_plan_lies(dataset, run_of, tmp_path):
    run = planned(run_of(dataset), dataset, tmp_path)
    plan, out = Path(run.data.path), tmp_path / "packed"
    pack(PackConfig(plan=plan, out=out, workers=0))

    def found(path):
        done = CliRunner().invoke(cli, ["verify", str(path), "--share", "0"])
        assert done.exit_code in (0, 1), done.output
        return "" if done.exit_code == 0 else done.output

    assert [found(path) for path in (plan, out, tmp_path / "index")] == [""] * 3
    whole = {path: path.read_bytes() for path in (plan, out / "plan.parquet", drops_path(plan))}
    table, facts = pq.read_table(plan), read_metadata(plan)
    rows = table.to_pylist()
    first, other = next(at for at, row in enumerate(rows) if row["media"]), len(rows) - 1
    columns = [name for name in rows[0] if name != "pack"]
    other_encoder = {**facts["config"], "encoder": {**facts["config"]["encoder"], "train_on": "all"}}
    for change, said in (
        (columns, "does not hold what its id"),
        *((name, "other rows or settings than were written") for name in (["key"], ["offset"], ["size"], ["media"])),
        ({"config": other_encoder}, "other rows or settings than were written"),
    ):
        copies = [dict(row) for row in rows]
        if isinstance(change, list):
            copies[first] |= {name: rows[other][name] for name in change}
        groups = [*facts["row_groups"], facts["packs"]]
        changed = pa.Table.from_pylist(copies, schema=table.schema)
        assert len(groups) == 2
        for path in (plan, out / "plan.parquet"):
            write_table(path, table.schema, [changed], facts | (change if isinstance(change, dict) else {}))
            assert said in found(path.parent if path.parent == out else path).replace("\n", " ")
            path.write_bytes(whole[path])
    (out / "plan.parquet").write_bytes(whole[plan][:200] + b"\0" * 40 + whole[plan][240:])
    assert "plan.parquet" in found(out)
    (out / "plan.parquet").write_bytes(whole[plan])
    drops_path(plan).write_text(whole[drops_path(plan)].decode() + '{"dropped": "x", "reason": "oversize"}\n')
    assert "has the drops" in found(plan)
    drops_path(plan).unlink()
    assert "No such file" in found(plan)
    (out / "drops.jsonl").unlink()
    assert "No such file" in found(out)
    file = next((tmp_path / "index").glob("*/*.parquet"))
    content = file.read_bytes()
    file.write_bytes(content[:-20])
    assert "is damaged or of another shard" in found(tmp_path / "index")
    file.unlink()
    assert f"{file.name} is missing" in found(tmp_path / "index").replace("\n", "")


def test_settings_of_a_packed_directory_that_somebody_changed_are_found(dataset, run_of, tmp_path):
    run = planned(run_of(dataset), dataset, tmp_path)
    pack(PackConfig(plan=Path(run.data.path), out=tmp_path / "packed", workers=0))
    manifest = tmp_path / "packed" / "packed.json"
    said = json.loads(manifest.read_text())
    said["encoder"]["train_on"] = "all"
    manifest.write_text(json.dumps(said))
    report = verify(VerifyConfig(directory=tmp_path / "packed", share=0))
    assert "was packed with train_on='assistant', the manifest says 'all'" in str(report.findings[0])
