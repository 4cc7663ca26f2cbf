"""The pixels that Pixtral's images take with their padding, counted in the tensors of every pack, on every road."""

import dataclasses
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from made_data import chat, converted
from PIL import Image
from support.made_index import made_index, row
from support.offline_processors import pixtral

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.demo import processor_path
from energon_packing.energon.loader import build_loader
from energon_packing.energon.states import check_fingerprint
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import ConfigError, UserError
from energon_packing.offline import measure as measuring
from energon_packing.offline.index import SCHEMA, Index
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.packs import SampleRemeasurer
from energon_packing.offline.plan import Plan, read_drops
from energon_packing.offline.planner import make_plan
from energon_packing.packing.model_cost import SQUARES
from energon_packing.report.stats import stats_report
from energon_packing.report.stats_samples import samples_of_index

LARGE, MOST = 512, 5_000_000  # 19 of the large images
SIZES = {"small": (32, 32), "large": (LARGE, LARGE), "tall": (32, 400), "wide": (500, 64)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """150 small images and a large one, tall and wide ones, texts, and a sample of too many large ones."""
    folder = tmp_path_factory.mktemp("padded")
    for name, size in SIZES.items():
        Image.fromarray(np.random.default_rng(1).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)).save(
            folder / f"{name}.png"
        )

    def shows(key, *names):
        return chat("<image>" * len(names) + " what?", f"{key} it is", id=key, images=[f"{each}.png" for each in names])

    records = [shows(f"small-{number}", "small") for number in range(150)]
    records.insert(70, shows("large", "large"))
    records[20:20] = [shows(f"tall-{number}", "tall", "small") for number in range(12)]
    records[120:120] = [shows(f"wide-{number}", "wide") for number in range(12)]
    records += [chat("say", f"text {number}", id=f"text-{number}") for number in range(6)]
    twice = [turn for _ in range(2) for turn in shows("many", *["large"] * 10)["messages"]]
    records.insert(40, {"id": "many", "messages": twice, "images": ["large.png"] * 20})
    pixtral(LARGE).save_pretrained(folder / "processor")
    return converted(folder, records, samples_per_shard=60), str(folder / "processor")


@pytest.fixture
def run_of(data):
    """A run on the data; keyword arguments replace fields of packing."""
    path, processor = data

    def make(path=path, **packing):
        usual = {"seq_length": 32768, "max_padded_pixels_per_pack": MOST, "drop_budget": 1.0}
        return RunConfig(
            data=DataConfig(path=str(path), workers=0, repeat=False, shuffle_buffer=1),
            encoder=EncoderConfig(processor=processor, decode_in_child=False),
            packing=PackingConfig(**usual | packing),
        )

    return make


@pytest.fixture(scope="module")
def index(data, tmp_path_factory):
    """The index of the data, with heights and widths."""
    path, processor = data
    out = tmp_path_factory.mktemp("index") / "index"
    run = RunConfig(encoder=EncoderConfig(processor=processor))
    measure(MeasureConfig(paths=(path,), out=out, workers=0), run)
    return out


def padded(pack):
    """Pixels of all images of a pack with their padding, of which a model gets three numbers each."""
    if not pack.batch.visual_inputs:
        return 0
    sizes = pack.batch.visual_inputs["image_sizes"]
    return len(sizes) * int(sizes[:, 0].max()) * int(sizes[:, 1].max())


def checked(loader, keys=182):
    """Packs of an epoch: each within the limit by its tensors, each sample in one of them or in the ledger."""
    packs = list(loader)
    emitted = [key for pack in packs for key in pack.keys]
    dropped = [entry for pack in packs for entry in pack.dropped] + list(loader.epoch_report.dropped_at_end)
    assert len(emitted) == len({*emitted})
    assert len({*emitted, *(entry.key for entry in dropped)}) == keys
    for pack in packs:
        assert padded(pack) <= MOST
        if pack.batch.visual_inputs:
            assert pack.batch.finished().visual_inputs["pixel_values"].nbytes == padded(pack) * 3 * 4
    assert max(map(padded, packs)) > MOST / 2
    return packs, dropped


TOLD = f"5242880 padded pixels; a pack holds packing.max_padded_pixels_per_pack={MOST}"


