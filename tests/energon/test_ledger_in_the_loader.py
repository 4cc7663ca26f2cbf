"""The files of the ledger after a whole epoch: of two workers, of a run that was stopped and went on, of a full disk.

The oracle is the list of keys in the shards.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections import Counter

import pytest
import yaml

from energon_packing.convert import ConvertConfig, convert
from energon_packing.convert.layout import dataset_entry
from energon_packing.energon.loader import build_loader
from energon_packing.errors import UserError
from energon_packing.ledger_report import merged


@pytest.fixture
def config(run_config, tmp_path):
    """A function from the number of workers to a run that drops about a quarter of its samples."""
    return lambda workers, repeat=False: run_config(
        data={"workers": workers, "repeat": repeat},
        seq_length=1024,
        ledger=str(tmp_path / "ledger"),
        drop_budget=1.0,
    )


def read(folder):
    """Worker file -> pack number -> keys, the last line of a number; and how often each key was dropped."""
    packs, dropped = {}, Counter()
    for file in sorted(folder.glob("*.jsonl")):
        own = packs.setdefault(file.stem, {})
        for line in file.read_text(encoding="utf-8").split("\n")[:-1]:
            entry = json.loads(line)
            if "pack" in entry:
                own[entry["pack"]] = entry["keys"]
            elif "dropped" in entry:
                dropped[entry["dropped"]] += 1
    return packs, dropped


def emitted(packs):
    return Counter(key for own in packs.values() for keys in own.values() for key in keys)


def test_two_workers_write_two_files_that_hold_every_key_once(config, tmp_path, train_keys):
    made = list(build_loader(config(2)))
    packs, dropped = read(tmp_path / "ledger")
    assert sorted(packs) == ["rank0-worker0", "rank0-worker1"]
    assert all(packs.values())
    assert sorted((emitted(packs) + dropped).elements()) == train_keys
    assert len(dropped) > 5
    for pack in made:
        assert packs[f"rank0-worker{pack.worker}"][pack.index] == list(pack.keys)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("saved", "lost"), [(1, 4), (5, 1), (5, 0)])
def test_a_run_that_was_stopped_and_went_on_enters_each_pack_of_the_run_that_was_not(
    config, tmp_path, workers, saved, lost
):
    endless = config(workers, repeat=True)
    expected = list(itertools.islice(build_loader(endless), 12))
    shutil.rmtree(tmp_path / "ledger")

    loader = build_loader(endless)
    packs = iter(loader)
    for _ in range(saved):
        next(packs)
    state = loader.save_state()
    for _ in range(lost):  # after the last checkpoint, and made again
        next(packs)
    del packs, loader
    path, cut = tmp_path / "ledger" / "rank0-worker0.jsonl", '{"pack": 99, "keys": ["'
    if not workers:  # others may still write while they are closed
        with path.open("a", encoding="utf-8") as file:
            file.write(cut)  # as if killed within a line
    again = build_loader(endless)
    again.restore_state(state)
    assert len(list(itertools.islice(again, 12 - saved))) == 12 - saved
    del again
    if not workers:
        assert path.with_suffix(".cut").read_text(encoding="utf-8") == cut + "\n"
    found, dropped = read(tmp_path / "ledger")
    for pack in expected:
        assert found[f"rank0-worker{pack.worker}"][pack.index] == list(pack.keys)
    told = {entry.key for pack in expected for entry in pack.dropped}
    assert told
    assert told <= set(dropped)
    report = merged(tmp_path / "ledger")
    assert (report.duplicates, report.restarts, report.abandoned) == ([], max(workers, 1), 0)
    if not workers:
        assert (report.packs, report.emitted) == (12, sum(len(pack.keys) for pack in expected))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full is Linux's")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_full_disk_stops_a_loader_with_one_sentence(config, tmp_path, workers):
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "rank0-worker0.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"rank0-worker0\.jsonl cannot be written \(No space left on device\)"):
        list(build_loader(config(workers)))


@pytest.mark.parametrize("form", ["blend", "blend_epochized"])
def test_a_data_set_that_a_blend_reads_more_often_than_another_has_no_duplicates(form, tmp_path, run_config):
    entries = []
    for letter, count, weight, repetitions in (("a", 12, 1, 3), ("b", 60, 1, 1)):
        turns = [{"from": "human", "value": "Say it"}, {"from": "gpt", "value": f"{letter} says so. " * 20}]
        source = tmp_path / f"{letter}.jsonl"
        source.write_text(
            "".join(json.dumps({"id": f"{letter}-{n}", "conversations": turns}) + "\n" for n in range(count))
        )
        convert(ConvertConfig(sources=(source,), out=tmp_path / letter, split={"train": 1.0}, workers=1))
        rate = {"weight": weight} if form == "blend" else {"repetitions": repetitions}
        entries.append(rate | {"path": dataset_entry(tmp_path / letter)})
    meta = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": {form: entries}}}
    (tmp_path / "blend.yaml").write_text(yaml.safe_dump(meta))
    data = {"path": str(tmp_path / "blend.yaml"), "repeat": form == "blend"}
    loader = build_loader(run_config(data=data, seq_length=1024, window=8, ledger=str(tmp_path / "ledger")))
    found = Counter(key for pack in itertools.islice(loader, 60) for key in pack.keys)
    report = merged(tmp_path / "ledger")
    assert max(found.values()) >= 3
    assert report.emitted == found.total()
    assert report.duplicates == []
