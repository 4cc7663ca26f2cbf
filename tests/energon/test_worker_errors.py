"""What ends a loader's workers is told in a sentence that says what to do."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time

import pytest

from energon_packing.energon.loader import build_loader
from energon_packing.energon.workers import in_sentences
from energon_packing.errors import ConfigError, UserError


@pytest.fixture
def no_signal_of_children():
    """Torch raises in whatever runs when a worker ends, pytest included; without the signal, where a pack is taken."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    gc.collect()  # torch's handler forgets the workers of a loader that is gone
    signal.signal(signal.SIGCHLD, before)


def test_a_worker_that_the_kernel_kills_ends_the_run_with_a_sentence(run_config, no_signal_of_children):
    packs = iter(build_loader(run_config(data={"workers": 1, "repeat": True}, drop_budget=1.0, seq_length=2048)))
    next(packs)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(
        UserError, match=rf"worker (\(pid {worker.pid}\) )?was killed.*memory runs out.*last checkpoint"
    ):
        for _ in packs:
            pass
    del packs


@pytest.mark.timeout(60)
@pytest.mark.parametrize("signals", [True, False], ids=["told_by_a_signal", "told_by_nobody"])
@pytest.mark.parametrize("later", [False, True], ids=["at_once", "later"])
def test_a_state_that_a_killed_worker_would_have_to_give_is_refused_within_seconds(run_config, request, later, signals):
    if not signals:
        request.getfixturevalue("no_signal_of_children")
    loader = build_loader(run_config(data={"workers": 2, "repeat": True}, drop_budget=1.0, seq_length=2048))
    packs = iter(loader)
    next(packs)
    save = loader.state_later() if later else loader.save_state
    pid = loader._loader._iterator._workers[-1].pid
    os.kill(pid, signal.SIGSTOP)  # it may not answer before its end
    began = time.monotonic()
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(UserError, match=rf"worker \(pid {pid}\) was killed.*continue from the last checkpoint"):
        save()
    assert time.monotonic() - began < 10
    with pytest.raises(UserError, match="was killed"):
        save()
    del packs


def raising(error):
    yield 1
    raise error


@pytest.mark.parametrize(
    ("error", "told"),
    [  # torch's and multiprocessing's own words
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible"),
            "Shared memory is f",
        ),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), r"pid 7\) was killed \(Killed\), as"),
        (RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"), r"pid 7, 8\) was killed, as"),
        (ConnectionResetError(104, "Connection reset by peer"), "worker was killed while it handed over a pack"),
        (EOFError(), "worker was killed while it handed over a pack"),
        (FileNotFoundError(2, "No such file or directory"), "worker was killed while it handed over a pack"),
        (RuntimeError("received 0 items of ancdata"), "too many open files"),
        (OSError(24, "Too many open files"), "too many open files"),
        (OSError(28, "No space left on device"), "Shared memory is full"),
        (
            FileNotFoundError("Caught FileNotFoundError in DataLoader worker process 1.\nOriginal\n  x\ntext/1.tar\n"),
            "cannot be read any more: text/1.tar. See whether",
        ),
        (RuntimeError("unable to write to file </torch_1_2>: No space left on device (28)"), "Shared memory is full"),
    ],
)
def test_errors_of_torch_say_what_to_do(error, told):
    packs = in_sentences(raising(error))
    assert next(packs) == 1
    with pytest.raises(UserError, match=told) as caught:
        next(packs)
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)


def test_other_errors_stay_what_they_are_and_lose_only_a_workers_traceback():
    other = RuntimeError("another")
    with pytest.raises(RuntimeError) as caught:
        list(in_sentences(raising(other)))
    assert caught.value is other
    text = "Caught ConfigError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  x\n"
    with pytest.raises(ConfigError) as told:
        list(in_sentences(raising(ConfigError(f"{text}energon_packing.errors.ConfigError: no such prompt.\n"))))
    assert str(told.value) == "no such prompt."
