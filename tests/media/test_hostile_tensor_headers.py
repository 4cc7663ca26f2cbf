"""Damaged files of tensors: each is read or rejected as a sample, never another error, and no value changes."""

import io
import json
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.errors import SampleRejected
from energon_packing.wan.tensor_files import read_tensor, tensor_info

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def file_of(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(16)


def read(header: Any) -> Any:
    data = file_of(header)
    return tensor_info(io.BytesIO(data), "safetensors", ("latents",))


@pytest.mark.parametrize("dtype", [["F32"], {"a": 1}, None, 3, True])
def test_a_type_that_is_no_text_is_rejected(dtype: Any) -> None:
    with pytest.raises(SampleRejected) as caught:
        read({"latents": {**GOOD, "dtype": dtype}})
    assert caught.value.reason == "wrong_dtype"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_header_is_read_or_rejected(data: Any) -> None:
    field = data.draw(st.sampled_from([*GOOD, "all", "file"]))
    value = data.draw(VALUES)
    header = value if field == "file" else {"latents": value if field == "all" else {**GOOD, field: value}}
    try:
        found = read(header)
    except SampleRejected as error:
        found = error.reason
    assert found


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_a_changed_byte_of_a_torch_file_is_rejected_or_changes_no_value(data: Any) -> None:
    tensor = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    stream = io.BytesIO()
    torch.save({"latents": tensor}, stream)
    whole = bytearray(stream.getvalue())
    values = whole.find(tensor.numpy().tobytes())  # which only the checksum guards
    at = data.draw(st.one_of(st.integers(values, values + 95), st.integers(0, len(whole) - 1)))
    whole[at] ^= data.draw(st.integers(1, 255))
    try:
        found = read_tensor(bytes(whole), "pt", ("latents",))
    except SampleRejected:
        return
    assert torch.equal(found, tensor)
