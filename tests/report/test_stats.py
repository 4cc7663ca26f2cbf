"""Statistics against counts made by hand in plain Python, on indexes, plans and data sets."""

import dataclasses
import itertools
import json
import os
import signal
import statistics as plain
import tempfile
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from pages import check_closed
from support.made_index import drawn_rows, made_index, row

from energon_packing.cli.main import cli
from energon_packing.config import PackingConfig, RunConfig, TrainingConfig, load_config
from energon_packing.demo import processor_path
from energon_packing.energon.loader import build_loader
from energon_packing.errors import UserError
from energon_packing.offline import measure
from energon_packing.offline.index import Index
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.packs import SampleRemeasurer
from energon_packing.offline.planner import make_plan
from energon_packing.packing import pack_stream
from energon_packing.report.sample_story import source_key
from energon_packing.report.stats import efficiency, packings, recommendation, statistics, stats_report
from energon_packing.report.stats_page import bin_name, number, share
from energon_packing.report.stats_samples import COLUMNS, StatsSamples, dataset_names, samples_of_index

pytest.importorskip("pyarrow", reason="pyarrow is not installed")
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def rows():
    return {
        "chats": [*drawn_rows(300, seed=1), row(0, reason="bad_record"), row(0, reason="bad_record")],
        HOSTILE.replace("/", "|"): [row(40, frames=8, turns=5, targets=0), row(0, reason=HOSTILE), row(900, second=90)],
    }


@pytest.fixture(scope="module")
def index(rows, tmp_path_factory):
    shards = {name: [each] for name, each in rows.items()}
    measured = {"processor": "one", "packing.pairs": "both"}
    return made_index(tmp_path_factory.mktemp("stats") / "index", shards, fingerprint=measured)


@pytest.fixture(scope="module")
def samples(index):
    return samples_of_index(Index.open(index), str(index))


def stats(*arguments):
    return CliRunner().invoke(cli, ["stats", *map(str, arguments)])


