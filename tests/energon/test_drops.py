"""What is dropped: told once with its setting, counted against the budget, reported by epoch, and in the ledger."""

import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import statistics
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from made_data import chat, chats, converted, metadataset
from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset
from PIL import Image
from support.drop_runs import Cell, stopped_after
from torch import distributed
from transformers import AutoProcessor

import energon_packing
from energon_packing.cli.main import cli
from energon_packing.config import DataConfig, EncoderConfig, LimitsConfig, PackingConfig, RunConfig
from energon_packing.convert.layout import dataset_entry
from energon_packing.demo import processor_path
from energon_packing.drops import FEWEST_DROPPED, FEWEST_READ, SETTING_OF, SHARE, DroppedSample, FrequentDrops
from energon_packing.energon import loader as loader_module
from energon_packing.energon import task_encoder as task_encoder_module
from energon_packing.energon.loader import build_dataset, build_loader
from energon_packing.energon.sample_task_encoder import TextTaskEncoder
from energon_packing.errors import UserError
from energon_packing.ledger import DropBudgetExceeded, Ledger, NothingToPack, merged
from energon_packing.report import settings as report_settings
from energon_packing.wan.config import TextToVideoRunConfig

QWEN = str(processor_path("qwen2_5_vl"))
LARGEST = 1280 * 28 * 28  # pixels of an image, as Qwen's model card has it; the processor of the tests has less


