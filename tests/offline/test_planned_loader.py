"""Packs of a plan: the samples of the online loader, in one order for any number of ranks and workers."""

import dataclasses
import gc
import itertools
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from energon_packing.cli.main import cli
from energon_packing.config import LimitsConfig, ParallelConfig, PlanConfig
from energon_packing.config.run import PlannedDatasetConfig, TrainingConfig
from energon_packing.energon.loader import build_loader, build_task_encoder
from energon_packing.energon.pack_bytes import field_digests
from energon_packing.errors import ConfigError, UserError
from energon_packing.offline import plan as plan_file
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.pack import PackConfig
from energon_packing.offline.pack import pack as pack_plan
from energon_packing.offline.packs import Passes, SampleRemeasurer
from energon_packing.offline.plan import Plan
from energon_packing.offline.planner import make_plan
from energon_packing.offline.shared_work import WorkersConfig
from energon_packing.packing.pipeline import Layout, best_order, simulate, stage_costs
from energon_packing.report import steps
from energon_packing.report.preview import Wanted, wanted_packs


def planned(run, dataset, folder, *, also=(), **settings):
    """A run on a plan of the data set and others, which is made if it is not there."""
    plan, index = folder / "plan.parquet", folder / "index"
    run = dataclasses.replace(run, plan=PlanConfig(**({"max_data_parallel": 4} | settings)))
    if not plan.exists():
        measure(MeasureConfig(paths=(Path(dataset), *also), out=index, workers=0), run)
        encoder = build_task_encoder(dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(dataset))))
        make_plan([index], run, plan, limits=encoder.limits, remeasure=SampleRemeasurer(encoder, [index]))
    return dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(plan)))


@pytest.fixture(scope="module")
def plan_of(dataset, run_of, tmp_path_factory):
    return planned(run_of(dataset), dataset, tmp_path_factory.mktemp("plan"))


def digests(packs):
    """What identifies each pack: all fields of its row, and its samples in order."""
    return [(pack.index, pack.keys, field_digests(pack.batch)) for pack in packs]


def samples_of(packs):
    """Key -> tokens, targets, positions and pixels of its segments; a key that occurs twice fails."""
    found = {}
    for pack in packs:
        batch = pack.batch.finished()
        starts = (batch.cu_seqlens_padded if batch.cu_seqlens_padded is not None else batch.cu_seqlens).tolist()
        spans = iter([(start, start + length) for start, length in zip(starts, batch.sample_lengths, strict=False)])
        for key in pack.keys:
            assert key not in found
            rows = []
            for _ in range(2 if key.startswith("pair") else 1):
                start, end = next(spans)
                fields = (batch.tokens, batch.labels, batch.loss_mask, batch.position_ids)
                rows.append([field[..., start:end].tolist() for field in fields])
            found[key] = rows
    return found


def pixels_of(packs):
    """The sum of the squares of all pixels."""
    inputs = [pack.batch.finished().visual_inputs or {} for pack in packs]
    names = ("pixel_values", "pixel_values_videos")
    return float(sum(each[name].double().pow(2).sum() for each in inputs for name in names if name in each))


@pytest.mark.both_layouts
def test_every_sample_is_in_one_pack_and_is_the_sample_of_the_online_loader(plan_of, dataset, run_of):
    offline, online = list(open_loader(plan_of)), list(build_loader(run_of(dataset)))
    assert [pack.index for pack in offline] == list(range(len(Plan.open(plan_of.data.path))))
    assert max(pack.batch.total_tokens for pack in offline) <= 2048
    expected = samples_of(online)
    assert len(expected) > 20
    assert samples_of(offline) == expected
    assert pixels_of(offline) == pytest.approx(pixels_of(online), rel=1e-12)
    assert pixels_of(online) > 1000


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0)])
def test_any_number_of_ranks_and_workers_reads_the_same_global_packs(plan_of, ranks, workers):
    whole = digests(open_loader(plan_of))
    parts = [digests(open_loader(plan_of, rank=rank, world_size=ranks, workers=workers)) for rank in range(ranks)]
    merged = [pack for step in itertools.zip_longest(*parts) for pack in step if pack is not None]
    assert merged == whole


