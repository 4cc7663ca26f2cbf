"""Pixels of a pack that is made in a loader's worker lie in shared memory from the start."""

import errno
import os

import pytest
import torch

from energon_packing import thd
from energon_packing.errors import PackingError
from energon_packing.thd.rows import joined


def rows():
    random = torch.Generator().manual_seed(0)
    return [
        {
            "key": f"sample{index}",
            "input_ids": torch.arange(4),
            "labels": torch.tensor([1, 2, 3, thd.IGNORE_INDEX]),
            "loss_mask": torch.tensor([1.0, 1.0, 1.0, 0.0]),
            "position_ids": torch.arange(4),
            "visual_inputs": {"pixel_values": torch.rand(2 + index, 3, generator=random)},
        }
        for index in range(2)
    ]


def pixels(made_of):
    return thd.assemble(made_of).visual_inputs["pixel_values"]


class Batches(torch.utils.data.IterableDataset):
    def __iter__(self):
        found = pixels(rows())
        yield found.is_shared(), found


def test_a_worker_joins_pixels_in_memory_that_it_shares_with_the_training_process():
    (shared, found), *_ = torch.utils.data.DataLoader(Batches(), batch_size=None, num_workers=1)
    assert shared
    assert torch.equal(found, pixels(rows()))


def test_outside_a_worker_no_shared_memory_is_taken():
    assert not pixels(rows()).is_shared()


def test_the_pixels_of_one_sample_are_a_copy_and_never_a_view_of_it():
    only = rows()[:1]
    given = only[0]["visual_inputs"]["pixel_values"]
    assert pixels(only).data_ptr() != given.data_ptr()


class Parts(torch.utils.data.IterableDataset):
    """Joins what `parts_of` gives, in a worker."""

    def __init__(self, kinds):
        self.kinds = kinds

    def __iter__(self):
        for kind in self.kinds:
            yield joined(parts_of(kind))


def parts_of(kind):
    random = torch.Generator().manual_seed(0)
    whole = torch.randint(256, (3000, 4, 6), dtype=torch.uint8, generator=random)
    return {
        "bytes": [whole[:5], whole[5:900], whole[900:]],
        "one": [whole],
        "bfloat16": [whole[:7].bfloat16(), whole[7:20].bfloat16()],
        "bool": [whole[:7] > 9, whole[7:] > 9],
        "int64": [whole[:3].long(), whole[3:4].long()],
        "empty parts": [whole[:0], whole[:2], whole[:0], whole[2:9]],
        "nothing": [whole[:0], whole[:0]],
        "turned": [whole.transpose(1, 2)[:50], whole.transpose(1, 2)[50:]],
        "every other": [whole[::2], whole[1::2]],
        "many": list(whole.split(1)),
    }[kind]


KINDS = ("bytes", "one", "bfloat16", "bool", "int64", "empty parts", "nothing", "turned", "every other", "many")


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_parts_of_any_form_are_joined_as_torch_does(strategy):
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        found = list(torch.utils.data.DataLoader(Parts(KINDS), batch_size=None, num_workers=1))
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    for kind, tensor in zip(KINDS, found, strict=True):
        expected = torch.cat(parts_of(kind))
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), kind


def test_writes_that_the_kernel_cuts_short_are_continued(monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: object())
    monkeypatch.setattr(os, "pwrite", lambda to, part, at: write(to, part[:1001], at))
    assert torch.equal(joined(parts_of("bytes")), torch.cat(parts_of("bytes")))


def test_shared_memory_that_is_full_is_an_error_that_says_so(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: object())
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(PackingError, match="/dev/shm larger"):
        joined(parts_of("bytes"))
