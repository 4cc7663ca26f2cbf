"""A finite epoch over ranks with unequal data: equally many packs, nobody waits for a rank that has gone."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
from forking_python import quick_python
from hypothesis import given, settings
from hypothesis import strategies as st
from made_data import chat, converted

from energon_packing import thd
from energon_packing.config import DataConfig, ParallelConfig, to_mapping
from energon_packing.energon.epoch_end import EpochReport, even_packs
from energon_packing.energon.loader import LoaderBase, build_loader, build_task_encoder
from energon_packing.errors import ConfigError
from energon_packing.ledger import NothingToPack
from energon_packing.offline.open_loader import EndlessPacks

PADDING = "padding"


class Ranks:
    """Ranks as threads: an agreement that all of them have to join, or it times out as a hang would."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=60)
        self.values = [0] * count

    def agree(self, rank):
        def agree(value, operation):
            self.values[rank] = value
            self.barrier.wait()
            found = (min if operation == "min" else max)(self.values)
            self.barrier.wait()
            return found

        return agree

    def run(self, work):
        """`work(rank, agree)` on every rank at once; results by rank."""
        results, errors = [None] * len(self.values), []

        def start(rank):
            try:
                results[rank] = work(rank, self.agree(rank))
            except Exception as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(len(self.values))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


def stream(kept, promised):
    """Packs of two workers in turn, each saying how many of its own are sure to come; `kept` False is a lost one."""
    left = [sum(promised[at] for at in range(worker, len(promised), 2)) for worker in (0, 1)]
    for at, worth in enumerate(promised):
        left[at % 2] -= worth
        if kept[at]:
            # A preference pair is one sample and two segments.
            batch = SimpleNamespace(sample_keys=(str(at), str(at)))
            yield SimpleNamespace(worker=at % 2, ahead=left[at % 2], keys=(str(at),), batch=batch)


def even(mode, sizes, known, resumed=False):
    """What each rank emits, or why it refuses."""
    reports = [EpochReport() for _ in sizes]

    def work(rank, agree):
        packs = stream([True] * sizes[rank], [int(known)] * sizes[rank])
        return emitted_or_told(packs, mode, agree, lambda: PADDING, reports[rank], rank=rank, resumed=resumed)

    return Ranks(len(sizes)).run(work), reports


def emitted_or_told(*arguments, **named):
    try:
        return list(even_packs(*arguments, **named))
    except NothingToPack as error:
        return str(error)


@given(sizes=st.lists(st.integers(1, 12), min_size=2, max_size=4), known=st.booleans())
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("mode", ["drop", "pad"])
def test_all_ranks_emit_equally_many_packs_and_no_step_is_all_padding(mode, sizes, known):
    emitted, reports = even(mode, sizes, known)
    assert {len(packs) for packs in emitted} == {min(sizes) if mode == "drop" else max(sizes)}
    for step in zip(*emitted, strict=True):
        assert any(pack != PADDING for pack in step)
    for size, packs, report in zip(sizes, emitted, reports, strict=True):
        real = [pack for pack in packs if pack != PADDING]
        assert report.packs == len(real)
        assert report.padding_packs == len(packs) - len(real)
        assert report.dropped_packs == len(report.dropped_keys) == size - len(real)
    assert len({report.agreements for report in reports}) == 1


@given(sizes=st.lists(st.integers(0, 3), min_size=2, max_size=4), mode=st.sampled_from(["drop", "pad"]))
@settings(max_examples=40, deadline=None)
def test_an_epoch_in_which_no_rank_would_emit_a_pack_is_refused_by_all_with_the_rank_that_has_none(sizes, mode):
    emitted, reports = even(mode, sizes, known=True)
    if (min if mode == "drop" else max)(sizes):
        assert not any(isinstance(each, str) for each in emitted)
    else:
        told = f"data-parallel rank {sizes.index(0)} has no pack"
        assert all(told in each and f"data.epoch_end is {mode}" in each for each in emitted)
        # A run that goes on after its last step has no packs left either, and that is no mistake.
        assert even(mode, sizes, known=True, resumed=True)[0] == [[] for _ in sizes]
    assert len({report.agreements for report in reports}) == 1


