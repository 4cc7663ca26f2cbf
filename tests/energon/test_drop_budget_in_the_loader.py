"""The drop budget on real windows: no sound run is stopped, whatever the window holds, and every unsound one is."""

from __future__ import annotations

import pytest
from bench.budget import Cell, measure, run
from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset

from energon_packing.config import EncoderConfig
from energon_packing.demo import processor_path
from energon_packing.energon import task_encoder as task_encoder_module
from energon_packing.energon.loader import build_loader
from energon_packing.energon.sample_task_encoder import MixedTaskEncoder
from energon_packing.ledger import Ledger

RUNS = 15  # `python scripts/bench.py budget` makes hundreds


@pytest.mark.timeout(300)
@pytest.mark.full
@pytest.mark.parametrize("stage", ["measure", "render"])
@pytest.mark.parametrize(("share", "window"), [(0.06, 1), (0.06, 1024), (0.02, 1024)])
def test_no_run_below_its_budget_is_stopped_whatever_its_window(share, window, stage):
    # Past the point at which a full window was read and the first packs have left it.
    cell = Cell(share=share, window=window, stage=stage, reads=1600)
    assert measure(cell, runs=RUNS)["stopped"] == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cell",
    [Cell(share=0.2, window=1), Cell(share=0.3, window=1024), Cell(share=0.4, window=256, stage="render")],
    ids=str,
)
def test_every_run_above_its_budget_is_stopped_within_the_stated_number_of_reads(cell):
    (result,) = run([cell], runs=RUNS)
    assert result["stopped"] == RUNS
    assert result["last"] <= result["at_most"]
    assert result["median"] <= 1.3 * result["expected"]


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


@pytest.mark.parametrize("buffer", [None, 16])
def test_every_sample_of_an_epoch_is_counted_as_read_once(run_config, train_keys, ledgers, buffer):
    packs = list(build_loader(run_config(seq_length=512, drop_budget=1.0), packing_buffer_size=buffer))
    (ledger,) = ledgers
    assert ledger.read == len(train_keys) == ledger.dropped + ledger.emitted
    assert ledger.emitted == sum(len(pack.keys) for pack in packs)
    assert 0 < ledger.dropped < ledger.read


def test_single_samples_are_counted_as_read_too(dataset, train_keys):
    encoder = EncoderConfig(processor=str(processor_path("qwen2_5_vl")))
    task_encoder = MixedTaskEncoder(encoder, max_length=512, drop_budget=1.0)
    made = get_train_dataset(
        str(dataset / "dataset.yaml"),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=2,
        task_encoder=task_encoder,
        max_samples_per_sequence=None,
        shuffle_buffer_size=None,
        repeat=False,
    )
    emitted = sum(len(batch.keys) for batch in get_savable_loader(made))
    ledger = task_encoder._ledger
    assert ledger is not None
    assert ledger.read == len(train_keys)
    assert ledger.dropped >= ledger.read - emitted - 1  # Energon leaves a short last batch out
    assert ledger.dropped > 0


@pytest.mark.parametrize("buffer", [None, 16])
def test_a_restored_run_counts_nothing_twice_and_forgets_nothing(run_config, ledgers, buffer):
    config = run_config(data={"repeat": True}, seq_length=512, drop_budget=1.0)
    loader = build_loader(config, packing_buffer_size=buffer)
    states, counts = [], []
    for _, _pack in zip(range(12), loader, strict=False):
        states.append(loader.save_state())
        counts.append(ledgers[0].counts())
    assert counts[-1]["reasons"]["oversize"] > 0
    for done in (1, 5, 9):
        again = build_loader(config, packing_buffer_size=buffer)
        again.restore_state(states[done - 1])
        for at, _pack in zip(range(done, 12), again, strict=False):
            assert ledgers[-1].counts() == counts[at]
