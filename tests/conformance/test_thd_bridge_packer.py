"""Packed rows against ``megatron.bridge.data.packing.in_batch``, field by field, and where its versions differ.

The installed version is always compared. A second one is read from a checkout of Megatron-Bridge where
``ENERGON_PACKING_BRIDGE_SOURCE`` names its ``src`` directory: only its packer is loaded, which needs torch alone.
``ENERGON_PACKING_PACKS`` sets how many random packs each property tries (`docs/correctness.md`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.p2p_cut import infers_padding
from torch.nn import functional

from energon_packing import thd
from energon_packing.thd.visible_padding import hides_padding

pytest.importorskip("megatron.core", reason="Megatron-Bridge is not installed")

PACKS = int(os.environ.get("ENERGON_PACKING_PACKS", "200"))
SOURCE = os.environ.get("ENERGON_PACKING_BRIDGE_SOURCE")
FIXED_WIDTH = (0, 7)
"""The version from which Bridge's packer knows a fixed width and a padding mask, and leaves out equal boundaries."""

# What our mapping has and Bridge's packer does not: the packer keeps one of two names of the token tensor, and knows no
# media (its callers add them). The padding mask is made from version 0.7 on, and there only where it is asked for.
OURS_ALONE = {"tokens", "padding_mask", "visual_inputs"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Packer:
    """One version of Bridge's packer."""

    version: tuple[int, int]
    module: Any

    @property
    def later(self) -> bool:
        return self.version >= FIXED_WIDTH

    def build(self, rows, **options):
        return self.module.build_mcore_thd_sequence_batch_from_rows(
            rows, sequence_tensor_pad_values={"turn": -1}, **options
        )


@pytest.fixture(scope="module", params=["installed", *(["source"] if SOURCE else [])])
def packer(request):
    """The packer of the installed version, then that of the checkout."""
    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("Megatron-Bridge is not installed")
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    try:
        if request.param == "installed":
            numbers = importlib.metadata.version("megatron-bridge").split(".")
            module = importlib.import_module("megatron.bridge.data.packing.in_batch")
        else:
            folder = Path(SOURCE) / "megatron" / "bridge"
            said = (folder / "package_info.py").read_text(encoding="utf-8")
            numbers = [re.search(rf"^{name} = (\d+)$", said, re.MULTILINE)[1] for name in ("MAJOR", "MINOR")]
            spec = importlib.util.spec_from_file_location("later_in_batch", folder / "data" / "packing" / "in_batch.py")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        yield Packer(version=(int(numbers[0]), int(numbers[1])), module=module)
    finally:
        stand_ins.uninstall()


def make_row(length: int, seed: int):
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    ids = torch.randint(1, 50_000, (length,), generator=generator)
    labels = torch.cat([ids[1:], torch.tensor([-100])])
    labels[torch.rand(length, generator=generator) < 0.3] = -100
    labels[-1] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "loss_mask": (labels >= 0).float(),
        "position_ids": torch.arange(length),
        "turn": torch.rand(length, generator=generator),
    }


def make_rows(lengths, seed=0):
    return [make_row(length, seed + index) for index, length in enumerate(lengths)]


def ours_of(rows, **options):
    return thd.assemble(rows, extra_fields={"turn": -1}, **options).to_bridge()


def same_fields(ours, theirs) -> None:
    for name, expected in theirs.items():
        if isinstance(expected, torch.Tensor):
            assert ours[name].dtype == expected.dtype, name
            assert ours[name].shape == expected.shape, name
            assert torch.equal(ours[name], expected), name
        else:
            assert type(ours[name]) is type(expected), name
            assert ours[name] == expected, name


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=10)


@st.composite
def multiples(draw):
    """Alignment of a run: context-parallel size 1 to 8, tensor-parallel size 1 to 8, another one for evaluation."""
    cp, evaluation = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([None, 1, 2, 4]))
    return thd.alignment_multiple(draw(st.integers(1, 8)), cp, draw(st.booleans()), evaluation)


