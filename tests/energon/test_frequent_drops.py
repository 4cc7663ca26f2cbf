"""Ordinary visual question answering is trained, and whatever drops a hundredth of a data set is one warning."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import os
import random
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset
from PIL import Image
from torch import distributed
from transformers import AutoProcessor

import energon_packing
from energon_packing.bridge_cpu import stand_ins
from energon_packing.cli.main import cli
from energon_packing.config import DataConfig, EncoderConfig, LimitsConfig, PackingConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.convert.layout import dataset_entry
from energon_packing.demo import processor_path
from energon_packing.drop_reasons import FEWEST_DROPPED, FEWEST_READ, SETTING_OF, SHARE, DroppedSample, FrequentDrops
from energon_packing.energon import loader_base
from energon_packing.energon.loader import build_dataset, build_loader
from energon_packing.energon.sample_task_encoder import TextTaskEncoder
from energon_packing.errors import ConfigError
from energon_packing.report.settings import settings
from energon_packing.wan.config import TextToVideoRunConfig

QWEN = str(processor_path("qwen2_5_vl"))
LARGEST = 1280 * 28 * 28  # pixels of an image, as Qwen's model card has it; the processor of the tests has less
OLD = LimitsConfig(min_active_ratio=1 / 256)
"""The default until 1/256 was InternVL's own."""


