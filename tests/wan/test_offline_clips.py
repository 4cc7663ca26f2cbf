"""Clips measured, planned and packed: sizes, clips and drops are those of the online loader, bit for bit."""

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from support.old_states import refused_without

from energon_packing.cli.main import cli
from energon_packing.config import DataConfig, EncoderConfig, ParallelConfig, RunConfig, to_mapping
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import processor_path
from energon_packing.energon.pack_bytes import field_digests
from energon_packing.errors import ConfigError, PackingError, UserError
from energon_packing.offline import source
from energon_packing.offline.index import Index
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.pack import PackConfig, pack
from energon_packing.offline.plan import Plan, read_drops
from energon_packing.offline.planner import make_plan
from energon_packing.offline.verify import VerifyConfig, first_difference, verify
from energon_packing.wan.config import TextToVideoConfig, TextToVideoPackingConfig, TextToVideoRunConfig
from energon_packing.wan.encoder import T5CaptionEncoder
from energon_packing.wan.stored import StoredClips
from energon_packing.wan.task_encoder import TextToVideoTaskEncoder, build_text_to_video_loader

pytest.importorskip("pyarrow", reason="pyarrow is not installed")

SEQ_LENGTH, TEXT = 48, 16
OLDEST = {
    *("data set", "rank", "ranks", "split", "workers", "multiple", "padding", "caption encoder", "latent encoder"),
    *(f"data.{name}" for name in ("epoch_end", "repeat", "seed", "shuffle_buffer", "shuffle_over_epochs")),
    *(f"encoder.{name}" for name in ("compat", "decode_seconds", "dtype", "fps", "latent_channels", "longer", "patch")),
    *(f"encoder.max_{name}" for name in ("frames", "pixels", "source_pixels", "text_tokens")),
    *("encoder.text_width", "packing.max_cost_per_pack", "packing.max_segments_per_pack"),
    *("packing.max_text_tokens_per_pack", "packing.policy", "packing.seq_length"),
    *(f"packing.{name}" for name in ("balance_window", "oversize", "window")),
}
"""Entries of a fingerprint that every state has, as in tests/energon/test_fingerprint.py."""
WAYS = {"tokens": {}, "copied": {"media": "copy"}, "pixels": {"store": "pixels"}}


@pytest.fixture(scope="module")
def run(dataset, pipeline):
    """A run on the converted clips: some are too long, some have too much text, and they are padded to 4."""
    return TextToVideoRunConfig(
        data=DataConfig(path=str(dataset), workers=0, repeat=False),
        encoder=TextToVideoConfig(
            latent_channels=4, text_width=32, max_pixels=64 * 48, vae=str(pipeline), text_encoder=str(pipeline)
        ),
        packing=TextToVideoPackingConfig(
            seq_length=SEQ_LENGTH, max_text_tokens_per_pack=TEXT, max_segments_per_pack=4, window=16, drop_budget=1.0
        ),
        parallel=ParallelConfig(context_parallel=2),
    )


@pytest.fixture(scope="module")
def index(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("clips") / "index"
    report = measure(MeasureConfig(paths=(Path(run.data.path),), out=out, workers=0), run)
    assert report.missing == 0
    return out


@pytest.fixture(scope="module")
def planned(run, index, tmp_path_factory):
    """The run on its plan."""
    out = tmp_path_factory.mktemp("clips") / "plan.parquet"
    make_plan([index], dataclasses.replace(run, plan=dataclasses.replace(run.plan, max_data_parallel=4)), out)
    return on(run, out)


@pytest.fixture(scope="module")
def online(run):
    """All packs of the online loader, and what it dropped."""
    loader = build_text_to_video_loader(run)
    packs = list(loader)
    return packs, drops_of(packs) | {entry.key: entry.reason for entry in loader.epoch_report.dropped_at_end}


@pytest.fixture(scope="module")
def whole(planned):
    """All packs of the plan."""
    return list(open_loader(planned))


def test_the_loader_of_clips_opens_their_plan_too(planned, whole):
    assert digests(build_text_to_video_loader(planned)) == digests(whole)


def test_micro_batches_of_clips_are_not_ordered_since_nothing_says_how_many_a_global_batch_has(planned):
    data = dataclasses.replace(planned.data, order_micro_batches=True, repeat=True)
    parallel = dataclasses.replace(planned.parallel, pipeline_parallel=2)
    with pytest.raises(ConfigError, match=r"order_micro_batches needs training\.global_batch_size.*turn ordering off"):
        open_loader(dataclasses.replace(planned, data=data, parallel=parallel))


def on(run, path):
    return dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(path)))