@settings(max_examples=PACKS, deadline=None)
@given(lengths=LENGTHS, multiple=multiples(), seed=st.integers(0, 10_000), pad=st.sampled_from([0, 7]))
def test_a_pack_equals_the_one_of_bridges_in_batch_packer_field_by_field(packer, lengths, multiple, seed, pad):
    rows = make_rows(lengths, seed)
    theirs = packer.build(rows, pad_token_id=pad, pad_to_multiple_of=multiple)
    ours = ours_of(rows, multiple=multiple, pad_token_id=pad)
    missing = set(ours) - set(theirs) - OURS_ALONE
    if hides_padding(lengths, multiple):
        # The accepted difference: Bridge hides its padding, with us a masked segment of one multiple shows it.
        assert not infers_padding(theirs["cu_seqlens_q"], theirs["cu_seqlens_q_padded"], "2.16")
        assert infers_padding(ours["cu_seqlens_q"], ours["cu_seqlens_q_padded"], "2.16")
        theirs = with_masked_segment(theirs, multiple, pad)
    same_fields(ours, theirs)
    assert ours["tokens"] is ours["input_ids"]
    assert ours["cu_seqlens_kv"] is ours["cu_seqlens_q"]
    assert theirs["cu_seqlens_kv"] is theirs["cu_seqlens_q"]
    if packer.later and multiple > 1 and all(length % multiple == 0 for length in lengths):
        # From 0.7 on Bridge leaves out physical boundaries that equal the real ones; ours do not come and go with the
        # data, because kernels are chosen by their presence.
        assert missing == {"cu_seqlens_q_padded", "cu_seqlens_kv_padded"}
        assert torch.equal(ours["cu_seqlens_q_padded"], ours["cu_seqlens_q"])
    else:
        assert missing == set()


def with_masked_segment(theirs, size, pad):
    """What Bridge's packer made, with the masked segment that ours puts after it."""
    width = theirs["total_tokens"]
    added = {"input_ids": pad, "labels": -100, "loss_mask": 0, "turn": -1}
    made = {name: functional.pad(theirs[name], (0, size), value=value) for name, value in added.items()}
    made["position_ids"] = torch.cat([theirs["position_ids"], torch.arange(size)[None]], dim=1)
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        made[name] = torch.cat([theirs[name], theirs[name][-1:] + size])
    made["cu_seqlens_kv"] = made["cu_seqlens_q"]
    return theirs | made | {"total_tokens": width + size}


def test_the_options_of_the_packer_are_those_of_its_version(packer):
    # The list of differences in docs/thd.md is complete only as long as this holds.
    known = {"rows", "token_key", "sequence_length", "pad_token_id", "ignore_index", "pad_to_multiple_of"}
    known |= {"sequence_tensor_pad_values"}
    if packer.later:
        known |= {"pad_to_max_length", "emit_padding_mask"}
    found = inspect.signature(packer.module.build_mcore_thd_sequence_batch_from_rows).parameters
    assert set(found) == known


@settings(max_examples=PACKS, deadline=None)
@given(lengths=LENGTHS, multiple=multiples(), seed=st.integers(0, 10_000), spare=st.integers(0, 5))
def test_later_versions_fill_a_row_of_fixed_width_as_we_do(packer, lengths, multiple, seed, spare):
    if not packer.later:
        pytest.skip("before 0.7 this packer knows no fixed width")
    rows = make_rows(lengths, seed)
    spare = max(spare, hides_padding(lengths, multiple))
    width = sum(-(-length // multiple) * multiple for length in lengths) + spare * multiple
    options = {"pad_to_max_length": True, "sequence_length": width, "emit_padding_mask": True}
    theirs = packer.build(rows, pad_to_multiple_of=multiple, **options)
    ours = ours_of(rows, multiple=multiple, width=width)
    boundaries = {name for name in theirs if name.startswith(("cu_seqlens", "max_seqlen"))}
    if spare == 0:
        same_fields(ours, theirs)
        return
    # They put the tail into the last sample's place, for which they need physical boundaries; with
    # us it is a masked segment of its own, and the kernel without physical boundaries stays.
    same_fields(ours, {name: value for name, value in theirs.items() if name not in {*boundaries, "position_ids"}})
    assert theirs["cu_seqlens_q_padded"].tolist()[-1] == width
    assert ("cu_seqlens_q_padded" in ours) == (multiple > 1)
    assert ours["cu_seqlens_q"].tolist() == [
        *theirs["cu_seqlens_q"].tolist(),
        theirs["cu_seqlens_q"].tolist()[-1] + spare * multiple,
    ]
    content = ~ours["padding_mask"]
    assert torch.equal(ours["position_ids"][content], theirs["position_ids"][content])


def test_dtypes_are_fixed_where_bridge_keeps_those_of_the_first_row(packer):
    # The one accepted difference in values that both emit.
    row = make_row(5, 0)
    row["input_ids"], row["loss_mask"] = row["input_ids"].int(), row["loss_mask"].bool()
    theirs, ours = packer.build([row]), ours_of([row])
    assert (theirs["input_ids"].dtype, ours["input_ids"].dtype) == (torch.int32, torch.int64)
    assert (theirs["loss_mask"].dtype, ours["loss_mask"].dtype) == (torch.bool, torch.float32)
    assert torch.equal(theirs["loss_mask"].float(), ours["loss_mask"])
