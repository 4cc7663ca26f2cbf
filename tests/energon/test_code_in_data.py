"""Code that lies in a data set or is named by its YAML runs on no road before its user says so.

The oracle is a file that the code writes: Energon itself, on the same data set, runs it.
"""

import contextlib
import io
import json
import pickle
import shutil
import sys
import tarfile
from pathlib import Path

import megatron.energon
import pytest
import yaml
from click.testing import CliRunner
from megatron.energon import (
    Cooker,
    DatasetLoaderInterface,
    DefaultTaskEncoder,
    WorkerConfig,
    flavors,
    get_loader,
    get_train_dataset,
)
from megatron.energon.flavors import BaseWebdatasetFactory
from megatron.energon.module_loader import ModuleLoader

from energon_packing.cli.main import cli
from energon_packing.convert import ConvertConfig, convert
from energon_packing.convert.layout import META_DIRECTORY as META
from energon_packing.demo import make_data, processor_path
from energon_packing.energon.loader import build_dataset, build_task_encoder
from energon_packing.errors import ConfigError
from energon_packing.trust import ENERGON_CLASSES

OURS = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset", "subflavors": {"energon_packing": "v1"}}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A monolithic data set of ours, without videos, and its conversion's source."""
    root = tmp_path_factory.mktemp("code")
    source = make_data(root / "made", conversations=12, seed=4, defects=False)
    convert(ConvertConfig(sources=(source,), out=root / "data", layout="monolithic", workers=0))
    return root / "data"


@pytest.fixture
def data(converted, tmp_path):
    """A copy that an attack may change."""
    shutil.copytree(converted, tmp_path / "data")
    return tmp_path / "data"


def running(marker, result="lambda part: True"):
    """Python that says that it ran; its functions do what Energon wants of them."""
    return f"open({str(marker)!r}, 'w').close()\npart_filter = keeps = {result}\nsample_loader = dict\n"


def call(marker):
    """A function that Energon calls wherever it takes a value of any type."""
    text = f"open({str(marker)!r}, 'w').close()"
    return {"__module__": "numpy.testing", "__function__": "runstring", "astr": text, "dict": {}}


def described(data, marker, **more):
    (data / META / "dataset.yaml").write_text(yaml.safe_dump(OURS | more, sort_keys=False))
    return data


def part_filter(name, file):
    def attack(data, marker):
        (data / META / file).write_text(running(marker))
        return described(data, marker, part_filter=name)

    return attack


def other_than_pyyaml_reads(data, marker):
    """PyYAML reads a date; Energon's parser a text, which is the name of a file."""
    (data / META / "2026-01-01").write_text(running(marker))
    file = data / META / "dataset.yaml"
    file.write_text(file.read_text() + "part_filter: 2026-01-01\n")
    return data


def absolute(data, marker):
    (data.parent / "elsewhere.py").write_text(running(marker))
    return described(data, marker, part_filter=f"{data.parent}/elsewhere.py:keeps")


def sample_loader(data, marker):
    """As `energon prepare` writes it, with a loader that its user wrote."""
    (data / META / "sample_loader.py").write_text(running(marker))
    kind = {"sample_type": {"__module__": "megatron.energon", "__class__": "TextSample"}}
    kind |= {"part_filter": "sample_loader.py:part_filter", "sample_loader": "sample_loader.py:sample_loader"}
    (data / META / "dataset.yaml").write_text(yaml.safe_dump(kind))
    return data


def own_class(data, marker):
    (data.parent / "evil_package.py").write_text(running(marker) + "class Kind: pass\n")
    (data / META / "dataset.yaml").write_text("__module__: evil_package\n__class__: Kind\n")
    return data


def decoder(data, marker):
    """A member that is a pickle, and the decoder that loads pickles; our loaders decode nothing by Energon."""

    class Runs:
        def __reduce__(self):
            return exec, (f"open({str(marker)!r}, 'w').close()",)

    shard = data / "train-000000.tar"
    with tarfile.open(shard, "w") as tar:
        for name, content in (("a.json", b'{"messages": []}'), ("a.pkl", pickle.dumps(Runs()))):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    BaseWebdatasetFactory.prepare_dataset(data, [shard.name], split_parts_ratio=[("train", 1.0)], workers=1)
    return described(data, marker, decoder={"__module__": "megatron.energon", "__class__": "SampleDecoder"})


def referring(make):
    """A metadataset that refers to the data set."""

    def attack(data, marker):
        file = data.parent / "meta.yaml"
        file.write_text(yaml.safe_dump(make(data, marker), sort_keys=False))
        return file

    return attack


