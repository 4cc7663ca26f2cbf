"""Two and four processes: Bridge's train loop and checkpoints on online packs that one rank of each replica reads.

Every run is Bridge's own: ``setup``, ``train``, its checkpoints, its pipeline schedules, its Qwen3-VL and GPT models;
see `support.bridge_cpu.stand_ins` for what is replaced below. The oracle of a loss curve is one process that
trains on the recorded packs of all replicas; that of a resume is the run that was never stopped.
"""

import itertools

import bridge_here  # noqa: F401
import pytest
from support import bridge_ranks
from support.bridge_cpu import stand_ins

from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data
from energon_packing.energon.metrics import RankLine, figures
from energon_packing.line_file import read_lines

if not stand_ins.needed():
    pytest.skip("a CUDA device and Transformer Engine are present: nothing is replaced", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEXT = {"family": "text", "layers": 4}
# Loaders with a worker make packs ahead of use, and this many more than a step takes; the others read when asked.
AHEAD = {"dataset": {"num_workers": 1, "data.packs_ahead": 5}}
LAYOUTS = {
    "tp2-cp2": {"world": 4, "tensor": 2, "context": 2},
    "dp2-cp2": {"world": 4, "context": 2, "global_batch": 4, **AHEAD},
    "pp2-dp2": {"world": 4, "pipeline": 2, "global_batch": 4, **AHEAD},
    "pp2-vp2": {"world": 2, "pipeline": 2, "virtual": 2, "global_batch": 4, **TEXT},
    "in-batch-dp2-cp2": {
        "world": 4,
        "context": 2,
        "global_batch": 8,
        "micro_batch": 2,
        "dataset": {"mode": "in_batch"},
    },
}
STEPS, KILLED_AFTER, SAVED_AT = 8, 5, 3  # the data are read more than once by then
# The layout whose interrupted run evaluates in between and writes metrics, while the other one does neither.
VALIDATED = "dp2-cp2"
# Two replicas, and several iterators of a rank. A pipeline is killed where each rank reads for itself.
KILLED = (VALIDATED, "pp2-vp2")
EVERY = {"dataset": {"readers": "every"}}
FAST = VALIDATED  # the layout of the fast tier
full = pytest.mark.full
NAMES = [name if name == FAST else pytest.param(name, marks=full) for name in LAYOUTS]


def planned(folder):
    vision, text = str(folder / "vision"), str(folder / "text")
    runs = [
        {"name": "weights-vision", "steps": 1, "save": vision, "save_interval": 1},
        {"name": "weights-text", "steps": 1, "save": text, "save_interval": 1, **TEXT},
    ]

    def add(name, settings, **more):
        weights = text if settings.get("family") == "text" else vision
        runs.append({"name": name, "weights": weights, "steps": STEPS, **settings, **more})

    for name, layout in (LAYOUTS).items():
        alone = {key: layout[key] for key in ("family", "layers", "global_batch", "micro_batch") if key in layout}
        add(name, layout)
        add(f"{name}-alone", alone, replay=name)
        if name not in KILLED:
            continue
        stop = {"save": str(folder / name), "save_interval": SAVED_AT}
        more = {}
        if name == VALIDATED:
            stop["validate_every"] = 4
            stop["dataset"] = layout["dataset"] | {"metrics.directory": str(folder / "metrics"), "metrics.interval": 2}
            more["tensorboard"] = str(folder / "events")
        add(f"{name}-killed", layout | stop, kill_after=KILLED_AFTER)
        add(f"{name}-resumed", layout | stop | {"save_interval": 100}, **more)
    base, pipeline = LAYOUTS["tp2-cp2"], LAYOUTS["pp2-dp2"]
    stop = {"save": str(folder / "every"), "save_interval": SAVED_AT}
    stop["dataset"] = AHEAD["dataset"] | {"readers": "every", "compare_every": 2}
    add("every-killed", pipeline, kill_after=SAVED_AT + 1, **stop)
    add("every-resumed", pipeline, kill_after=4, **stop | {"save_interval": 100})
    add("every-broken", base, steps=6, broken_decoder=2, **EVERY)
    add("one-broken-reader", base, steps=4, broken_decoder=0)
    add("error", base, steps=6, broken_reader=[0, 6], broken_decoder=2)
    add("error-pipeline", pipeline, steps=6, broken_reader=[1, 4])
    return runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    """All runs, made once; those of one layout in the fast tier."""
    folder = tmp_path_factory.mktemp("ranks")
    source = make_data(folder / "made", conversations=80, defects=False)
    convert(ConvertConfig(sources=(source,), out=folder / "data", split={"train": 0.8, "val": 0.2}, workers=0))
    runs = planned(folder)
    if request.config.getoption("--fast"):
        runs = [run for run in runs if run["name"].startswith((FAST, "weights-vision"))]
    bridge_ranks.launch(runs, folder, folder / "data", timeout=850)
    return folder


@pytest.fixture
def run(folder):
    """The reports of the ranks of a run by its name."""

    def find(name, *, fails=False):
        world = next(run for run in planned(folder) if run["name"] == name).get("world", 1)
        found = bridge_ranks.reports(folder, name, world)
        for report in found:
            assert fails or report["error"] is None, report["error"][2]
        return found

    return find


def replicas(name):
    """Ranks of each replica, the reading one first; Megatron numbers tensor ranks first, pipeline ranks last."""
    layout = LAYOUTS[name]
    size = layout.get("tensor", 1) * layout.get("context", 1)
    data = layout["world"] // (size * layout.get("pipeline", 1))
    return [[rank for rank in range(layout["world"]) if rank // size % data == replica] for replica in range(data)]


def digests(report):
    return [pack["digest"] for pack in report["packs"] if not pack["validation"]]


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_of_a_replica_train_on_the_same_packs_and_other_replicas_on_others(name, run):
    reports = run(name)
    packs = [[digests(reports[rank]) for rank in ranks] for ranks in replicas(name)]
    for replica in packs:
        layout = LAYOUTS[name]
        micro_batches = layout.get("global_batch", 2) // layout.get("micro_batch", 1)
        assert len(replica[0]) == STEPS * micro_batches // len(packs)
        assert all(other == replica[0] for other in replica)
    assert len(packs) == 2 if "dp2" in name else len(packs) == 1
    if len(packs) == 2:
        assert not set(packs[0][0]) & set(packs[1][0])


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_of_a_replica_reads(name, run):
    reading = [rank for rank, report in enumerate(run(name)) if any(pack["reads"] for pack in report["packs"])]
    assert reading == [ranks[0] for ranks in replicas(name)]


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_attends_by_the_boundaries_of_its_packs(name, run):
    """Middle pipeline stages too: where a rank got none, its attention would run across samples."""
    for report in run(name):
        boundaries = [pack["boundaries"] for pack in report["packs"]]
        widths = [[end - start for start, end in itertools.pairwise(each)] for each in boundaries]
        assert any(sum(width > 8 for width in row) > 1 for row in widths)  # two samples; padding is narrower
        assert report["attention"] == boundaries


@full
def test_pixels_go_to_the_first_pipeline_stage_only(run):
    reports = run("pp2-dp2")
    for first, second in replicas("pp2-dp2"):
        images = [pack["images"] for pack in reports[first]["packs"]]
        assert any(images)
        assert [pack["pixels"] is not None for pack in reports[first]["packs"]] == images
        assert [pack["images"] for pack in reports[second]["packs"]] == images  # their sizes, which positions need
        assert not any(pack["pixels"] for pack in reports[second]["packs"])


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradient_norms_equal_those_of_one_process_on_the_same_packs(name, run):
    reports, (alone,) = run(name), run(f"{name}-alone")
    for report in reports:
        assert len(report["losses"]) == STEPS
        differences = [abs(a - b) for a, b in zip(report["losses"], alone["losses"], strict=True)]
        norms = [abs(a - b) / b for a, b in zip(report["norms"], alone["norms"], strict=True)]
        assert max(differences) < 1e-4
        assert max(norms) < 1e-3
    print(f"\n{name}: losses differ by {max(differences):.1e}, gradient norms by {max(norms):.1e} of theirs")
    assert alone["losses"][-1] < alone["losses"][0] - 0.5


@pytest.mark.parametrize("name", [name if name == FAST else pytest.param(name, marks=full) for name in KILLED])
def test_a_run_that_was_killed_goes_on_from_its_checkpoint_with_the_same_packs_and_the_same_losses(name, run, folder):
    whole, killed, resumed = run(name), run(f"{name}-killed"), run(f"{name}-resumed")
    each = len(digests(whole[0])) // STEPS
    for before, first, second in zip(whole, killed, resumed, strict=True):
        assert first["losses"] == before["losses"][:KILLED_AFTER]
        assert digests(second) == digests(before)[SAVED_AT * each :]
        assert second["losses"] == before["losses"][SAVED_AT:]
        assert second["norms"] == before["norms"][SAVED_AT:]
    states = sorted(file.name for file in (folder / name / "energon" / f"step_{SAVED_AT:07d}").iterdir())
    assert states == [f"train_dataloader_dprank{replica:03d}.pt" for replica in range(len(replicas(name)))]


def test_validation_during_training_changes_no_training_pack_and_no_loss(run):
    for plain, validated in zip(run(VALIDATED), run(f"{VALIDATED}-killed"), strict=True):
        held_out = [pack["digest"] for pack in validated["packs"] if pack["validation"]]
        assert len(held_out) > 2
        assert not set(held_out) & set(digests(plain))
        assert digests(validated) == digests(plain)[: len(digests(validated))]
        assert validated["losses"] == plain["losses"][:KILLED_AFTER]


def test_every_evaluation_has_the_same_packs_before_a_kill_and_after_it(run):
    """Rows of the report on held-out packs come first, then those of Bridge's evaluations every fourth step."""
    for killed, resumed in zip(run(f"{VALIDATED}-killed"), run(f"{VALIDATED}-resumed"), strict=True):
        before, after = (
            [pack["digest"] for pack in report["packs"] if pack["validation"]] for report in (killed, resumed)
        )
        each = 2 * len(digests(killed)) // KILLED_AFTER  # of two global batches
        first = before[:each]
        assert len(set(first)) > 1
        assert (before, after) == (2 * first, 3 * first)


def test_metrics_count_the_training_packs_of_every_replica_over_a_kill_and_reach_the_rank_that_has_a_logger(
    run, folder
):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    killed, resumed = (run(f"{VALIDATED}-{name}") for name in ("killed", "resumed"))
    each = len(digests(run(VALIDATED)[0])) // STEPS
    assert each == 2
    newest = []
    for rank, (reader, *_) in enumerate(replicas(VALIDATED)):
        lines = list(read_lines(folder / "metrics" / f"rank{rank}.jsonl"))
        before, after = (len(digests(reports[reader])) for reports in (killed, resumed))
        assert (before, after) == (KILLED_AFTER * each, (STEPS - SAVED_AT) * each)  # in the kill's run and the next
        assert [line["pack"] for line in lines] == [0, 4, 8, 0, 10, 14, 16]
        assert [line["last"]["packs"] for line in lines] == [0, 4, 4, 0, 4, 4, 2]
        assert lines[-1]["total"]["packs"] == after
        assert lines[-1]["ended"]
        assert [pack for line in lines for pack, _ in line["steps"]] == [2, 4, 6, 8, 8, 10, 12, 14, 16]
        assert len({line["run"] for line in lines}) == 2
        before_last, last = map(RankLine.of, lines[-3:-1])
        newest.append(last.after(before_last))  # ranks are compared on the steps of two lines
    assert VALIDATED == "dp2-cp2"  # its last rank has the logger and reads nothing
    found: dict[str, list[tuple[int, float]]] = {}
    (events,) = (folder / "events").iterdir()
    for event in loader.EventFileLoader(str(events)).Load():
        for value in event.summary.value:
            if value.tag.startswith("packing/"):
                found.setdefault(value.tag, []).append((event.step, value.tensor.float_val[0]))
    expected = figures(newest)
    assert len(expected) == 17
    for name, value in expected.items():
        assert found[f"packing/{name}"][-1][1] == pytest.approx(value, rel=1e-6), name
    assert min(value for _, value in found["packing/tflops_per_device"]) > 0
    assert [count for _, count in found["packing/ranks"]] == [2.0] * len(found["packing/ranks"])
    assert {step for points in found.values() for step, _ in points} <= {6, 7, 8}


@full
def test_ranks_that_each_read_for_themselves_train_as_with_one_reader_and_resume(run):
    one, killed, resumed = run("pp2-dp2"), run("every-killed"), run("every-resumed")
    for before, first, second in zip(one, killed, resumed, strict=True):
        assert all(pack["reads"] for pack in first["packs"])
        assert first["losses"] == before["losses"][: SAVED_AT + 1]
        assert second["losses"] == before["losses"][SAVED_AT : SAVED_AT + 4]


@full
def test_a_decoder_that_fails_on_one_reading_rank_stops_all_of_them_with_the_sample_named(run):
    errors = [report["error"] for report in run("every-broken", fails=True)]
    assert {error[0] for error in errors} == {"PackingError"}
    assert len({error[1] for error in errors}) == 1
    assert "differs inside a replica from sample" in errors[0][1]
    assert "rank 0 has 'demo" in errors[0][1]
    assert "rank 2 has" in errors[0][1]


@full
def test_a_sample_that_the_reader_cannot_decode_is_left_out_on_every_rank(run):
    reports = run("one-broken-reader")
    assert digests(reports[0]) != digests(run("tp2-cp2")[0])[: len(digests(reports[0]))]
    assert all(digests(report) == digests(reports[0]) for report in reports)
    assert len({tuple(report["losses"]) for report in reports}) == 1
    assert len(reports[0]["losses"]) == 4


@full
def test_an_error_of_the_reader_is_raised_on_every_rank_at_the_same_pack(run):
    reports = run("error", fails=True)
    assert [report["error"][:2] for report in reports] == [["UserError", "the disk of this rank is full of ducks"]] * 4
    assert {len(report["packs"]) for report in reports} == {6}
    for plain, other in zip(run("tp2-cp2"), reports, strict=True):  # a decoder that fails where nobody reads harms none
        assert other["losses"] == plain["losses"][:3]


@full
def test_an_error_of_one_replicas_reader_ends_all_ranks_of_a_pipeline(run):
    reports = run("error-pipeline", fails=True)
    assert all(report["error"] for report in reports)
    assert reports[1]["error"][:2] == ["UserError", "the disk of this rank is full of ducks"]
