"""Stored packs: read back bit for bit, and refused if their bytes are not what was written."""

import dataclasses
import json
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing import thd
from energon_packing.energon.pack_bytes import field_digests
from energon_packing.offline.files import HOST, remove_leftovers, replacing
from energon_packing.offline.shards import DamagedBytes, from_bytes, to_bytes
from energon_packing.offline.stored_pack import StoredPack, StoredSample, decode_row, encode_row
from energon_packing.thd.pixels import PixelForm


@st.composite
def rows(draw):
    """A packed row with everything that a field may hold: weights, positions, extras, bytes of pixels, a tail."""
    axes = draw(st.sampled_from([1, 3]))
    multiple = draw(st.sampled_from([1, 2, 8]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weighting = draw(st.sampled_from(["ones", "sample", "token"]))
    vocabulary = draw(st.sampled_from([100, 30_000, 200_000, 2**40]))
    samples = []
    for number in range(draw(st.integers(1, 6))):
        length = draw(st.integers(2, 40))
        ids = random.integers(0, vocabulary, length)
        learned = random.random(length) < 0.5
        learned[-1] = False
        weights = {"ones": 1.0, "sample": 0.3 + number, "token": random.random(length) + 0.1}[weighting]
        counted = np.arange(length) + (start := draw(st.sampled_from([0, 0, 7])))
        drawn = random.integers(0, 2**20, (3, length)) if draw(st.booleans()) else np.tile(counted, (3, 1))
        labels = np.where(learned, np.roll(ids, -1), -100)
        if draw(st.booleans()):
            labels = np.where(learned, random.integers(0, vocabulary, length), -100)  # not the token that follows
        row = {
            "key": f"key-{number}",
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy((learned * weights).astype(np.float32)),
            "position_ids": torch.from_numpy(counted if axes == 1 else drawn),
            "position_start": start,
            "reward": torch.from_numpy(random.random(length).astype(np.float32)),
            "types": torch.from_numpy(random.integers(0, 3, length)),
        }
        if draw(st.booleans()):
            patches = draw(st.integers(1, 5))
            row["visual_inputs"] = {
                "pixel_values": torch.from_numpy(random.integers(0, 256, (patches, 12)).astype(np.uint8)),
                "image_grid_thw": torch.from_numpy(random.integers(0, 2**33, (1, 3))),
            }
            form = PixelForm(layout="patches", mean=(1.5, 2.0, 3.0), deviation=(0.1, 0.2, 0.3), repeat=2)
            row["pixel_forms"] = {"pixel_values": form}
        samples.append(row)
    total = draw(st.sampled_from([None, 512]))
    return thd.assemble(
        samples, multiple=multiple, width=total, pad_token_id=3, extra_fields={"reward": 0.0, "types": 0}
    )


def same(left, right):
    assert field_digests(left) == field_digests(right)
    for spec in dataclasses.fields(left):
        ours, theirs = getattr(left, spec.name), getattr(right, spec.name)
        if not isinstance(ours, torch.Tensor) and spec.name not in ("visual_inputs", "extra"):
            assert ours == theirs
    assert (left.cu_seqlens_padded is left.cu_seqlens) == (right.cu_seqlens_padded is right.cu_seqlens)


@given(batch=rows())
@settings(max_examples=60, deadline=None)
def test_a_row_is_read_back_bit_for_bit_and_as_part_of_a_pack(batch):
    same(decode_row(*encode_row(batch)), batch)
    samples = tuple(StoredSample(key=key, dataset=0) for key in batch.sample_keys)
    stored = StoredPack(samples=samples, order=tuple(range(len(samples))), finished=True, batch=batch)
    content = b"".join(stored.to_bytes())
    assert len(content) % 64 == 0
    again = StoredPack.from_bytes(memoryview(bytearray(content)))
    assert (again.samples, again.order) == (samples, stored.order)
    same(again.batch, batch)


@given(batch=rows(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_damage_is_refused_or_changes_values_only(batch, data):
    """Never another error, never memory that the record does not have."""
    samples = tuple(StoredSample(key=key, dataset=0) for key in batch.sample_keys)
    order = tuple(range(len(samples)))
    content = bytearray(b"".join(StoredPack(samples=samples, order=order, finished=True, batch=batch).to_bytes()))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.sampled_from([len(content), len(content) // 2, 20, 8, 3]))]
    try:
        again = StoredPack.from_bytes(memoryview(content))
    except DamagedBytes:
        return
    assert again.batch is None or again.batch.num_samples == batch.num_samples


def test_a_text_row_takes_less_than_five_bytes_a_token():
    ids = torch.arange(30_000, 62_768)
    row = {"key": "k", "input_ids": ids, "labels": torch.cat([ids[1:], torch.tensor([-100])])}
    row |= {"loss_mask": torch.cat([torch.ones(32_767), torch.zeros(1)]), "position_ids": torch.arange(32_768)}
    values, arrays = encode_row(thd.assemble([row]))
    assert sum(len(part) for part in to_bytes(values, arrays)) < 4.3 * 32_768


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (["a", "int64", [2**61], 0], "does not fit"),
        (["a", "int64", [4], 2**62], "does not fit"),
        (["a", "int64", [-4], 0], "cannot be"),
        (["a", "object", [1], 0], "cannot be"),
        (["a", "int64", [1.5], 0], "cannot be"),
    ],
)
def test_arrays_that_would_lie_outside_their_record_are_refused_before_any_memory_is_taken(array, said):
    header = json.dumps({"values": {}, "arrays": [array]}).encode()
    content = bytearray(len(header).to_bytes(8, "little") + header + bytes(200))
    with pytest.raises(DamagedBytes, match=said):
        from_bytes(memoryview(content))


def test_a_header_longer_than_its_record_is_refused():
    with pytest.raises(DamagedBytes, match="its header would have"):
        from_bytes(memoryview(bytearray((2**50).to_bytes(8, "little") + bytes(100))))


def test_a_file_that_a_process_of_another_container_is_writing_is_no_leftover(tmp_path):
    ended = subprocess.Popen(["true"])  # it has a number that no process here has
    ended.wait()
    of_another, left = (tmp_path / f".{name}.{HOST}.{ended.pid}" for name in "xy")
    left.touch()
    with suppress(FileNotFoundError), replacing(tmp_path / "x") as aside:
        aside.rename(of_another)
        remove_leftovers(tmp_path)
        assert list(tmp_path.iterdir()) == [of_another]


def test_two_processes_of_the_same_number_on_hosts_of_one_name_write_two_files(tmp_path):
    with replacing(tmp_path / "x") as first:
        first.write_bytes(b"whole")
        with suppress(KeyboardInterrupt), replacing(tmp_path / "x") as second:
            second.write_bytes(b"bro")
            raise KeyboardInterrupt
    assert (tmp_path / "x").read_bytes() == b"whole"


def test_a_file_of_a_process_that_ended_unnoticed_is_a_leftover_and_that_of_a_living_one_is_not(tmp_path):
    ended = subprocess.Popen(["true"])
    living, left = (tmp_path / f".x.{HOST}.{process}" for process in (os.getpid(), ended.pid))
    living.touch()
    left.touch()
    while "Z (zombie)" not in Path(f"/proc/{ended.pid}/status").read_text():
        time.sleep(0.01)
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [living]
    ended.wait()
