"""Storage whose reads fail now and then: short failures change nothing, long ones cost their sample for good."""

from __future__ import annotations

import errno
import itertools
import random
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.energon.cache.file_store import WebdatasetFileStore

from energon_packing import read_again as module
from energon_packing.energon.loader import build_loader
from energon_packing.read_again import PAUSES, read_again


class Flaky:
    """Makes reads of text and media fail in bursts, from a seed."""

    def __init__(self, monkeypatch, *, longest, share):
        self.on, self.failed, self._rest = True, 0, False
        self._random, self._left, self._longest, self._share = random.Random(5), 0, longest, share
        monkeypatch.setattr(module, "PAUSES", (0.0,) * len(PAUSES))
        monkeypatch.setattr(module, "_failing", set())
        for owner, name in (
            (tarfile.ExFileObject, "read"),
            (WebdatasetFileStore, "_get_part_by_raw_sample_pointer"),
        ):
            monkeypatch.setattr(owner, name, self._failing(getattr(owner, name)))

    def _failing(self, original):
        def read(*arguments, **named):
            if not self._left and self.on and not self._rest and self._random.random() < self._share:
                self._left = self._random.randint(1, self._longest)
            self._rest = False
            if self._left:
                self._left -= 1
                self.failed += 1
                self._rest = not self._left  # two bursts never meet
                raise OSError(errno.EIO, "Input/output error")
            return original(*arguments, **named)

        return read


def keys_of(packs):
    return [key for pack in packs for key in pack.keys]


def test_failures_shorter_than_all_tries_change_no_pack(run_config, monkeypatch):
    plain = [pack.keys for pack in build_loader(run_config(seq_length=2048))]
    flaky = Flaky(monkeypatch, longest=len(PAUSES), share=0.2)
    loader = build_loader(run_config(seq_length=2048))
    assert [pack.keys for pack in loader] == plain
    assert flaky.failed > 20
    assert not loader.epoch_report.dropped


@pytest.mark.parametrize("saved", [2, 4])
def test_what_was_dropped_before_a_state_stays_dropped_and_what_was_emitted_is_not_given_again(
    run_config, monkeypatch, saved
):
    # A restore in the tail of a finite epoch is not promised, so the run repeats, and its first epoch is not used up.
    config = run_config(data={"repeat": True, "shuffle_buffer": 4}, seq_length=1536, window=8, drop_budget=1.0)
    flaky = Flaky(monkeypatch, longest=3 * len(PAUSES), share=0.1)
    loader = build_loader(config)
    packs = iter(loader)
    first = list(itertools.islice(packs, saved))
    state = loader.save_state()
    before = {entry.key for pack in first for entry in pack.dropped}
    assert flaky.failed
    flaky.on, flaky._left = False, 0  # the storage is well again
    again = build_loader(config)
    again.restore_state(state)
    replayed = list(itertools.islice(again, 5))
    given_keys = keys_of([*first, *replayed])
    assert len(given_keys) == len(set(given_keys))
    assert before
    assert not before & {*given_keys, *(entry.key for pack in replayed for entry in pack.dropped)}


@given(fails=st.lists(st.integers(0, 6), max_size=8), lasting=st.booleans())
def test_tries_are_bounded_and_pauses_are_not_repeated_for_what_stays_broken(fails, lasting):
    calls, slept = [], []
    module._failing.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.time, "sleep", slept.append)
        broken = False
        for count in fails:
            left, before = count, len(calls)

            def read():
                nonlocal left
                calls.append(1)
                if left:
                    left -= 1
                    raise OSError(errno.ENOENT if lasting else errno.EIO, "x")
                return 7

            tries = 1 if broken or lasting else 1 + len(PAUSES)
            if count < tries:
                assert read_again("place", read) == 7
                broken = False
            else:
                with pytest.raises(OSError, match="x"):
                    read_again("place", read)
                broken = broken or not lasting
            assert len(calls) - before == min(count + 1, tries)
    assert set(slept) <= set(PAUSES)
