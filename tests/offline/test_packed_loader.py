"""Three ways to the packs of a plan: from the data sets, from packed tokens, from packed pixels. They are the same."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import transformers
from PIL import Image
from support.offline_processors import glm4v
from test_planned_loader import digests, planned

from energon_packing import build_loader, thd
from energon_packing.config import (
    PACK_LIMITS,
    DataConfig,
    EncoderConfig,
    LimitsConfig,
    PackingConfig,
    ParallelConfig,
    RunConfig,
)
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import processor_path
from energon_packing.energon.pack_bytes import tensors_of
from energon_packing.errors import ConfigError, UserError
from energon_packing.offline.files import read_metadata, write_table
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.pack import PackConfig, pack
from energon_packing.offline.plan import Plan
from energon_packing.offline.verify import VerifyConfig, first_difference, verify
from energon_packing.report.sample_story import story_in_plan

WAYS = {"tokens": {}, "copied": {"media": "copy"}, "pixels": {"store": "pixels"}}
SMALL = {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}


def packed(run, folder, way, **settings):
    """The run on its plan, packed in one of the ways."""
    out = folder / way
    report = pack(PackConfig(**({"plan": Path(run.data.path), "out": out, "workers": 0} | WAYS[way] | settings)))
    assert report.missing == 0
    return on(run, out)


def on(run, path):
    return dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(path)))


def read(run, **options):
    """All packs of an epoch, their pixels as the processor's numbers."""
    return [dataclasses.replace(each, batch=each.batch.finished()) for each in open_loader(run, **options)]


def check_same(expected, found):
    """Everything about every pack, each tensor bit for bit."""
    assert len(found) == len(expected)
    for ours, theirs in zip(expected, found, strict=True):
        tensors, others = tensors_of(ours.batch), tensors_of(theirs.batch)
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == others[name].dtype, name
            assert torch.equal(tensor, others[name]), name
        assert theirs.batch.visual_counts == ours.batch.visual_counts
        assert (theirs.batch.sample_keys, theirs.batch.fillers) == (ours.batch.sample_keys, ours.batch.fillers)
        for field in dataclasses.fields(ours):
            if field.name not in ("batch", "worker", "read"):
                assert getattr(theirs, field.name) == getattr(ours, field.name), field.name
        # A data set may have moved.
        read = [sorted((kind, count) for (_, kind), count in each.read.items()) for each in (theirs, ours)]
        assert read[0] == read[1]
    assert first_difference(expected[0], found[0]) is None


