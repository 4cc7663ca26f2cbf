"""Text shards that break off, hold a damaged block, fail in a read or are gone: what is lost is named, the rest read.

The oracle of what is lost is the tar itself: samples whose bytes lie wholly before a cut are left, and no others.
"""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import tarfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.energon import get_loader
from test_epoch_report import config_of, source_of

from energon_packing import read_again
from energon_packing.convert import ConvertConfig, convert
from energon_packing.energon.cookers import REASON
from energon_packing.energon.loader import build_dataset, build_loader, build_task_encoder
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import UserError
from energon_packing.ledger import DropBudgetExceeded
from energon_packing.read_again import PAUSES

RECORDS = 40


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """40 conversations in two shards."""
    root = tmp_path_factory.mktemp("shards")
    source = source_of(root / "chats.jsonl", [5 + number % 7 for number in range(RECORDS)])
    options: dict[str, Any] = {"split": {"train": 1.0}, "workers": 0, "samples_per_shard": RECORDS // 2}
    convert(ConvertConfig(sources=(source,), out=root / "data", **options))
    return root / "data"


def places(shard) -> dict[str, tuple[int, int]]:
    """Key -> first byte of the sample and the byte after its last."""
    with tarfile.open(shard) as tar:
        return {
            member.name.removesuffix(".json"): (member.offset, member.offset_data + member.size)
            for member in tar.getmembers()
        }


def read(config, **arguments):
    loader = build_loader(config, **arguments)
    packs = list(loader)
    dropped = [entry for pack in packs for entry in pack.dropped] + loader.epoch_report.dropped_at_end
    assert loader.epoch_report.read == RECORDS
    return [key for pack in packs for key in pack.keys], dropped


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_shard_that_breaks_off_costs_what_lies_after_and_each_is_named(whole, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cut") / "data"
    shutil.copytree(whole, folder)
    shard, other = sorted((folder / "text").glob("*.tar"))
    there = places(shard)
    cut = data.draw(st.integers(0, max(end for _, end in there.values())))
    with shard.open("r+b") as stream:
        stream.truncate(cut)
    emitted, dropped = read(config_of(folder))
    kept = {key for key, (_, end) in there.items() if end <= cut}
    assert sorted(emitted) == sorted({*kept, *places(other)})
    assert {entry.reason for entry in dropped} <= {REASON}
    assert len(dropped) == len(there) - len(kept)
    starts = {f"train-000000@{start}" for key, (start, _) in there.items() if key not in kept}
    assert {entry.key for entry in dropped} == starts
    assert all("train-000000.tar at byte" in entry.detail for entry in dropped)


def test_a_damaged_header_costs_its_sample(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "data")
    shard = sorted((tmp_path / "data" / "text").glob("*.tar"))[1]
    key, (start, _) = list(places(shard).items())[7]
    with shard.open("r+b") as stream:
        stream.seek(start)
        stream.write(b"\xff" * 512)
    emitted, dropped = read(config_of(tmp_path / "data"))
    assert len(emitted) == RECORDS - 1
    assert key not in emitted
    assert [entry.key for entry in dropped] == [f"train-000001@{start}"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_is_gone_is_named_and_stops_a_run_with_a_budget(whole, tmp_path, workers):
    shutil.copytree(whole, tmp_path / "data")
    shard = sorted((tmp_path / "data" / "text").glob("*.tar"))[0]
    own = places(shard)
    shard.unlink()
    emitted, dropped = read(config_of(tmp_path / "data", workers=workers))
    assert len(emitted) == RECORDS - len(own)
    assert len(dropped) == len(own)
    assert "No such file" in dropped[0].detail
    with pytest.raises(DropBudgetExceeded, match=r"train-000000\.tar at byte"):
        list(build_loader(config_of(tmp_path / "data", workers=workers, drop_budget=0.0)))


def test_a_read_that_fails_every_time_costs_one_sample_and_the_state_goes_on(whole, monkeypatch):
    config = config_of(whole, window=4)
    loader = build_loader(config)
    plain = [key for pack in build_loader(config) for key in pack.keys]
    calls = itertools.count()
    original = tarfile.ExFileObject.read

    def failing(self, *arguments):
        if 2 <= next(calls) < 2 + 1 + len(PAUSES):
            raise OSError(errno.EIO, "Input/output error")
        return original(self, *arguments)

    monkeypatch.setattr(read_again, "PAUSES", (0.0,) * len(PAUSES))
    monkeypatch.setattr(tarfile.ExFileObject, "read", failing)
    packs = iter(loader)
    first = list(itertools.islice(packs, 2))
    keys = [key for pack in first for key in pack.keys]
    state = loader.save_state()
    rest = [key for pack in packs for key in pack.keys]
    assert len(keys + rest) == len(plain) - 1
    (entry,) = [entry for pack in first for entry in pack.dropped]
    assert entry.reason == REASON
    assert "Input/output error" in entry.detail
    again = build_loader(config)
    again.restore_state(state)
    assert [key for pack in again for key in pack.keys] == rest


def test_with_cookers_of_a_user_the_run_ends_with_the_shard_named(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "data")
    sorted((tmp_path / "data" / "text").glob("*.tar"))[0].write_bytes(b"")
    config = config_of(tmp_path / "data")
    cookers = (*build_task_encoder(config).cookers,)
    encoder = PackingTaskEncoder(config.encoder, config.packing, cookers=cookers)
    with pytest.raises(UserError, match=r"A shard cannot be read: .*train-000000\.tar at byte \d+"):
        list(build_loader(config, task_encoder=encoder))


def test_the_command_names_the_shard_and_reports_no_bug(whole, tmp_path):
    from click.testing import CliRunner

    from energon_packing.cli.main import cli
    from energon_packing.demo import processor_path

    shutil.copytree(whole, tmp_path / "data")
    for shard in (tmp_path / "data" / "text").glob("*.tar"):
        shard.write_bytes(shard.read_bytes()[:700])
    options = ["--set", f"encoder.processor={processor_path('text')}", "--json"]
    result = CliRunner().invoke(cli, ["preview", str(tmp_path / "data"), *options])
    assert result.exit_code == 2
    sentence = json.loads(result.output)["error"]
    assert "unreadable_shard" in sentence
    assert ".tar at byte" in sentence
    assert "bug" not in sentence


def test_a_cut_shard_of_one_data_set_of_a_blend_costs_its_own_samples(whole, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(whole, tmp_path / name)
    shard = sorted((tmp_path / "two" / "text").glob("*.tar"))[0]
    there = places(shard)
    with shard.open("r+b") as stream:
        stream.truncate(list(there.values())[4][1])
    (tmp_path / "blend.yaml").write_text(
        "{__module__: megatron.energon, __class__: MetadatasetV2, splits: {train: {blend_epochized: "
        "[{repetitions: 1, path: one/dataset.yaml}, {repetitions: 2, path: two/dataset.yaml}]}}}"
    )
    loader = build_loader(config_of(tmp_path / "blend.yaml"))
    packs = list(loader)
    lost = 2 * (len(there) - 5)
    assert loader.epoch_report.dropped == {REASON: lost}
    assert sum(len(pack.keys) for pack in packs) == 3 * RECORDS - lost


def test_open_tars_remember_nothing_of_what_was_read(whole):
    dataset = build_dataset(config_of(whole))
    assert list(get_loader(dataset))
    while not hasattr(dataset, "join_readers"):
        dataset = dataset.datasets[0] if hasattr(dataset, "datasets") else dataset.dataset
    (reader,) = dataset.join_readers
    assert reader.itar_files_cache
    assert not any(tar.members for tar in reader.itar_files_cache.values())
