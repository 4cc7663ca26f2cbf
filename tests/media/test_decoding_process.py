"""The child process that decodes: hangs, crashes, errors, large results, dead parents. The decoders are planted."""

import ctypes
import itertools
import json
import mmap
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.drops import CRASH, ENDED, TIMEOUT
from energon_packing.energon.workers import keep_freed_memory
from energon_packing.errors import PackingError, SampleRejected, UserError
from energon_packing.media import decoding_process
from energon_packing.media.decoding_process import MOST_IN_A_ROW, DecodingProcess


def act(request, read):
    """What a decoder may do, by its name."""
    if request == "hang":  # in C, with the interpreter's lock held
        lock = _locked()
        ctypes.pythonapi.PyThread_acquire_lock(lock, 1)
    if request == "loop":
        while True:
            pass
    if request == "segfault":
        ctypes.string_at(0)
    if request == "abort":
        os.abort()
    if request == "exit":
        os._exit(3)
    if request == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if isinstance(request, signal.Signals):
        os.kill(os.getpid(), request)
    if isinstance(request, tuple):  # the first time, another one
        how, mark = request
        if not mark.exists():
            mark.touch()
            act(how, read)
    if request == "slow":
        time.sleep(5.0)
    if isinstance(request, Exception):
        raise request
    return {"pid": os.getpid(), "data": read("file")}


def _locked():
    allocate = ctypes.pythonapi.PyThread_allocate_lock
    allocate.restype = ctypes.c_void_p
    lock = ctypes.c_void_p(allocate())
    ctypes.pythonapi.PyThread_acquire_lock(lock, 1)
    return lock


def read(name):
    return name.encode()


@pytest.fixture
def process(monkeypatch):
    """Its deadline is one that no busy machine misses; the test of a decode that hangs makes it short for that one."""
    monkeypatch.setattr(decoding_process, "GRACE", 0.1)
    made = DecodingProcess(act, 60.0)
    yield made
    made.close()


@pytest.mark.parametrize("how", ["hang", "loop"])
def test_a_decoder_that_hangs_is_ended_at_the_deadline_and_costs_its_sample(process, how, monkeypatch):
    first = process("fine", read, ("file",))["pid"]
    with monkeypatch.context() as short:
        short.setattr(process, "_seconds", 0.3)
        with pytest.raises(SampleRejected, match=r"decode_timeout: decoding hung and was ended after encoder\.decode_"):
            process(how, read)
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    again = process("fine", read, ("file",))
    assert again["pid"] != first
    assert again["data"] == b"file"


@pytest.mark.parametrize(
    ("how", "cause", "reason"),
    [
        *(("segfault", "SIGSEGV", CRASH), ("abort", "SIGABRT", CRASH)),
        *((signal.SIGBUS, "SIGBUS", CRASH), (signal.SIGILL, "SIGILL", CRASH), (signal.SIGFPE, "SIGFPE", CRASH)),
        *(("exit", "exit code 3", ENDED), ("killed", "SIGKILL, as where memory runs out; lower data.workers", ENDED)),
    ],
)
def test_a_decoder_that_crashes_costs_its_sample_and_the_cause_is_named(process, how, cause, reason):
    process("fine", read, ("file",))
    with pytest.raises(SampleRejected, match=cause) as caught:
        process(how, read)
    assert caught.value.reason == reason
    assert process("fine", read, ("file",))["data"] == b"file"


LATE = SampleRejected(TIMEOUT, "frame 3")


@pytest.mark.parametrize(("how", "in_child"), [("killed", True), ("hang", True), (LATE, True), (LATE, False)])
def test_what_proves_nothing_about_a_sample_is_tried_once_more_in_a_new_child(
    process, how, in_child, monkeypatch, tmp_path
):
    first = process("fine", read, ("file",))["pid"]
    if how == "hang":
        monkeypatch.setattr(process, "_seconds", 5.0)
    found = process((how, tmp_path / "once"), read, ("file",), in_child=in_child)
    assert found["data"] == b"file"
    assert (found["pid"] == os.getpid()) is not in_child
    assert found["pid"] != first
    monkeypatch.setattr(process, "_seconds", 0.3)
    with pytest.raises(SampleRejected) as caught:  # each time
        process(how, read, in_child=in_child)
    assert caught.value.reason == (ENDED if how == "killed" else TIMEOUT)


