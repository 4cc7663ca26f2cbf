"""Groups and limits of the data sets of a blend."""

import itertools
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
from made_data import chat, converted, metadataset
from megatron.energon import WorkerConfig, get_loader, get_train_dataset
from megatron.energon.epathlib import EPath
from megatron.energon.source_info import SourceInfo

from energon_packing.config import RunConfig
from energon_packing.convert.layout import dataset_entry
from energon_packing.energon.loader import build_loader, build_task_encoder
from energon_packing.energon.sample_task_encoder import MixedTaskEncoder
from energon_packing.energon.samples import by_group, first_of_same, group_name
from energon_packing.errors import ConfigError, PackingError


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Three data sets of texts; the keys of each begin with its letter."""
    root = tmp_path_factory.mktemp("groups")

    def record(letter, number):
        answer = f"{letter} says {number}. " * (1 + (7 * number + ord(letter)) % 23)
        return chat("Say it", answer, id=f"{letter}-{number}")

    return {letter: converted(root / letter, (record(letter, number) for number in range(60))) for letter in "abc"}


@pytest.fixture
def blend(parts, tmp_path, run_config):
    """Makes the configuration of a run on the three data sets with these groups and weights."""

    def make(groups, weights=(4, 2, 1), workers=0, **packing) -> RunConfig:
        entries = []
        for letter, group, weight in zip("abc", groups, weights, strict=True):
            entry = {"weight": weight, "path": str(dataset_entry(str(parts[letter])))}
            entries.append(entry if group is None else entry | {"subflavors": {"group": group}})
        path = metadataset(tmp_path / "blend.yaml", {"blend": entries})
        data = {"path": path, "repeat": True, "workers": workers}
        return run_config(data=data, drop_budget=1.0, **({"seq_length": 1024, "window": 48} | packing))

    return make


def first(loader, count):
    return list(itertools.islice(loader, count))


def mixtures(packs):
    """The sets of data sets that packs consist of."""
    return {"".join(sorted({key[0] for key in pack.keys})) for pack in packs}


def test_packs_hold_samples_of_one_group_only_and_rare_groups_fill_theirs_as_well(blend):
    together = first(build_loader(blend((None, None, None))), 8)
    assert "abc" in mixtures(together)
    apart = first(build_loader(blend(("text", "charts", "charts"))), 40)
    assert mixtures(apart) <= {"a", "b", "c", "bc"}
    assert {"a", "bc"} <= mixtures(apart)
    fill = {
        name: [pack.batch.real_tokens / 1024 for pack in apart if (pack.keys[0][0] == "a") == (name == "a")]
        for name in ("a", "bc")
    }
    assert min(sum(shares) / len(shares) for shares in fill.values()) > 0.97
    # Shares of the blend stay: a group waits only until it holds as much as the other.
    tokens = {name: sum(shares) for name, shares in fill.items()}
    assert 0.35 < tokens["bc"] / tokens["a"] < 1.2


def test_disjoint_buffers_keep_groups_apart_too(blend):
    packs = first(build_loader(blend(("x", "y", "x")), packing_buffer_size=40), 30)
    assert mixtures(packs) <= {"a", "c", "ac", "b"}
    assert {"ac", "b"} <= mixtures(packs)


def test_a_restored_run_with_groups_goes_on_bit_for_bit(blend, continues):
    config = blend(("text", "charts", "rare"), workers=2, balance_window=3)
    packs, _ = continues(lambda: build_loader(config), packs=22, at=[7])
    assert {keys[0][0] for keys, *_ in packs[7:]} == {"a", "b", "c"}


def test_a_selection_across_groups_stops_the_run(blend, monkeypatch):
    config = blend(("text", "charts", None))
    encoder = build_task_encoder(config)
    monkeypatch.setattr(encoder, "select_pack", lambda samples, ended: list(range(len(samples)))[:3])
    with pytest.raises(PackingError, match="of one group of data sets"):
        first(build_loader(config, task_encoder=encoder), 20)


def test_a_group_that_is_no_name_stops_the_run_in_a_sentence(blend):
    with pytest.raises(ConfigError, match=r"subflavors.group is \['charts'\]; it must be a name"):
        first(build_loader(blend((None, ["charts"], None))), 3)
    assert [group_name(each) for each in (None, {}, {"group": "a"}, {"group": 3})] == ["", "", "a", "3"]
    assert by_group([]) == {}


def test_a_plan_of_the_blend_has_the_same_groups(blend, tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from energon_packing.offline.measure import MeasureConfig, measure
    from energon_packing.offline.plan import Plan
    from energon_packing.offline.planner import make_plan

    config = blend(("text", "charts", "text"))
    index, plan = tmp_path / "index", tmp_path / "plan.parquet"
    measure(MeasureConfig(paths=(tmp_path / "blend.yaml",), out=index, workers=0), config)
    make_plan([index], config, plan)
    packs = Plan.open(plan).packs(0, len(Plan.open(plan)))
    found = {"".join(sorted({sample.key[0] for sample in pack.samples})) for pack in packs}
    assert found <= {"a", "c", "ac", "b"}
    assert {"ac", "b"} <= found


TALK = {"human": "And what about that", "gpt": "It is like this"}


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """Another data set, with keys of its own."""
    records = []
    for number in range(40):
        rounds = 1 + number % 6
        turns = [{"from": who, "value": f"{what} {at}. " * 12} for at in range(rounds) for who, what in TALK.items()]
        records.append({"id": f"second-{number}", "conversations": turns})
    return converted(tmp_path_factory.mktemp("second"), records)


@pytest.fixture
def blend_limits(dataset, second, tmp_path, run_config):
    """Makes the configuration of a run on both data sets, the second under ``limits``."""

    def make(limits, **packing):
        entries = [
            {"weight": 1, "path": str(dataset_entry(str(dataset)))},
            {"weight": 1, "path": str(dataset_entry(str(second)))},
        ]
        if limits is not None:
            entries[1]["subflavors"] = {"limits": limits}
        path = metadataset(tmp_path / "blend.yaml", {"blend": entries})
        return run_config(
            data={"path": path, "repeat": True, "workers": packing.pop("workers", 0)},
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


@pytest.mark.parametrize("read", [some, single_samples])
def test_only_samples_of_that_data_set_are_under_its_limits(blend_limits, read):
    plain, _ = read(blend_limits(None))
    assert plain[False]
    assert max(plain[True].values()) > 200
    found, dropped = read(blend_limits({"max_tokens": 200}))
    assert max(found[True].values()) <= 200
    assert max(found[False].values()) > 200
    told = {("second" in entry.key, entry.reason) for entry in dropped}
    assert told - {(False, "oversize")} == {(True, "too_many_tokens")}
    cut, _ = read(blend_limits({"max_tokens": 200, "when_over": ["truncate"]}))
    assert max(cut[True].values()) <= 200
    assert set(cut[True]) - set(found[True])


def test_limits_above_a_packs_are_lowered_with_one_warning_a_data_set(blend_limits, second):
    config = blend_limits({"max_tokens": 100_000, "max_images": 50}, max_images_per_pack=8)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found, _ = some(config)
    told = [str(warning.message) for warning in told if "lowered" in str(warning.message)]
    assert len(told) == 1
    assert str(second) in told[0]
    assert "max_tokens 100000 to packing.seq_length 1536, max_images 50 to packing.max_images_per_pack 8" in told[0]
    assert found[True]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"max_imagse": 2},
            r"subflavors\.limits of the data set .*unknown key 'max_imagse'; did you mean 'max_images'",
        ),
        ("few", r"subflavors\.limits of the data set .* is 'few'"),
    ],
)
def test_limits_that_cannot_work_stop_the_run_with_the_data_sets_name(blend_limits, limits, message):
    with pytest.raises(ConfigError, match=message):
        some(blend_limits(limits, workers=1))


def few(folder, count, letter="a", words=lambda number: 1 + 7 * number % 23):
    return converted(
        folder, (chat("Say it", f"{letter} {at}. " * words(at), id=f"{letter}-{at}") for at in range(count))
    )


def places(pack):
    """Of each sample the shard and place that Energon read it from, and its piece."""
    pieces = (key.partition("#")[2] for key in pack.keys)
    sources = ((str(it.dataset_path), it.shard_name, it.index) for it in pack.__sources__)
    return [*zip(sources, pieces, strict=True)]


def alone_in(packs):
    """How often each place is in packs, of which none has one twice."""
    assert all(len(set(places(pack))) == len(pack.keys) for pack in packs)
    return Counter(place for pack in packs for place in places(pack))


@pytest.mark.parametrize("buffer", [None, 40])
@pytest.mark.parametrize("window", [16, 64])
@pytest.mark.parametrize(("count", "row"), [(2, 64), (5, 160), (30, 1024)])
def test_no_pack_has_a_sample_twice_also_of_a_data_set_smaller_than_the_window(
    tmp_path, run_config, count, row, window, buffer
):
    data = {"path": str(few(tmp_path, count)), "repeat": True}
    config = run_config(data=data, seq_length=row, window=window)
    times = alone_in(first(build_loader(config, packing_buffer_size=buffer), 40))
    assert len(times) == count
    assert max(times.values()) - min(times.values()) <= (buffer or window), "no sample waits for longer"


def test_a_small_part_of_a_blend_is_in_no_pack_twice_and_equal_keys_of_another_are_other_samples(
    tmp_path, run_config, continues
):
    parts = [few(tmp_path / "few", 5), few(tmp_path / "more", 60)]
    entries = [{"weight": 1 + 3 * at, "path": str(dataset_entry(str(part)))} for at, part in enumerate(parts)]
    data = {"path": metadataset(tmp_path / "blend.yaml", {"blend": entries}), "repeat": True}
    config = run_config(data=data, seq_length=1024, window=48, drop_budget=1.0, balance_window=3)
    packs = first(build_loader(config), 60)
    times = alone_in(packs)
    assert len(times) > 60
    assert any(len(set(pack.keys)) < len(pack.keys) for pack in packs), "a-0 of both may share a pack"
    continues(lambda: build_loader(config), packs=14, at=[6])


def test_pieces_of_a_sample_share_a_pack_and_none_is_there_twice(tmp_path, run_config):
    data = {"path": str(few(tmp_path, 3, words=lambda at: 60 * (1 + 2 * at))), "repeat": True}
    config = run_config(data=data, seq_length=256, window=24, oversize="split", drop_budget=1.0)
    packs = first(build_loader(config), 60)
    assert {piece for _, piece in alone_in(packs)} > {"0", "1"}


def test_copies_in_the_window_count_for_their_group_and_leave_room_for_the_others(blend, tmp_path, run_config):
    parts = [few(tmp_path / "few", 2), few(tmp_path / "more", 60, "b")]
    entries = [
        {"weight": 3 - 2 * at, "path": str(dataset_entry(str(part))), "subflavors": {"group": "ab"[at]}}
        for at, part in enumerate(parts)
    ]
    data = {"path": metadataset(tmp_path / "blend.yaml", {"blend": entries}), "repeat": True}
    packs = first(build_loader(run_config(data=data, seq_length=1024, window=64)), 150)
    own = [[pack for pack in packs if pack.keys[0][0] == letter] for letter in "ab"]
    alone_in(own[1])
    assert len(own[1]) > 2
    for of in own:
        assert sum(pack.batch.real_tokens for pack in of) > len(of) * 0.9 * 1024


@pytest.mark.parametrize(("count", "others", "ranks"), [(2, 0, 1), (5, 200, 1), (100, 0, 10)])
def test_rows_are_full_also_where_a_data_set_or_a_reader_has_fewer_samples_than_a_row(
    tmp_path, run_config, count, others, ranks
):
    path = str(few(tmp_path / "few", count))
    if others:
        entries = [{"weight": 1, "path": str(dataset_entry(str(few(tmp_path / "more", others, "b"))))}]
        entries.append({"weight": 1, "path": str(dataset_entry(path))})
        path = metadataset(tmp_path / "blend.yaml", {"blend": entries})
    config = run_config(data={"path": path, "repeat": True}, seq_length=2048, window=128)
    packs = first(build_loader(config, world_size=ranks), 20)
    assert sum(pack.batch.real_tokens for pack in packs) > 20 * 0.95 * 2048
    times = Counter(key for pack in packs for key in pack.keys if key[0] == "a")
    assert max(times.values()) - min(times.values()) <= 0.5 * max(times.values()) + 2


def test_equal_keys_that_a_cooker_made_are_other_samples_if_they_were_read_from_other_places():
    read = [("a", "shard-0.tar", 0), ("a", "shard-0.tar", 1), ("a", "shard-1.tar", 0), ("b", "shard-0.tar", 0)] * 2
    sources = [SourceInfo(dataset_path=EPath("/" + at), shard_name=of, index=n, file_names=()) for at, of, n in read]
    samples = [SimpleNamespace(__key__="same", __sources__=(source,)) for source in sources]
    assert first_of_same(samples) == [0, 1, 2, 3, 0, 1, 2, 3]
