"""Rows of a plan that ranks share, each with a context-parallel size of its own."""

import dataclasses
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from support.made_index import drawn_rows, made_index
from test_planned_loader import pixels_of, planned, samples_of

from energon_packing.cli.main import cli
from energon_packing.config import ParallelConfig, RunConfig, from_mapping, to_mapping
from energon_packing.config.run import MetricsConfig, PlannedDatasetConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.drops import CRASH, ENDED, TIMEOUT
from energon_packing.energon.loader import build_loader
from energon_packing.energon.metrics import PackMetrics, PackSums, RankLine, sums_of
from energon_packing.energon.pack_bytes import field_digests
from energon_packing.errors import ConfigError, SampleRejected, UserError
from energon_packing.ledger import merged, standing_lines
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.plan import Plan
from energon_packing.offline.planner import make_plan
from energon_packing.plain_yaml import load_yaml
from energon_packing.thd.alignment import alignment_multiple
from energon_packing.thd.checks import check_thd

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dynamic_context.md"
(BLOCK,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
OF_PAGE = from_mapping(RunConfig, load_yaml(BLOCK), where="the page")
# Keys and values of other ranks cost so much that the few samples gain by sizes of their own.
DYNAMIC = dataclasses.replace(OF_PAGE.parallel, exchange_cost=0.2)


@pytest.fixture(scope="module")
def shared(dataset, run_of, tmp_path_factory):
    """A run whose samples are up to 2,048 tokens long, of which each rank holds 512."""
    run = dataclasses.replace(run_of(dataset), parallel=DYNAMIC, training=OF_PAGE.training)
    assert run.packing.seq_length == OF_PAGE.packing.seq_length
    return planned(run, dataset, tmp_path_factory.mktemp("shared"))


def rows_of(run, ranks, steps=None, **arguments):
    """The rows of each rank of one pass."""
    parts = []
    for rank in range(ranks):
        loader = open_loader(run, rank=rank, world_size=ranks, **arguments)
        parts.append(list(loader if steps is None else itertools.islice(loader, steps)))
    return parts


@pytest.mark.parametrize("ranks", [4, 8, 12])
def test_each_sample_is_in_one_row_that_its_ranks_share(shared, dataset, run_of, ranks):
    parts = rows_of(shared, ranks)
    assert len({len(rows) for rows in parts}) == 1, "a rank without a row would hang the others"
    counted = []
    sizes = set()
    for rank, rows in enumerate(parts):
        for place, pack in enumerate(rows):
            size = pack.batch.shared.local_cp_size
            first = rank - rank % size
            same = parts[first][place]
            assert (same.keys, field_digests(same.batch)) == (pack.keys, field_digests(pack.batch))
            assert pack.batch.total_tokens <= 512 * size
            assert not check_thd(pack.batch, multiple=alignment_multiple(1, size))
            assert pack.counts == (rank == first)
            if pack.counts and pack.keys:
                counted.append(pack)
                sizes.add(size)
    assert sizes == {1, 2, 4}
    expected = samples_of(build_loader(run_of(dataset)))
    assert samples_of(counted) == expected
    assert pixels_of(counted) == pytest.approx(pixels_of(build_loader(run_of(dataset))), rel=1e-12)


def test_rows_of_a_step_hold_the_samples_of_its_packs_whatever_the_ranks(shared):
    plan = Plan.open(shared.data.path)
    packs = [{each.name for each in pack.samples} for pack in plan.packs(0, len(plan))]
    for ranks in (4, 8):
        steps = {}
        for rank, rows in enumerate(rows_of(shared, ranks)):
            step, left = -1, 0
            for pack in rows:
                if not left:
                    step, left = step + 1, pack.batch.shared.micro_batches
                left -= 1
                if pack.counts:
                    steps.setdefault(step, []).extend(pack.keys)
            assert left == 0, rank
        for step, keys in steps.items():
            assert sorted(keys) == sorted(set().union(*packs[8 * step : 8 * step + 8]))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_goes_on_with_other_ranks_at_the_same_global_batch(shared, workers):
    run = dataclasses.replace(shared, data=dataclasses.replace(shared.data, repeat=True))
    loader = open_loader(run, rank=3, world_size=4, workers=workers)
    count, rows = len(Plan.open(run.data.path)) // 8 + 1, iter(loader)  # into the second pass
    for _ in range(count):
        for _ in range(next(rows).batch.shared.micro_batches - 1):
            next(rows)
    state = loader.save_state()
    assert state["position"] == 8 * count
    names = []
    for ranks in (4, 8):
        keys = []
        for rank in range(ranks):
            other = open_loader(run, rank=rank, world_size=ranks)
            other.restore_state(state)
            rows = iter(other)
            first = next(rows)
            made = [first, *itertools.islice(rows, first.batch.shared.micro_batches - 1)]
            assert other.save_state()["position"] == 8 * count + 8
            keys += [key for pack in made if pack.counts for key in pack.keys]
        names.append(sorted(keys))
    assert names[0] == names[1]
    static = dataclasses.replace(run, parallel=ParallelConfig(context_parallel=4))  # one setting goes back
    packs = open_loader(static)
    packs.restore_state(state)
    assert sorted(key for pack in itertools.islice(packs, 8) for key in pack.keys) == names[0]


def test_a_state_inside_a_global_batch_goes_on_with_the_same_ranks_only(shared):
    loader = open_loader(shared, rank=1, world_size=4)
    whole = [field_digests(pack.batch) for pack in loader]
    loader = open_loader(shared, rank=1, world_size=4)
    for _ in itertools.islice(loader, 2):
        pass
    state = loader.save_state()
    other = open_loader(shared, rank=1, world_size=4)
    other.restore_state(state)
    assert [field_digests(pack.batch) for pack in other] == whole[2:]
    with pytest.raises(ConfigError, match="inside a global batch"):
        open_loader(shared, rank=1, world_size=8).restore_state(state)


def test_a_state_inside_a_batch_of_which_an_extended_plan_keeps_a_part_is_refused(shared, tmp_path):
    """The packs after those have other rows, so what was taken of the batch says nothing."""
    old, batch = Path(shared.data.path), shared.training.global_batch_size
    loader = open_loader(shared, world_size=4)
    for _ in itertools.islice(loader, 2):
        pass
    state = loader.save_state()
    assert state["batch"]
    for first in (batch - 1, batch):
        out = tmp_path / f"{first}.parquet"
        longer = dataclasses.replace(shared, plan=dataclasses.replace(shared.plan, epochs=2))
        make_plan([old.parent / "index"], longer, out, extend=old, first=first)
        other = open_loader(
            dataclasses.replace(shared, data=dataclasses.replace(shared.data, path=str(out))), world_size=4
        )
        if first == batch:
            other.restore_state(state)
        else:
            with pytest.raises(ConfigError, match="inside a global batch"):
                other.restore_state(state)


def test_every_evaluation_has_the_same_rows_and_ends_with_a_global_batch(shared):
    parts = []
    for rank in range(4):
        loader = open_loader(shared, rank=rank, world_size=4, evaluation=16)
        parts.append([(pack.keys, pack.batch.shared) for pack in itertools.islice(loader, 90)])
    period = next(n for n in range(1, 45) if parts[0][:n] == parts[0][n : 2 * n])
    left = 0
    for _, told in parts[0][:period]:
        left = (left or told.micro_batches) - 1
    assert left == 0
    assert all(part[:period] == part[period : 2 * period] for part in parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallel": dataclasses.replace(DYNAMIC, max_seqlen_per_dp_cp_rank=256)}, "a row of 4 ranks holds 256"),
        ({"parallel": dataclasses.replace(DYNAMIC, max_seqlen_per_dp_cp_rank=511)}, "511 tokens for each rank"),
        ({"parallel": dataclasses.replace(DYNAMIC, min_dynamic_context_parallel_size=4)}, "have no groups of 4 to 4"),
        ({"packing": {"pad_to_max_length": True}}, "packing.pad_to_max_length is about packs"),
        ({"packing": {"max_cost_per_pack": 1e6}}, "packing.max_cost_per_pack is about packs"),
        ({"data": {"order_micro_batches": True}}, "data.order_micro_batches is about packs"),
    ],
)
def test_what_cannot_work_is_one_sentence(shared, change, message):
    def opened():
        own = {
            name: dataclasses.replace(getattr(shared, name), **value) if isinstance(value, dict) else value
            for name, value in change.items()
        }
        return open_loader(dataclasses.replace(shared, **own), world_size=6 if "no groups" in message else 4)

    with pytest.raises(ConfigError, match=message):
        opened()