def make_vqa(folder: Path, count: int = 1000) -> Path:
    """Questions about photos of about 1024x768, of which one in 12.5 has an answer of one word; returns the file."""
    draw = random.Random(30)
    folder.mkdir(parents=True, exist_ok=True)
    short = set(draw.sample(range(count), count * 80 // 1000))
    for number in range(20):
        size = (1024 + draw.randrange(-64, 65), 768 + draw.randrange(-48, 49))
        Image.new("RGB", size, tuple(draw.randrange(256) for _ in range(3))).save(folder / f"photo{number}.jpg")
    lines = []
    for number in range(count):
        answer = draw.choice(["Yes.", "No.", "Two."]) if number in short else "A dog that runs along a wide beach."
        lines.append(
            {
                "messages": [
                    {"role": "user", "content": f"<image>Question {number}: what is it?"},
                    {"role": "assistant", "content": answer},
                ],
                "images": [f"photo{number % 20}.jpg"],
            }
        )
    (folder / "vqa.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "vqa.jsonl"


def converted(source: Path) -> Path:
    out = source.parent / "data"
    convert(ConvertConfig(sources=(source,), out=out, split={"train": 1.0}, workers=0))
    return out


@pytest.fixture(scope="module")
def vqa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(make_vqa(tmp_path_factory.mktemp("vqa"), 100))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 conversations, 18 of which are too long for a row of 128 tokens, the first of them at place 3."""
    folder = tmp_path_factory.mktemp("texts")
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": "word " * (300 if number % 33 == 3 and number < 590 else 10)},
            ]
        }
        for number in range(600)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return converted(folder / "chats.jsonl")


def run_of(path: Path, *, data: dict[str, Any] | None = None, encoder: Any = None, **packing: Any) -> RunConfig:
    encoder = encoder or EncoderConfig(processor=str(processor_path("text")))
    return RunConfig(
        data=DataConfig(**{"path": str(path), "workers": 0, "shuffle_buffer": 1} | (data or {})),
        encoder=encoder,
        packing=PackingConfig(**{"seq_length": 128, "window": 16} | packing),
    )


def told_by(read: Any) -> list[str]:
    """The warnings about drops that a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read()
    return [str(entry.message) for entry in caught if " are dropped as " in str(entry.message)]


def counts_of(sentence: str) -> tuple[int, int]:
    """Samples dropped and read, in "18 of the 600 samples ..."."""
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
    answers = [json.loads(line)["messages"][1]["content"] for line in (vqa.parent / "vqa.jsonl").open()]
    assert Counter(trained) == Counter(answers)


def test_under_the_rule_of_internvl_the_same_answers_are_dropped_and_the_run_says_so(vqa: Path) -> None:
    encoder = EncoderConfig(processor=QWEN, max_pixels=LARGEST, decode_in_child=False, limits=OLD)
    loader = build_loader(run_of(vqa, data={"repeat": False}, encoder=encoder, seq_length=8192))
    (told,) = told_by(lambda: list(loader))
    assert told.startswith(f"8 of the 100 samples read so far from {vqa}/text are dropped as too_few_targets (8.0%)")
    assert told.endswith("The setting encoder.limits.min_active_ratio governs this.")


def consumers() -> dict[str, Any]:
    """Ways to read a data set, each a function of a configuration that returns an iterator of packs."""

    def bridge(run: RunConfig) -> Any:
        stand_ins.install()
        pytest.importorskip("megatron.bridge")
        from megatron.bridge.data.base import DatasetBuildContext

        from energon_packing.bridge import PackedEnergonDatasetConfig

        made = PackedEnergonDatasetConfig(
            path=run.data.path, processor=run.encoder.processor, seq_length=128, num_workers=run.data.workers
        )
        made.packing.window, made.data.shuffle_buffer = 16, 1
        context = DatasetBuildContext(train_samples=600, valid_samples=0, test_samples=0, pg_collection=None)
        packs = made.build_datasets(context)[0]
        return (dataclasses.make_dataclass("P", ["keys"])((1,) * 8) for _ in iter(lambda: next(packs), None))

    def megatron_lm(run: RunConfig) -> Any:
        from energon_packing.bridge.pack_iterator import EndlessPacks

        finite = dataclasses.replace(run, data=dataclasses.replace(run.data, repeat=False))
        packs = EndlessPacks(build_loader(finite))
        return (dataclasses.make_dataclass("P", ["keys"])(next(packs).sample_keys) for _ in iter(int, 1))

    return {"our loader": build_loader, "bridge": bridge, "megatron_lm": megatron_lm}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["our loader", "bridge", "megatron_lm"])
def test_a_reason_that_drops_three_in_a_hundred_is_one_warning_of_a_run(texts: Path, name: str, workers: int) -> None:
    packs = consumers()[name](run_of(texts, data={"workers": workers}))
    (told,) = told_by(lambda: take(packs, 1500))
    dropped, read = counts_of(told)
    assert dropped >= FEWEST_DROPPED
    assert read >= FEWEST_READ
    assert SHARE <= dropped / read <= 0.05  # 3 % in truth
    assert "are dropped as oversize" in told
    assert re.search(r": 3\d\d tokens; a row holds", told)
    assert told.endswith("The setting packing.seq_length governs this.")


@pytest.mark.parametrize("buffer", [None, 64])
@pytest.mark.parametrize("workers", [0, 2])
def test_so_it_is_in_plain_energon_whose_workers_tell_it(
    texts: Path,
    workers: int,
    buffer: int | None,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: os.write(2, f"{message}\n".encode()))
    dataset = build_dataset(run_of(texts, data={"workers": workers}), packing_buffer_size=buffer)
    take(get_savable_loader(dataset), 1500)
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
    (told,) = told_by(lambda: take(get_savable_loader(dataset), 1500))
    assert told.endswith("318 tokens; max_length is 128. The setting packing.seq_length governs this.")


@pytest.fixture(scope="module")
def rare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """700 conversations without media, and 6 with an image among them."""
    source = make_vqa(tmp_path_factory.mktemp("rare"), 6)
    lines = [
        {"messages": [{"role": "user", "content": str(number)}, {"role": "assistant", "content": "word"}]}
        for number in range(700)
    ]
    mixed = source.read_text().splitlines() + [json.dumps(line) for line in lines]
    random.Random(1).shuffle(mixed)
    source.write_text("\n".join(mixed))
    return converted(source)


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


def test_a_run_that_is_resumed_tells_what_it_counts_itself_and_no_more_than_once(texts: Path) -> None:
    run = run_of(texts)
    first = build_loader(run)
    assert len(told_by(lambda: take(first, 400))) == 1
    state = first.save_state()
    again = build_loader(run)
    again.restore_state(state)
    told = told_by(lambda: take(again, 1200))
    assert len(told) == 1
    dropped, read = counts_of(told[0])
    assert SHARE <= dropped / read <= 0.05


def test_of_all_ranks_the_first_one_tells(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        loader_base, "_BUILT", itertools.repeat(0)
    )  # each rank is a process, and these its first loaders
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        loaders = [build_loader(run_of(texts), rank=rank, world_size=2) for rank in range(2)]
        assert len(told_by(lambda: [take(loader, 900) for loader in loaders])) == 1
        monkeypatch.setattr(loader_base, "_BUILT", itertools.repeat(1))
        second = build_loader(run_of(texts), rank=0, world_size=2)
        assert len(told_by(lambda: take(second, 900))) == 1, "another loader of the same data tells too"
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


def reasons_of_the_package() -> tuple[set[str], list[str]]:
    """Reasons that reach a ledger, by the calls that give them; and calls whose reason is no literal."""
    package = Path(energon_packing.__file__).parent
    reasons: set[str] = set()
    computed = []
    for file in sorted(package.rglob("*.py")):
        if file.relative_to(package).parts[0] in ("convert", "demo"):  # their reasons are in rejects
            continue
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            place = {"SampleRejected": 0, "drop": 1, "refuse_size": 1, "_refuse": 1, "_ended": 0}.get(name)
            named = [word.value for word in node.keywords if name in ("Problem", "cls") and word.arg == "reason"]
            if any(word.arg == "fatal" for word in node.keywords):
                continue
            given = named or ([] if place is None or len(node.args) <= place else [node.args[place]])
            for value in given:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    reasons.add(value.value)
                else:
                    computed.append(f"{file.relative_to(package)}: {ast.unparse(value)}")
        reasons.update(  # rows of an index
            value.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Dict)
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant) and key.value == "reason" and isinstance(value, ast.Constant)
        )
    return {reason for reason in reasons if reason}, sorted(set(computed))