def version_2(reference):
    return {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": reference}}


def nested(data, marker):
    inner = data.parent / "inner.yaml"
    inner.write_text(yaml.safe_dump(version_2({"path": str(data), "subflavors": {"x": call(marker)}})))
    return version_2({"blend": [{"path": "./inner.yaml", "weight": 1}]})


def other_config(data, marker):
    (data / META / "evil.py").write_text(running(marker))
    (data / META / "other.yaml").write_text(yaml.safe_dump(OURS | {"part_filter": "evil.py:keeps"}))
    return version_2({"path": str(data), "dataset_config": "other.yaml"})


def joined(data, marker):
    (data.parent / "evil_package.py").write_text(running(marker) + "def join(*samples): return samples[0]\n")
    joiner = {"__module__": "evil_package", "__function__": "join"}
    return version_2({"join": [{"path": str(data)}, {"path": str(data)}], "joiner": joiner})


def version_1(data, marker):
    reference = {"path": str(data), "subflavors": {"x": {"y": call(marker)}}}
    return {
        "__module__": "megatron.energon",
        "__class__": "Metadataset",
        "splits": {"train": {"datasets": [{**reference, "subflavors": {"x": call(marker)}}]}},
    }


ATTACKS = {
    "part_filter: FILE.py:NAME": part_filter("evil.py:keeps", "evil.py"),
    "part_filter: FILE.py": part_filter("evil.py", "evil.py"),
    "part_filter: FILE": part_filter("evil", "evil"),
    "part_filter: /FILE.py:NAME": absolute,
    "part_filter: DATE": other_than_pyyaml_reads,
    "sample_loader.py": sample_loader,
    "a class of a package": own_class,
    "a decoder of pickles": decoder,
    "subflavors of a data set": lambda data, marker: described(data, marker, subflavors={"x": call(marker)}),
    "subflavors of a reference": referring(
        lambda data, marker: version_2({"path": str(data), "subflavors": {"x": call(marker)}})
    ),
    "a metadataset in another": referring(nested),
    "dataset_config": referring(other_config),
    "joiner": referring(joined),
    "a metadataset of version 1": referring(version_1),
}


@pytest.fixture
def attack(request, data, tmp_path, monkeypatch):
    """The path of a data set with an attack, and the file that shows that it ran."""
    monkeypatch.syspath_prepend(str(tmp_path))
    marker = tmp_path / "ran"
    yield ATTACKS[request.param](data, marker), marker
    sys.modules.pop("evil_package", None)


every_attack = pytest.mark.parametrize("attack", ATTACKS, indirect=True)


def opened_by_energon(path):
    """What plain Energon does with it; it stops at samples that no cooker of its own takes, after the code ran."""
    encoder = DefaultTaskEncoder()
    encoder.decoder, encoder.cookers = None, [Cooker(dict)]  # ours has no decoder
    with contextlib.suppress(Exception):
        workers = WorkerConfig(rank=0, world_size=1, num_workers=0)
        dataset = get_train_dataset(
            str(path),
            worker_config=workers,
            batch_size=None,
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
            task_encoder=encoder,
        )
        next(iter(get_loader(dataset)))


@every_attack
def test_code_that_a_data_set_names_runs_in_energon_and_not_in_our_loader_before_it_is_trusted(attack, run_config):
    path, marker = attack
    config = run_config(data={"path": str(path)})
    encoder = build_task_encoder(config)
    with pytest.raises(ConfigError, match=r"(?s)^/.*\.yaml, line \d+, names .* add --trust to the command") as refused:
        build_dataset(config, task_encoder=encoder, workers=0)
    assert not marker.exists()
    named, _, line = str(refused.value).split(" names ")[0].strip(",").rpartition(", line ")
    assert Path(named).read_text().splitlines()[int(line) - 1]
    ModuleLoader._modules.clear()
    opened_by_energon(path)
    assert marker.exists()


def run(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


@pytest.fixture
def written_run(tmp_path):
    """Writes the configuration of a run on a data set."""

    def write(data, **more):
        values = {
            "data": {"path": str(data), "workers": 0} | more,
            "encoder": {"processor": processor_path("qwen2_5_vl")},
        }
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(json.loads(json.dumps(values, default=str))))
        return file

    return write


OPENS = {
    "validate": lambda run, _: ("validate", run, "--no-bridge"),
    "validate --measure": lambda run, _: ("validate", run, "--no-bridge", "--no-data", "--measure", 4),
    "preview": lambda run, data: ("preview", data, "--config", run, "--packs", 1),
    "stats": lambda run, data: ("stats", data, "--config", run, "--data-parallel", 2),
}


@pytest.mark.parametrize("command", OPENS)
@pytest.mark.parametrize("attack", ["part_filter: FILE.py:NAME"], indirect=True)
def test_each_command_that_reads_through_energon_names_file_line_and_flag_and_obeys_flag_and_setting(
    attack, command, written_run
):
    data, marker = attack
    words = OPENS[command](written_run(data), data)
    result = run(*words)
    told = " ".join(result.output.replace("\u2502", " ").split())
    assert (result.exit_code, marker.exists()) == (1 if command == "validate" else 2, False)
    assert "--trust" in told
    assert "evil.py" in told
    for allowed in ((*words, "--trust"), OPENS[command](written_run(data, trust=True), data)):
        ModuleLoader._modules.clear()
        result = run(*allowed)
        assert (result.exit_code, marker.exists()) == (0, True), result.output
        marker.unlink()


@pytest.mark.parametrize("attack", ["part_filter: FILE.py:NAME", "subflavors of a reference"], indirect=True)
def test_commands_that_read_shards_themselves_run_nothing(attack, tmp_path, written_run):
    data, marker = attack
    file, index = written_run(data), tmp_path / "index"
    run("init", data, "--processor", processor_path("qwen2_5_vl"), "--out", tmp_path / "new.yaml")
    run("measure", data, "--config", file, "--out", index, "--workers", 0)
    run("plan", index, "--config", file, "--out", tmp_path / "plan.parquet")
    run("pack", tmp_path / "plan.parquet", "--out", tmp_path / "packed", "--workers", 0)
    assert (tmp_path / "new.yaml").exists()
    assert not marker.exists()


def test_data_sets_of_ours_and_of_energon_that_name_its_own_classes_need_no_flag(data, run_config):
    build_dataset(run_config(data={"path": str(data)}), workers=0)
    exported = {name for name in vars(megatron.energon) if name.endswith(("Sample", "Webdataset"))}
    assert exported - {"SkipSample"} <= ENERGON_CLASSES
    found = [getattr(flavors, name, None) or getattr(megatron.energon, name) for name in ENERGON_CLASSES]
    kinds = (dict, megatron.energon.Sample, megatron.energon.BaseCoreDatasetFactory, DatasetLoaderInterface)
    assert all(issubclass(each, kinds) for each in found)