def test_rows_of_their_own_size_need_a_plan_that_was_made_for_them(shared, dataset, run_of, tmp_path):
    fixed = planned(run_of(dataset), dataset, tmp_path)
    run = dataclasses.replace(shared, data=fixed.data)
    with pytest.raises(ConfigError, match="aligns samples to 1 tokens, but the parallel sizes of this run need 8"):
        open_loader(run, world_size=4)
    fixed = planned(
        dataclasses.replace(run_of(dataset), parallel=ParallelConfig(context_parallel=4)), dataset, tmp_path / ".."
    )
    with pytest.raises(ConfigError, match="made for a fixed context-parallel size"):
        open_loader(dataclasses.replace(shared, data=fixed.data), world_size=4)
    stream = dataclasses.replace(shared, data=dataclasses.replace(shared.data, path=str(dataset)))
    with pytest.raises(ConfigError, match="is no plan, which knows all lengths"):
        open_loader(stream, world_size=4)


def bad_on(loader, key, reason):
    """The loader cannot render a sample any more."""
    render = loader._packs._encoder.postencode_sample

    def refuse(sample):
        if sample.__key__ != key:
            return render(sample)
        if reason == "render_error":
            raise ValueError("odd")
        raise SampleRejected(reason, "it hung")

    loader._packs._encoder.postencode_sample = refuse


