"""States that do not belong to a run, damaged ones and hostile files are refused; and what a state costs."""

import contextlib
import copy
import dataclasses
import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from forking_python import quick_python
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_data import chat, converted, metadataset
from megatron.energon.epathlib import EPath
from megatron.energon.eyaml import load_yaml
from megatron.energon.flavors.jsonl.jsonl_prepare import JsonlPreparator

from energon_packing.config import to_mapping
from energon_packing.energon import loader as loader_module
from energon_packing.energon import window
from energon_packing.energon.data_identity import data_identity
from energon_packing.energon.loader import build_loader
from energon_packing.energon.states import read_state
from energon_packing.errors import ConfigError, UserError


def config_of(run_config: Any, path: Path | None = None, **data: Any) -> Any:
    made = run_config(data={"repeat": True, **data}, seq_length=2048, window=8)
    return made if path is None else dataclasses.replace(made, data=dataclasses.replace(made.data, path=str(path)))


def state_of(config: Any, packs: int = 2, **arguments: Any) -> Any:
    loader = build_loader(config, **arguments)
    list(itertools.islice(loader, packs))
    return loader.save_state()


def keys_after(config: Any, state: Any, packs: int = 6, **arguments: Any) -> list[Any]:
    loader = build_loader(config, **arguments)
    loader.restore_state(state)
    return [pack.keys for pack in itertools.islice(loader, packs)]


LOOP_OF_ENERGON = """
import itertools, json, sys
import torch.distributed as dist
from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset
from energon_packing.config import from_mapping, RunConfig
from energon_packing.convert import dataset_entry
from energon_packing.energon.loader import build_loader, build_task_encoder

rank, config = int(sys.argv[1]), from_mapping(RunConfig, json.loads(sys.argv[3]), where="test")
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)

def energons():
    readers = WorkerConfig(rank=rank, world_size=2, num_workers=0)
    how = dict(batch_size=None, shuffle_buffer_size=4, max_samples_per_sequence=None, worker_config=readers)
    encoder = build_task_encoder(config)
    return get_savable_loader(get_train_dataset(dataset_entry(config.data.path), task_encoder=encoder, **how))

def keys(loader, packs=3):
    return [pack.keys for pack in itertools.islice(loader, packs)]

for make in (energons, lambda: build_loader(config, rank=rank, world_size=2)):
    loader, again = make(), [make() for _ in range(3)]
    keys(loader, 2)
    own, of_all = loader.save_state_rank(), [loader.save_state_global(1)]
    assert (of_all[0] is None) == (rank == 0)
    rest = keys(loader)
    again[0].restore_state_rank(own)
    again[1].restore_state_global(of_all[0], src_rank=1)
    dist.broadcast_object_list(of_all, 1)
    again[2].restore_state_global(of_all[0])
    assert [keys(each) for each in again] == [rest] * 3, make
    print(json.dumps(rest))
dist.destroy_process_group()
"""


