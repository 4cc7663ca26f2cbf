"""Pixels of a pack that is made in a loader's worker lie in shared memory from the start."""

from __future__ import annotations

import torch

from energon_packing import thd


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
