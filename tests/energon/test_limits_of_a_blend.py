"""Limits that a blended metadataset gives to one of its data sets."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import yaml
from megatron.energon import WorkerConfig, get_loader, get_train_dataset

from energon_packing.convert import ConvertConfig, convert
from energon_packing.convert.layout import dataset_entry
from energon_packing.energon.loader import build_loader
from energon_packing.energon.sample_task_encoder import MixedTaskEncoder
from energon_packing.errors import ConfigError

TALK = {"human": "And what about that", "gpt": "It is like this"}


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """Another data set, with keys of its own."""
    root = tmp_path_factory.mktemp("second")
    lines = []
    for number in range(40):
        rounds = 1 + number % 6
        turns = [{"from": who, "value": f"{what} {at}. " * 12} for at in range(rounds) for who, what in TALK.items()]
        lines.append(json.dumps({"id": f"second-{number}", "conversations": turns}))
    source = root / "second.jsonl"
    source.write_text("\n".join(lines))
    convert(ConvertConfig(sources=(source,), out=root / "data", split={"train": 1.0}, workers=1))
    return root / "data"


@pytest.fixture
def blend(dataset, second, tmp_path, run_config):
    """Makes the configuration of a run on both data sets, the second under ``limits``."""

    def make(limits, **packing):
        entries = [
            {"weight": 1, "path": str(dataset_entry(str(dataset)))},
            {"weight": 1, "path": str(dataset_entry(str(second)))},
        ]
        if limits is not None:
            entries[1]["subflavors"] = {"limits": limits}
        file = tmp_path / "blend.yaml"
        meta = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": {"blend": entries}}}
        file.write_text(yaml.safe_dump(meta))
        workers = packing.pop("workers", 0)
        return run_config(
            data={"path": str(file), "repeat": True, "workers": workers},
            drop_budget=1.0,
            **({"seq_length": 1536} | packing),
        )

    return make


def some(config, packs=8):
    """Lengths by whether the sample is of the second data set, and what was dropped."""
    found, dropped = {True: {}, False: {}}, []
    for number, pack in enumerate(build_loader(config)):
        for key, length in zip(pack.batch.sample_keys, pack.batch.sample_lengths, strict=True):
            found["second" in key][key] = length
        dropped += pack.dropped
        if number == packs - 1:
            break
    return found, dropped


def test_only_samples_of_that_data_set_are_under_its_limits(blend):
    plain, _ = some(blend(None))
    assert plain[True]
    assert plain[False]
    assert max(plain[True].values()) > 200
    found, dropped = some(blend({"max_tokens": 200}))
    assert max(found[True].values()) <= 200
    assert max(found[False].values()) > 200
    refused = [entry for entry in dropped if entry.reason == "too_many_tokens"]
    assert refused
    assert all("second" in entry.key for entry in refused)
    cut, dropped = some(blend({"max_tokens": 200, "when_over": ["truncate"]}))
    assert max(cut[True].values()) <= 200
    assert set(cut[True]) - set(found[True])


def test_limits_above_a_packs_are_lowered_with_one_warning_a_data_set(blend, second):
    config = blend({"max_tokens": 100_000, "max_images": 50}, max_images_per_pack=8)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found, _ = some(config)
    told = [str(warning.message) for warning in told if "lowered" in str(warning.message)]
    assert len(told) == 1
    assert str(second) in told[0]
    assert "max_tokens 100000 to packing.seq_length 1536, max_images 50 to packing.max_images_per_pack 8" in told[0]
    assert found[True]


def single_samples(config, batches=20, **arguments):
    """As `some`, from the task encoder that does not pack."""
    task_encoder = MixedTaskEncoder(config.encoder, max_length=4096, drop_budget=1.0, **arguments)
    dataset = get_train_dataset(
        config.data.path,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=2,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=task_encoder,
    )
    found, dropped = {True: {}, False: {}}, []
    for _, batch in zip(range(batches), get_loader(dataset), strict=False):
        for key, length in zip(batch.keys, batch.lengths.tolist(), strict=True):
            found["second" in key][key] = length
        dropped += batch.dropped
    return found, dropped


def test_single_samples_without_packs_are_under_the_limits_of_their_data_set_too(blend):
    plain, _ = single_samples(blend(None))
    assert max(plain[True].values()) > 200
    found, dropped = single_samples(blend({"max_tokens": 200}))
    assert found[True]
    assert max(found[True].values()) <= 200
    assert max(found[False].values()) > 200
    assert {entry.reason for entry in dropped if "second" in entry.key} == {"too_many_tokens"}
    assert all("second" in entry.key for entry in dropped)
    cut, _ = single_samples(blend({"max_tokens": 200, "when_over": ["truncate"]}))
    assert max(cut[True].values()) <= 200
    assert set(cut[True]) - set(found[True])


def test_the_metadataset_of_the_documentation_works(run_config, dataset, second, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text(encoding="utf-8")
    section = page.partition("## Limits of one data set of a blend")[2].partition("\n## ")[0]
    meta = yaml.safe_load(section.split("```yaml\n")[1].split("```")[0])
    entries = meta["splits"]["train"]["blend"]
    for entry, path in zip(entries, (second, dataset), strict=True):
        entry["path"] = dataset_entry(str(path))
    file = tmp_path / "page.yaml"
    file.write_text(yaml.safe_dump(meta))
    config = run_config(data={"path": str(file), "repeat": True}, drop_budget=1.0, seq_length=4096)
    found, _ = some(config)
    assert found[True]
    assert found[False]


BAD_LIMITS = [
    ({"max_imagse": 2}, r"subflavors\.limits of the data set .*unknown key 'max_imagse'; did you mean 'max_images'"),
    ("few", r"subflavors\.limits of the data set .* is 'few'"),
]


@pytest.mark.parametrize(("limits", "message"), BAD_LIMITS)
def test_single_samples_stop_at_limits_that_cannot_work(blend, limits, message):
    with pytest.raises(Exception, match=message):  # Energon wraps what it counts as fatal
        single_samples(blend(limits))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("limits", "message"), BAD_LIMITS)
def test_limits_that_cannot_work_stop_the_run_with_the_data_sets_name(blend, limits, message, workers):
    with pytest.raises(ConfigError, match=message):
        some(blend(limits, workers=workers))