def test_without_the_limit_one_large_image_pads_all(run_of):
    assert max(map(padded, build_loader(run_of(max_padded_pixels_per_pack=None)))) > 3 * MOST


@pytest.mark.parametrize(
    ("packing", "buffer"), [({}, None), ({"policy": "best_fit", "window": 64}, None), ({}, 80), ({}, 500)]
)
def test_no_pack_online_is_over_the_limit_and_every_sample_is_emitted_once(run_of, packing, buffer):
    loader = build_loader(run_of(**packing), **({} if buffer is None else {"packing_buffer_size": buffer}))
    _, dropped = checked(loader)
    assert [(entry.key, entry.reason, entry.detail) for entry in dropped] == [("many", "over_limit", TOLD)]


def test_a_sample_over_the_limit_alone_stops_the_run_that_asks_for_it(run_of):
    with pytest.raises(ConfigError, match=f"Sample many has {TOLD}"):
        list(build_loader(run_of(oversize="raise")))


def test_pieces_of_a_split_sample_are_within_the_limit(run_of):
    packs, dropped = checked(build_loader(run_of(oversize="split", split_at="token")), keys=183)
    assert not dropped
    assert {"many#0", "many#1"} <= {key for pack in packs for key in pack.keys}


def test_a_piece_is_judged_by_its_own_largest_image(data, run_of, tmp_path):
    """An exchange of 30 small images after one with a large image fits a pack, so it is not cut."""
    for name in ("small", "large"):
        Image.new("RGB", SIZES[name]).save(tmp_path / f"{name}.png")
    shown = [("large", 1), ("small", 30)]
    turns = [turn for name, count in shown for turn in chat("<image>" * count + " what?", f"{name} it is")["messages"]]
    images = [f"{name}.png" for name, count in shown for _ in range(count)]
    path = converted(tmp_path, [{"id": "mixed", "messages": turns, "images": images}])
    run = run_of(path, oversize="split", split_at="turn", max_padded_pixels_per_pack=400_000)
    packs = list(build_loader(run))
    assert sorted((key, len(pack.batch.visual_inputs["image_sizes"])) for pack in packs for key in pack.keys) == [
        ("mixed#0", 1),
        ("mixed#1", 30),
    ]


def test_a_stream_under_the_limit_goes_on_after_a_restart(run_of, continues):
    run = run_of(window=32)
    endless = dataclasses.replace(run, data=dataclasses.replace(run.data, repeat=True, shuffle_buffer=8))
    continues(lambda: build_loader(endless), packs=12, at=(1, 4, 7))


@pytest.mark.parametrize("packing", [{}, {"max_images_per_pack": 40}, {"policy": "next_fit"}])
def test_no_pack_of_a_plan_is_over_the_limit_and_the_drops_name_it(run_of, index, tmp_path, packing):
    run, out = run_of(**packing), tmp_path / "plan.parquet"
    make_plan([index], run, out)
    facts = Plan.open(out).facts
    assert facts.decided["max_padded_pixels_per_pack"] == MOST
    checked(open_loader(run_of(out, **packing)), keys=181)
    (drop,) = read_drops(out, facts.id)
    assert (drop["dropped"], drop["reason"], drop["detail"]) == ("many", "over_limit", TOLD)
    assert drop["setting"] == "packing.max_padded_pixels_per_pack"
    before = out.read_bytes()
    make_plan([index], run, out, force=True)
    assert out.read_bytes() == before
    with pytest.raises(ConfigError, match="and its packs may hold more than this run's 4000000; plan again"):
        open_loader(run_of(out, **packing, max_padded_pixels_per_pack=4_000_000))


def test_pieces_of_a_split_sample_are_planned_within_the_limit(run_of, index, tmp_path):
    run, out = run_of(oversize="split", split_at="token"), tmp_path / "plan.parquet"
    remeasure = SampleRemeasurer(PackingTaskEncoder(run.encoder, run.packing), [index])
    make_plan([index], run, out, remeasure=remeasure)
    checked(open_loader(run_of(out, oversize="split", split_at="token")), keys=183)