def test_a_loop_that_saves_and_restores_under_energons_names_goes_on_with_our_loader(run_config, tmp_path):
    words = str(tmp_path / "store"), json.dumps(to_mapping(config_of(run_config, workers=0)))
    ranks = [
        subprocess.Popen(
            [quick_python(), "-W", "ignore", "-c", LOOP_OF_ENERGON, str(rank), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in (0, 1)
    ]
    try:
        told = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert told[0].splitlines()[-1] != told[1].splitlines()[-1]
    alone = build_loader(config_of(run_config))
    with pytest.raises(ConfigError, match="no list of 1, one for each data-parallel rank"):
        alone.restore_state_global(alone.save_state_rank())


@pytest.mark.parametrize("workers", [1])
def test_an_error_in_a_pack_that_is_made_ahead_leaves_the_state_of_the_last_one_whole(run_config, workers, monkeypatch):
    config = config_of(run_config, workers=workers)
    keys = [pack.keys for pack in itertools.islice(build_loader(config), 3 + workers)]

    def render_or_drop(render: Any, sample: Any, ledger: Any, *, own: Any = window.render_or_drop) -> Any:
        if sample.__key__ in keys[workers]:  # the second pack of the first worker
            raise OSError(5, "Input/output error")
        return own(render, sample, ledger)

    with monkeypatch.context() as broken:
        broken.setattr(window, "render_or_drop", render_or_drop)
        loader = build_loader(config)
        packs = iter(loader)
        next(packs)
        time.sleep(1.0)  # the worker has met its error by now
        state = loader.save_state()
        with pytest.raises(UserError, match="Input/output error"):
            list(packs)
    assert keys_after(config, state, packs=3) == keys[workers:]


def test_a_loader_that_an_error_ended_in_this_process_gives_no_state(run_config, monkeypatch):
    loader = build_loader(config_of(run_config, workers=0))
    packs = iter(loader)
    next(packs)

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(window, "render_or_drop", fail)
    with pytest.raises(UserError, match="Input/output error"):
        next(packs)
    with pytest.raises(UserError, match="within a pack, whose samples a state saved now would lose"):
        loader.save_state()


def test_a_worker_that_never_stores_a_state_is_an_error_and_no_wait(run_config, monkeypatch):
    monkeypatch.setattr(loader_module, "_BEGUN_SECONDS", 0.2)
    loader = build_loader(config_of(run_config, workers=1))
    loader._patience = 0.0
    next(iter(loader))
    asked = loader._loader.save_state_rank
    nothing = dataclasses.replace(asked().worker_states[0], state=None)
    monkeypatch.setattr(
        loader._loader, "save_state_rank", lambda: dataclasses.replace(asked(), worker_states=[nothing])
    )
    with pytest.raises(UserError, match="has saved no state within"):
        loader.save_state()


def test_a_state_of_another_reader_is_refused_in_one_sentence(run_config):
    readers = {"rank": 0, "world_size": 2, "workers": 0}
    state = state_of(config_of(run_config), **readers)
    for other, told in (
        ({"rank": 1}, "rank=0, but this run has 1; give each data-parallel rank"),
        ({"world_size": 3}, "ranks=2, but this run has 3; restore the number"),
        ({"workers": 1}, "workers=0, but this run has 1; restore the number"),
    ):
        with pytest.raises(ConfigError, match=told):
            build_loader(config_of(run_config), **readers | other).restore_state(state)
    for name, other in (("ranks", {"world_size": 3}), ("workers", {"workers": 1})):
        with pytest.raises(ConfigError, match=f"accept_changed names '{name}'.*docs/offline.md"):
            build_loader(config_of(run_config, accept_changed=(name,)), **readers | other).restore_state(state)


def test_one_state_in_memory_can_be_restored_twice_and_saving_does_not_change_it(run_config):
    config = config_of(run_config)
    loader = build_loader(config)
    packs = iter(loader)
    list(itertools.islice(packs, 3))
    state = loader.save_state()
    before = repr(state)
    rest = [pack.keys for pack in itertools.islice(packs, 6)]
    assert repr(state) == before
    assert keys_after(config, state) == rest
    assert keys_after(config, state) == rest
    assert repr(state) == before


def test_what_is_no_state_is_refused_in_one_sentence_and_an_older_one_with_the_way_on(run_config):
    loader = build_loader(config_of(run_config))
    for state in (None, "state", {"format": "energon_packing plan 1", "position": 3}, object()):
        with pytest.raises(ConfigError, match="not what a loader of this version saved"):
            loader.restore_state(state)
    for made in (1, 2):
        with pytest.raises(ConfigError, match=r"older version saved it.*missing_state.*--packing-restart-data"):
            loader.restore_state({"format": f"energon_packing loader {made}", "fingerprint": {}, "loader": None})


def test_a_state_with_a_part_replaced_is_refused_or_restored_but_never_another_error(damage_target):
    config, state, rest = damage_target

    @settings(max_examples=6, deadline=None)
    @given(data=st.data())
    def restore(data):
        with contextlib.suppress(ConfigError):
            assert len(keys_after(config, damaged(state, data), packs=2)) == 2

    restore()
    assert keys_after(config, state, packs=2) == rest[:2]


def damaged(state: Any, data: st.DataObject) -> Any:
    """A copy of a state with one part replaced."""
    broken = copy.deepcopy(state)
    where: Any = broken
    for _ in range(data.draw(st.integers(1, 9))):
        inner = vars(where) if hasattr(where, "__dict__") and not isinstance(where, dict) else where
        if not isinstance(inner, dict | list) or not inner:
            break
        at = data.draw(st.sampled_from(list(inner) if isinstance(inner, dict) else list(range(len(inner)))))
        parent, where = inner, inner[at]
    parent[at] = data.draw(st.sampled_from([None, 0, -1, "x", [], {}, (1, 2), 10**30, [None] * 3]))
    return broken


@pytest.fixture(scope="module")
def damage_target(run_config_of):
    config = config_of(run_config_of)
    loader = build_loader(config)
    list(itertools.islice(loader, 3))
    state = loader.save_state()
    return config, state, keys_after(config, state)


def test_an_accepted_setting_restores_with_a_warning_and_reads_on_where_the_state_was(run_config):
    plain = config_of(run_config, shuffle_buffer=1)
    other = dataclasses.replace(plain, encoder=dataclasses.replace(plain.encoder, max_pixels=50_000))
    state = state_of(plain, packs=4)
    with pytest.raises(ConfigError, match=r'data.accept_changed=\["encoder.max_pixels"\]'):
        build_loader(other).restore_state(state)
    willing = dataclasses.replace(other, data=dataclasses.replace(other.data, accept_changed=("encoder",)))
    emitted = {key for pack in itertools.islice(build_loader(plain), 4) for key in pack.keys}
    loader = build_loader(willing)
    with pytest.warns(UserWarning, match="max_pixels=null, but this run has 50000"):
        loader.restore_state(state)
    # What the state had not emitted follows, each sample once: the order of reading is that of the data, not of packs.
    later: list[str] = []
    for pack in itertools.islice(loader, 8):
        later += pack.keys
    again = loader.save_state()
    assert len(later) == len(set(later))
    assert not emitted & set(later)
    build_loader(other).restore_state(again)  # the new state is one of the new setting


@pytest.fixture
def copied(dataset, tmp_path):
    """A copy of the data set, which a test may change."""
    shutil.copytree(dataset, tmp_path / "data")
    return tmp_path / "data"


def prepared(directory: Path) -> None:
    """Energon gives a prepared data set a new identifier."""
    (directory / ".nv-meta" / "index.uuid").write_text(str(uuid.uuid4()))


def edited(data: Path) -> None:
    """Other records in a shard, indexed again by Energon; counts stay as they are."""
    prepared(data / "text")


def cut(data: Path) -> None:
    """A media shard of another length, with no word in any index."""
    shard = next((data / "media").glob("*.tar"))
    shard.write_bytes(shard.read_bytes() + b"\0" * 512)


def first_key(data: Path) -> None:
    """Another first record in a shard of the same length."""
    shard = next((data / "text").glob("train-*.tar"))
    content = bytearray(shard.read_bytes())
    content[0] ^= 1
    shard.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "named"),
    [(edited, "text"), (cut, "media"), (first_key, "text")],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_changed_data_beneath_equal_shard_counts_are_refused_by_name(run_config, copied, change, named):
    config = config_of(run_config, copied)
    state = state_of(config)
    change(copied)
    with pytest.raises(ConfigError, match=rf"made with data set \d \({named}\)=index "):
        build_loader(config).restore_state(state)
    willing = dataclasses.replace(config, data=dataclasses.replace(config.data, accept_changed=("data set",)))
    with pytest.warns(UserWarning, match="data set"):
        build_loader(willing).restore_state(state)


def test_swapped_shards_of_a_data_set_are_refused(run_config, demo_shards):
    config = config_of(run_config, demo_shards)
    state = state_of(config)
    first, second = sorted((demo_shards / "text").glob("train-*.tar"))[:2]
    first.rename(aside := first.with_suffix(".aside"))
    second.rename(first)
    aside.rename(second)
    with pytest.raises(ConfigError, match=r"data set \d \(text\)"):
        build_loader(config).restore_state(state)


@pytest.fixture
def demo_shards(tmp_path):
    """A data set of several shards."""
    return converted(tmp_path, (chat("What?", f"Number {number}.") for number in range(36)), samples_per_shard=12)


def test_every_child_of_nested_metadatasets_counts_and_moving_all_of_them_does_not(tmp_path, dataset):
    for name in ("one", "two"):
        shutil.copytree(dataset, tmp_path / "all" / name)
    inner = {"blend": [{"weight": 1, "path": "./two/text", "aux": {"media": "./two/media"}}]}
    outer = {"blend": [{"weight": 1, "path": "./one/text"}, {"weight": 2, "path": "./inner.yaml"}]}
    metadataset(tmp_path / "all" / "inner.yaml", inner)
    metadataset(tmp_path / "all" / "outer.yaml", outer, val={"path": "./one/media"})
    found = data_identity(str(tmp_path / "all" / "outer.yaml"), "train")
    assert [name.split()[-1] for name in found] == ["set", "(text)", "(inner.yaml)", "(media)", "(text)"]
    (tmp_path / "all").rename(tmp_path / "moved")
    assert data_identity(str(tmp_path / "moved" / "outer.yaml"), "train") == found
    prepared(tmp_path / "moved" / "two" / "media")
    now = data_identity(str(tmp_path / "moved" / "outer.yaml"), "train")
    assert [name for name in found if found[name] != now[name]] == ["data set 3 (media)"]


@pytest.mark.parametrize(
    ("name", "changed", "same"),
    [
        ("dataset.yaml", lambda text: f"# the blend of March\n{text}\n# checked by Ana\n", True),
        ("dataset.yaml", lambda text: text.replace(":\n", ":   \n") + "\n\n", True),
        ("dataset.yaml", lambda text: yaml.safe_dump(yaml.safe_load(text), sort_keys=True), True),
        ("dataset.yaml", lambda text: text.replace("train:", "'train':"), True),
        ("text/.nv-meta/split.yaml", lambda text: f"# by hand\n{text}", True),
        ("text/.nv-meta/dataset.yaml", lambda text: f"{text}# by hand\n", True),
        ("dataset.yaml", lambda text: text.replace("v1", "v1\n      made: again"), False),
        ("dataset.yaml", lambda text: text.replace("path: ./text", "path: text"), False),
        ("text/.nv-meta/split.yaml", lambda text: text.replace("exclude: []", "exclude: [demo-00001]"), False),
    ],
)
def test_a_state_belongs_to_what_a_yaml_file_says_not_to_how_it_is_written(dataset, tmp_path, name, changed, same):
    shutil.copytree(dataset, tmp_path / "own")
    identity = data_identity(str(tmp_path / "own"), "train")
    file = tmp_path / "own" / name
    before = file.read_text()
    file.write_text(changed(before))
    assert file.read_text() != before
    assert (load_yaml(file.read_bytes()) == load_yaml(before.encode())) == same
    assert (data_identity(str(tmp_path / "own"), "train") == identity) == same


@pytest.mark.parametrize(("named", "file"), [("split_config", "other.yaml"), ("dataset_config", "its.json")])
def test_files_that_a_metadataset_names_belong_to_the_data(dataset, tmp_path, named, file):
    shutil.copytree(dataset, tmp_path / "data")
    place = tmp_path / "data" / "text"
    blend = metadataset(tmp_path / "blend.yaml", {"path": str(place), named: file})
    config = place / ".nv-meta" / file
    identities = []
    for content in ("{exclude: []}", "# by hand\n{exclude:  []}\n", "{exclude: [demo-00001]}"):
        config.write_text(content)
        identities.append(data_identity(blend, "train"))
    before, commented, changed = identities
    assert before == commented
    assert [name for name in before if before[name] != changed[name]] == ["data set 1 (text)"]
    assert data_identity(str(place), "train") == {"data set": data_identity(str(dataset / "text"), "train")["data set"]}


def test_lines_of_json_that_were_edited_and_indexed_again_are_other_data(tmp_path):
    blend = metadataset(tmp_path / "blend.yaml", {"path": "./chats.jsonl"})
    lines = tmp_path / "chats.jsonl"
    found = []
    for said in ("one", "one", "three"):
        lines.write_text(f'{{"said": "x"}}\n{{"said": "{said}"}}\n')
        JsonlPreparator.prepare_dataset(EPath(lines))
        found.append(data_identity(blend, "train"))
    assert list(found[0]) == ["data set", "data set 1 (chats.jsonl)"]
    assert found[0] == found[1] != found[2]


def test_the_identity_of_data_reads_one_header_of_a_shard(dataset, monkeypatch):
    read = []
    taken = os.pread
    monkeypatch.setattr(os, "pread", lambda *what: read.append(what[1:]) or taken(*what))
    data_identity(str(dataset), "train")
    assert set(read) == {(512, 0)}
    assert len(read) == len(list(dataset.glob("*/*.tar")))


MISSING = "begin again."


@pytest.fixture(scope="module")
def good(run_config_of, tmp_path_factory):
    """The file of a state as a checkpoint of Bridge or Megatron-LM holds it."""
    loader = build_loader(run_config_of(data={"repeat": True}, window=8, seq_length=2048))
    list(itertools.islice(loader, 2))
    path = tmp_path_factory.mktemp("states") / "train_dataloader_dprank000.pt"
    torch.save({"dataloader_state_dict": {"packs": 2, "source": loader.save_state()}}, path)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_state(path, missing=MISSING)
    (line,) = str(caught.value).splitlines()
    assert path.name in line
    return line


def test_a_missing_an_empty_and_a_foreign_file_are_refused_by_name(tmp_path, good):
    assert "There is no state" in refused(tmp_path / "missing.pt")
    for name, content in (("empty.pt", b""), ("text.pt", b"hello"), ("cut.pt", good.read_bytes()[:-200])):
        (tmp_path / name).write_bytes(content)
        assert "is not the state of a loader" in refused(tmp_path / name)
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps({"packs": 3}))
    refused(tmp_path / "pickle.pt")
    torch.save({"model": torch.zeros(3)}, tmp_path / "model.pt")
    assert "has no dataloader_state_dict" in refused(tmp_path / "model.pt")
    (tmp_path / "folder.pt").mkdir()
    refused(tmp_path / "folder.pt")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_refused_by_name_or_gives_the_same_state(tmp_path, good, data):
    content = bytearray(good.read_bytes())
    path = tmp_path / "damaged.pt"
    how = data.draw(st.sampled_from(["flip", "cut", "replace", "double"]))
    at = data.draw(st.integers(0, len(content) - 1))
    if how == "flip":
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del content[at:]
    elif how == "replace":
        content[at : at + 40] = data.draw(st.binary(max_size=60))
    else:
        content[at:at] = content[: data.draw(st.integers(1, 400))]
    path.write_bytes(content)
    try:
        found: Any = read_state(path, missing=MISSING)
    except ConfigError as error:
        message = str(error)
    else:
        message = path.name
        assert pickle.dumps(found) == pickle.dumps(read_state(good, missing=MISSING))
    assert path.name in message
    assert "\n" not in message


