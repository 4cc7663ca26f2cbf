"""Packs ahead of use: whose state is saved, where errors arrive, and that nothing remains, whoever dies."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import threading
import time
import weakref
from pathlib import Path

import pytest
import replica_ranks
import torch
from forking_python import quick_python
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import ranks_environment

from energon_packing.config import DataConfig
from energon_packing.energon import replica_reader
from energon_packing.energon.loader import build_loader
from energon_packing.energon.pack_bytes import field_digests
from energon_packing.energon.replica import Replica
from energon_packing.energon.replica_channel import SharedBlock
from energon_packing.energon.replica_reader import EveryReader, OneReader
from energon_packing.errors import ConfigError, PackingError

DEPTHS = (1, 3)


def number_of(batch):
    return int(batch.tokens[0, 0]) // 100


@pytest.mark.parametrize("reader", [OneReader, EveryReader])
@settings(deadline=None, max_examples=20)
@given(
    depth=st.sampled_from(DEPTHS),
    steps=st.lists(st.sampled_from(["train", "validate", "save"]), max_size=25),
    pause=st.booleans(),
)
def test_a_state_belongs_to_the_last_pack_that_was_used_whatever_was_read_since(reader, depth, steps, pause):
    train, validation = (reader(replica_ranks.Source(), Replica(), depth=depth) for _ in range(2))
    used = {"train": 0, "validate": 0}
    for step in steps:
        if step == "save":
            if not used["train"]:
                continue
            if pause:
                time.sleep(0.001)  # packs are made in the meantime
            state = train.save_state()
            assert state == {"packs": used["train"], "source": {"next": used["train"]}}
            again = reader(replica_ranks.Source(), Replica(), depth=depth)
            again.restore_state(json.loads(json.dumps(state)))
            assert again.save_state() == state
            assert [number_of(next(again)) for _ in range(3)] == list(range(used["train"], used["train"] + 3))
            again.close()
        else:
            assert number_of(next({"train": train, "validate": validation}[step])) == used[step]
            used[step] += 1
    train.close()
    validation.close()


class LoaderSource:
    """The batches of a loader, and how many were read."""

    def __init__(self, loader):
        self._loader, self._packs, self.read = loader, iter(loader), 0

    def __next__(self):
        batch = next(self._packs).batch
        self.read += 1
        return batch

    def save_state(self):
        return self._loader.save_state()

    def state_later(self):
        return self._loader.state_later()

    def restore_state(self, state):
        self._loader.restore_state(state)


@pytest.mark.parametrize(("workers", "depth"), [(0, 2), (2, 3)])
def test_a_loader_continues_bit_identically_from_the_pack_that_was_used(run_config, workers, depth):
    """With workers, its state is asked for when packs were read since; without, it is taken after each pack."""
    settings_of_run = {"window": 16, "seq_length": 2048, "drop_budget": 1.0}
    config = run_config(data={"workers": workers, "repeat": True, "packs_ahead": depth}, **settings_of_run)

    def reader():
        made = LoaderSource(build_loader(config))
        return made, OneReader(made, Replica(), depth=depth)

    def when_read(source, count):
        deadline = time.monotonic() + 60
        while source.read < count and time.monotonic() < deadline:
            time.sleep(0.01)
        return source.read == count

    source, plain = reader()
    reference = [field_digests(next(plain)) for _ in range(8)]
    assert when_read(source, 8 + depth)  # without workers, only one loader may read at a time
    source, ahead = reader()
    for used in range(1, 5):
        assert field_digests(next(ahead)) == reference[used - 1]
        assert when_read(source, used + depth)
        if used == 4:
            state = ahead.save_state()
            source_again, again = reader()
            again.restore_state(state)
            for number in range(used, used + 3):
                assert field_digests(next(again)) == reference[number]
            assert when_read(source_again, 3 + depth)
            assert again.save_state()["packs"] == used + 3


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_error_is_raised_at_its_pack_and_again_by_whoever_asks_on(depth):
    def change(number):
        if number == 3:
            raise ConfigError("no such prompt.")
        return replica_ranks.pack(number)

    reader = OneReader(replica_ranks.Source(change=change), Replica(), depth=depth)
    assert [number_of(next(reader)) for _ in range(3)] == [0, 1, 2]
    state = reader.save_state()
    for _ in range(2):
        with pytest.raises(ConfigError, match="no such prompt"):
            next(reader)
    assert reader.save_state() == state == {"packs": 3, "source": {"next": 3}}


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_end_comes_after_the_last_pack_and_stays(depth):
    reader = OneReader(replica_ranks.Source(end=4), Replica(), depth=depth)
    assert [number_of(batch) for batch in reader] == [0, 1, 2, 3]
    assert list(reader) == []


@pytest.mark.parametrize("depth", DEPTHS)
def test_never_more_packs_are_read_than_were_asked_for_and_the_depth(depth):
    source = replica_ranks.Source()
    reader = OneReader(source, Replica(), depth=depth)
    assert source.next == 0  # nothing is read before the first pack, when a state may still be restored
    for used in range(1, 8):
        next(reader)
        deadline = time.monotonic() + 10
        while source.next < used + depth and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.005)
        assert source.next == used + depth
    reader.close()


def test_a_reader_with_packs_ahead_does_not_go_back():
    reader = OneReader(replica_ranks.Source(), Replica(), depth=1)
    next(reader)
    with pytest.raises(PackingError, match="before its first pack"):
        reader.restore_state({"packs": 0, "source": {"next": 0}})


def alive(name="packs ahead"):
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


@pytest.mark.parametrize("closed", [True, False])
def test_the_thread_ends_with_its_reader(closed):
    others = set(alive())  # those of earlier tests may end at any moment
    reader = OneReader(replica_ranks.Source(), Replica(), depth=2)
    next(reader)
    (own,) = set(alive()) - others
    if closed:
        reader.close()
        with pytest.raises(PackingError, match="closed"):
            next(reader)
    else:
        del reader
        gc.collect()
    own.join(timeout=200)
    assert not own.is_alive()


@pytest.mark.parametrize("first", ["error", "close"])
def test_a_loader_ends_with_its_reader_whose_thread_met_an_error_that_nobody_took(first):
    """Its workers would go on until garbage is collected, which waits for them."""
    closed, source = threading.Event(), replica_ranks.Source()

    def change(number):
        if number:
            assert first == "error" or closed.wait(200)
            raise ConfigError("no such prompt.")
        return replica_ranks.pack(number)

    source.change = change
    reader, found = OneReader(source, Replica(), depth=2), weakref.ref(source)
    next(reader)
    thread = reader._ahead.thread
    if first == "error":
        thread.join(200)
    del source, change
    gc.disable()
    try:
        reader.close()
        del reader
        closed.set()
        thread.join(200)
        assert found() is None
    finally:
        gc.enable()


def test_ranks_of_stages_and_hosts_end_while_packs_are_on_their_way(tmp_path):
    command = [quick_python(), "-W", "ignore", str(Path(replica_ranks.__file__)), str(tmp_path), "2", "nobody"]
    started = time.monotonic()
    ended = subprocess.run(command, env=ranks_environment(), capture_output=True, text=True, timeout=200, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    print(f"ended after {time.monotonic() - started:.1f} s")


_ENDS = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
import replica_ranks
from energon_packing.energon.replica import Replica
from energon_packing.energon.replica_reader import OneReader

class Group:  # a process group lets go of the lock of the interpreter as it ends
    def __del__(self):
        begun.set()
        time.sleep(1.0)
        sys.stderr.write("ended")

begun = threading.Event()
reader = OneReader(replica_ranks.Source(), Replica(), depth=2)
next(reader)
reader._road.group = Group()
reader.close()
del reader
begun.wait()
"""