@pytest.fixture(scope="module")
def plan_of(dataset, run_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    return planned(run_of(dataset), dataset, folder)


@pytest.fixture(scope="module")
def packed_runs(plan_of):
    """Way -> the run on packs that were stored in that way, four in a shard."""
    return {way: packed(plan_of, Path(plan_of.data.path).parent, way, shard_packs=4) for way in WAYS}


def test_every_pack_of_an_epoch_is_the_planned_one_whatever_it_is_read_from(plan_of, packed_runs):
    expected = read(plan_of)
    assert sum(bool(each.batch.visual_inputs) for each in expected) > 3
    assert any("pixel_values_videos" in (each.batch.visual_inputs or {}) for each in expected)
    assert any(key.startswith("pair") for each in expected for key in each.keys)
    for way in WAYS:
        check_same(expected, read(packed_runs[way], workers=2))  # the tests below have no workers


def test_build_loader_opens_a_plan_and_its_packs_too(plan_of, packed_runs):
    for run in (plan_of, packed_runs["tokens"]):
        made, expected = (digests(opens(run, rank=1, world_size=2)) for opens in (build_loader, open_loader))
        assert made == expected != []
        with pytest.raises(ConfigError, match="made already; leave out packing_buffer_size"):
            build_loader(run, packing_buffer_size=8)


def test_a_family_with_positions_on_three_axes_has_the_same_packs_three_ways(dataset, run_of, tmp_path):
    """Of all other processors, tests/lock has the rows of each way."""
    glm4v(SMALL, SMALL).save_pretrained(tmp_path / "processor")
    encoder = EncoderConfig(processor=str(tmp_path / "processor"), family="auto", position_ids="mrope")
    run = dataclasses.replace(run_of(dataset), encoder=encoder)
    run = planned(run, dataset, tmp_path)
    expected = read(run)
    assert sum(bool(each.batch.visual_inputs) for each in expected) > 2
    for way in ("tokens", "pixels"):
        check_same(expected, read(packed(run, tmp_path, way)))


@pytest.mark.parametrize(
    ("way", "packing", "encoder"),
    [
        ("copied", {"oversize": "split", "split_positions": "continue"}, {"position_ids": "mrope"}),
        ("pixels", {"dummy_image": True}, {"loss_weighting": "square"}),
        (
            "tokens",
            {"seq_length": 512, "pad_to_max_length": True},
            {"limits": LimitsConfig(max_tokens=4096, when_over=("resize", "truncate"))},
        ),
    ],
    ids=["split", "dummy_image", "resize"],
)
def test_what_a_row_makes_of_long_samples_is_stored_as_it_is_planned(way, packing, encoder, dataset, run_of, tmp_path):
    run = run_of(dataset, encoder=encoder, **packing)
    run = planned(dataclasses.replace(run, parallel=ParallelConfig(context_parallel=2)), dataset, tmp_path)
    expected = read(run)
    assert sum(len(each.changed) for each in expected) > 0 or "dummy_image" in packing
    # A plan for context parallelism 2 serves 1, and rows of another width: the packs are assembled again.
    change = {"packing": dataclasses.replace(run.packing, pad_to_max_length=not run.packing.pad_to_max_length)}
    change["parallel"] = ParallelConfig()
    assembled_again = read(dataclasses.replace(run, **change))
    run_packed = packed(run, tmp_path, way)
    check_same(expected, read(run_packed))
    check_same(assembled_again, read(dataclasses.replace(run_packed, **change)))


def test_samples_of_less_than_a_unit_of_a_tiny_model_are_stored_with_what_they_cost(dataset, run_of, tmp_path):
    sizes = {"hidden_size": 2, "intermediate_size": 2, "vocab_size": 2, "num_attention_heads": 1}
    transformers.LlamaConfig(num_hidden_layers=1, **sizes).save_pretrained(tmp_path / "model")
    with pytest.warns(UserWarning, match="has no vision model, and samples have images"):  # of the plan
        run = planned(run_of(dataset, cost_model=str(tmp_path / "model")), dataset, tmp_path)
    expected = read(run)
    assert any(it.cost == 0 for pack in Plan.open(run.data.path).packs(0, len(expected)) for it in pack.samples)
    check_same(expected, read(packed(run, tmp_path, "tokens")))


def test_a_run_says_to_whom_padding_belongs_whatever_is_stored(dataset, run_of, tmp_path):
    run = dataclasses.replace(run_of(dataset), parallel=ParallelConfig(context_parallel=2))
    planned_run = planned(run, dataset, tmp_path)
    real = dataclasses.replace(run.packing, padding="real")
    expected = [thd.real_padding(each.batch) for each in read(planned_run)]
    assert any(batch.real_tokens < batch.total_tokens for batch in expected)
    for stored in (planned_run, packed(dataclasses.replace(planned_run, packing=real), tmp_path, "pixels")):
        for ours, batch in zip(read(dataclasses.replace(stored, packing=real)), expected, strict=True):
            assert ours.batch.cu_seqlens_padded is None
            assert torch.equal(ours.batch.cu_seqlens, batch.cu_seqlens)
            assert torch.equal(ours.batch.tokens, batch.tokens)
    check_same(read(planned_run), read(stored))


@pytest.mark.parametrize(("way", "pixels"), [("tokens", "float32"), ("pixels", "bfloat16")])
def test_pixels_are_what_the_run_asks_for_whatever_is_stored(way, pixels, plan_of, packed_runs):
    expected, found = (
        read(dataclasses.replace(run, encoder=dataclasses.replace(run.encoder, pixels=pixels)))
        for run in (plan_of, packed_runs[way])
    )
    shown = [each.batch.visual_inputs for each in expected if "pixel_values" in (each.batch.visual_inputs or {})]
    assert {str(inputs["pixel_values"].dtype) for inputs in shown} == {f"torch.{pixels}"}
    check_same(expected, found)


def test_preference_pairs_with_images_and_extra_fields_are_stored_with_them(tmp_path):
    Image.new("RGB", (60, 80), (200, 30, 90)).save(tmp_path / "image.png")
    records = [
        {
            **{"id": f"k{at}", "conversations": [{"from": "human", "value": "<image>Q?"}], "images": ["image.png"]},
            "chosen": {"from": "gpt", "value": "Because " * (at + 1)},
            "rejected": {"from": "gpt", "value": "No"},
            "extras": {"reward": {"chosen": 0.5 + at, "rejected": -at}},
        }
        for at in range(12)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    convert(ConvertConfig(sources=(tmp_path / "a.jsonl",), out=tmp_path / "data", split={"train": 1.0}, workers=0))
    run = RunConfig(
        data=DataConfig(path=str(tmp_path / "data"), workers=0, repeat=False),
        encoder=EncoderConfig(processor=str(processor_path("qwen2_5_vl")), extra_fields=("reward", "preference")),
        packing=PackingConfig(seq_length=256, pairs="both"),
    )
    run = planned(run, tmp_path / "data", tmp_path)
    expected = read(run)
    assert all(each.batch.extra["reward"].any() for each in expected)
    check_same(expected, read(packed(run, tmp_path, "pixels")))


def endless(run):
    return dataclasses.replace(run, data=dataclasses.replace(run.data, repeat=True))


@pytest.fixture(scope="module")
def whole(plan_of):
    """The first packs of the plan, over its end."""
    return digests(itertools.islice(open_loader(endless(plan_of)), 32))


def test_a_state_of_the_plan_continues_on_its_packs_and_back_with_any_ranks(plan_of, whole, packed_runs):
    stored, source, ranks = endless(packed_runs["tokens"]), endless(plan_of), 2
    for begun, continued in ((source, stored), (stored, source)):
        before = open_loader(begun, rank=3, world_size=4)
        for _ in itertools.islice(before, 2):
            pass
        state = before.save_state()
        loaders = [open_loader(continued, rank=rank, world_size=ranks) for rank in range(ranks)]
        for loader in loaders:
            loader.restore_state(state)
        merged = [digests(itertools.islice(loader, 24 // ranks)) for loader in loaders]
        assert all(loader.save_state() == state | {"position": 32} for loader in loaders)
        assert [each for step in zip(*merged, strict=True) for each in step] == whole[8:]


def test_a_sample_that_cannot_be_decoded_is_dropped_as_from_the_plan(dataset, run_of, tmp_path):
    copied = tmp_path / "data"
    shutil.copytree(dataset, copied)
    run = planned(run_of(copied), copied, tmp_path)
    plan = Plan.open(run.data.path)
    shown = [each for made in plan.packs(0, len(plan)) for each in made.samples if each.media]
    source, media = plan.facts.datasets[shown[0].dataset], shown[0].media[0]
    with (Path(source.media_root) / source.media_shards[media.shard]).open("r+b") as file:
        file.seek(media.offset)
        file.write(b"\0" * media.size)
    expected = read(run)
    dropped = [(entry.key, entry.reason) for each in expected for entry in each.dropped]
    assert {each.key for each in shown if media in each.media} == dict(dropped).keys()
    assert [each.index for each in expected] == list(range(len(plan)))
    for way, settings in WAYS.items():
        report = pack(PackConfig(plan=Path(run.data.path), out=tmp_path / way, workers=0, **settings))
        check_same(expected, read(on(run, tmp_path / way)))
    # Pixels are decoded, and their samples so dropped, when they are packed.
    assert sum(sum(shard.drops.values()) for shard in report.facts.shards) == len(dropped)
    lines = [json.loads(line) for line in (tmp_path / "pixels" / "drops.jsonl").read_text().splitlines()]
    assert lines[0] == {"plan": plan.facts.id}
    assert [(line["dropped"], line["reason"]) for line in lines[1:]] == dropped
    for made in plan.packs(0, len(plan)):
        for each in made.samples:
            stored = [it for it in story_in_plan(each.name, tmp_path / "pixels") if it.stage == "stored"]
            assert {it.outcome for it in stored} == {"dropped" if each.name in dict(dropped) else "ok"}
            assert all(f"pack {made.number} in shard-0" in it.text for it in stored)


def test_packing_that_drops_more_than_the_budget_stops_however_few_the_samples_are(dataset, run_of, tmp_path):
    copied = tmp_path / "data"
    shutil.copytree(dataset, copied)
    run = planned(run_of(copied, drop_budget=0.1), copied, tmp_path)
    plan = Plan.open(run.data.path)
    samples = [each for made in plan.packs(0, len(plan)) for each in made.samples]
    (source,) = plan.facts.datasets
    for media in (media for each in samples for media in each.media):
        with (Path(source.media_root) / source.media_shards[media.shard]).open("r+b") as file:
            file.seek(media.offset)
            file.write(b"\0" * media.size)
    bad = sum(bool(each.media) for each in samples)
    asked = PackConfig(plan=Path(run.data.path), out=tmp_path / "packed", workers=0, store="pixels")
    for _ in range(2):
        with pytest.raises(
            UserError, match=rf"{bad} of {len(samples)} samples .* packing\.drop_budget=0\.1 of the plan"
        ):
            pack(asked)


def test_a_packed_run_needs_its_data_sets_only_for_media_that_stayed_there(dataset, run_of, tmp_path):
    copied = tmp_path / "data"
    shutil.copytree(dataset, copied)
    run = planned(run_of(copied), copied, tmp_path)
    runs = {way: packed(run, tmp_path, way) for way in WAYS}
    expected = read(run)
    uuid = next(
        path
        for path in copied.rglob("index.uuid")
        if "media" in str(path) or len(list(copied.rglob("index.uuid"))) == 1
    )
    before = uuid.read_text()
    uuid.write_text("another")
    with pytest.raises(UserError, match=r"changed since .* was packed with --media reference"):
        read(runs["tokens"])
    uuid.write_text(before)
    check_same(expected, read(runs["tokens"]))
    shutil.rmtree(copied)
    with pytest.raises(UserError, match=r"media is not there; restore it"):
        read(runs["tokens"])
    for way in ("copied", "pixels"):
        check_same(expected, read(runs[way]))
        assert not verify(VerifyConfig(directory=Path(runs[way].data.path), share=0)).findings


def test_data_sets_that_moved_are_planned_where_they_are_and_nothing_is_packed_again(dataset, run_of, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    shutil.copytree(dataset, before)
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    run = planned(run_of(before), before, tmp_path / "first")
    stored = packed(run, tmp_path, "tokens")
    expected = read(run)
    before.rename(after)
    with pytest.raises(UserError, match=r"media is not there; restore it"):
        read(stored)
    moved = planned(run_of(after), after, tmp_path / "second")
    report = pack(PackConfig(plan=Path(moved.data.path), out=tmp_path / "tokens", workers=0))
    assert (report.packed, report.missing) == (0, 0)
    check_same(expected, read(stored))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"encoder": {"position_ids": "1d"}}, "was packed with position_ids=auto"),
        ({"encoder": {"loss_weighting": "sample"}}, "was packed with loss_weighting="),
    ],
)
def test_a_run_whose_settings_are_not_those_of_the_stored_packs_is_refused_by_name(change, sentence, packed_runs):
    run = packed_runs["tokens"]
    changed = {name: dataclasses.replace(getattr(run, name), **values) for name, values in change.items()}
    with pytest.raises(ConfigError, match=sentence):
        open_loader(dataclasses.replace(run, **changed))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("way", ["plan", "tokens"])
def test_media_that_changed_since_they_were_measured_end_the_run_by_name(dataset, run_of, tmp_path, way, workers):
    copied = tmp_path / "data"
    shutil.copytree(dataset, copied)
    run = planned(run_of(copied), copied, tmp_path)
    (source,) = Plan.open(run.data.path).facts.datasets
    (name,) = source.media_shards
    shard = Path(source.media_root) / name
    run = run if way == "plan" else packed(run, tmp_path, way)
    content = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(content)  # a copy is as good
    assert read(run, workers=workers)
    for changed, told in (
        (b"\0" * 512 + content, f"{len(content) + 512} bytes, .* instead of {len(content)} bytes"),
        (b"\0" * len(content), f"{len(content)} bytes, first header .* instead of {len(content)} bytes"),
    ):
        shard.write_bytes(changed)
        with pytest.raises(UserError, match=rf"{name} changed since it was measured \({told}"):
            read(run, workers=workers)
    shard.rename(tmp_path / "away.tar")
    with pytest.raises(UserError, match=rf"{name}, media of the plan, is missing \(No such file"):
        read(run, workers=workers)


def test_a_plan_of_an_index_without_sizes_of_media_is_read_as_before(plan_of, tmp_path):
    plan = Plan.open(plan_of.data.path)
    table, facts = pq.read_table(plan.path), read_metadata(plan.path)
    for each in facts["datasets"]:
        del each["media_states"]
    write_table(tmp_path / "older.parquet", table.schema, [table], facts)
    older = dataclasses.replace(plan_of, data=dataclasses.replace(plan_of.data, path=str(tmp_path / "older.parquet")))
    check_same(read(plan_of), read(older))


@pytest.mark.parametrize(
    "name", [*PACK_LIMITS, *(f"limits.{each.name}" for each in dataclasses.fields(LimitsConfig) if "max" in each.name)]
)
def test_a_limit_of_the_run_that_is_tighter_than_the_plans_is_refused_by_name(plan_of, packed_runs, name):
    """Also where a state would be restored: the loader is built before."""
    if name == "max_padded_pixels_per_pack":
        pytest.skip("this family pads no images; tests/energon/test_padded_pixels.py")
    for run in (plan_of, packed_runs["tokens"], packed_runs["pixels"]):
        section, _, limit = ("packing", "", name) if name in PACK_LIMITS else ("encoder", *name.split(".")[1:] * 2)
        change = {limit: 5}
        if section == "encoder":
            change = {"limits": dataclasses.replace(run.encoder.limits, **change)}
        tighter = dataclasses.replace(run, **{section: dataclasses.replace(getattr(run, section), **change)})
        with pytest.raises(ConfigError, match=rf"was made with (packing|encoder\.limits)\.{limit}=None, .*this run"):
            open_loader(tighter)