def packed(planned, folder, way):
    out = folder / way
    pack(PackConfig(plan=Path(planned.data.path), out=out, workers=0, shard_packs=5, **WAYS[way]))
    return on(planned, out)


def digests(packs):
    return [(each.keys, each.changed, each.cost, each.dropped, field_digests(each.batch)) for each in packs]


def clips_of(packs):
    """Everything about each clip that does not depend on its neighbours, by key."""
    found = {}
    for each in packs:
        batch, query, key = each.batch, 0, 0
        for at, name in enumerate(batch.keys):
            patches, text = int(batch.seq_len_q[at]), int(batch.seq_len_kv[at])
            found[name] = (
                batch.video_latents[query : query + patches].clone(),
                batch.context_embeddings[key : key + text].clone(),
                batch.grid_sizes[at].clone(),
                batch.video_metadata[at],
            )
            query += int(batch.seq_len_q_padded[at])
            key += int(batch.seq_len_kv_padded[at])
        assert each.occupied <= SEQ_LENGTH
        assert int(batch.seq_len_kv_padded.sum()) <= TEXT
        assert len(batch.keys) <= 4
    return found


def drops_of(packs):
    return {entry.key: entry.reason for each in packs for entry in each.dropped}


def check_same(expected, found):
    assert expected.keys() == found.keys()
    for name, (*tensors, metadata) in expected.items():
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(tensors, found[name], strict=False)), name
        assert metadata == found[name][-1]


def test_the_index_has_a_row_for_every_clip_with_the_sizes_of_the_online_loader(index, online):
    packs, dropped = online
    rows = rows_of(Index.open(index))
    sizes = {row["key"]: (row["length"], row["text_tokens"]) for row in rows}
    frames = {row["key"]: row["frames"] for row in rows}
    assert len(rows) == len(sizes) == 36
    for each in packs:
        lengths = zip(each.batch.seq_len_q.tolist(), each.batch.seq_len_kv.tolist(), strict=True)
        steps = each.batch.grid_sizes[:, 0].tolist()
        for key, size, latents in zip(each.keys, lengths, steps, strict=False):  # the last may be a filler
            assert sizes.pop(key) == size
            assert frames[key] in (0, 1 + 4 * (latents - 1)), "those that the VAE is given, not all of the file"
    assert sizes.keys() == dropped.keys()
    assert all(row["reason"] is None for row in rows)  # what is dropped is so by limits of a pack


def test_a_planned_epoch_has_the_clips_and_the_drops_of_the_online_loader(online, whole, planned):
    packs, dropped = online
    check_same(clips_of(packs), clips_of(whole))
    plan = Plan.open(planned.data.path)
    assert {line["dropped"]: line["reason"] for line in read_drops(plan.path, plan.facts.id)} == dropped
    assert set(dropped.values()) == {"oversize", "over_limit"}
    assert {each.batch.fillers for each in whole} == {0, 1}


def test_a_record_that_cannot_be_measured_is_dropped_with_the_reason_of_the_online_loader(run, index, tmp_path):
    narrow = dataclasses.replace(run, encoder=dataclasses.replace(run.encoder, max_text_tokens=6, max_pixels=16 * 16))
    found = measure(MeasureConfig(paths=(Path(run.data.path),), out=tmp_path / "index", workers=0), narrow).index
    rows = rows_of(found)
    refused = {row["key"]: (row["reason"], row["detail"]) for row in rows if row["reason"] is not None}
    encoder = TextToVideoTaskEncoder(dataclasses.replace(narrow, packing=TextToVideoPackingConfig(seq_length=2**20)))
    loader = build_text_to_video_loader(narrow, task_encoder=encoder)
    packs = list(loader)
    entries = [entry for each in packs for entry in each.dropped] + list(loader.epoch_report.dropped_at_end)
    assert refused == {entry.key: (entry.reason, entry.detail) for entry in entries}
    assert len(refused) > 6
    with pytest.raises(UserError, match=r"max_pixels|max_text_tokens"):
        measure(MeasureConfig(paths=(Path(run.data.path),), out=index, workers=0), narrow)