PASSED_ON = [
    "chat/structures.py: found.reason",
    "encoders/decoding.py: error.reason",
    "encoders/fitting.py: over.reason",  # oversize and too_many_*, see below
    "energon/cookers.py: error.reason",
    "energon/disjoint_buffers.py: error.reason",
    "energon/disjoint_buffers.py: reason",
    "energon/packer.py: error.reason",
    "energon/sample_task_encoder.py: error.reason",
    "energon/samples.py: error.reason",
    "energon/samples.py: problem.reason",
    "energon/shard_reads.py: REASON",  # unreadable_shard
    "energon/split_pieces.py: piece.reason",
    "energon/task_encoder.py: reason",  # oversize or over_limit
    "energon/window_task_encoder.py: reason",
    "ledger.py: REASON",  # quarantined
    "media/decoding_process.py: CRASH",
    "media/decoding_process.py: TIMEOUT",
    "media/decoding_process.py: reason",
    "offline/packed_clips.py: *sample.dropped",
    "offline/packed_packs.py: *sample.dropped",
    "wan/encoder.py: error.reason",
    "wan/task_encoder.py: error.reason",
    "wan/task_encoder.py: reason",  # oversize or over_limit
]
"""Calls that pass a reason on, or take it from a name; a new one belongs here, and its reason in `SETTING_OF`."""


def test_every_reason_that_a_ledger_can_hold_has_its_setting_or_none() -> None:
    from energon_packing.energon.shard_reads import REASON as UNREADABLE
    from energon_packing.quarantine import CRASH, REASON, TIMEOUT

    reasons, computed = reasons_of_the_package()
    assert computed == PASSED_ON
    limits = {field.name.replace("max_", "too_many_") for field in dataclasses.fields(LimitsConfig)}
    reasons |= {UNREADABLE, REASON, CRASH, TIMEOUT, "oversize", "over_limit", "unmeasured"}
    reasons |= {name for name in limits if name.startswith("too_many_")}
    assert reasons == set(SETTING_OF)
    known = {each.name for each in settings()}
    known |= {f"encoder.{field.name}" for field in dataclasses.fields(TextToVideoRunConfig().encoder)}
    assert set(filter(None, SETTING_OF.values())) <= known


@pytest.mark.parametrize("command", ["measure", "stats", "stats of an index", "preview", "validate"])
def test_the_commands_that_look_at_data_tell_it_too_with_the_setting(vqa: Path, tmp_path: Path, command: str) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"data: {{path: {vqa}}}\npacking: {{seq_length: 8192}}\n"
        f"encoder: {{processor: {QWEN}, max_pixels: {LARGEST}, limits: {{min_active_ratio: 0.00390625}}}}\n"
    )
    index = ["measure", str(vqa), "--config", str(config), "--out", str(tmp_path / "index"), "--workers", "0"]
    arguments = {
        "measure": index,
        "stats": ["stats", str(vqa), "--config", str(config)],
        "stats of an index": ["stats", str(tmp_path / "index")],
        "preview": ["preview", str(vqa), "--config", str(config), "--packs", "1"],
        "validate": ["validate", str(config), "--no-bridge"],
    }[command]
    if command == "stats of an index":
        assert CliRunner().invoke(cli, index).exit_code == 0
    for form in ([], ["--json"]):
        done = CliRunner().invoke(cli, [*arguments, *form])
        assert done.exit_code == 0, done.output
        said = " ".join(done.output.split())
        assert said.count(" are dropped as too_few_targets") == 1, done.output
        assert "The setting encoder.limits.min_active_ratio governs this" in said


@pytest.mark.parametrize("what", ["state", "index"])
def test_what_was_made_under_the_old_default_is_refused_by_its_name(vqa: Path, tmp_path: Path, what: str) -> None:
    encoders = [
        EncoderConfig(processor=QWEN, max_pixels=LARGEST, decode_in_child=False, limits=limits)
        for limits in (OLD, LimitsConfig())
    ]
    if what == "state":
        old, new = (build_loader(run_of(vqa, encoder=encoder, seq_length=8192)) for encoder in encoders)
        next(iter(old))
        with pytest.raises(ConfigError, match=r"made with encoder\.limits=.*min_active_ratio.*0\.00390625.*this run"):
            new.restore_state(old.save_state())
        return
    for limits, code in (("{min_active_ratio: 0.00390625}", 0), ("{}", 2)):
        config = tmp_path / "run.yaml"
        config.write_text(f"encoder: {{processor: {QWEN}, max_pixels: {LARGEST}, limits: {limits}}}\n")
        arguments = ["measure", str(vqa), "--config", str(config), "--out", str(tmp_path / "index"), "--workers", "0"]
        done = CliRunner().invoke(cli, arguments)
        assert done.exit_code == code, done.output
    said = str(done.exception or "") + done.output
    assert "encoder.limits was" in " ".join(said.split())