def make_vqa(folder: Path, count: int) -> list[dict[str, Any]]:
    """Records of questions about photos of about 1024x768, of which one in 12.5 has an answer of one word."""
    draw = random.Random(30)
    short = set(draw.sample(range(count), count * 80 // 1000))
    for number in range(20):
        size = (1024 + draw.randrange(-64, 65), 768 + draw.randrange(-48, 49))
        Image.new("RGB", size, tuple(draw.randrange(256) for _ in range(3))).save(folder / f"photo{number}.jpg")
    records = []
    for number in range(count):
        answer = draw.choice(["Yes.", "No.", "Two."]) if number in short else "A dog that runs along a wide beach."
        records.append(chat(f"<image>Question {number}: what is it?", answer, images=[f"photo{number % 20}.jpg"]))
    return records


@pytest.fixture(scope="module")
def vqa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vqa")
    return converted(folder, make_vqa(folder, 100))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 conversations, 9 of which are too long for a row of 256 tokens, the first of them at place 3."""
    words = [300 if number % 33 == 3 else 10 for number in range(300)]
    return converted(tmp_path_factory.mktemp("texts"), chats(words))


def run_of(path: Path, *, data: dict[str, Any] | None = None, encoder: Any = None, **packing: Any) -> RunConfig:
    encoder = encoder or EncoderConfig(processor=str(processor_path("text")))
    return RunConfig(
        data=DataConfig(**{"path": str(path), "workers": 0, "shuffle_buffer": 1} | (data or {})),
        encoder=encoder,
        packing=PackingConfig(**{"seq_length": 256, "window": 16} | packing),
    )


def told_by(read: Any) -> list[str]:
    """The warnings about drops that a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read()
    return [str(entry.message) for entry in caught if " are dropped as " in str(entry.message)]


def counts_of(sentence: str) -> tuple[int, int]:
    """Samples dropped and read, in "9 of the 300 samples ..."."""
    return int(sentence.split()[0]), int(sentence.split()[3].replace(",", ""))


def take(packs: Any, samples: int) -> int:
    """Reads packs until so many samples were emitted."""
    emitted = 0
    for pack in packs:
        emitted += len(pack.keys)
        if emitted >= samples:
            break
    return emitted


def test_one_word_answers_to_photos_are_trained_as_the_processor_writes_them(vqa: Path) -> None:
    encoder = EncoderConfig(processor=QWEN, max_pixels=LARGEST, decode_in_child=False)
    loader = build_loader(run_of(vqa, data={"repeat": False}, encoder=encoder, seq_length=8192))
    tokenizer = AutoProcessor.from_pretrained(QWEN).tokenizer
    trained: list[str] = []

    def read() -> None:
        for pack in loader:
            ids = pack.batch.labels[0]
            trained.extend(tokenizer.decode(ids[ids >= 0].tolist()).split("<|im_end|>")[:-1])

    assert told_by(read) == []
    answers = [json.loads(line)["messages"][1]["content"] for line in (vqa.parent / "chats.jsonl").open()]
    assert Counter(trained) == Counter(answers)


@pytest.mark.parametrize("workers", [2])
def test_a_reason_that_drops_three_in_a_hundred_is_one_warning_of_a_run(texts: Path, workers: int) -> None:
    packs = build_loader(run_of(texts, data={"workers": workers}))
    (told,) = told_by(lambda: take(packs, 350))
    dropped, read = counts_of(told)
    assert dropped >= FEWEST_DROPPED
    assert read >= FEWEST_READ
    assert SHARE <= dropped / read <= 0.05  # 3 % in truth
    assert "are dropped as oversize" in told
    assert re.search(r": 3\d\d tokens; a row holds", told)
    assert told.endswith("The setting packing.seq_length governs this.")


@pytest.mark.parametrize(("workers", "buffer"), [(2, None)])
def test_so_it_is_in_plain_energon_whose_workers_tell_it(
    texts: Path,
    workers: int,
    buffer: int | None,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: os.write(2, f"{message}\n".encode()))
    dataset = build_dataset(run_of(texts, data={"workers": workers}), packing_buffer_size=buffer)
    take(get_savable_loader(dataset), 500)  # each of two workers counts its own
    said = capfd.readouterr().err
    assert said.count(" are dropped as oversize") == 1, said
    assert "The setting packing.seq_length governs this." in said


def test_so_it_is_without_packing(texts: Path) -> None:
    encoder = TextTaskEncoder(EncoderConfig(processor=str(processor_path("text"))), max_length=128)
    workers = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset(
        dataset_entry(str(texts)),
        worker_config=workers,
        batch_size=4,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=encoder,
    )
    (told,) = told_by(lambda: take(get_savable_loader(dataset), 350))
    assert told.endswith("318 tokens; max_length is 128. The setting packing.seq_length governs this.")


@pytest.fixture(scope="module")
def rare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """700 conversations without media, and 6 with an image among them."""
    folder = tmp_path_factory.mktemp("rare")
    mixed = make_vqa(folder, 6) + [chat(str(number), "word") for number in range(700)]
    random.Random(1).shuffle(mixed)
    return converted(folder, mixed)


def test_a_reason_that_drops_all_of_a_rare_modality_is_told(rare: Path) -> None:
    encoder = EncoderConfig(processor=QWEN, modality="text")
    run = run_of(rare, data={"repeat": False}, encoder=encoder)
    (told,) = told_by(lambda: list(build_loader(run)))
    assert " image samples read so far from " in told
    assert "other_modality (100.0%)" in told
    assert told.endswith("The setting encoder.modality governs this.")


def test_an_index_knows_the_modality_of_what_was_dropped(rare: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"encoder: {{processor: {QWEN}, modality: text}}\n")
    arguments = ["measure", str(rare), "--config", str(config), "--out", str(tmp_path / "index"), "--workers", "0"]
    done = CliRunner().invoke(cli, [*arguments, "--json"])
    (told,) = json.loads(done.stdout)["warnings"]
    assert told.startswith(f"6 of the 6 image samples measured from {rare} are dropped as other_modality (100.0%)")


def test_of_all_ranks_the_first_one_tells(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        loaders = []
        for rank in range(2):  # each is a process, and this its first loader of these data, whatever else it loads
            monkeypatch.setattr(loader_module, "_PLACES", Counter())
            if rank:
                others = run_of(texts, data={"seed": 7})
                assert build_loader(others, rank=rank, world_size=2)._place != loaders[0]._place
            loaders.append(build_loader(run_of(texts), rank=rank, world_size=2))
            assert loaders[rank]._place == loaders[0]._place
        assert len(told_by(lambda: [take(loader, 240) for loader in loaders])) == 1
        second = build_loader(run_of(texts), rank=0, world_size=2)
        assert len(told_by(lambda: take(second, 240))) == 1, "another loader of the same data tells too"
    finally:
        distributed.destroy_process_group()


ENTRY = st.tuples(st.sampled_from("ab"), st.sampled_from(["text", "image", ""]), st.sampled_from([None, "x", "y"]))


@given(st.lists(st.lists(ENTRY, max_size=40), max_size=40))
@example([[("a", "text", None)] * 195 + [("a", "image", "x")] * 5])
@example([[("a", "text", None)] * 3000 + [("a", "image", "x")] * 5])
def test_each_frequent_reason_is_told_once_with_the_counts_of_that_moment(parts: list[list[Any]]) -> None:
    watch = FrequentDrops()
    read: Counter[tuple[str, str]] = Counter()
    dropped: Counter[tuple[str, str, str]] = Counter()
    told: list[str] = []

    def due(data: str, kinds: set[str], reason: str, final: bool) -> bool:
        lost, whole = sum(dropped[data, kind, reason] for kind in kinds), sum(read[data, kind] for kind in kinds)
        all_ = sum(count for (each, _), count in read.items() if each == data)
        enough = final or (lost >= FEWEST_DROPPED and all_ >= FEWEST_READ)
        return bool(lost) and enough and lost >= SHARE * whole

    seen: set[tuple[str, str, str]] = set()
    for number, part in enumerate([*parts, []]):
        final = number == len(parts)
        for at, (data, kind, reason) in enumerate(part):
            read[data, kind] += 1
            entry = DroppedSample(key=str(at), reason=reason or "", detail="why", data=data, modality=kind)
            watch.add({(data, kind): 1}, [entry] if reason else [])
            if reason:
                dropped[data, kind, reason] += 1
        news = watch.news(final=final)
        told += news
        expected = 0
        for data in "ab":
            for reason in "xy":
                for kinds in ({"text", "image", ""}, {"text"}, {"image"}):
                    name = (data, reason, "" if len(kinds) > 1 else next(iter(kinds)))
                    if name not in seen and (data, reason, "") not in seen and due(data, kinds, reason, final):
                        seen.add(name)
                        expected += 1
        assert len(news) == expected
    assert len(set(told)) == len(told)
    assert watch.news(final=True) == []


def test_every_reason_is_explained_by_a_page_for_readers() -> None:
    made = ("api.md", "cli.md", "correctness.md", "settings.md")  # of code
    pages = (page for page in (Path(__file__).parents[2] / "docs").glob("*.md") if page.name not in made)
    told = "".join(re.sub(r"(?s)^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M) for page in pages)
    assert [reason for reason in SETTING_OF if f"`{reason}`" not in told] == []


def test_every_reason_that_is_written_in_the_package_has_its_setting_or_none() -> None:
    package = Path(energon_packing.__file__).parent
    reasons: set[str] = set()
    for file in package.rglob("*.py"):
        place = file.relative_to(package)
        if place.parts[0] not in ("convert", "demo") and place.stem not in ("text_to_video", "tensor_files"):  # rejects
            reasons.update(re.findall(r"(?:SampleRejected\(|(?<!as_)reason=)\s*\"(\w+)\"", file.read_text()))
    assert reasons - {"config"} <= set(SETTING_OF), reasons - set(SETTING_OF)
    known = {each.name for each in report_settings.settings()}
    known |= {f"encoder.{field.name}" for field in dataclasses.fields(TextToVideoRunConfig().encoder)}
    assert set(filter(None, SETTING_OF.values())) <= known


@pytest.mark.parametrize("command", ["measure", "stats", "preview", "validate"])
def test_the_commands_that_look_at_data_tell_it_too_with_the_setting(vqa: Path, tmp_path: Path, command: str) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"data: {{path: {vqa}}}\npacking: {{seq_length: 8192}}\n"
        f"encoder: {{processor: {QWEN}, max_pixels: {LARGEST}, limits: {{min_active_ratio: 0.00390625}}}}\n"
    )
    arguments = {
        "measure": ["measure", str(vqa), "--config", str(config), "--out", str(tmp_path / "index"), "--workers", "0"],
        "stats": ["stats", str(vqa), "--config", str(config)],
        "preview": ["preview", str(vqa), "--config", str(config), "--packs", "1"],
        "validate": ["validate", str(config), "--no-bridge"],
    }[command]
    done = CliRunner().invoke(cli, [*arguments, *(["--json"] if command in ("stats", "preview") else [])])
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert said.count(" are dropped as too_few_targets") == 1, done.output
    assert "The setting encoder.limits.min_active_ratio governs this" in said


RUNS = 8  # `scripts/bench.py budget` of commit 4b22f01 made hundreds


@pytest.mark.timeout(300)
@pytest.mark.full
@pytest.mark.parametrize(("share", "window", "stage"), [(0.06, 1024, "measure"), (0.06, 1, "render")])
def test_no_run_below_its_budget_is_stopped_whatever_its_window(share, window, stage):
    # Past the point at which a full window was read and the first packs have left it.
    cell = Cell(share=share, window=window, stage=stage, reads=1600)
    assert [stopped_after(cell, run) for run in range(RUNS)] == [None] * RUNS


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("cell", "expected", "at_most"),  # docs/limits.md: with average luck, and but for one run in a million
    [
        (Cell(share=0.3, window=1024), 200, 450),
        (Cell(share=0.4, window=256, stage="render"), 483, 681),
    ],
    ids=str,
)
def test_every_run_above_its_budget_is_stopped_within_the_stated_number_of_reads(cell, expected, at_most):
    stops = [stopped_after(cell, run) for run in range(RUNS)]
    assert max(stops) <= at_most
    assert statistics.median(stops) <= 1.3 * expected


@pytest.fixture
def ledgers(monkeypatch):
    """All ledgers that loaders make from now on."""
    made = []

    class Kept(Ledger):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            made.append(self)

    monkeypatch.setattr(task_encoder_module, "Ledger", Kept)
    return made


@pytest.mark.parametrize("buffer", [16])
def test_every_sample_of_an_epoch_is_counted_as_read_once(run_config, train_keys, ledgers, buffer):
    packs = list(build_loader(run_config(seq_length=512, drop_budget=1.0), packing_buffer_size=buffer))
    (ledger,) = ledgers
    assert ledger.read == len(train_keys) == ledger.dropped + ledger.emitted
    assert ledger.emitted == sum(len(pack.keys) for pack in packs)
    assert 0 < ledger.dropped < ledger.read


@pytest.mark.parametrize("buffer", [None, 16])
def test_a_restored_run_counts_nothing_twice_and_forgets_nothing(run_config, ledgers, buffer):
    config = run_config(data={"repeat": True}, seq_length=512, drop_budget=1.0)
    loader = build_loader(config, packing_buffer_size=buffer)
    states, counts = [], []
    for _, _pack in zip(range(12), loader, strict=False):
        states.append(loader.save_state())
        counts.append(ledgers[0].counts())
    assert counts[-1]["reasons"]["oversize"] > 0
    for done in (1, 9):
        again = build_loader(config, packing_buffer_size=buffer)
        again.restore_state(states[done - 1])
        for at, _pack in zip(range(done, 12), again, strict=False):
            assert ledgers[-1].counts() == counts[at]


@pytest.fixture(scope="module")
def texts_epoch(tmp_path_factory):
    """Conversations of so many words, of which those of 300 words are too long for a row."""
    made: dict[Any, Any] = {}

    def make(lengths: tuple[int, ...]) -> Any:
        if lengths not in made:
            made[lengths] = converted(tmp_path_factory.mktemp("epochs"), chats(lengths))
        return made[lengths]

    return make


def config_of(path: Any, *, workers: int = 0, **packing: Any) -> RunConfig:
    return RunConfig(
        data=DataConfig(path=str(path), workers=workers, repeat=False, shuffle_buffer=1),
        encoder=EncoderConfig(processor=str(processor_path("text"))),
        packing=PackingConfig(**{"seq_length": 128, "window": 16, "drop_budget": 1.0} | packing),
    )


def check(report: Any, emitted: int, dropped: Counter[str], read: int) -> None:
    assert report.complete
    assert (report.read, report.emitted, report.dropped) == (read, emitted, dropped)
    assert report.read == report.emitted + report.dropped.total()


@pytest.mark.parametrize(("workers", "buffer"), [(0, None), (4, None), (1, 8)])
def test_everything_read_is_emitted_or_dropped_by_reason_in_every_epoch(texts_epoch, workers, buffer):
    lengths = (10, 10) + (300,) * 50  # two of four workers make no pack
    loader = build_loader(config_of(texts_epoch(lengths), workers=workers), packing_buffer_size=buffer)
    for _ in range(2):
        packs = list(loader)
        assert all(pack.keys for pack in packs)
        check(loader.epoch_report, sum(len(pack.keys) for pack in packs), Counter(oversize=50), len(lengths))
        in_packs = sum(len(pack.dropped) for pack in packs)
        assert in_packs + len(loader.epoch_report.dropped_at_end) == 50
        assert bool(loader.epoch_report.dropped_at_end) == (workers == 4)
        assert loader.epoch_report.packs == len(packs)
        if buffer is not None:
            break


@pytest.mark.parametrize("workers", [0, 2])
def test_a_finite_run_that_makes_no_pack_ends_with_the_reason(texts_epoch, workers):
    loader = build_loader(config_of(texts_epoch((300,) * 70), workers=workers))
    with pytest.raises(NothingToPack) as caught:
        list(loader)
    assert "70 samples were read and 70 dropped (70 oversize; one is chats" in str(caught.value)
    assert isinstance(caught.value, UserError)
    check(loader.epoch_report, 0, Counter(oversize=70), 70)


def test_the_budget_is_asked_over_all_workers(texts_epoch):
    """Each of four workers reads too few samples for the budget to judge; all of them together read enough."""
    lengths = (10, 300) * 300
    loader = build_loader(config_of(texts_epoch(lengths), workers=4, drop_budget=0.1))
    with pytest.raises(
        DropBudgetExceeded,
        match=r"^\d+ of the \d\d\d samples read were dropped \(of this one of 4 readers \d+ oversize\)",
    ):
        list(loader)


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


@pytest.mark.parametrize(("workers", "saved", "lost"), [(0, 1, 4), (2, 5, 1)])
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


def test_samples_that_a_restored_run_can_no_longer_use_are_in_the_report(texts, tmp_path):
    run = run_of(texts, data={"repeat": False}, seq_length=128, ledger=str(tmp_path), drop_budget=1.0)
    loader = build_loader(run)
    for _ in zip(range(3), loader, strict=False):
        state = loader.save_state()
    del loader
    strict = dataclasses.replace(run.encoder, limits=LimitsConfig(max_tokens=2))
    again = build_loader(
        dataclasses.replace(run, encoder=strict, data=dataclasses.replace(run.data, accept_changed=("encoder",)))
    )
    with pytest.warns(UserWarning, match=r"data\.accept_changed"):
        again.restore_state(state)
    list(again)
    report = merged(tmp_path)
    assert report.dropped["too_many_tokens"] > 200
    assert report.emitted + report.dropped.total() == 300


def test_a_new_run_with_fewer_readers_in_the_same_place_counts_alone(texts, tmp_path):
    for ranks, workers, read in ((1, 2, 300), (2, 1, 300), (1, 0, 300)):
        for rank in range(ranks):
            run = run_of(texts, data={"repeat": False, "workers": workers}, ledger=str(tmp_path), drop_budget=1.0)
            list(build_loader(run, rank=rank, world_size=ranks))
        report = merged(tmp_path)
        assert report.emitted + report.dropped.total() == read
        assert report.duplicates == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full is Linux's")
def test_a_full_disk_stops_a_loader_with_one_sentence(config, tmp_path):
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "rank0-worker0.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"rank0-worker0\.jsonl cannot be written \(No space left on device\)"):
        list(build_loader(config(1)))


@pytest.mark.parametrize("form", ["blend", "blend_epochized"])
def test_a_data_set_that_a_blend_reads_more_often_than_another_has_no_duplicates(form, tmp_path, run_config):
    entries = []
    for letter, count, weight, repetitions in (("a", 12, 1, 3), ("b", 60, 1, 1)):
        records = [chat("Say it", f"{letter} says so. " * 20, id=f"{letter}-{n}") for n in range(count)]
        made = converted(tmp_path / letter, records)
        rate = {"weight": weight} if form == "blend" else {"repetitions": repetitions}
        entries.append(rate | {"path": dataset_entry(made)})
    data = {"path": metadataset(tmp_path / "blend.yaml", {form: entries}), "repeat": form == "blend"}
    loader = build_loader(run_config(data=data, seq_length=1024, window=8, ledger=str(tmp_path / "ledger")))
    found = Counter(key for pack in itertools.islice(loader, 60) for key in pack.keys)
    report = merged(tmp_path / "ledger")
    assert max(found.values()) >= 3
    assert report.emitted == found.total()
    assert report.duplicates == []