def test_a_plan_without_the_limit_is_what_it_was_and_does_not_suit_a_run_with_one(run_of, index, tmp_path):
    out = tmp_path / "plan.parquet"
    make_plan([index], run_of(max_padded_pixels_per_pack=None), out)
    facts = Plan.open(out).facts
    assert "max_padded_pixels_per_pack" not in facts.decided
    with pytest.raises(ConfigError, match=r"was made with packing\.max_padded_pixels_per_pack=None"):
        open_loader(run_of(out))
    assert max(map(padded, open_loader(run_of(out, max_padded_pixels_per_pack=None)))) > 7 * MOST


def test_an_index_has_the_largest_height_and_width_of_a_sample_as_the_processor_resizes_them(index):
    opened = Index.open(index)
    (dataset,) = opened.datasets
    rows = [each for shard in dataset.shards for each in opened.rows(dataset, shard).to_pylist()]
    shapes = {each["key"]: (each["images"], each["height"], each["width"]) for each in rows}
    assert shapes["tall-3"] == (2, 400, 32)
    assert shapes["wide-3"] == (1, 64, 512)  # 500 is rounded up to whole patches of 16
    assert shapes["many"] == (20, LARGE, LARGE)
    assert shapes["text-3"] == (0, 0, 0)


def test_an_older_index_is_read_without_the_limit_and_measured_again_for_it(run_of, data, tmp_path, monkeypatch):
    path, _ = data
    asked = MeasureConfig(paths=(path,), out=tmp_path / "index", workers=0)
    with monkeypatch.context() as older:
        older.setattr(measuring, "MOST_PATCHES", {})
        assert measure(asked, run_of()).measured == 4
    (file, *_) = (tmp_path / "index").rglob("*.parquet")
    assert pq.read_schema(file).names == [*SCHEMA.names, *SQUARES]
    make_plan([tmp_path / "index"], run_of(max_padded_pixels_per_pack=None), tmp_path / "plan.parquet")
    with pytest.raises(UserError, match="has no heights and widths of images; run 'energon-packing measure' again"):
        make_plan([tmp_path / "index"], run_of(), tmp_path / "other.parquet")
    assert measure(asked, run_of()).measured == 4
    assert measure(asked, run_of()).reused == 4
    make_plan([tmp_path / "index"], run_of(), tmp_path / "other.parquet")


def test_families_that_do_not_pad_have_neither_the_columns_nor_the_limit(data, tmp_path):
    path, _ = data
    run = RunConfig(
        encoder=EncoderConfig(processor=str(processor_path("qwen2_5_vl"))),
        packing=PackingConfig(seq_length=32768, max_padded_pixels_per_pack=1),
    )
    measure(MeasureConfig(paths=(path,), out=tmp_path / "index", workers=0), run)
    (file, *_) = (tmp_path / "index").rglob("*.parquet")
    assert pq.read_schema(file).names == [*SCHEMA.names, *SQUARES]
    facts = make_plan([tmp_path / "index"], run, tmp_path / "plan.parquet")
    assert not facts.drops
    assert facts.samples == 182
    assert open_loader(dataclasses.replace(run, data=DataConfig(path=str(tmp_path / "plan.parquet"), workers=0)))
    assert PackingTaskEncoder(run.encoder, run.packing).limits.padded_pixels is None


def test_a_state_of_before_the_limit_fits_a_run_without_one_only(run_of):
    without, limited = (
        PackingTaskEncoder(run.encoder, run.packing).fingerprint()
        for run in (run_of(max_padded_pixels_per_pack=None), run_of())
    )
    before = {name: value for name, value in without.items() if name != "packing.max_padded_pixels_per_pack"}
    assert not check_fingerprint(before, without)
    with pytest.raises(ConfigError, match=rf"any packing.max_padded_pixels_per_pack, but this run has {MOST}"):
        check_fingerprint(before, limited)


def test_statistics_do_not_count_the_limit(tmp_path):
    fingerprint = {"processor": "one", "family": "pixtral"}
    index = made_index(tmp_path / "index", {"a": [[row(100, images=1) for _ in range(9)]]}, fingerprint=fingerprint)
    reports = [
        stats_report(samples_of_index(Index.open(index), "a"), RunConfig(packing=packing), seq_lengths=[512])
        for packing in (PackingConfig(), PackingConfig(max_padded_pixels_per_pack=1))
    ]
    assert json.dumps(reports[0]["packing"]) == json.dumps(reports[1]["packing"])