@pytest.mark.parametrize(
    "way", ["pixels", *(pytest.param(way, marks=pytest.mark.full) for way in ("tokens", "copied"))]
)
def test_every_way_gives_the_packs_of_the_plan_digest_by_digest(planned, whole, tmp_path, way):
    run = packed(planned, tmp_path, way)
    found = list(open_loader(run))
    assert digests(found) == digests(whole)
    assert first_difference(whole[0], found[0]) is None
    report = verify(VerifyConfig(directory=Path(run.data.path), share=1.0, workers=0))
    assert (report.findings, report.remade) == ((), len(whole))


@pytest.mark.parametrize("kind", ["plan", "packs"])
def test_clips_that_moved_are_named_at_once(run, rows, tmp_path, kind):
    data, as_train = tmp_path / "here" / "clips", {"train": 1.0}
    convert(
        ConvertConfig(sources=(rows,), out=data, format="text-to-video", layout="monolithic", split=as_train, workers=0)
    )
    measure(MeasureConfig(paths=(data,), out=tmp_path / "index", workers=0), on(run, data))
    make_plan([tmp_path / "index"], on(run, data), plan := tmp_path / "plan.parquet")
    config = on(run, plan) if kind == "plan" else packed(on(run, plan), tmp_path, "tokens")
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(UserError, match=r"here/clips is not there; restore it, or measure"):
        open_loader(config)


def test_every_way_is_read_ahead_from_a_store(planned, whole, tmp_path, monkeypatch):
    pytest.importorskip("multistorageclient", reason="pip install '.[remote]'")
    profile = {"storage_provider": {"type": "file", "options": {"base_path": str(tmp_path)}}}
    (tmp_path / "msc.json").write_text(json.dumps({"profiles": {"clips-in-store": profile}}))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    ahead = set()
    start = source._RemotePieces.start
    monkeypatch.setattr(
        source._RemotePieces, "start", lambda self, owner, places: ahead.add(owner) or start(self, owner, places)
    )
    for way in ("copied", "pixels"):
        packed(planned, tmp_path, way)
        ahead.clear()
        assert digests(open_loader(on(planned, f"msc://clips-in-store/{way}"))) == digests(whole)
        assert ahead >= set(range(len(whole)))


@pytest.fixture
def repairing(monkeypatch):
    """Installs an ftfy, or takes it away."""

    def make(installed):
        monkeypatch.setitem(sys.modules, "ftfy", SimpleNamespace(fix_text=str) if installed else None)

    return make


def test_states_and_stored_packs_from_before_a_setting_are_read_where_it_has_its_default(planned, whole, tmp_path):
    run = packed(planned, tmp_path, "pixels")
    file = Path(run.data.path) / "packed.json"
    facts = json.loads(file.read_text())
    facts["encoder"].pop("encoder.frame_size", None)
    file.write_text(json.dumps(facts))
    loader = open_loader(run)
    next(iter(loader))
    state = loader.save_state()
    state["fingerprint"].pop("encoder.frame_size", None)
    again = open_loader(run)
    again.restore_state(state)
    assert digests(again) == digests(whole[1:])
    other = dataclasses.replace(run, encoder=dataclasses.replace(run.encoder, frame_size=(16, 16)))
    with pytest.raises(ConfigError, match=r"encoder\.frame_size"):
        open_loader(other)


def test_a_state_from_before_any_setting_of_clips_but_the_oldest_is_accepted(run):
    own = build_text_to_video_loader(run).save_state()["fingerprint"]
    entries = {name for name in refused_without(own) if not name.startswith("data set ")}
    assert entries - {"ftfy"} == OLDEST  # which is there where it is installed


@pytest.mark.parametrize("installed", [True, False])
def test_ftfy_may_come_and_go_where_captions_are_stored_as_embeddings(run, tmp_path, repairing, installed):
    repairing(installed)
    stored = packed(measured_anew(run, tmp_path), tmp_path, "pixels")
    loader = open_loader(stored)
    expected = digests(loader)
    next(iter(loader := open_loader(stored)))
    state = loader.save_state()
    repairing(not installed)
    again = open_loader(stored)
    again.restore_state(state)
    assert digests(again) == expected[1:]


@pytest.mark.parametrize("installed", [True, False])
def test_plans_and_stored_tokens_are_refused_with_another_ftfy_and_say_what_to_do(run, tmp_path, repairing, installed):
    repairing(installed)
    plan = measured_anew(run, tmp_path)
    paths = plan, packed(plan, tmp_path, "tokens")
    repairing(not installed)
    for made in paths:
        accepting = dataclasses.replace(made, data=dataclasses.replace(made.data, accept_changed=("ftfy",)))
        for each in (made, accepting):  # a plan is made again, whatever states accept
            with pytest.raises(ConfigError, match=r"ftfy=.*; install or remove ftfy, or measure and plan again"):
                open_loader(each)