@pytest.mark.parametrize("reason", [TIMEOUT, CRASH, ENDED, "render_error"])
def test_a_sample_that_one_rank_cannot_read_stops_all_once_and_is_left_out_afterwards(shared, tmp_path, reason):
    """A decoder that takes too long on one rank of a row would leave the others waiting for its part."""
    packing = dataclasses.replace(shared.packing, ledger=str(tmp_path / "ledger"))
    run = dataclasses.replace(shared, packing=packing)
    parts = rows_of(shared, 4)
    rank, bad, size = next(
        (rank, pack.keys[0], size)
        for rank in (1, 3)
        for pack in parts[rank]
        if (size := pack.batch.shared.local_cp_size) > 1
    )
    loader = open_loader(run, rank=rank, world_size=4)
    before = open_loader(run, rank=rank - rank % size, world_size=4)
    bad_on(loader, bad, reason)
    with pytest.raises(UserError, match=f"sample {bad} could not be read on rank {rank}"):
        list(loader)
    # A process that begins meanwhile still leaves out what all others do.
    assert bad in {key for pack in before for key in pack.keys}
    del loader, before
    again = [pack for rows in rows_of(run, 4) for pack in rows]
    assert bad not in {key for pack in again for key in pack.keys}
    assert sum(entry.key == bad for pack in again for entry in pack.dropped) == 1
    if reason == TIMEOUT:
        report = merged(tmp_path / "ledger")
        assert (report.emitted, report.dropped["quarantined"], report.duplicates) == (27, 1, [])


@pytest.mark.parametrize("first", ["dynamic", "static"])
def test_the_ledger_counts_each_sample_once_however_ranks_and_sizes_change(shared, tmp_path, first):
    """Killed on 4 ranks at the end of the second pass, or with one size, and continued on 8 from its beginning."""
    packing = dataclasses.replace(shared.packing, ledger=str(tmp_path / "ledger"))
    data = dataclasses.replace(shared.data, repeat=True)
    run = dataclasses.replace(shared, packing=packing, data=data)
    static = dataclasses.replace(run, parallel=ParallelConfig(context_parallel=4))
    count = len(Plan.open(run.data.path))
    state = None
    for rank in range(4 if first == "dynamic" else 1):
        loader = open_loader(run, rank=rank, world_size=4) if first == "dynamic" else open_loader(static)
        rows, position = iter(loader), 0
        while position < 2 * count:
            next(rows)
            position = loader.save_state()["position"]
            state = loader.save_state() if state is None and position == count else state
    assert state["position"] == count
    for rank in range(8):
        loader = open_loader(run, rank=rank, world_size=8)
        loader.restore_state(state)
        rows = iter(loader)
        while loader.save_state()["position"] < 3 * count:
            next(rows)
    report = merged(tmp_path / "ledger")
    assert report.duplicates == []
    keys = [key for _, line in standing_lines(tmp_path / "ledger") for key in line.get("keys", ())]
    assert len(set(keys)) == 28
    assert report.emitted == len(keys)
    assert {keys.count(key) for key in keys} == {3}