def test_a_run_that_goes_on_after_the_last_pack_of_an_epoch_begins_the_next_one():
    def endless():
        epochs = iter([[], [SimpleNamespace(batch="first of the next")]])
        nothing = dict.fromkeys(("save_state", "state_later", "restore_state"), lambda *_: None)
        return EndlessPacks(type("Loader", (), {"__iter__": lambda _: iter(next(epochs))} | nothing)())

    resumed = endless()
    resumed.restore_state({})
    assert next(resumed) == "first of the next"
    with pytest.raises(ConfigError, match="A whole epoch of the data set had no packs"):
        next(endless())


def test_what_a_resumed_epoch_has_left_may_all_be_dropped():
    report = EpochReport(dropped=Counter(corrupt_media=1))
    loader = SimpleNamespace(_resumed=True, _world_size=1, _rank=0, _shares=None)
    LoaderBase._check_epoch(loader, report)
    loader._resumed = False
    with pytest.raises(NothingToPack, match="1 dropped \\(1 corrupt_media\\)"):
        LoaderBase._check_epoch(loader, report)


def test_ranks_that_know_packs_ahead_exchange_an_integer_a_window_not_a_pack():
    _, reports = even("pad", [60, 50, 55], known=True)
    assert reports[0].agreements <= 5
    _, reports = even("pad", [60, 50, 55], known=False)
    assert reports[0].agreements == 61


@given(data=st.data())
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("mode", ["drop", "pad"])
def test_a_promised_pack_that_is_lost_to_bad_media_does_not_hang_the_others(mode, data):
    sizes = data.draw(st.lists(st.integers(0, 10), min_size=2, max_size=3))
    kept = [data.draw(st.lists(st.booleans(), min_size=size, max_size=size)) for size in sizes]
    reports = [EpochReport() for _ in sizes]

    def work(rank, agree):
        packs = stream(kept[rank], [1] * sizes[rank])
        return emitted_or_told(packs, mode, agree, lambda: PADDING, reports[rank], rank=rank)

    emitted = Ranks(len(sizes)).run(work)
    if isinstance(emitted[0], str):
        assert not (all if mode == "drop" else any)(any(own) for own in kept)
        assert all(isinstance(packs, str) for packs in emitted)
        return
    assert len({len(packs) for packs in emitted}) == 1
    for own, report in zip(kept, reports, strict=True):
        assert report.packs + report.dropped_packs == sum(own)


@pytest.fixture(scope="module", params=[2])
def skewed_epochs(request, run_config_of):
    """Packs of three ranks, of which rank 0 drops all but short samples and runs out long before the others."""
    found = []
    for rank, length in enumerate((256, 2048, 2048)):
        config = run_config_of(data={"workers": request.param}, seq_length=length, window=8, drop_budget=1.0)
        found.append(list(build_loader(config, rank=rank, world_size=3)))
    assert len(found[0]) < min(len(found[1]), len(found[2]))
    return found, build_task_encoder(config)


def test_packs_that_a_worker_announces_really_come(skewed_epochs):
    for packs in skewed_epochs[0]:
        for at, pack in enumerate(packs):
            assert sum(later.worker == pack.worker for later in packs[at + 1 :]) >= pack.ahead


@pytest.mark.parametrize(
    ("width", "positions", "parallel"),
    [(False, "1d", {}), (True, "1d", {"context_parallel": 2}), (False, "mrope", {"context_parallel": 2})],
)
def test_a_padding_pack_is_a_valid_row_that_teaches_nothing(run_config, width, positions, parallel):
    config = run_config(pad_to_max_length=width, encoder={"position_ids": positions})
    config = dataclasses.replace(config, parallel=ParallelConfig(**parallel))
    pack = build_task_encoder(config).padding_pack()
    assert pack.padding
    assert thd.check_thd(pack.batch, multiple=config.parallel.multiple) == []
    assert pack.batch.total_tokens == (4096 if width else config.parallel.multiple)
    assert pack.batch.position_ids.dim() == (3 if positions == "mrope" else 2)
    assert (pack.batch.labels == thd.IGNORE_INDEX).all()
    assert pack.batch.padding_mask.all()
    assert pack.batch.num_samples == 0
    if len(parallel):
        thd.slice_for_context_parallel(pack.batch, 2, 1)


def test_settings_that_cannot_work_are_told_in_a_sentence(run_config):
    with pytest.raises(ConfigError, match=r"data\.repeat"):
        DataConfig(repeat=True, epoch_end="pad")
    loader = build_loader(run_config(data={"epoch_end": "pad"}), rank=0, world_size=2)
    with pytest.raises(ConfigError, match=r"initialise torch\.distributed"):
        next(iter(loader))