@pytest.mark.parametrize("installed", [True, False])
def test_a_state_with_another_ftfy_is_refused_until_it_is_accepted(run, repairing, installed):
    repairing(installed)
    next(iter(loader := build_text_to_video_loader(run)))
    state = loader.save_state()
    repairing(not installed)
    with pytest.raises(ConfigError, match=r'ftfy.*; install or remove ftfy, set data\.accept_changed=\["ftfy"\]'):
        build_text_to_video_loader(run).restore_state(state)
    accepting = dataclasses.replace(run, data=dataclasses.replace(run.data, accept_changed=("ftfy",)))
    loader = build_text_to_video_loader(accepting)
    with pytest.warns(UserWarning, match="ftfy"):
        loader.restore_state(state)
    assert next(iter(loader)).keys


def measured_anew(run, folder):
    """The run on a plan of its own."""
    measure(MeasureConfig(paths=(Path(run.data.path),), out=folder / "index", workers=0), run)
    make_plan([folder / "index"], run, folder / "plan.parquet")
    return on(run, folder / "plan.parquet")


def rows_of(index):
    return [row for each in index.datasets for shard in each.shards for row in index.rows(each, shard).to_pylist()]


@pytest.mark.full
def test_latents_of_bfloat16_are_stored_bit_for_bit_and_are_no_others(run, index, tmp_path):
    half = dataclasses.replace(run, encoder=dataclasses.replace(run.encoder, dtype="bfloat16"))
    make_plan([index], half, tmp_path / "plan.parquet")
    expected = list(open_loader(on(half, tmp_path / "plan.parquet")))
    stored = packed(on(half, tmp_path / "plan.parquet"), tmp_path, "pixels")
    assert digests(list(open_loader(stored))) == digests(expected)
    assert expected[0].batch.video_latents.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=r"was packed with encoder\.dtype="):
        open_loader(dataclasses.replace(stored, encoder=run.encoder))


def test_a_run_continues_at_its_position_with_other_ranks_and_from_what_is_stored(planned, whole, tmp_path):
    stored = packed(planned, tmp_path, "pixels")
    ranks = [iter(loader := open_loader(planned, rank=rank, world_size=2)) for rank in (0, 1)]
    begun = [next(rank) for _ in range(2) for rank in ranks]
    state = loader.save_state()
    assert digests(begun) == digests(whole[:4])
    for world_size in (1, 3):
        loaders = [open_loader(stored, rank=rank, world_size=world_size) for rank in range(world_size)]
        for each in loaders:
            each.restore_state(state)
        rest = [iter(each) for each in loaders]
        found = [next(rest[at % world_size]) for at in range(6)]
        assert digests(found) == digests(whole[4:10])


@pytest.mark.full
def test_a_clip_that_cannot_be_rendered_is_dropped_alike_from_everything_that_is_stored(planned, tmp_path):
    tight = dataclasses.replace(planned, encoder=dataclasses.replace(planned.encoder, max_source_pixels=2000))
    expected = list(open_loader(tight))
    dropped = drops_of(expected)
    assert set(dropped.values()) == {"media_too_large"}
    stored = dataclasses.replace(packed(planned, tmp_path, "tokens"), encoder=tight.encoder)
    assert digests(list(open_loader(stored))) == digests(expected)


def test_a_stored_pack_that_cannot_be_assembled_is_named_with_its_shard(planned, tmp_path, monkeypatch):
    run = packed(planned, tmp_path, "pixels")
    read = StoredClips.from_bytes.__func__

    def damaged(cls, buffer):
        first, *rest = read(cls, buffer).samples
        measured = dataclasses.replace(first.measured, grid=(1, 1, 1))
        return StoredClips(samples=(dataclasses.replace(first, measured=measured), *rest))

    monkeypatch.setattr(StoredClips, "from_bytes", classmethod(damaged))
    with pytest.raises(PackingError, match=r"pack 0 in .*shard-00000\.bin cannot be assembled: clips .* have patches"):
        next(iter(open_loader(run)))