def test_metrics_count_each_sample_once_and_every_rank_has_a_line(shared, tmp_path):
    """The first rank of a row counts it; a sample that all of its ranks drop is one drop."""
    bad = next(pack.keys[0] for pack in rows_of(shared, 4)[0] if pack.batch.shared.local_cp_size == 4)
    whole, room, steps = PackSums(), 0, []
    for rank in range(4):
        loader = open_loader(shared, rank=rank, world_size=4)
        bad_on(loader, bad, "corrupt_media")
        metrics = PackMetrics(MetricsConfig(directory=str(tmp_path), interval=1), capacity=512, rank=rank, world_size=4)
        cost, ends, taken = Counter(), [], 0
        for number, pack in enumerate(metrics.watch(loader), start=1):
            size, rows, *_ = pack.batch.shared
            whole.add(sums_of(pack, loader.capacity))
            room += 512 * size * (pack.counts and bool(pack.keys))
            cost[len(ends)] += pack.cost
            taken += 1
            if taken == rows:
                ends, taken = [*ends, number], 0
        lines = [json.loads(line) for line in (tmp_path / f"rank{rank}.jsonl").read_text().splitlines()]
        steps.append([tuple(step) for line in lines for step in line["steps"]])
        assert steps[-1] == [(number, cost[at]) for at, number in enumerate(ends)], (
            "a step is the rows of a global batch"
        )
    assert (whole.samples, whole.read, whole.dropped) == (27, 28, {"corrupt_media": 1})
    assert whole.room == room


def test_a_rank_whose_rows_others_count_is_compared_with_them():
    """Its line has steps, and no packs of its own; one that only pads is left out of nothing but the sums."""
    line = RankLine(
        run="a", rank=1, ranks=2, time=2.0, last=PackSums(), total=PackSums(), steps={8: 3.0}, memory={}, ended=False
    )
    before = dataclasses.replace(line, time=1.0, last=PackSums(packs=5, seconds=1.0), steps={4: 2.0})
    assert line.after(before).last == PackSums(), "the figures of the interval before are not repeated"
    assert line.after(before).steps == {4: 2.0, 8: 3.0}


def test_each_rank_pays_its_part_of_a_rows_language_and_all_of_its_vision(shared):
    plan = Plan.open(shared.data.path)
    costs = {each.name: (each.cost, each.vision_cost) for pack in plan.packs(0, len(plan)) for each in pack.samples}
    for pack in rows_of(shared, 4)[0]:
        total, vision = (sum(costs[key][at] for key in pack.keys) for at in (0, 1))
        assert pack.cost == vision + (total - vision) // pack.batch.shared.local_cp_size


def test_ranks_that_would_leave_out_or_share_other_samples_do_not_start(shared, tmp_path):
    packing = dataclasses.replace(shared.packing, ledger=str(tmp_path / "ledger"))
    run = dataclasses.replace(shared, packing=packing)
    one = open_loader(run, world_size=4).alike()
    quarantine = tmp_path / "ledger" / "quarantine" / "rank0-worker0.jsonl"
    quarantine.parent.mkdir(parents=True)
    quarantine.write_text(json.dumps({"data": "here", "key": "a", "reason": TIMEOUT, "detail": "late"}) + "\n")
    assert open_loader(run, world_size=4).alike() != one
    images = dataclasses.replace(shared.packing, max_images_per_pack=None)
    assert open_loader(dataclasses.replace(shared, packing=images), world_size=4).alike() == one
    other = dataclasses.replace(shared.parallel, exchange_cost=0.3)
    assert open_loader(dataclasses.replace(shared, parallel=other), world_size=4).alike() != one
    quarantine.unlink()
    quarantine.mkdir()
    with pytest.raises(UserError, match=r"ledger .* cannot be read"):
        open_loader(run, world_size=4)