def test_a_first_time_out_that_is_not_tried_again_proves_nothing(process, monkeypatch):
    process("fine", read, ("file",))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # no new child may follow
    monkeypatch.setattr(process, "_seconds", 0.3)
    with pytest.raises(SampleRejected, match="hung") as caught:
        process("hang", read)
    assert caught.value.reason == ENDED


def test_a_fault_is_not_tried_again(process, tmp_path):
    with pytest.raises(SampleRejected, match="SIGSEGV"):
        process(("segfault", tmp_path / "once"), read, ("file",))
    assert process(("segfault", tmp_path / "once"), read, ("file",))["data"] == b"file"


def private_mib(pid):
    """By the kernel's account."""
    return psutil.Process(pid).memory_full_info().uss / 2**20


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_a_child_of_a_process_that_keeps_freed_memory_returns_it_after_some_samples(monkeypatch):
    monkeypatch.setattr(decoding_process, "TRIM_EVERY", 4)

    def works(request, read):
        blocks = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(64)]
        return {"pid": os.getpid(), "sum": sum(int(block[-1]) for block in blocks)}

    def sizes():
        process = DecodingProcess(works, None)
        for number in range(1, 10):
            pid = process(number, read)["pid"]
            until = time.monotonic() + 10.0
            while number % 4 == 0 and private_mib(pid) > 40 and time.monotonic() < until:
                time.sleep(0.01)
            yield private_mib(pid)

    told, tell = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            keep_freed_memory()
            os.write(tell, json.dumps(list(sizes())).encode())
        finally:
            os._exit(1)
    os.close(tell)
    with os.fdopen(told) as pipe:
        found = json.load(pipe)
    os.waitpid(parent, 0)
    assert [size > 50 for size in found] == [True, True, True, False] * 2 + [True], found


def test_a_child_that_grows_is_renewed_and_no_answer_is_lost(monkeypatch):
    monkeypatch.setattr(decoding_process, "TRIM_EVERY", 5)
    monkeypatch.setattr(decoding_process, "MOST_GROWTH", 16 << 20)
    leak = []

    def leaks(request, read):
        leak.append(mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))  # new pages, not freed ones
        leak[-1].write(bytes(1 << 20))
        return {"pid": os.getpid(), "request": torch.full((3,), request)}

    process = DecodingProcess(leaks, None)
    found = [process(number, read) for number in range(60)]
    process.close()
    assert [each["request"].tolist() for each in found] == [[number] * 3 for number in range(60)]
    lives = [len(list(own)) for _, own in itertools.groupby(each["pid"] for each in found)]
    assert lives == [21, 21, 18]  # 20 MiB are too many, which the next answer says
    assert not leak


def test_crashes_without_end_stop_the_run_with_a_sentence(process):
    reasons = []
    for _ in range(MOST_IN_A_ROW - 1):
        with pytest.raises(SampleRejected) as caught:
            process("exit", read)
        reasons.append(caught.value.reason)
    with pytest.raises(UserError, match=r"8 samples in a row ended the decoding process.*exit code 3.*decode_in_child"):
        process("exit", read)
    assert set(reasons) == {ENDED}


def test_the_last_sample_before_a_stop_is_tried_once_more_too(process, tmp_path):
    for _ in range(MOST_IN_A_ROW - 1):
        with pytest.raises(SampleRejected):
            process("exit", read)
    assert process(("killed", tmp_path / "once"), read, ("file",))["data"] == b"file"


def test_one_good_sample_between_crashes_starts_the_count_anew(process):
    for _ in range(MOST_IN_A_ROW + 1):
        with pytest.raises(SampleRejected):
            process("exit", read)
        process("fine", read, ("file",))


@pytest.mark.parametrize(
    "error", [SampleRejected("corrupt_media", "cut off", 7), PackingError("broken"), MemoryError("m"), KeyError("k")]
)
def test_an_error_of_the_decoder_arrives_as_it_was_raised_and_the_child_lives_on(process, error):
    pid = process("fine", read, ("file",))["pid"]
    with pytest.raises(type(error)) as caught:
        process(error, read)
    assert caught.value.args == error.args
    assert vars(caught.value) == vars(error)
    assert process("fine", read, ("file",))["pid"] == pid