@pytest.mark.parametrize(("saving", "ranks", "workers"), [(3, 2, 1)])
def test_a_state_of_any_rank_continues_with_other_ranks_and_workers_at_the_same_pack(plan_of, ranks, workers, saving):
    endless = dataclasses.replace(plan_of, data=dataclasses.replace(plan_of.data, repeat=True))
    count = len(Plan.open(plan_of.data.path))
    before = open_loader(endless, rank=saving, world_size=4, workers=2)
    steps = count // 4 - 1
    for _ in itertools.islice(before, steps):
        pass
    state = before.save_state()
    assert state["position"] == 4 * steps
    whole = digests(itertools.islice(open_loader(endless), 4 * steps + 16))  # over the end of the plan
    merged = []
    for rank in range(ranks):
        loader = open_loader(endless, rank=rank, world_size=ranks, workers=workers)
        loader.restore_state(state)
        packs = digests(itertools.islice(loader, 16 // ranks))
        merged.append(packs)
        assert loader.save_state()["position"] == 4 * steps + 16
    assert [pack for step in zip(*merged, strict=True) for pack in step] == whole[4 * steps :]


def ordering(run, *, on=True, batch=8, **parallel):
    """An endless run on two pipeline ranks whose micro-batches are ordered."""
    data = dataclasses.replace(run.data, repeat=True, order_micro_batches=on)
    layout = ParallelConfig(**{"pipeline_parallel": 2} | parallel)
    return dataclasses.replace(run, data=data, parallel=layout, training=TrainingConfig(global_batch_size=batch))


def indices(run, count, *, state=None, **of):
    """Positions of the next packs, and the state after them."""
    loader = open_loader(run, **{"workers": 0} | of)
    if state is not None:
        loader.restore_state(state)
    return [pack.index for pack in itertools.islice(loader, count)], loader.save_state()


def test_the_packs_of_a_plan_that_are_shown_are_those_asked_for_however_a_run_orders_them(plan_of):
    run, plan = ordering(plan_of, batch=6), Plan.open(plan_of.data.path)
    for first, key in ((1, None), (3, None), (0, plan.packs(3, 4)[0].samples[0].key)):
        wanted = Wanted(packs=1, first=first, key=key)
        ((pack, places),) = wanted_packs(run, build_task_encoder(run), wanted, lambda *_: None, print)
        assert pack.index == (first or 3)
        assert all(places)


@pytest.mark.parametrize(("ranks", "chunks"), [(1, 1), (2, 1), (1, 2)])
def test_each_global_batch_has_its_packs_in_the_order_that_the_pipeline_is_through_with_soonest(plan_of, ranks, chunks):
    run = ordering(plan_of, virtual_pipeline=chunks)
    plan, passes = Plan.open(plan_of.data.path), Passes(Plan.open(plan_of.data.path).facts)
    costs, layout, size = plan.costs(0, len(plan)), Layout(2, chunks), 8 // ranks
    steps, faster = len(plan) // 8 + 1, 0  # over the end of the plan
    for rank in range(ranks):
        of = {"rank": rank, "world_size": ranks}
        given, _ = indices(ordering(plan_of, on=False), size * steps, **of)
        found, _ = indices(run, size * steps, **of)
        if ranks == chunks == 1:  # as another stage of the replica reads it, however it does
            assert found == indices(run, size * steps, **of, workers=2)[0]
        for at in range(0, size * steps, size):
            batch, own = given[at : at + size], found[at : at + size]
            forward, backward = stage_costs(costs[[passes.number(each) for each in batch]], layout)
            assert own == [batch[each] for each in best_order(forward, backward, layout)]
            order = [batch.index(each) for each in own]
            assert sorted(order) == list(range(size))
            times = [simulate(forward[some], backward[some], layout).makespan for some in (order, range(size))]
            faster += times[0] < times[1]
    assert faster


def test_a_run_that_resumes_after_a_step_or_inside_one_sees_the_order_of_the_run_that_went_on(plan_of):
    run, of = ordering(plan_of), {"rank": 1, "world_size": 2}
    whole, _ = indices(run, 24, **of)
    for taken in (0, 3, 4, 9):
        before, state = indices(run, taken, **of)
        assert state["position"] == 2 * taken
        assert ("batch" in state) == (taken % 4 > 0)
        assert before + indices(run, 24 - taken, state=state, **of)[0] == whole


def test_a_state_after_a_step_goes_on_in_any_layout_and_one_inside_a_step_only_in_its_own(plan_of):
    run = ordering(plan_of)
    _, whole = indices(run, 8)
    others = (ordering(plan_of, on=False), ordering(plan_of, pipeline_parallel=4), ordering(plan_of, batch=16))
    _, inside = indices(run, 7)
    for other in others:
        assert sorted(indices(other, 16, state=whole)[0]) == list(range(8, 24))
        with pytest.raises(
            ConfigError,
            match=r"inside a global batch \(\[7, 8, 1, 2, 1, 0\]\), which had another order there \(data\.order",
        ):
            indices(other, 1, state=inside)
    assert sorted(indices(run, 9, state=inside)[0])[1:] == list(range(8, 16))


def test_stats_tell_how_long_the_ranks_of_pipelines_compute_in_the_order_of_a_plan_and_ordered(plan_of):
    path, size, plan = plan_of.data.path, 8, Plan.open(plan_of.data.path)
    asked = ["stats", path, "--layout", "2", "--data-parallel", "2", "--micro-batches", "4", "--json"]
    told = json.loads(CliRunner().invoke(cli, asked, catch_exceptions=False).stdout)
    costs, steps = plan.costs(0, len(plan)), len(plan) // size
    assert (told["steps"], told["of"]) == (steps, steps)
    for on, each in zip((False, True), told["orders"], strict=True):
        taken, busy, bubbles = 0, 0, []
        found = [indices(ordering(plan_of, on=on), 4 * steps, rank=rank, world_size=2)[0] for rank in range(2)]
        for step in range(steps):
            own = [stage_costs(costs[some[4 * step : 4 * step + 4]], Layout(2)) for some in found]
            both = [simulate(*each, Layout(2)) for each in own]
            taken += max(each.makespan for each in both)
            busy += sum(each.busy.mean() for each in both) / 2
            bubbles += [each.bubble for each in both]
        assert each["efficiency"] == pytest.approx(busy / taken)
        assert each["bubble"] == pytest.approx(sum(bubbles) / len(bubbles))
    for wrong, says in (("4y2", "give it as 4, or as 4x2"), ("2x3", "must lie between|leave none of them over")):
        asked[3], asked[7] = wrong, "3"
        result = CliRunner().invoke(cli, asked[:-1])
        assert result.exit_code == 2
        assert re.search(says, " ".join(result.output.split()))


def test_micro_batches_are_ordered_of_plans_alone_without_end_and_of_a_batch_that_ranks_share(plan_of, dataset, run_of):
    with pytest.raises(ConfigError, match="is no plan"):
        open_loader(ordering(run_of(dataset)))
    for batch, ranks in ((1, 1), (1, 2), (2, 4), (4, 4), (10, 4)):  # 1 where a loop of one's own forgets to say it
        says = rf"order_micro_batches needs training\.global_batch_size, now {batch}: set .* a multiple of {ranks} data"
        with pytest.raises(ConfigError, match=says):
            open_loader(ordering(plan_of, batch=batch), world_size=ranks)
    with pytest.raises(ConfigError, match="leave none of them over"):
        open_loader(ordering(plan_of, batch=5, virtual_pipeline=2))
    run = ordering(plan_of)
    finite = dataclasses.replace(run, data=dataclasses.replace(run.data, repeat=False))
    with pytest.raises(ConfigError, match=r"order_micro_batches needs data\.repeat: true"):
        open_loader(finite)
    open_loader(finite, evaluation=4)


def test_a_run_whose_replicas_may_meet_in_every_micro_batch_is_told_that_ordering_may_not_pay(plan_of):
    with pytest.warns(UserWarning, match=r"parallel\.expert_parallel 2 .*may meet in every micro-batch.*off\.$"):
        open_loader(ordering(plan_of, expert_parallel=2))


@pytest.mark.parametrize("batch", [[], None, 3, "8", [0, 8, 1, 2, 1, 0], [8, 8, 1, 2, 1, 0], [9, 8, 1, 2, 1, 0], [[]]])
def test_a_state_whose_batch_is_damaged_is_refused_in_a_sentence_that_shows_it(plan_of, batch):
    _, state = indices(ordering(plan_of), 7)
    for run in (ordering(plan_of), ordering(plan_of, on=False)):
        with pytest.raises(ConfigError, match=rf"inside a global batch \({re.escape(str(batch))}\).*restore one that"):
            open_loader(run).restore_state(state | {"batch": batch})


def test_an_ordered_run_reads_the_costs_of_the_packs_that_come_and_of_no_others(dataset, run_of, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_file, "LEAST_ROWS", 1)
    run = ordering(planned(run_of(dataset), dataset, tmp_path), batch=4)
    facts, read, reads = Plan.open(run.data.path).facts, [], Plan._read
    assert len(facts.row_groups) == facts.packs > 4

    def recorded(plan, group, columns):
        read.extend([group.number] * (columns is not None))
        return reads(plan, group, columns)

    monkeypatch.setattr(Plan, "_read", recorded)
    packs = iter(open_loader(run, rank=1, world_size=2, workers=0))
    assert read == []
    for step in range(3 * facts.packs // 4):  # passes after the plan, too
        for _ in range(2):
            next(packs)
        positions = (4 * step + 1, 4 * step + 3)
        wanted = [Passes(facts).number(each) for each in positions]
        assert read == [each for each in wanted if each in read], "each once, if it is not known from the step before"
        assert read == wanted or step >= facts.packs // 4
        read.clear()


def test_of_many_replicas_some_are_simulated_which_lie_at_equal_distances(plan_of, monkeypatch):
    costs, count, chosen = Plan.open(plan_of.data.path).costs(0, 8), 2, []
    monkeypatch.setattr(
        steps, "stage_costs", lambda own, layout: chosen.append(own.tolist()) or stage_costs(own, layout)
    )
    told = steps.layout_report(Path(plan_of.data.path), "2", 4, count, most=2)
    assert chosen == [costs[0::4].tolist(), costs[3::4].tolist()]
    both = [stage_costs(costs[rank::4], Layout(2)) for rank in (0, 3)]
    times = [simulate(*each, Layout(2)) for each in both]
    assert told["orders"][0]["bubble"] == pytest.approx(sum(each.bubble for each in times) / 2)
    busy = sum(each.busy.mean() for each in times) / 2
    assert told["orders"][0]["efficiency"] == pytest.approx(busy / max(each.makespan for each in times))


def test_a_finite_run_that_was_saved_at_its_end_has_no_more_packs(plan_of):
    """The plan does not begin again for it, as it does, in another order, for a loader that is read once more."""
    finished, restored = (open_loader(plan_of, rank=0, world_size=3) for _ in range(2))
    read = [pack.keys for pack in finished]
    restored.restore_state(finished.save_state())
    assert list(restored) == []
    again = [pack.keys for pack in restored]
    assert again == [pack.keys for pack in finished] != read
    assert len(again) == len(read)


@pytest.mark.parametrize("repeat", [True, False])
def test_a_plan_that_ends_in_the_middle_of_a_data_set_ends_its_run_on_all_ranks_at_the_same_step(
    dataset, run_of, tmp_path, repeat
):
    half = {Path(dataset).name: PlannedDatasetConfig(epochs=0.5)}
    run = planned(run_of(dataset, data={"repeat": repeat}), dataset, tmp_path, datasets=half)
    packs = len(Plan.open(run.data.path))
    ranks = next(number for number in range(2, packs) if packs % number)
    refused = "ends after .* packs, in the middle of .*set it to .* 2 goes through every data set once"
    for rank in range(ranks):
        loader = open_loader(run, rank=rank, world_size=ranks)
        epochs = itertools.chain(loader, loader)  # of a loop of one's own
        whole = packs // ranks + (not repeat and rank < packs % ranks)
        assert all(pack.keys for pack in itertools.islice(epochs, whole))
        with pytest.raises(UserError, match=refused):
            next(epochs)


def test_the_passes_after_the_plan_are_the_same_from_stored_packs_and_for_any_ranks_and_after_a_restart(
    plan_of, tmp_path
):
    packs = len(Plan.open(plan_of.data.path))
    endless = dataclasses.replace(plan_of, data=dataclasses.replace(plan_of.data, repeat=True))
    first, second, third = (
        digests(itertools.islice(packs_of, packs)) for packs_of in [iter(open_loader(endless))] for _ in range(3)
    )
    named = [sorted(keys for _, keys, _ in each) for each in (first, second, third)]
    assert named[0] == named[1] == named[2]
    orders = [[keys for _, keys, _ in each] for each in (first, second, third)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    pack_plan(PackConfig(plan=Path(plan_of.data.path), out=tmp_path / "packed", workers=0))
    stored = dataclasses.replace(endless, data=dataclasses.replace(endless.data, path=str(tmp_path / "packed")))
    assert digests(itertools.islice(open_loader(stored), 2 * packs)) == first + second
    before = open_loader(endless)
    list(itertools.islice(before, packs + 3))
    state = before.save_state()
    parts = []
    for rank in range(3):
        loader = open_loader(stored if rank else endless, rank=rank, world_size=3)
        loader.restore_state(state)
        parts.append(digests(itertools.islice(loader, 4)))
    assert [made for step in zip(*parts, strict=True) for made in step] == (second + third)[3:15]
    resumed = open_loader(stored)
    resumed.restore_state(state | {"order": 2})  # of a version that ordered what is left of groups otherwise
    numbers = [Passes(Plan.open(plan_of.data.path).facts, older=True).number(packs + at) for at in range(3, 7)]
    went_on = [keys for _, keys, _ in digests(itertools.islice(resumed, 4))]
    assert went_on == [first[number][1] for number in numbers]
    assert resumed.save_state()["order"] == 2
    older = {name: value for name, value in state.items() if name != "order"}
    with pytest.raises(ConfigError, match=r'the last of \d+ packs, where the version that saved.*changed=\["order"\]'):
        open_loader(endless).restore_state(older)
    accepted = dataclasses.replace(endless.data, accept_changed=("order",))
    loader = open_loader(dataclasses.replace(endless, data=accepted))
    with pytest.warns(UserWarning, match="was at position .* had another order"):
        loader.restore_state(older)
    assert digests(itertools.islice(loader, 4)) == (second + third)[3:7]


def test_samples_that_are_measured_again_by_several_processes_make_the_same_plan(dataset, run_of, tmp_path):
    run = run_of(dataset, seq_length=256, oversize="split")
    index, encoder = tmp_path / "index", build_task_encoder(run)
    measure(MeasureConfig(paths=(Path(dataset),), out=index, workers=0), run)
    asked = []

    class Elsewhere(SampleRemeasurer):
        def do(self, task):
            (tmp_path / f"process-{os.getpid()}").touch()
            return super().do(task)

    made = []
    for number, workers in enumerate((0, 1, 3)):
        again = Elsewhere(encoder, [index], WorkersConfig(workers=workers), run)
        make_plan([index], run, tmp_path / f"{number}.parquet", limits=encoder.limits, remeasure=again)
        made.append((tmp_path / f"{number}.parquet").read_bytes())
        asked.append(len(list(tmp_path.glob("process-*"))))
    assert made[0] == made[1] == made[2]
    assert asked[0] == 1 < asked[1] < asked[2], "by processes"
    copied = pickle.loads(pickle.dumps(SampleRemeasurer(encoder, [index], None, run)))  # as to another machine
    make_plan([index], run, tmp_path / "copied.parquet", limits=encoder.limits, remeasure=copied)
    assert (tmp_path / "copied.parquet").read_bytes() == made[0]


@pytest.mark.parametrize("form", ["plan", "packed"])
def test_media_of_a_pack_are_announced_to_the_kernel_in_the_order_of_their_places_before_one_is_read(
    plan_of, tmp_path, monkeypatch, form
):
    if form == "packed":
        pack_plan(PackConfig(plan=Path(plan_of.data.path), out=tmp_path / "packed", workers=0))
    path = plan_of.data.path if form == "plan" else str(tmp_path / "packed")
    plan, seen = Plan.open(plan_of.data.path), []

    def place(descriptor, offset, size):
        return os.readlink(f"/proc/self/fd/{descriptor}"), offset, size

    advise, read = os.posix_fadvise, os.pread
    monkeypatch.setattr(
        os, "posix_fadvise", lambda *to: (seen.append(("expected", place(*to[:3]))), advise(*to))[1], raising=True
    )
    monkeypatch.setattr(
        os, "pread", lambda file, size, at: (seen.append(("read", place(file, at, size))), read(file, size, at))[1]
    )
    loader = iter(open_loader(dataclasses.replace(plan_of, data=dataclasses.replace(plan_of.data, path=path))))
    checked = 0
    for pack in plan.packs(0, len(plan)):
        seen.clear()
        next(loader)
        media = set()
        for sample in pack.samples:
            source = plan.facts.datasets[sample.dataset]
            tars = [Path(source.media_root) / source.media_shards[each.shard] for each in sample.media]
            media |= {(str(tar), each.offset, each.size) for tar, each in zip(tars, sample.media, strict=True)}
        told = [at for what, at in seen if what == "expected"]
        first = next((number for number, (what, at) in enumerate(seen) if what == "read" and at in media), 0)
        assert sorted(media) == told
        assert [what for what, at in seen[:first] if at in media] == ["expected"] * len(media)
        checked += len(media) > 2
    assert checked


def test_the_state_after_the_last_step_is_the_same_on_every_rank(plan_of):
    """Packs that the ranks do not divide leave some ranks a pack short; a run that repeats may go on from each."""
    packs = len(Plan.open(plan_of.data.path))
    ranks = next(number for number in range(2, packs) if packs % number)
    first, last = (open_loader(plan_of, rank=rank, world_size=ranks) for rank in (0, ranks - 1))
    list(itertools.islice(first, -(-packs // ranks)))  # as training takes them: nobody asks for one more
    list(last)
    assert first.save_state() == last.save_state()


def test_a_loader_that_nobody_holds_any_more_leaves_no_tar_open(plan_of):
    def tars():
        gc.collect()
        places = (Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd"))
        return sorted(str(place.readlink()) for place in places if place.is_file() and place.resolve().suffix == ".tar")

    before, loader = tars(), open_loader(plan_of)
    list(loader)
    assert len(tars()) > len(before)
    del loader
    assert tars() == before


def test_a_state_read_later_is_that_of_the_pack_at_which_it_was_asked_for(plan_of):
    loader = open_loader(plan_of)
    packs = iter(loader)
    next(packs)
    later = loader.state_later()
    next(packs)
    assert (later()["position"], loader.save_state()["position"]) == (1, 2)


@pytest.mark.parametrize(
    ("packing", "encoder"),
    [
        ({"oversize": "split"}, {}),
        ({"dummy_image": True}, {}),
        ({"seq_length": 512}, {"limits": LimitsConfig(max_tokens=4096, when_over=("resize", "truncate"))}),
    ],
    ids=["split", "dummy_image", "resize"],
)
def test_what_a_row_makes_of_long_samples_is_planned_as_it_is_packed_online(
    packing, encoder, dataset, run_of, tmp_path
):
    run = run_of(dataset, encoder=encoder, **packing)
    run = dataclasses.replace(run, parallel=ParallelConfig(context_parallel=2))
    offline = list(open_loader(planned(run, dataset, tmp_path)))
    assert samples_of(offline) == samples_of(build_loader(run))
    assert not any(pack.dropped for pack in offline)


def test_the_command_plan_measures_long_samples_again_by_itself(dataset, run_of, tmp_path):
    run = planned(run_of(dataset, oversize="split", dummy_image=True), dataset, tmp_path)
    file, out = tmp_path / "run.json", tmp_path / "by_command.parquet"
    file.write_text(json.dumps(Plan.open(run.data.path).facts.config))
    done = CliRunner().invoke(cli, ["plan", str(tmp_path / "index"), "--config", str(file), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert out.read_bytes() == Path(run.data.path).read_bytes()


def test_media_that_were_prepared_again_are_refused_and_measured_again(dataset, run_of, tmp_path):
    """Their places in the plan are those of other files then."""
    copied = tmp_path / "data"
    shutil.copytree(dataset, copied)
    base = run_of(copied)
    run = planned(base, copied, tmp_path)
    before = Plan.open(run.data.path).facts
    (source,) = before.datasets
    uuid = Path(source.media_root) / ".nv-meta" / "index.uuid"
    uuid.write_text("12345678-1234-1234-1234-123456789abc")
    with pytest.raises(UserError, match=r"media of the plan, changed since .* 'energon-packing measure' and"):
        list(open_loader(run))
    again = measure(MeasureConfig(paths=(copied,), out=tmp_path / "index", workers=0), base)
    assert (again.measured, again.reused) == (len(source.shards), 0)
    Path(run.data.path).unlink()
    run = planned(base, copied, tmp_path)
    assert Plan.open(run.data.path).facts.id != before.id
    assert list(open_loader(run))


def test_a_plan_whose_data_or_settings_changed_is_refused_by_name(dataset, run_of, tmp_path):
    copied = tmp_path / "data"
    shutil.copytree(dataset, copied)
    run = planned(run_of(copied), copied, tmp_path)
    for change, sentence in (
        ({"encoder": dataclasses.replace(run.encoder, train_on="all")}, "train_on"),
        ({"packing": dataclasses.replace(run.packing, seq_length=4096)}, "seq_length 2048, but this run has 4096"),
        ({"parallel": ParallelConfig(context_parallel=2)}, "aligns samples to 1 tokens"),
        ({"packing": dataclasses.replace(run.packing, oversize="split")}, "oversize='drop'"),
        ({"packing": dataclasses.replace(run.packing, max_images_per_pack=1)}, "may hold more than this run's 1"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            open_loader(dataclasses.replace(run, **change))
    with pytest.raises(ConfigError, match="plan of the split train, not of 'val'"):
        open_loader(run, split="val")
    loader = open_loader(run)
    next(iter(loader))
    weighted = dataclasses.replace(run, encoder=dataclasses.replace(run.encoder, position_ids="1d"))
    other = {"format": "energon_packing plan 1", "position": 4, "fingerprint": {"plan": "another"}}
    for reader, state, sentence in (
        (run, other, r"was made with(out any)? .*, but this run has"),
        (run, {"anything": 1}, "not that of a plan"),
        (weighted, loader.save_state(), "made with position_ids="),
    ):
        with pytest.raises(ConfigError, match=sentence):
            open_loader(reader).restore_state(state)
    os.utime(next(copied.rglob("train-000000.tar")), ns=(5, 5))  # as a copy has another time
    assert len(list(open_loader(run))) == len(Plan.open(run.data.path))
    first = next(copied.rglob("train-000000.tar"))
    content = first.read_bytes()
    first.write_bytes(content + b"\0" * 512)
    with pytest.raises(UserError, match=r"train-000000\.tar changed since it was measured"):
        list(open_loader(run))
    first.unlink()
    with pytest.raises(UserError, match=r"train-000000\.tar, a shard of the plan, is missing"):
        list(open_loader(run))
    first.write_bytes(content.replace(b'"value"', b'"velue"').replace(b"The ", b"Teh "))
    with pytest.raises(UserError, match=r"is planned with .* bring the data set back as it was"):
        list(open_loader(run))
    with pytest.raises(UserError, match="There is no plan"):
        open_loader(dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(tmp_path / "no.parquet"))))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_plan_that_was_replaced_under_its_run_is_not_read_as_the_old_one(dataset, run_of, tmp_path, workers):
    (tmp_path / "other").mkdir()
    run = planned(run_of(dataset), dataset, tmp_path)
    other = planned(run_of(dataset), dataset, tmp_path / "other", seed=7)
    loader = open_loader(run, workers=workers)
    os.replace(other.data.path, run.data.path)
    with pytest.raises(UserError, match=r"plan\.parquet was replaced by another plan since this run began"):
        next(iter(loader))