def test_data_sets_of_two_groups_and_a_sample_of_two_epochs_share_no_row(dataset, sources, run_of, tmp_path):
    other = tmp_path / "second"
    convert(ConvertConfig(sources=sources, out=other, split={"train": 1.0}, workers=0))
    run = dataclasses.replace(
        run_of(dataset), parallel=DYNAMIC, training=dataclasses.replace(OF_PAGE.training, global_batch_size=40)
    )
    run = planned(run, dataset, tmp_path, also=(other,), epochs=2, datasets={"second": PlannedDatasetConfig(group="b")})
    plan = Plan.open(run.data.path)
    of = {each.root: number for number, each in enumerate(plan.facts.datasets)}
    assert len(of) == 2
    for rows in rows_of(run, 4):
        for pack in rows:
            assert len({*pack.keys}) == len(pack.keys)
            assert len({data for data, _ in pack.read}) <= 1
    assert sum(len(pack.keys) for rows in rows_of(run, 4) for pack in rows if pack.counts) == 4 * 28


@pytest.mark.parametrize(("batch", "period", "ranks"), [(8, 8, 16), (6, 6, 4), (4, 12, 8)])
def test_an_evaluation_is_some_global_batches_whatever_the_ranks(shared, batch, period, ranks):
    training = dataclasses.replace(shared.training, global_batch_size=batch)
    run = dataclasses.replace(shared, training=training)
    keys = []
    for rank in range(ranks):
        loader = open_loader(run, rank=rank, world_size=ranks, evaluation=period)
        rows = iter(loader)
        while loader.save_state()["position"] < period:
            pack = next(rows)
            keys += pack.keys if pack.counts else ()
    plan = Plan.open(run.data.path)
    planned_keys = [each.name for pack in plan.packs(0, min(period, len(plan))) for each in pack.samples]
    assert sorted(keys) == sorted(planned_keys)


def test_damaged_plans_and_states_are_refused_in_a_sentence(shared, tmp_path):
    loader = open_loader(shared, rank=0, world_size=4)
    next(iter(loader))
    state = loader.save_state()

    def first_row(taken):
        other = open_loader(shared, rank=0, world_size=4)
        other.restore_state(state | {"batch": [taken, *state["batch"][1:]]})
        return next(iter(other))

    assert first_row(1).keys
    for taken in (1000, -1, True):
        with pytest.raises(ConfigError, match=r"is damaged|inside a global batch"):
            first_row(taken)
    table = pq.read_table(shared.data.path)
    file = tmp_path / "damaged.parquet"
    for column, values in (("images", None), ("length", -1)):
        index = table.schema.get_field_index(column)
        broken = table.drop_columns([column])
        if values is not None:
            broken = table.set_column(index, table.schema.field(column), pa.array([values] * len(table), pa.int32()))
        pq.write_table(broken.replace_schema_metadata(table.schema.metadata), file)
        run = dataclasses.replace(shared, data=dataclasses.replace(shared.data, path=str(file)))
        with pytest.raises(UserError, match="is damaged"):
            open_loader(run, world_size=4)


def test_preview_shows_the_packs_of_a_plan_and_of_its_data_set(shared, dataset, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(to_mapping(shared)))
    for path in (shared.data.path, dataset):
        done = CliRunner().invoke(cli, ["preview", str(path), "--config", str(file), "--json"])
        assert done.exit_code == 0, done.output


def test_a_run_that_does_not_say_its_global_batch_is_refused(shared):
    training = dataclasses.replace(shared.training, global_batch_size=1)
    with pytest.raises(ConfigError, match="global_batch_size is 1"):
        open_loader(dataclasses.replace(shared, training=training), world_size=4)


def test_packs_of_a_plan_for_rows_of_their_own_size_are_in_random_order(run_of, tmp_path):
    """Neighbours in cost, as in a plan for a fixed size, would be steps of equal lengths."""
    index = made_index(tmp_path / "index", {"a": [drawn_rows(4000, seed=3)]})
    run = RunConfig(parallel=DYNAMIC, packing=OF_PAGE.packing)
    make_plan([index], run, tmp_path / "plan.parquet")
    plan = Plan.open(tmp_path / "plan.parquet")
    costs = plan.costs(0, len(plan)).sum(axis=1)
    assert len(costs) > 200
    assert abs(np.corrcoef(costs[1:], costs[:-1])[0, 1]) < 4 / np.sqrt(len(costs))
