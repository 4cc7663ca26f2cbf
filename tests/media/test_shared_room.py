"""Memory of a process and its decoding child: what lies in it stays as it was made for as long as it is used."""

import ctypes
import gc
import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.drops import CRASH
from energon_packing.errors import SampleRejected
from energon_packing.media import decoding_process as shared_room
from energon_packing.media.decoding_process import DecodingProcess, Results, SharedRoom, empty_result

SIZES = (1, 100, 5000, 70_000, 400_000)
ROOM = 1 << 20


def work(request, read):
    """A tensor of one value, in the memory of results or elsewhere; the lengths of files."""
    value, size, there = request
    made = empty_result((size,), torch.uint8) if there else torch.empty(size, dtype=torch.uint8)
    return {"pixels": made.fill_(value), "small": torch.tensor([value]), "files": [len(read(name)) for name in "ab"]}


@pytest.fixture(scope="module")
def process():
    """A child with little memory, so that results are copied, moved and sent through the pipe too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("energon_packing.media.decoding_process.ROOM", ROOM)
        patch.setattr(shared_room, "FILES", 1000)
        made = DecodingProcess(work, 60.0)
        made((0, 1, True), lambda name: b"", "ab")
        yield made
    made.close()


@settings(max_examples=40)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(SIZES), st.booleans(), st.integers(0, 3), st.sampled_from((0, 10, 2000))), max_size=30
    )
)
def test_results_keep_their_values_while_others_come_and_go(process, steps):
    held = {}
    for number, (size, there, forgotten, file) in enumerate(steps):
        made = process((number, size, there), lambda name, file=file: b"x" * file, "ab")
        assert made["files"] == [file, file]
        held[number] = made["pixels"], made["small"]
        for old in list(held)[:forgotten]:
            del held[old]
        del made
        for value, (pixels, small) in held.items():
            assert pixels.unique().tolist() == small.tolist() == [value]


def test_a_large_result_is_the_memory_itself_and_its_place_is_used_again_when_it_is_gone(process):
    gc.collect()
    first = process((1, 70_000, True), lambda name: b"", "ab")["pixels"]
    second = process((2, 70_000, True), lambda name: b"", "ab")["pixels"]
    room = process._child.room
    pages = -(-70_080 // mmap.PAGESIZE) * mmap.PAGESIZE  # a small tensor lies between
    assert [room.place_of(each) for each in (first, second)] == [0, pages]
    del first
    assert room.free() > 70_000
    del second
    assert room.free() == 0


def test_files_travel_with_the_request_and_are_read_once():
    asked = []

    def read(name):
        asked.append(name)
        if name == "b":
            raise KeyError(name)
        return b"12345"

    def lengths(request, read):
        try:
            return {"a": len(read("a")), "again": len(read("a")), "b": len(read("b"))}
        except KeyError as error:
            return {"missing": error.args[0]}

    process = DecodingProcess(lengths, 60.0)
    assert process(0, read, ("a", "b")) == {"missing": "b"}
    assert asked == ["a", "b"]
    process.close()


def test_a_view_that_is_not_whole_is_copied_and_a_transposed_one_keeps_its_order():
    room = SharedRoom(ROOM)
    results = Results(room, 0)
    made = results.empty((40, 50), torch.float32)
    made.copy_(torch.arange(2000.0).view(40, 50))
    found = room.taken(results.put({"part": made[:, 1:], "turned": made.t()}), 0, results.end)
    assert torch.equal(found["part"], made[:, 1:])
    assert found["part"].data_ptr() != made[:, 1:].data_ptr()
    assert found["turned"].stride() == (1, 50)
    assert found["turned"].data_ptr() == made.data_ptr()


@pytest.mark.parametrize("where", ["the sample before", "before all", "after all", "a file"])
def test_a_decoder_that_writes_outside_of_its_results_ends_and_changes_nothing(where):
    def work(request, read):
        made = empty_result((70_000,), torch.uint8).fill_(1)
        if request:
            ctypes.memset(shared_room._results._room._address + request, 9, 1)
        return {"pixels": made}

    process = DecodingProcess(work, 60.0)
    try:
        held = process(0, lambda name: b"abc", ("a",))["pixels"]
        room = process._child.room
        places = {
            "the sample before": 69_999,
            "before all": -1,
            "after all": room.room + shared_room.FILES,
            "a file": room.room,
        }
        with pytest.raises(SampleRejected) as caught:
            process(places[where], lambda name: b"abc", ("a",))
        assert caught.value.reason == CRASH
        assert held.unique().tolist() == [1]
    finally:
        process.close()