TRAINER = """
import json, sys
import torch, torch.distributed as dist
from energon_packing.config import from_mapping, RunConfig
from energon_packing.energon.loader import build_loader

rank, store, configs = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
loader = build_loader(from_mapping(RunConfig, configs[rank], where="test"), rank=rank, world_size=2)
loader.tell = lambda sentence: print("told:", sentence)
steps, tokens = 0, []
for pack in loader:
    trained = torch.tensor(float(pack.batch.loss_mask.sum()))
    dist.all_reduce(trained)  # the gradient of a real trainer: hangs when a rank is missing
    steps += 1
    tokens.append(float(trained))
assert min(tokens) > 0, "a step without a target on any rank"
print(json.dumps([steps, loader.epoch_report.packs, loader.epoch_report.padding_packs, loader.epoch_report.agreements]))
dist.destroy_process_group()
"""


def train_in_two_processes(configs, folder):
    """What each rank printed, and its exit code."""
    configs = [to_mapping(config) for config in configs]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [quick_python(), "-c", TRAINER, str(rank), str(folder / "store"), json.dumps(configs)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return outputs, [rank.returncode for rank in ranks]


def test_two_processes_train_through_an_uneven_epoch_without_a_hang(run_config, tmp_path):
    lengths = (512, 2048)
    configs = [run_config(data={"epoch_end": "pad"}, seq_length=each, window=8, drop_budget=1.0) for each in lengths]
    outputs, codes = train_in_two_processes(configs, tmp_path)
    assert codes == [0, 0]
    (steps, real, padded, agreements), other = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert steps == other[0] == real + padded
    assert agreements == other[3]
    assert padded + other[2] > 0


@pytest.fixture(scope="module")
def one_sample(tmp_path_factory):
    """A data set of which rank 0 of 2 gets nothing."""
    return converted(tmp_path_factory.mktemp("one"), [chat("What?", "That.")])


def test_an_epoch_that_one_rank_without_a_pack_would_end_for_all_is_refused_by_all(run_config, tmp_path):
    changes = {"data": {"epoch_end": "drop"}, "drop_budget": 1.0}
    outputs, codes = train_in_two_processes([run_config(**changes), run_config(**changes, seq_length=16)], tmp_path)
    for output in outputs:
        assert "data.epoch_end is drop, and data-parallel rank 1 has no pack" in output.splitlines()[-1]
    assert re.search(r"\b(\d+) dropped, \1 oversize", outputs[1])
    assert codes == [1, 1]


def test_a_rank_without_a_sample_is_told_where_the_others_train(run_config, one_sample, tmp_path):
    changes = {"path": str(one_sample), "epoch_end": "pad"}
    outputs, codes = train_in_two_processes([run_config(data=changes)] * 2, tmp_path)
    assert codes == [0, 0]
    assert json.loads(outputs[0].splitlines()[-1]) == [1, 0, 1, 2]
    assert "told" not in outputs[1]
    assert "told: Data-parallel rank 0 of 2 had no sample in this epoch, so its 1 packs were padding" in outputs[0]
    with pytest.warns(UserWarning, match="Data-parallel rank 0 of 2 had no sample in this epoch; give data.split more"):
        assert list(build_loader(run_config(data={"path": str(one_sample)}), rank=0, world_size=2)) == []


def test_statistics_of_the_loader_are_those_of_its_packs(run_config):
    loader = build_loader(run_config(seq_length=2048, drop_budget=1.0))
    packs = list(loader)
    found = loader.statistics()
    lengths = [length for pack in packs for length in pack.batch.sample_lengths]
    assert found["segments_per_pack"] == pytest.approx(len(lengths) / len(packs))
    assert found["fill"] == pytest.approx(sum(lengths) / (2048 * len(packs)))
    parts = ("fill", "padding_alignment", "padding_tail", "padding_unused")
    assert sum(found[name] for name in parts) == pytest.approx(1)
    dropped = loader.epoch_report.dropped.total() - len(loader.epoch_report.dropped_at_end)
    assert found["dropped_share"] == pytest.approx(dropped / loader.epoch_report.read)
    delays = [delay for pack in packs for delay in pack.delays]
    assert found["delay_max"] == max(delays) < len(lengths)
    assert found["delay_mean"] == pytest.approx(sum(delays) / len(delays))
    assert 0 < found["held_max"] <= 32
    assert min(delays) >= 0