def test_a_value_that_differs_is_named_with_its_clip(whole):
    pack = next(each for each in whole if len(each.keys) > 1)
    latents = pack.batch.video_latents.clone()
    latents[int(pack.batch.seq_len_q_padded[0]), 0, 0] += 1
    changed = dataclasses.replace(pack, batch=dataclasses.replace(pack.batch, video_latents=latents))
    assert f"video_latents of sample {pack.keys[1]}" in first_difference(pack, changed)


def test_the_commands_of_the_page_take_clips_as_they_take_conversations(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sections = {name: to_mapping(getattr(run, name)) for name in ("encoder", "packing", "parallel")}
    Path("wan.yaml").write_text(json.dumps(sections))
    Path("data").mkdir()
    Path("data/clips").symlink_to(run.data.path)
    page = (Path(__file__).parents[2] / "docs/offline.md").read_text()
    block = page.partition("## Clips\n")[2].partition("```bash\n")[2].partition("```")[0]
    commands = [shlex.split(line)[1:] for line in block.splitlines()]
    assert [words[0] for words in commands] == ["measure", "plan", "pack", "verify", "preview"]
    here = {"measure", "pack", "verify"}
    commands = [[*words, *(("--workers", "0") if words[0] in here else ())] for words in commands]
    preview = [word.replace("packed", "plan.parquet") for word in commands[-1]]
    more = [["explain", "s30", "plan.parquet"], *(["stats", path] for path in ("index", "plan.parquet"))]
    said = []
    for words in (*commands, preview, *more):
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, (words, done.output, done.exception)
        said.append(done.stdout)
    assert "patches" in said[1]
    assert "text tokens" in said[1]
    assert said[4] == said[5]


def test_what_is_no_clip_and_what_is_no_plan_of_clips_is_refused_by_name(run, planned, index, tmp_path):
    conversations = RunConfig(data=DataConfig(path=planned.data.path))
    with pytest.raises(ConfigError, match="is a plan of clips, but this run reads conversations"):
        open_loader(conversations)
    with pytest.raises(UserError, match="holds clips, but conversations are expected"):
        measure(
            MeasureConfig(paths=(Path(run.data.path),), out=tmp_path / "out", workers=0),
            RunConfig(encoder=EncoderConfig(processor=str(processor_path("qwen2_5_vl")))),
        )
    with pytest.raises(ConfigError, match="is an index of clips"):
        make_plan([index], conversations, tmp_path / "plan.parquet")
    other = dataclasses.replace(planned, encoder=dataclasses.replace(planned.encoder, max_text_tokens=30))
    with pytest.raises(ConfigError, match=r"encoder\.max_text_tokens"):
        open_loader(other)


def test_a_caption_of_another_number_of_tokens_than_planned_stops_the_run_with_its_key(planned, monkeypatch):
    tokenize = T5CaptionEncoder.tokenize

    def longer(self, caption, limit):
        token_ids, found = tokenize(self, caption, limit)
        return [*token_ids[:1], *token_ids], found + 1

    monkeypatch.setattr(T5CaptionEncoder, "tokenize", longer)
    with pytest.raises(UserError, match=r"sample s\d+ is planned with .* patches and text tokens"):
        list(open_loader(planned))


def test_images_are_planned_and_packed_as_they_are_read_online(run, tmp_path):
    import numpy as np
    from PIL import Image

    from energon_packing.convert import ConvertConfig, convert

    for number in range(5):
        pixels = np.full((48, 32 + 16 * (number % 2), 3), 40 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    lines = [json.dumps({"id": f"i{number}", "caption": "a ball", "image": f"{number}.png"}) for number in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    source, data = (tmp_path / "rows.jsonl",), tmp_path / "data"
    convert(ConvertConfig(sources=source, out=data, format="text-to-video", split={"train": 1.0}, workers=0))
    images = on(run, data)
    expected = clips_of(build_text_to_video_loader(images))
    assert sorted(expected) == [f"i{number}" for number in range(5)]
    measure(MeasureConfig(paths=(data,), out=tmp_path / "index", workers=0), images)
    make_plan([tmp_path / "index"], images, tmp_path / "plan.parquet")
    planned = on(images, tmp_path / "plan.parquet")
    for each in (planned, *(packed(planned, tmp_path, way) for way in WAYS)):
        found = clips_of(open_loader(each))
        assert sorted(found) == sorted(expected)
        for key, parts in found.items():
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(parts[:3], expected[key][:3], strict=True))