def test_one_flipped_bit_of_a_number_is_refused(tmp_path):
    """A pickle with another number is still a pickle: only its checksum tells."""
    path = tmp_path / "state.pt"
    torch.save({"dataloader_state_dict": {"packs": 1234567, "source": None}}, path)
    content = path.read_bytes()
    path.write_bytes(content.replace((1234567).to_bytes(4, "little"), (1234566).to_bytes(4, "little")))
    assert path.read_bytes() != content
    assert "checksum" in refused(path)


MOST_CALLS = 1500
"""Of Python and C, for one state. Copying a buffer of 100 samples item by item takes 4,000, of 2,000 74,000."""
ENDLESS = {"repeat": True, "workers": 0}


def loader_of(config, packs=1, **arguments):
    """A loader that has given some packs, and the data set that its workers would save."""
    loader = build_loader(config, **arguments)
    stream = iter(loader)
    list(itertools.islice(stream, packs))
    return stream, loader._loader.dataset


def slow_again(dataset):
    """Gives all data sets back the ``save_state`` of their classes, which Energon wrote."""
    vars(dataset).pop("save_state", None)
    for each in getattr(dataset, "datasets", ()):
        slow_again(each)


@pytest.fixture
def blend(dataset, tmp_path):
    """The data set twice, as a metadataset."""
    part = {"weight": 1, "path": str(dataset / "dataset.yaml")}
    return metadataset(tmp_path / "blend.yaml", {"blend": [part, dict(part)]})


