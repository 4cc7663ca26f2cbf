"""How often samples are seen: by their length, by rank, by data set of a blend, and in splits of a few samples."""

import dataclasses
import functools
import gc
import itertools
import json
import math
import random
import shutil
import tarfile
from collections import Counter
from io import BytesIO
from pathlib import Path

import made_data
import numpy as np
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st
from made_data import chat, metadataset
from megatron.energon import (
    Cooker,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from megatron.energon.epathlib import EPath
from PIL import Image

from energon_packing import PackingTaskEncoder
from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.conversation import Conversation, Turn
from energon_packing.demo import processor_path
from energon_packing.energon.loader import build_loader
from energon_packing.energon.reader_shares import _local, _media_tokens, _read_sizes, deal
from energon_packing.energon.samples import ConversationSample
from energon_packing.errors import ConfigError, UserError

IMAGE = b'{"kind": "image", "name": "a.jpg", '
LOOKS_LIKE_MEDIA = (
    b"\xff\xd8\x00\x00" * 9,
    IMAGE,
    IMAGE + b'"width": 56, "height": 56}',
    IMAGE + b'"width": "56", "height": [-1]}',
    IMAGE + b'"width": 1e999, "height": true}',
    IMAGE + b'"width": 2147483647, "height": 2147483647}',
    IMAGE + b'"frame_names": 3}',
    IMAGE + b'"x": ' + b"[" * 9999 + b"]" * 9999 + b"}",
    b'{"kind": "video", "name": "' + b"\\" * 99 + b'", "frames": 0}',
)


def record(key: str, words: int, image: bool = False) -> dict:
    images = {"images": [f"{words}.png"]} if image else {}
    return chat("<image>Say it." if image else "Say it.", "word " * words, id=key, **images)


def converted(folder: Path, records: list[dict]) -> str:
    folder.mkdir(parents=True)
    for name in {image for each in records for image in each.get("images", ())}:
        size = 28 * int(name.removesuffix(".png"))
        Image.new("RGB", (size, 56), (200, 20, 20)).save(folder / name)
    return str(made_data.converted(folder, records, samples_per_shard=250))


def prepared(folder: Path, records: list[dict]) -> str:
    """A WebDataset of somebody else, prepared by Energon; our package knows nothing of its records."""
    from click.testing import CliRunner
    from megatron.energon.tools.prepare import command

    folder.mkdir(parents=True)
    for shard in range(-(-len(records) // 300)):
        with tarfile.open(folder / f"s{shard:03d}.tar", "w") as tar:
            for each in records[300 * shard : 300 * (shard + 1)]:
                text = json.dumps({"said": each["messages"][1]["content"]}).encode()
                member = tarfile.TarInfo(f"{each['id']}.json")
                member.size = len(text)
                tar.addfile(member, BytesIO(text))
    words = ["--non-interactive", "--no-progress", "--num-workers", "1", "--split-ratio", "1,0,0"]
    done = CliRunner().invoke(command, [str(folder), *words, "--sample-type", "CrudeWebdataset"])
    assert done.exit_code == 0, (done.output, done.exception)
    return str(folder)


@stateless
def cook_foreign(sample) -> ConversationSample:
    said = sample["json"] if isinstance(sample["json"], dict) else json.loads(sample["json"])
    turns = (Turn(role="user", parts=("Say it.",)), Turn(role="assistant", parts=(said["said"],)))
    conversation = Conversation(key=sample["__key__"], turns=turns)
    return ConversationSample(**basic_sample_keys(sample), conversation=conversation)


def source_records(name: str, samples: int) -> list[dict]:
    draw = random.Random(7)
    half = samples // 2
    short, long = [record(f"a-{n}", 8) for n in range(half)], [record(f"b-{n}", 150) for n in range(half)]
    if name == "shuffled":
        words = [min(int(draw.lognormvariate(3.3, 1)) + 1, 400) for _ in range(samples)]
        return [record(f"{'ab'[w > 27]}-{n}", w) for n, w in enumerate(words)]
    if name == "foreign":  # the period of the source is that of a deal in turns
        return [each for pair in zip(short, long, strict=True) for each in pair]
    return short + long


def run_of(path: str, *, repeat: bool = True, workers: int = 0, **packing) -> RunConfig:
    return RunConfig(
        data=DataConfig(path=path, workers=workers, repeat=repeat, shuffle_buffer=8),
        encoder=EncoderConfig(processor=str(processor_path("qwen2_5_vl")), decode_in_child=False),
        packing=PackingConfig(**{"seq_length": 512, "window": 16, "drop_budget": 1.0, **packing}),
    )


@functools.cache
def encoder_of(path: str, seq_length: int = 512) -> PackingTaskEncoder:
    run = run_of(path, seq_length=seq_length)
    cookers = [Cooker(cook_foreign)] if (Path(path) / "s000.tar").exists() else []
    return PackingTaskEncoder(run.encoder, run.packing, cookers=cookers)


def read(path: str, ranks: int, workers: int, packs: int | None, **options) -> list[Counter]:
    """Keys that each rank gives in that many packs, or in a finite epoch; its packs under ``None``."""
    run = run_of(path, repeat=packs is not None, workers=workers)
    seen = []
    pack = None
    for rank in range(ranks):
        loader = build_loader(run, task_encoder=encoder_of(path), rank=rank, world_size=ranks, **options)
        own = Counter()
        for pack in itertools.islice(loader, packs):
            own.update([None, *pack.keys])
        seen.append(own)
        loader = pack = None
        gc.collect()  # or the workers of an endless loader live on
    return seen


def times_seen(seen: list[Counter], sizes: dict[str, int]) -> dict[str, float]:
    total = sum(seen, Counter())
    return {g: sum(n for key, n in total.items() if key and key[0] == g) / sizes[g] for g in sizes}


@functools.cache
def make_source(root: Path, name: str, samples: int) -> tuple[str, Counter]:
    """Path and group sizes."""
    records = source_records(name, samples)
    write = prepared if name == "foreign" else converted
    return write(root / f"{name}{samples}", records), Counter(each["id"][0] for each in records)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`make_source` by name and number of samples."""
    return functools.partial(make_source, tmp_path_factory.mktemp("shares"))


def row(path: str, sizes: Counter, ranks: int, workers: int) -> tuple[dict[str, float], list[int]]:
    """Mean times seen by group in three epochs, and packs per rank in a finite one."""
    epoch = read(path, ranks, workers, None)
    packs = sum(own[None] for own in epoch)
    return times_seen(read(path, ranks, workers, round(3 * packs / ranks)), sizes), [own[None] for own in epoch]


@pytest.mark.parametrize(("name", "ranks", "workers"), [("length", 2, 0), ("foreign", 4, 0)])
def test_short_and_long_samples_are_seen_equally_often_and_ranks_have_as_many_packs(made, name, ranks, workers):
    path, sizes = made(name, 400)
    times, packs = row(path, sizes, ranks, workers)
    assert max(times.values()) <= 1.05 * min(times.values()), times
    assert max(packs) - min(packs) <= max(2, 0.02 * max(packs)), packs


@for_all(
    samples=st.integers(1, 3000),
    readers=st.integers(1, 40),
    sizes=st.none() | st.lists(st.integers(1, 10**7), min_size=1, max_size=9),
)
def test_every_sample_is_dealt_to_one_reader_and_without_sizes_all_have_as_many(samples, readers, sizes):
    known = None if sizes is None else np.resize(np.array(sizes), samples)
    bounds, reader_of = deal(samples, readers, known)
    assert (bounds[0], bounds[-1]) == (0, samples)
    assert (np.diff(bounds) >= 0).all()
    assert ((reader_of >= 0) & (reader_of < readers)).all()
    held = np.bincount(reader_of, np.diff(bounds), readers)
    if known is None:
        assert held.max() - held.min() <= 1
    again = deal(samples, readers, known)
    assert (again[0] == bounds).all()
    assert (again[1] == reader_of).all()


def test_ranks_of_a_finite_epoch_have_as_many_tokens_where_images_are_stored_apart(tmp_path):
    """All records have about as many bytes, and their images 1 to 80 tokens."""
    draw = random.Random(3)
    widths = [min(int(draw.lognormvariate(2.5, 1)) + 1, 80) for _ in range(400)]
    records = [record(f"{n}", 3, image=True) | {"images": [f"{width}.png"]} for n, width in enumerate(widths)]
    path = converted(tmp_path / "made", records)
    tokens = [
        sum(pack.occupied for pack in build_loader(run, task_encoder=encoder_of(path), rank=rank, world_size=4))
        for run in [run_of(path, repeat=False)]
        for rank in range(4)
    ]
    assert max(tokens) <= 1.02 * min(tokens), tokens


@for_all(parts=st.lists(st.sampled_from(LOOKS_LIKE_MEDIA), min_size=1, max_size=9))
def test_what_looks_like_an_image_in_a_foreign_shard_does_no_harm(tmp_path_factory, parts):
    file = tmp_path_factory.mktemp("shard") / "s.tar"
    file.write_bytes(b"".join(parts))
    offsets = np.cumsum([0, *map(len, parts)])
    encoder = encoder_of("")
    sizes = _read_sizes(file, offsets, functools.partial(_media_tokens, encoder.media_tokens))
    assert (sizes >= 0).all()
    assert (sizes <= np.diff(offsets) + 4 * encoder.limits.tokens).all()


def keys_of(name: str, samples: int) -> Counter:
    return Counter(each["id"] for each in source_records(name, samples))


@pytest.mark.parametrize(("samples", "ranks", "workers"), [(60, 3, 2), (60, 7, 0), (3, 7, 0)])
def test_an_epoch_gives_each_sample_once_on_any_number_of_ranks_and_workers(made, ranks, workers, samples):
    path, _ = made("shuffled", samples)
    given = sum(read(path, ranks, workers, None), Counter())
    assert given - Counter({None: given[None]}) == keys_of("shuffled", samples)


@pytest.fixture(scope="module")
def few_and_many(tmp_path_factory):
    """Data sets of 3 and 300 samples of equal length."""
    root = tmp_path_factory.mktemp("blends")
    return [
        converted(root / name, [record(f"{name}-{n}", 20) for n in range(samples)]) + "/text"
        for name, samples in (("a", 3), ("b", 300))
    ]


@pytest.mark.parametrize(("ranks", "workers"), [(8, 0)])
def test_each_data_set_of_a_blend_has_its_share_on_any_number_of_readers(few_and_many, tmp_path, ranks, workers):
    path = metadataset(tmp_path / "blend.yaml", {"blend": [{"path": path, "weight": 1} for path in few_and_many]})
    given = sum(read(path, ranks, workers, 160 // ranks), Counter())
    share = sum(given[f"a-{n}"] for n in range(3)) / (given.total() - given[None])
    assert abs(share - 0.5) < 0.01 + 3 * 0.5 / math.sqrt(given.total()), share  # what Energon draws is chance


@pytest.mark.parametrize(("ranks", "samples"), [(8, 20)])
def test_repetitions_in_a_blend_hold_on_any_number_of_readers(few_and_many, tmp_path, ranks, samples):
    subset = {"range": [0, samples]}
    blend = [
        {"path": few_and_many[0], "repetitions": 20},
        {"path": few_and_many[1], "repetitions": 1, "subset": subset},
    ]
    path = metadataset(tmp_path / "blend.yaml", {"blend_epochized": blend})
    given = sum(read(path, ranks, 0, 8), Counter())
    share = sum(given[f"a-{n}"] for n in range(3)) / (given.total() - given[None])
    assert abs(share - 60 / (60 + samples)) < 0.04, share
    epoch = sum(read(path, ranks, 0, None), Counter())
    assert {epoch[f"a-{n}"] for n in range(3)} == {20}
    assert {epoch[f"b-{n}"] for n in range(samples)} == {1}


def test_a_reader_that_has_nothing_of_a_finite_blend_has_no_packs(few_and_many, tmp_path):
    parts = [{"path": path, "repetitions": 1, "subset": {"range": [0, 3]}} for path in few_and_many]
    given = sum(read(metadataset(tmp_path / "blend.yaml", {"blend_epochized": parts}), 8, 0, None), Counter())
    assert given - Counter({None: given[None]}) == Counter([f"{name}-{n}" for name in "ab" for n in range(3)])


@pytest.mark.parametrize(("ranks", "workers"), [(4, 2)])
def test_a_split_smaller_than_the_readers_is_read_by_all_of_them(few_and_many, ranks, workers):
    for own in read(few_and_many[0], ranks, workers, 3):
        assert {key[0] for key in own if key} == {"a"}
        assert own[None] == 3


def test_many_small_data_sets_leave_no_reader_with_less_than_another(few_and_many, tmp_path):
    parts = [{"path": few_and_many[1], "repetitions": 1, "subset": {"range": [12 * n, 12 * n + 12]}} for n in range(12)]
    path = metadataset(tmp_path / "blend.yaml", {"blend_epochized": parts})
    own = [sum(count for key, count in each.items() if key) for each in read(path, 8, 0, None)]
    assert own == [18] * 8
    assert all(each.total() > each[None] for each in read(path, 8, 0, 2))  # without end, where 18 are enough


@pytest.mark.parametrize(("repetitions", "ranks", "good"), [(0.1, 16, False), (0.5, 2, True), (2.5, 16, False)])
def test_a_fraction_of_a_data_set_is_read_or_refused_with_the_number(few_and_many, tmp_path, repetitions, ranks, good):
    parts = [
        {"path": few_and_many[1], "repetitions": repetitions, "subset": {"range": [0, 60]}},
        {"path": few_and_many[1], "repetitions": 1, "subset": {"range": [60, 300]}},
    ]
    path = metadataset(tmp_path / "blend.yaml", {"blend_epochized": parts})
    if good:
        given = sum(read(path, ranks, 0, None), Counter())
        assert sum(given[f"b-{n}"] for n in range(60)) == 60 * repetitions
    else:
        with pytest.raises(UserError, match=f"readers .* samples of .* is to be repeated {repetitions} times"):
            read(path, ranks, 0, None)


def test_excluded_samples_count_for_nobodys_share(tmp_path):
    path = Path(made_data.converted(tmp_path, [record(f"b-{n}", 20) for n in range(24)], samples_per_shard=12)) / "text"
    split = path / ".nv-meta" / "split.yaml"
    keys = [f"train-{n // 12:06d}.tar/b-{n}" for n in range(24) if n not in (7, 20)]
    split.write_text(split.read_text().replace("exclude: []", f"exclude: {json.dumps(keys)}"))
    for own in read(str(path), 2, 0, 1):
        assert {key for key in own if key} == {"b-7", "b-20"}


def test_readers_of_the_whole_begin_at_different_places_where_nothing_is_shuffled(few_and_many):
    run = run_of(few_and_many[1])
    encoder = encoder_of(few_and_many[1])
    first = set()
    for rank in range(2):
        dataset = get_train_dataset(
            few_and_many[0],
            worker_config=WorkerConfig(rank=rank, world_size=2, num_workers=0),
            batch_size=None,
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
            shuffle_over_epochs_multiplier=None,
            parallel_shard_iters=1,
            task_encoder=encoder,
        )
        first.add(next(iter(get_savable_loader(dataset))).keys[0])
    assert run.data.repeat
    assert len(first) == 2


def test_a_split_without_samples_is_refused_when_the_loader_is_built(few_and_many, tmp_path):
    path = metadataset(tmp_path / "blend.yaml", {"path": few_and_many[1], "subset": {"range": [5, 5]}})
    with pytest.raises(UserError, match="has no samples in this split"):
        read(path, 2, 0, 1)


def test_a_subset_is_dealt_whole_and_nothing_else_of_its_data_set(made, tmp_path):
    path, _ = made("length", 400)
    part = [{"path": f"{path}/text", "subset": {"range": [50, 350]}, "repetitions": 1}]
    halves = {"blend_epochized": part, "subset": {"range": ["50%", "100%"]}}
    given = sum(read(metadataset(tmp_path / "blend.yaml", halves), 3, 0, None), Counter())
    del given[None]
    assert given == Counter([f"b-{n}" for n in range(150)])  # of 200 short and 200 long ones


@pytest.mark.parametrize(("samples", "ranks", "workers"), [(60, 2, 0)])
def test_a_state_of_dealt_samples_continues_exactly_after_every_pack(made, continues, samples, ranks, workers):
    path, _ = made("shuffled", samples)
    arguments = {"task_encoder": encoder_of(path), "rank": ranks - 1, "world_size": ranks}
    continues(functools.partial(build_loader, run_of(path, workers=workers), **arguments), packs=5, at=(1, 3))


def test_a_state_is_refused_where_other_samples_are_a_readers(made, tmp_path):
    """Another size of a shard's sample changes what each reader has, although counts and names are the same."""
    path, _ = made("length", 400)
    loader = build_loader(run_of(path), task_encoder=encoder_of(path), rank=0, world_size=2)
    next(iter(loader))
    state = loader.save_state()
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    index = next((copy / "text").glob("train-000000.tar.idx"))
    offsets = np.fromfile(index, dtype=np.uint64)
    offsets[5] += 512
    offsets.tofile(index)
    other = build_loader(run_of(str(copy)), task_encoder=encoder_of(path), rank=0, world_size=2)
    with pytest.raises(ConfigError, match="data set shares"):
        other.restore_state(state)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_of_a_sample_that_the_data_have_no_more_is_refused_in_a_sentence(few_and_many, ranks):
    """The run accepts other data, and the window holds a sample of the old ones."""
    few, many = (run_of(path) for path in few_and_many)
    loader = build_loader(many, world_size=ranks)
    next(iter(loader))
    accepting = dataclasses.replace(few.data, accept_changed=("data set", "data set shares"))
    other = build_loader(dataclasses.replace(few, data=accepting), world_size=ranks)
    with pytest.warns(UserWarning, match="data set"):
        other.restore_state(loader.save_state())
    with pytest.raises(UserError, match="of a data set that has 3 now; it was made smaller"):
        next(iter(other))


def test_json_lines_are_dealt_whole_with_their_own_keys(tmp_path):
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.jsonl.jsonl_prepare import JsonlPreparator

    lines = tmp_path / "chats.jsonl"
    lines.write_text("".join(json.dumps({"said": "word " * (1 + n % 30)}) + "\n" for n in range(90)))
    JsonlPreparator.prepare_dataset(EPath(lines))
    path = metadataset(tmp_path / "blend.yaml", {"path": str(lines), "subflavors": {}})
    run = run_of(path, repeat=False)
    encoder = PackingTaskEncoder(run.encoder, run.packing, cookers=[Cooker(cook_foreign)])
    given = Counter()
    for rank in range(3):
        for pack in build_loader(run, task_encoder=encoder, rank=rank, world_size=3):
            given.update(pack.keys)
    assert given == Counter(str(n) for n in range(90))


def test_the_file_of_a_shard_is_found_where_energon_has_no_method_for_it(tmp_path, monkeypatch):
    shard = EPath(tmp_path / "a.tar")
    expected = _local(shard)
    monkeypatch.delattr(EPath, "local_path", raising=False)  # as in 7.3
    assert _local(shard) == expected == tmp_path / "a.tar"