def test_a_process_ends_after_its_thread_has_let_go_of_the_groups_of_ranks():
    """Else it would come back from the group's end into an interpreter that is gone, which aborts the process."""
    command = [quick_python(), "-W", "ignore", "-c", _ENDS, str(Path(__file__).parent)]
    ended = subprocess.run(command, env=ranks_environment(), capture_output=True, text=True, timeout=200, check=False)
    assert (ended.returncode, ended.stderr) == (0, "ended")


def test_the_depth_is_checked_and_needs_workers_and_ranks_that_end_alone():
    with pytest.raises(ConfigError, match="packs_ahead"):
        DataConfig(packs_ahead=-1)
    assert DataConfig(packs_ahead=3).depth == 3
    assert DataConfig(packs_ahead=3, workers=0).depth == 0
    assert DataConfig(packs_ahead=3, repeat=False, epoch_end="drop").depth == 0
    assert replica_reader.EXIT_SECONDS > 0


# --- Blocks -----------------------------------------------------------------------------------------------------------


def test_a_block_of_a_workers_tensor_is_that_tensors_own_memory():
    class One(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield torch.arange(1000)[None]

    (sent,) = torch.utils.data.DataLoader(One(), batch_size=None, num_workers=1)
    block = SharedBlock.of(sent[:, 10:20].squeeze(0))
    assert torch.equal(block.view().view(torch.int64), torch.arange(10, 20))
    sent[0, 10] = 77  # seen through the block, so nothing was copied
    assert int(block.view().view(torch.int64)[0]) == 77


@pytest.mark.parametrize("size", [0, 1, 4097, 3 << 20])
def test_a_block_of_any_other_tensor_holds_a_copy_that_every_view_has_for_itself(size):
    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
    block = SharedBlock.of(tensor)
    one, two = block.view(), block.view()
    one.fill_(1)
    assert torch.equal(two, tensor)
    descriptor = block.descriptor
    del block
    assert torch.equal(two, tensor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_block_of_a_tensor_that_is_not_contiguous_holds_its_values_in_order():
    tensor = torch.arange(12).view(3, 4).T
    assert torch.equal(SharedBlock.of(tensor).view().view(torch.int64), tensor.flatten())


# --- Ranks that are killed --------------------------------------------------------------------------------------------


def shared_files():
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_is_named_by_the_other_and_leaves_nothing_behind(killed, tmp_path):
    before = shared_files()
    command = [quick_python(), "-W", "ignore", str(Path(replica_ranks.__file__)), str(tmp_path), "2", str(killed)]
    run = subprocess.Popen(command, env=ranks_environment(), start_new_session=True)
    survivor = tmp_path / "survivor.json"
    try:
        run.wait(timeout=120)
        deadline = time.monotonic() + 60
        while not survivor.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)  # the ranks and their worker
    *packs, (name, message) = json.loads(survivor.read_text())
    assert len(packs) >= 2
    assert name == "PackingError"
    assert f"rank {killed}" in message
    assert "has ended" in message
    deadline = time.monotonic() + 20
    while shared_files() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert shared_files() <= before
