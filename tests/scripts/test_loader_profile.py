"""`scripts/loader_profile.py` waits as a trainer does: for workers that are too slow, and only for those."""

import functools
import itertools
import json
import time
from types import SimpleNamespace

import loader_profile as module
import pytest
from click.testing import CliRunner
from loader_profile import rehearse

from energon_packing.config import load_config
from energon_packing.demo import processor_path
from energon_packing.energon.loader import build_loader
from energon_packing.energon.task_encoder import PackingTaskEncoder


@pytest.fixture(scope="module")
def settings(demo_data):
    encoder = f"encoder.processor={processor_path('qwen2_5_vl')}"
    return [encoder, "packing.seq_length=4096", "packing.window=8", f"data.path={demo_data(16)}"]


def test_samples_and_tokens_are_those_of_the_loader_and_the_first_packs_do_not_count(settings, monkeypatch):
    now = itertools.count()
    clock = SimpleNamespace(sleep=lambda _: None, perf_counter=lambda: float(next(now)))
    monkeypatch.setattr(module, "time", clock)
    run = load_config(None, [*settings, "data.workers=0"])
    found = rehearse(run, workers=0, step_seconds=1.0, packs_per_step=2, steps=3)
    packs = list(itertools.islice(build_loader(run), 2, 8))
    seconds = 2 * 3 + 1  # of a clock that goes on by one whenever it is read
    assert found["waited_share"] == pytest.approx(3 / seconds)
    assert found["per_second"] == pytest.approx(
        {
            "steps": 3 / seconds,
            "packs": 6 / seconds,
            "samples": sum(pack.batch.num_samples for pack in packs) / seconds,
            "tokens": sum(pack.batch.real_tokens for pack in packs) / seconds,
        }
    )


def test_a_step_waits_for_one_slow_worker_and_not_for_four(settings, monkeypatch):
    """A worker takes 0.4 seconds for a pack, a step 0.2: one worker makes it wait half of the time."""
    assemble = PackingTaskEncoder.pack_selected_samples

    @functools.wraps(assemble)  # Energon asks a method whether it is stateless
    def slow(self, *arguments, **named):
        time.sleep(0.4)
        return assemble(self, *arguments, **named)

    monkeypatch.setattr(PackingTaskEncoder, "pack_selected_samples", slow)
    run = load_config(None, settings)
    one, four = (rehearse(run, workers=workers, step_seconds=0.2, steps=6) for workers in (1, 4))
    assert 0.45 < one["waited_share"] < 0.7
    assert 1.4 < one["per_second"]["packs"] <= 2.6
    assert four["waited_share"] < one["waited_share"] / 2


def test_the_command_writes_no_ledger_and_refuses_what_it_cannot_read(settings, tmp_path):
    path = settings[-1].partition("=")[2]
    words = [word for setting in settings[:-1] for word in ("--set", setting)]
    words += ["--set", f"packing.ledger={tmp_path / 'ledger'}", "--step-seconds", "0", "--steps", "2", "--json"]
    done = CliRunner().invoke(module.main, [path, *words, "--workers", "0", "--workers", "1"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [row["workers"] for row in rows] == [0, 1]
    assert all(0 < row["waited_share"] <= 1 for row in rows)
    assert not (tmp_path / "ledger").exists(), "the ledger is that of a run, which may be alive"
    done = CliRunner().invoke(module.main, [str(tmp_path / "nothing"), *words])
    assert (done.exit_code, "nothing" in json.loads(done.stdout)["error"]) == (2, True)