def result(*arguments):
    found = stats(*arguments, "--json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def result_of_mistake(*arguments):
    found = stats(*arguments)
    assert found.exit_code == 2, found.output
    return found.output


def test_every_figure_is_that_of_the_rows(rows, samples):
    found = statistics(samples)
    kept = [each for part in rows.values() for each in part if each["reason"] is None]
    tokens = [each["length"] + each["second"] for each in kept]
    assert (found["samples"], found["measured"]) == (305, 305)
    expected = {
        "tokens": tokens,
        "trained_share": [each["targets"] / size for each, size in zip(kept, tokens, strict=True)],
        **{
            name: [each[name] for each in kept] for name in ("turns", "stills", "videos", "frames", "pixels", "patches")
        },
    }
    assert set(found["quantities"]) == set(expected)
    for name, values in expected.items():
        own = found["quantities"][name]
        assert own["mean"] == pytest.approx(plain.fmean(values))
        assert own["p50"] == pytest.approx(plain.median(values))
        assert own["largest"] == max(values)
        assert (own["sum"], own["sum_error"]) == (pytest.approx(sum(values)), 0)
        for each in own["histogram"]:
            assert each["samples"] == sum(
                each["from"] <= value < each["below"] or (name == "trained_share" and value == each["below"] == 1)
                for value in values
            )
        assert sum(each["samples"] for each in own["histogram"]) == len(values)
    assert {each["reason"]: each["samples"] for each in found["drops"]} == {"bad_record": 2, HOSTILE: 1}
    modality = Counter(("image" if each["stills"] else "") + ("video" if each["videos"] else "") for each in kept)
    named = {each["name"]: each["samples"] for each in found["modalities"]}
    assert named == {"text": modality[""], "image": modality["image"], "video": modality["video"]}
    assert [each["tokens"] for each in found["datasets"]] == [sum(tokens[:-2]), sum(tokens[-2:])]
    assert [each.get("dropped", 0) for each in found["datasets"]] == [2, 1]


def test_rows_hold_the_tokens_that_they_are_said_to_hold(samples):
    """Beside the run's own rows; compared with the packs that the online packer makes of many epochs."""
    run = RunConfig(packing=PackingConfig(seq_length=512, window=64), training=TrainingConfig(global_batch_size=4))
    tokens, seen = samples.tokens, []
    for found in packings(samples, run, seq_lengths=(512, 1024), multiples=(1, 16), windows=(16,)):
        row, multiple = found["seq_length"], found["multiple"]
        seen.append((row, multiple, found["window"]))
        assert found["fill"] + found["alignment"] + found["tail"] == pytest.approx(1)
        assert (found["alignment"] == 0) == (multiple == 1)
        assert found["steps"] == found["packs"] / 4
        first, second = samples.columns["length"], samples.columns["second"]
        aligned = (-(-first // multiple) - (-second // multiple)) * multiple
        kept = np.flatnonzero(aligned <= row)
        assert found["too_long"] == tokens.size - kept.size
        assert found["lost"] == pytest.approx(1 - tokens[kept].sum() / tokens.sum())
        room = found["packs"] * row
        assert found["fill"] * room == pytest.approx(tokens[kept].sum(), rel=0.02)
        if found["window"] is not None:
            random = np.random.default_rng(3)
            stream = [int(at) for _ in range(40) for at in random.permutation(kept)]
            packs = list(pack_stream(stream, row, length=lambda at, of=aligned: int(of[at]), window=found["window"]))[
                200:-200
            ]
            true = sum(tokens[pack].sum() for pack in packs) / (len(packs) * row)
            assert found["fill"] == pytest.approx(true, abs=2 * found["fill_error"] + 1e-3)
    assert seen[0] == (512, 1, 64), "the run's own configuration is the first line"
    assert len(seen) == 2 * 2 * 3


@pytest.mark.parametrize(
    ("oversize", "limits"),
    [("drop", ["packing.max_images_per_pack=1"]), ("truncate", []), ("split", [])],
    ids=["images", "truncate", "split"],
)
def test_a_run_makes_the_packs_that_are_foretold(dataset, tmp_path, oversize, limits):
    """Rows so short that many samples are longer; an epoch that ends, of one rank without workers."""
    sets = ["packing.seq_length=512", "packing.window=8", "packing.drop_budget=1", "data.workers=0", *limits]
    sets += [f"encoder.processor={processor_path('qwen2_5_vl')}", f"packing.oversize={oversize}", "data.repeat=false"]
    report = result(dataset, *(word for each in sets for word in ("--set", each)), "--full", "--workers", 0)
    own, all_tokens = report["packing"][0], report["quantities"]["tokens"]["sum"]
    run = load_config(None, [*sets, f"data.path={dataset}", f"packing.ledger={tmp_path / 'ledger'}"])
    packs = [pack.batch for pack in build_loader(run)]
    kept = sum(sum(batch.sample_lengths) for batch in packs)
    assert own["lost"] == pytest.approx(1 - kept / all_tokens, abs=1e-6)
    assert abs(own["packs"] + own["end_packs"] - len(packs)) <= 2 * own["end_packs_error"] + 2
    reasons = "\n".join(report["recommendation"]["reasons"])
    assert ("packing.oversize=split:" in reasons) == (oversize != "split"), reasons
    entries = [json.loads(line) for file in (tmp_path / "ledger").iterdir() for line in file.open()]
    dropped = Counter(entry["reason"] for entry in entries if "dropped" in entry)
    assert own["dropped"] == dropped.total(), dropped
    if oversize == "drop":
        assert (own["too_long"], own["over_limit"]) == (dropped["oversize"], dropped["over_limit"])


@pytest.mark.parametrize("oversize", ["drop", "split"])
def test_a_plan_of_three_epochs_tells_the_samples_drops_and_steps_that_a_run_of_it_has(dataset, tmp_path, oversize):
    """The run is the oracle, and of drops the sentence with which the planner refuses them."""
    sets = [f"encoder.processor={processor_path('qwen2_5_vl')}", "packing.seq_length=600", "plan.epochs=3"]
    sets += [f"packing.oversize={oversize}", "data.repeat=false", "data.workers=0", "training.global_batch_size=4"]
    run = load_config(None, [*sets, "packing.drop_budget=1.0"])
    plan, index = tmp_path / "plan.parquet", tmp_path / "index"
    measure.measure(measure.MeasureConfig(paths=(dataset,), out=index, workers=0), run)
    make_plan([index], run, plan, remeasure=SampleRemeasurer(None, [index], run=run))
    packs = list(open_loader(load_config(None, [*sets, f"data.path={plan}"])))
    lengths = [length for pack in packs for length in pack.batch.sample_lengths]
    keys = [key for pack in packs for key in pack.keys]
    trained = {source_key(key) for key in keys}
    _, *drops = map(json.loads, plan.with_name("plan.drops.jsonl").read_text().splitlines())
    lost = {source_key(drop["dropped"]) for drop in drops}
    assert any("#" in key for key in keys) == (oversize == "split")

    shown = result(plan)
    assert (shown["samples"], len(trained | lost)) == (40, 40)
    assert [each["samples"] for each in shown["datasets"]] == [len(trained)]
    tokens = shown["quantities"]["tokens"]
    assert (tokens["samples"], 3 * tokens["sum"]) == (len(trained), sum(lengths))
    assert sum(each["samples"] for each in shown["drops"]) == len(lost)
    assert all("of the 40 samples planned" in each for each in shown["warnings"])
    own = shown["plan"]
    assert (own["rows"], own["packs"], own["steps"]) == (len(keys), len(packs), len(packs) // 4)
    assert own["fill"] == pytest.approx(sum(lengths) / (600 * len(packs)), abs=1e-6)
    assert own["fill"] + own["alignment"] + own["tail"] == pytest.approx(1)
    assert (own["dropped"], own["read"]) == (len(lost), 40)
    strict = load_config(None, [*sets, "packing.drop_budget=0"])
    with pytest.raises(UserError, match=f"^{len(lost)} of 40 samples would be dropped"):
        make_plan([index], strict, plan, force=True, remeasure=SampleRemeasurer(None, [index], run=strict))
    assert (shown["packing"], shown["recommendation"]["settings"]) == ([], {}), "from what survived, none"
    assert "on its index" in result_of_mistake(plan, "--seq-length", 1024)


def test_drops_of_each_modality_are_those_of_its_rows(tmp_path):
    bad = [row(0, images=2, reason="bad"), row(0, frames=3, reason="bad"), row(0, turns=0, reason="unread")]
    rows = [*[row(90)] * 5, *[row(90, images=1)] * 3, *bad, row(0, reason="bad"), row(0, images=1, reason="bad")]
    found = statistics(samples_of_index(Index.open(made_index(tmp_path / "index", {"a": [rows]})), "index"))
    groups = {each["name"]: (each["samples"], each["dropped"]) for each in found["modalities"]}
    assert groups == {"text": (5, 1), "image": (3, 2), "video": (0, 1), "unknown": (0, 1)}


def drawn(rows, measured, seed):
    """`measured` of the rows, as a data set's random sample is."""
    chosen = np.random.default_rng(seed).choice(len(rows), measured, replace=False)
    part = [rows[at] for at in chosen]
    kept = [each for each in part if each["reason"] is None]
    return StatsSamples(
        path="drawn",
        kind="data set",
        total=len(rows),
        measured=measured,
        datasets=("a",),
        dataset=np.zeros(len(kept), dtype=np.int64),
        columns={name: np.array([each[name] for each in kept], dtype=np.int64) for name in COLUMNS},
        drops=(dict(Counter(each["reason"] for each in part if each["reason"] is not None)),),
    )


def test_95_of_100_intervals_hold_the_truth():
    rows = [*drawn_rows(2900, seed=3), *(row(0, reason="bad_record") for _ in range(100))]
    tokens = [each["length"] for each in rows if each["reason"] is None]
    truth = {"mean": plain.fmean(tokens), "sum": sum(tokens), "drops": 100 / 3000}
    hits = Counter()
    for seed in range(200):
        found = statistics(drawn(rows, 300, seed))
        own = found["quantities"]["tokens"]
        for name in ("mean", "sum"):
            hits[name] += abs(own[name] - truth[name]) <= own[f"{name}_error"]
        drops = found["drops"][0] if found["drops"] else {"share": 0.0, "error": 1.0}
        hits["drops"] += abs(drops["share"] - truth["drops"]) <= drops["error"]
    assert all(0.89 <= count / 200 <= 0.99 for count in hits.values()), hits


def test_nearly_all_and_all_of_what_was_measured_are_not_all_that_there_are():
    rows, hits = [*[row(90)] * 2940, *[row(90, images=1)] * 60], 0
    for seed in range(200):
        text = statistics(drawn(rows, 100, seed))["modalities"][0]
        hits += abs(text["share"] - 0.98) <= text["error"] > 0
    assert hits / 200 >= 0.89
    part = dataclasses.replace(drawn(rows, 100, 0), datasets=("a", "b"), measured=101, drops=({}, {"bad_record": 1}))
    own, other = statistics(part)["datasets"]
    assert 0.9 < own["share"] <= 1 < own["share"] + own["error"] + 0.01
    errors = [value for name, value in other.items() if "error" in name]
    assert all(0 <= error <= 1 for error in errors), "of a data set of which no sample could be used"


def test_means_of_a_handful_hold_the_truth_and_one_sample_says_nothing():
    sizes = np.random.default_rng(5).gamma(4, 60, 200).astype(int) + 20
    rows, hits = [*[row(90)] * 2800, *[row(int(size), images=1) for size in sizes]], 0
    for seed in range(200):
        image = statistics(drawn(rows, 100, seed))["modalities"][1]
        hits += abs(image["mean_tokens"] - sizes.mean()) <= image["mean_tokens_error"]
    assert hits / 200 >= 0.9, "of seven images"
    for alike in (1, 2):
        few = statistics(drawn([row(90)] * 18 + [row(500, images=1)] * alike, 17 + alike, 0))["modalities"][1]
        assert (few["samples"] > 0, few["mean_tokens_error"] > 100) == (True, True), alike


def test_what_is_recommended_is_better_than_the_run_by_more_than_chance():
    long = drawn([row(256)] * 900 + [row(3072)] * 100, 1000, 0)

    def advice(samples, **packing):
        run = RunConfig(packing=PackingConfig(**packing))
        return stats_report(samples, run, seq_lengths=(1024, 4096, 8192), windows=(16, 256))["recommendation"]

    assert advice(long, seq_length=4096)["settings"] == {}, "nothing to change"
    found = advice(long, seq_length=1024)
    assert found["settings"] == {"packing.seq_length": 4096}
    assert not any("oversize=split" in reason for reason in found["reasons"]), "nobody measured what splitting keeps"
    nothing = stats_report(long, RunConfig(packing=PackingConfig(seq_length=128)))["recommendation"]
    assert nothing["settings"] == {}
    assert "--seq-length" in nothing["reasons"][0]
    many = drawn([row(300)] * 50 + [row(0, reason="bad_record")] * 50, 100, 0)
    assert any("drop_budget" in reason for reason in stats_report(many, RunConfig())["recommendation"]["reasons"])
    # What limits leave out fits no longer row; what chance makes is no reason; weights decide what a run drops.
    images = drawn([row(500)] * 270 + [row(500, images=3)] * 30, 300, 0)
    reasons = stats_report(images, RunConfig(packing=PackingConfig(max_images_per_pack=2)))["recommendation"]["reasons"]
    assert any(
        "10.00% of the tokens are in no row; no longer row is known to lose less." in reason for reason in reasons
    )
    blend = stats_report(dataclasses.replace(many, mix=np.array([100.0])), RunConfig())["recommendation"]
    assert not any("drop_budget" in reason for reason in blend["reasons"])
    both = drawn([row(500)] * 70 + [row(500, images=3)] * 10 + [row(3000)] * 6, 86, 0)
    reasons = stats_report(both, RunConfig(packing=PackingConfig(seq_length=2048, max_images_per_pack=2)))
    assert any("rows of 4096 would lose at most 8.62%" in each for each in reasons["recommendation"]["reasons"])
    left = RunConfig(packing=PackingConfig(max_images_per_pack=2))
    for none, cause in ((row(0, reason="bad_record"), "are dropped"), (row(9, images=3), "Limits of a row")):
        assert cause in stats_report(drawn([none] * 9, 9, 0), left)["recommendation"]["reasons"][0]
    # All lengths lose, and longer rows are hardly fuller.
    rest = drawn([row(1022)] * 900 + [row(8)] * 45 + [row(9000)] * 10, 955, 0)
    assert advice(rest, seq_length=1024)["settings"] == {}
    # One of the hundred that were looked at does not fit, and it is a fifth of the tokens.
    rare = drawn([row(128)] * 1990 + [row(3000)] * 10, 100, 2)
    assert advice(rare, seq_length=1024)["settings"] == {"packing.seq_length": 4096}
    # Nothing fits the run's own rows; others of another alignment do.
    none = stats_report(drawn([row(900)] * 9, 9, 0), RunConfig(packing=PackingConfig(seq_length=512)), multiples=(2,))
    assert "of the run's alignment" in none["recommendation"]["reasons"][0]
    # Longer rows, 1.6 % fuller: sure if 24 streams agree, chance if they spread by more than that.
    row_of, noise = next(packings(long, RunConfig())), np.random.default_rng(0).normal(size=(2, 24))
    for spread, wanted in ((0.0001, {"packing.seq_length": 8192}), (0.02, {})):
        fills = [fill + spread * each for fill, each in zip((0.95, 0.966), noise, strict=True)]
        found = [row_of | {"fill": fill.mean(), "fills": fill.tolist(), "part": 0.9, "lost": 0} for fill in fills]
        found[1]["seq_length"] = 8192
        assert recommendation(long, RunConfig(), found)["settings"] == wanted
    # 1,096 tokens and 3,000 fill rows only together, and small windows are soon full of either.
    pairs = drawn([row(1096), row(3000)] * 400, 800, 0)
    assert advice(pairs, window=2)["settings"]["packing.window"] == 256
    # 61 rows and a half: one half-empty row at the end of an epoch is no reason for another window.
    last = drawn([row(2048)] * 123, 123, 0)
    found = stats_report(last, RunConfig(packing=PackingConfig(window=256)))
    assert found["packing"][0]["fill"] == 1
    assert found["recommendation"]["settings"] == {}


def test_readers_of_a_blend_that_was_measured_in_part_have_its_mix():
    """Five long samples are half of what is read, however few samples a reader has."""
    part = drawn([row(900)] * 5 + [row(50)] * 1600, 1605, 0)
    dataset = (part.columns["length"] == 50).astype(int)
    blend = dataclasses.replace(part, datasets=("a", "b"), dataset=dataset, drops=({}, {}), total=3210)
    blend = dataclasses.replace(blend, mix=np.array([802.5, 802.5]))
    run = RunConfig(packing=PackingConfig(seq_length=4096, window=256))
    for ranks in (1, 16):
        found = next(iter(packings(blend, run, ranks=ranks)))
        assert found["packs"] == pytest.approx(802.5 * 950 / 4096, rel=0.15), ranks


@pytest.mark.parametrize("which", ["chats", "half rows with images", "giants"])
def test_95_of_100_intervals_of_rows_hold_the_truth(which):
    """Twelve draws; the whole list is packed by the online packer."""
    random = np.random.default_rng(11)
    lengths, images, most = np.clip(random.lognormal(6, 1, 8000), 1, 60000).astype(int), np.zeros(8000, int), None
    if which == "half rows with images":
        lengths, most = np.clip(random.normal(2200, 500, 8000), 200, 6000).astype(int), 6
        images = np.where(random.random(8000) < 0.4, random.integers(1, 9, 8000), 0)
    if which == "giants":  # 1 % of the tokens in 4 of the samples
        lengths = random.integers(100, 900, 8000)
        lengths[random.choice(8000, 4, replace=False)] = 12000
    rows = [row(int(length), images=int(count)) for length, count in zip(lengths, images, strict=True)]
    run = RunConfig(packing=PackingConfig(seq_length=4096, window=64, max_images_per_pack=most))
    fits = np.flatnonzero((lengths <= 4096) & (images <= (most or 8)))
    stream = [int(at) for _ in range(5) for at in random.permutation(fits)]
    limited = {"images": (lambda at: int(images[at]), most)} if most else None
    packs = list(pack_stream(stream, 4096, length=lambda at: int(lengths[at]), window=64, constraints=limited))[
        600:-100
    ]
    fill = sum(lengths[pack].sum() for pack in packs) / (len(packs) * 4096)
    truth = {"fill": fill, "packs": lengths[fits].sum() / fill / 4096}
    truth |= {"lost": 1 - lengths[fits].sum() / lengths.sum(), "too_long": int((lengths > 4096).sum())}
    truth["over_limit"] = int(((lengths <= 4096) & (images > (most or 8))).sum())
    hits = Counter()
    for seed in range(12):
        own = next(iter(packings(drawn(rows, 600, seed), run, seed=seed)))
        hits.update(name for name, true in truth.items() if abs(own[name] - true) <= own[f"{name}_error"])
    assert min(hits[name] for name in truth) >= 10, hits


@pytest.mark.parametrize(
    ("lengths", "verdict", "alone"),
    [([100, 300, 900, 2000] * 100, "helps", 0.403), ([2000] * 400, "hardly helps", 0.977)],
)
def test_one_line_says_whether_packing_helps_these_samples(lengths, verdict, alone):
    found = stats_report(
        drawn([row(length) for length in lengths], len(lengths), 0), RunConfig(packing=PackingConfig(seq_length=2048))
    )
    line = found["recommendation"]["reasons"][0]
    advised = found["recommendation"]["settings"].get("packing.window", 256)
    (packed,) = (each["fill"] for each in found["packing"] if each["window"] == advised)
    assert line.startswith(f"Packing {verdict}: packed rows are {packed:.2%}")
    assert float(line.rpartition("one sample ")[2].split("%")[0]) / 100 == pytest.approx(alone, abs=2e-3)
    assert plain.fmean(lengths) / 2048 == pytest.approx(alone, abs=5e-4)


def test_the_tables_fit_80_columns_and_the_page_is_closed(index, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = tmp_path / "stats.html"
    shown = stats(index, "--html", page, "--seq-length", 1024, "--window", 64)
    assert shown.exit_code == 0, shown.output
    assert max(map(len, shown.output.splitlines())) <= max(80, len(str(page)) + 9)
    for word in ("305 samples", "This run: rows of 4,096 tokens", "bad_record", "1,024"):
        assert word in shown.output
    source = page.read_text()
    found = check_closed(source)
    assert HOSTILE in found.text, "the reason is shown, as text"
    assert HOSTILE not in source
    assert "script" not in found.names(), "this page runs nothing"
    assert source.count("<svg") == 8


@pytest.fixture(scope="module")
def dataset(demo_data):
    return demo_data(40, samples_per_shard=15)


def test_a_data_set_is_drawn_from_or_measured_whole(dataset, tmp_path):
    processor = f"encoder.processor={processor_path('qwen2_5_vl')}"
    options = ("--set", processor, "--seq-length", 2048, "--window", 64)
    whole = result(dataset, *options)
    full = result(dataset, *options, "--full", "--workers", 0)
    assert whole["measured"] == whole["samples"] == 40
    assert whole["quantities"] == full["quantities"], "drawing all is measuring all"
    assert whole["modalities"] == full["modalities"]
    assert [each["name"] for each in (*whole["datasets"], *full["datasets"])] == ["data", "data"], "and not 'text'"
    part = result(dataset, *options, "--samples", 25)
    assert (part["measured"], part["samples"]) == (25, 40)
    own, true = part["quantities"]["tokens"], whole["quantities"]["tokens"]
    assert abs(own["mean"] - true["mean"]) <= 2 * own["mean_error"]
    assert part == result(dataset, *options, "--samples", 25), "the seed decides"


def test_a_command_that_is_told_to_end_leaves_no_directory(dataset, tmp_path, monkeypatch):
    def told_to_end(*_):
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # which would end the tests
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # after Ray, Python names a handler that the system no longer has
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(measure, "measure", told_to_end)
    ended = stats(dataset, "--full", "--set", f"encoder.processor={processor_path('qwen2_5_vl')}")
    assert (ended.exit_code, list(tmp_path.iterdir())) == (128 + signal.SIGTERM, [])


@pytest.mark.parametrize("weights", [(3, 1), None])
def test_readers_have_the_tokens_that_loaders_of_their_ranks_give(dataset, demo_data, tmp_path, weights):
    """Three ranks of one reader each, of a blend by weights or by repetitions; the packs tell their tokens."""
    parts = [{"path": str(path / "dataset.yaml")} for path in (dataset, demo_data(30, seed=6, samples_per_shard=15))]
    for part, weight, repetitions in zip(parts, weights or (0, 0), (1, 2), strict=True):
        part |= {"weight": weight} if weights else {"repetitions": repetitions}
    content = {"blend" if weights else "blend_epochized": parts}
    path = tmp_path / "blend.yaml"
    words = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": content}}
    path.write_text(json.dumps(words))
    sets = [f"encoder.processor={processor_path('qwen2_5_vl')}", "data.workers=0", "data.repeat=false"]
    sets += ["packing.seq_length=8192", "data.repeat=true"] if weights else ["packing.seq_length=8192"]
    options = [word for each in sets for word in ("--set", each)]
    found = result(path, *options, "--data-parallel", 3, "--full", "--workers", 0)
    readers = found["readers"]
    means = [each["tokens"] / samples for each, samples in zip(found["datasets"], (40, 30), strict=True)]
    ratio = (3, 1) if weights else (40, 60)
    drawn = [mean * samples for mean, samples in zip(means, ratio, strict=True)]
    for each, samples, tokens in zip(readers["datasets"], ratio, drawn, strict=True):
        assert each["share"] == pytest.approx(samples / sum(ratio))
        assert each["token_share"] == pytest.approx(tokens / sum(drawn))
    part = result(path, *options, "--data-parallel", 3, "--samples", 20)["readers"]
    assert part["all"]["least_tokens"] is None
    assert [each["share"] for each in part["datasets"]] == [each["share"] for each in readers["datasets"]]
    if weights:
        return
    run = load_config(None, [*sets, f"data.path={path}"])
    given = [sum(sum(pack.batch.sample_lengths) for pack in build_loader(run, rank=n, world_size=3)) for n in range(3)]
    own = readers["all"]
    assert [own["least_tokens"], own["most_tokens"]] == [min(given), max(given)]
    assert own["mean_tokens"] == pytest.approx(sum(given) / 3)


@pytest.mark.parametrize("readers", [1, 4, 6])
def test_rows_of_readers_that_have_less_than_a_row_are_as_full_as_their_loaders_make_them(dataset, readers):
    """40 samples; of six readers, each has the whole data set."""
    sets = [f"encoder.processor={processor_path('qwen2_5_vl')}", "data.workers=0", "packing.window=64"]
    sets += ["packing.seq_length=32768", "data.repeat=true"]
    options = [word for each in sets for word in ("--set", each)]
    own, *others = result(dataset, *options, "--data-parallel", readers, "--full", "--workers", 0)["packing"]
    run, fills = load_config(None, [*sets, f"data.path={dataset}"]), []
    for rank in range(readers):
        packs = [*itertools.islice(build_loader(run, rank=rank, world_size=readers), 14)]
        fills += [pack.batch.real_tokens / 32768 for pack in packs[4:]]
    assert own["fill"] == pytest.approx(plain.mean(fills), rel=0.1)
    assert all(each["fill"] > own["fill"] - 0.05 for each in others if each["window"] and each["window"] >= 64)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("nothing",), "There is no nothing"),
        (("INDEX", "--full"), "--full, --workers, --split, --samples are for data sets"),
        (("INDEX", "--set", "packing.oversize=split", "--seq-length", "512"), "which needs a processor"),
        (("DATASET", "--set", "encoder.processor=p", "--full", "--samples", "5"), "--full measures all samples"),
        (("DATASET", "--set", "encoder.processor=p", "--workers", "2"), "--workers is for --full"),
        (("INDEX", "--seq-length", "1000", "--multiple", "16"), "use 992 or 1008"),
        (("DATASET",), "--set encoder.processor"),
        (("INDEX", "--fill"), "No such option '--fill'"),
        (
            ("INDEX", "--set", "packing.policy=first_fit"),
            "packing.policy is 'first_fit', an unknown packing policy; known",
        ),
        (("DATASET", "--set", "encoder.processor=p", "--set", "data.split=val"), "has no split 'val'; it has 'train'"),
        (("INDEX", "--html", "no/where.html"), "no/where.html cannot be written: there is no directory no."),
    ],
)
def test_a_mistake_is_one_sentence(arguments, sentence, index, dataset):
    places = {"INDEX": index, "DATASET": dataset}
    found = stats(*(places.get(argument, argument) for argument in arguments))
    assert (found.exit_code, sentence in found.output) == (2, True)


def test_ranks_that_sort_their_packs_are_foretold_to_wait_less():
    costs = 24576 * 32768 + (32768**2 * np.random.default_rng(1).beta(0.6, 2.0, 3000)).astype(int)
    for ranks in (2, 64):
        random = np.random.default_rng(5)
        drawn = [random.choice(costs, size=20 * 64).tolist() for _ in range(ranks)]
        for window in (1, 64):
            emitted = [[] for _ in drawn]
            for rank, packs in enumerate(drawn):
                for start in range(0, len(packs), window):
                    emitted[rank] += sorted(packs[start : start + window], reverse=start // window % 2 == 1)
            steps = list(zip(*emitted, strict=True))
            share_of_time = sum(map(sum, steps)) / ranks / sum(map(max, steps))
            assert efficiency(costs, ranks, window, 5) == pytest.approx(share_of_time)
        assert 1 - efficiency(costs, ranks, 64, 5) < 0.4 * (1 - efficiency(costs, ranks, 1, 5))


def test_numbers_and_bins_read_well():
    assert [number(value) for value in (0, 7, 1.25, 999, 1024, 12_345, 2_500_000, 1.02e9)] == [
        *("0", "7", "1.25", "999", "1,024", "12.3k", "2.5M", "1.02G")
    ]
    assert number(200_000, 5000) == "200k ±5k"
    assert number(200_000, 5) == "200k"
    assert [share(value) for value in (0, 0.5, 0.0123, 1)] == ["0.0 %", "50.0 %", "1.2 %", "100.0 %"]
    assert share(1 / 3000, 0.0019) == "0.033 ±0.190 %"
    assert [share(0.5, 0.01), share(0, 0.0015)] == ["50.0 \u00b11.0 %", "< 0.15 %"]
    bins = [(0, 1), (1, 2), (2, 4), (512, 1024), (1024, 2048), (1 << 20, 1 << 21)]
    names = [bin_name({"from": low, "below": below}, "tokens") for low, below in bins]
    assert names == ["0", "1", "2-3", "512-1k", "1k-2k", "1M-2M"]
    parts = [("/a/blend.yaml", "/a/chats/text"), ("/a/blend.yaml", "/b/chats"), ("/a/text", "/a/text")]
    names = dataset_names([SimpleNamespace(path=path, root=root) for path, root in parts])
    assert names == ("a/chats", "b/chats", "a/text"), "by their own directories, and not by that of their records"