def test_an_error_of_reading_reaches_the_decoder():
    def fails(name):
        raise OSError(5, "Input/output error")

    def tells(request, read):
        try:
            return {"data": read("x")}
        except OSError as error:
            return {"errno": error.errno}

    process = DecodingProcess(tells, None)
    assert process(0, fails, ("x",)) == {"errno": 5}
    assert process(0, read, ("x",)) == {"data": b"x"}
    process.close()


LAYOUTS = st.tuples(
    st.sampled_from([torch.uint8, torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.booleans(),
)


ROOMS = (1, 200, 1 << 20)


def tensors_of(layouts):
    """The same tensors in every process."""
    made, drawn = {}, torch.Generator().manual_seed(len(layouts))
    for number, (dtype, shape, turned) in enumerate(layouts):
        tensor = torch.randint(0, 2, shape, generator=drawn).to(dtype)
        made[f"t{number}"] = {"inner": tensor.permute(tuple(reversed(range(tensor.dim())))) if turned else tensor}
    return made


@pytest.fixture(scope="module")
def processes():
    """Bytes of the memory that a result is handed over in -> a process that makes the tensors it is asked for."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for room in ROOMS:
            patch.setattr(decoding_process, "ROOM", room)
            made[room] = DecodingProcess(lambda layouts, read: {**tensors_of(layouts), "other": (1, "x")}, 60.0)
            made[room]([], read)  # takes the room
    yield made
    for process in made.values():
        process.close()


@settings(max_examples=60)
@given(layouts=st.lists(LAYOUTS, max_size=4), room=st.sampled_from(ROOMS))
def test_tensors_arrive_with_their_values_types_shapes_and_order_of_memory(processes, layouts, room):
    made = tensors_of(layouts)
    found = processes[room](layouts, read)
    assert found.pop("other") == (1, "x")
    assert found.keys() == made.keys()
    for name in made:
        ours, theirs = found[name]["inner"], made[name]["inner"]
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert not ours.numel() or ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs)


def test_a_fork_of_the_parent_gets_a_child_of_its_own_and_leaves_the_other_one(process):
    pid = process("fine", read, ("file",))["pid"]
    fork = os.fork()
    if fork == 0:
        os._exit(0 if process("fine", read, ("file",))["pid"] != pid else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0
    assert process("fine", read, ("file",))["pid"] == pid


def test_the_answer_to_a_call_that_was_interrupted_is_not_given_to_the_next_one(process):
    def interrupt(*_):
        raise KeyboardInterrupt

    process("fine", read, ("file",))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            process("slow", read, ("file",))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert process("fine", lambda name: b"another file", ("file",))["data"] == b"another file"


def test_a_child_that_ended_while_idle_is_replaced(process):
    pid = process("fine", read, ("file",))["pid"]
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert process("fine", read, ("file",))["pid"] != pid


@pytest.mark.parametrize("how", ["fine", "hang"])
def test_a_parent_that_is_killed_takes_its_child_along_even_within_a_decode(how):
    told, tell = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            process = DecodingProcess(act, None)
            os.write(tell, b"%d\n" % process("fine", read, ("file",))["pid"])
            process(how, read, ("file",))
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(tell)
    with os.fdopen(told) as pipe:
        child = int(pipe.readline())
    time.sleep(0.2)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    for _ in range(200):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        raise AssertionError("the child outlived its parent")


def test_a_process_that_uses_a_gpu_is_not_forked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    process = DecodingProcess(lambda request, read: {"pid": os.getpid(), "data": read(request)}, 1.0)
    assert process("a", str.encode) == {"pid": os.getpid(), "data": b"a"}
    assert process._child is None


def test_a_process_has_few_children_however_many_encoders_it_has():
    parents = [DecodingProcess(act, 5.0) for _ in range(2 * decoding_process.MOST_CHILDREN)]
    pids = [parent("fine", str.encode, ("file",))["pid"] for parent in parents]
    alive = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert alive == pids[-decoding_process.MOST_CHILDREN :]
    assert parents[0]("fine", str.encode, ("file",))["pid"] not in pids
    assert not os.path.exists(f"/proc/{alive[0]}")
    assert parents[-1]("fine", str.encode, ("file",))["pid"] == pids[-1]


def test_the_child_of_an_encoder_ends_with_it():
    parent = DecodingProcess(act, 5.0)
    pid = parent("fine", str.encode, ("file",))["pid"]
    del parent
    assert not os.path.exists(f"/proc/{pid}")
