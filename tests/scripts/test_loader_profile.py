"""`scripts/loader_profile.py` counts every second once, in the stage that spent it, and every sample that it read."""

import contextlib
import itertools
import json
import math

import loader_profile as module
import pytest
from click.testing import CliRunner
from loader_profile import STAGES, StageClock, loader_profile

from energon_packing.config import load_config
from energon_packing.demo import processor_path
from energon_packing.energon.loader import build_loader


class Time:
    """A clock that tests move."""

    now = 100.0

    def __call__(self):
        return self.now


def test_only_the_inner_stage_counts():
    clock = Time()
    stages = StageClock(clock)
    with stages.stage("decode"):
        clock.now += 2
        with contextlib.suppress(ValueError), stages.stage("pixels"):
            clock.now += 8
            raise ValueError("an error ends its stage")
        clock.now += 16
    clock.now += 32
    stages.count()
    assert {name: seconds for name, seconds in stages.seconds.items() if seconds} == {
        "read": 32,
        "decode": 18,
        "pixels": 8,
    }


@pytest.fixture(scope="module")
def run(demo_data):
    settings = (f"encoder.processor={processor_path('qwen2_5_vl')}", "packing.seq_length=4096", "packing.window=8")
    return load_config(None, [*settings, f"data.path={demo_data(16)}", "data.workers=0"])


@pytest.fixture
def no_hand_over(monkeypatch):
    monkeypatch.setattr(module, "_handed_over", lambda *_: 0.001)


def test_samples_and_tokens_are_those_of_the_loader_and_no_second_is_lost(run, no_hand_over):
    found = loader_profile(run, packs=3)
    packs = list(itertools.islice(build_loader(run), 1, 4))
    assert found["packs"] == 3
    assert found["samples"] == sum(len(pack.keys) for pack in packs)
    assert found["tokens"] == sum(pack.batch.real_tokens for pack in packs)
    assert found["fill"] == pytest.approx(found["tokens"] / 3 / 4096)
    assert [each["stage"] for each in found["stages"]] == list(STAGES)
    assert sum(each["share"] for each in found["stages"]) == pytest.approx(1)
    whole = sum(each["ms_per_sample"] for each in found["stages"]) * found["samples"] / 1e3
    assert whole == pytest.approx(found["cpu_seconds"])
    assert all(each["share"] > 0 for each in found["stages"]), "each stage of this data was seen"


def test_a_slow_stage_shows_and_asks_for_workers(run, monkeypatch, no_hand_over):
    """On a clock that stands still but in `decode_media`, which takes a second per sample."""
    from energon_packing.encoders import decoding

    clock = Time()
    monkeypatch.setattr(module, "StageClock", lambda: StageClock(clock))
    decode = decoding.decode_media

    def slow(*arguments, **settings):
        clock.now += 1.0
        return decode(*arguments, **settings)

    monkeypatch.setattr(decoding, "decode_media", slow)
    found = loader_profile(run, packs=4, step_seconds=(0.5, 2.0), packs_per_step=3)
    assert found["cpu_seconds"] == found["samples_with_media"] > 0
    shares = {each["stage"]: each["share"] for each in found["stages"]}
    assert shares["decode"] == 1
    per_pack = found["cpu_seconds"] / 4
    assert found["workers"] == [
        {"step_seconds": seconds, "workers": math.ceil(3 * per_pack / seconds)} for seconds in (0.5, 2.0)
    ]


def test_the_command_writes_no_ledger_and_refuses_data_that_end_before(run, tmp_path):
    words = ["--set", "packing.window=8", "--set", f"encoder.processor={processor_path('qwen2_5_vl')}"]
    words = [run.data.path, *words, "--set", f"packing.ledger={tmp_path / 'ledger'}"]
    done = CliRunner().invoke(module.main, [*words, "--set", "packing.seq_length=4096", "--packs", "3", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["hand_over_ms"] > 0
    assert not (tmp_path / "ledger").exists(), "the ledger is that of a run, which may be alive"
    done = CliRunner().invoke(
        module.main,
        [*words, "--set", "packing.seq_length=131072", "--set", "packing.window=99", "--set", "data.repeat=false"],
    )
    assert (done.exit_code, "data.repeat=true" in done.output) == (2, True)