@pytest.mark.parametrize(
    ("data", "arguments"),
    [
        ({"shuffle_buffer": 20, "shuffle_over_epochs": 3}, {"sequence": 1}),
        ({"shuffle_buffer": 20}, {"packing_buffer_size": 16}),
        ({"shuffle_buffer": 1}, {}),
        ({"shuffle_buffer": 20, "path": "blend"}, {}),
    ],
    ids=["slices", "disjoint buffers", "plain", "blend"],
)
def test_a_state_is_the_one_that_energon_saves_and_does_not_change_with_the_loader(run_config, blend, data, arguments):
    data = ENDLESS | data | ({"path": blend} if "path" in data else {})
    packs, saved = loader_of(run_config(data=data, seq_length=2048, drop_budget=1.0), 4, **arguments)
    state = saved.save_state()
    before = repr(state)
    slow_again(saved)
    assert saved.save_state() == state
    list(itertools.islice(packs, 4))
    assert repr(state) == before != repr(saved.save_state())


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """70 short conversations, which come again and again."""
    return str(converted(tmp_path_factory.mktemp("texts"), [chat("What?", "A word or two.")] * 70))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "arguments", "window"),
    [
        ({"shuffle_buffer": 2_000}, {}, 32),
        ({"shuffle_buffer": 1, "shuffle_over_epochs": 60}, {"sequence": 1}, 512),
    ],
    ids=["buffer of 2,000", "window of 512 and 4,200 slices"],
)
def test_a_state_takes_as_few_steps_at_any_size(run_config, texts, data, arguments, window):
    config = run_config(data=ENDLESS | data | {"path": texts}, family="text", seq_length=256, window=window)
    _, saved = loader_of(config, **arguments)
    calls = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    saved.save_state()
    sys.setprofile(None)
    assert calls["call"] + calls["c_call"] <= MOST_CALLS
