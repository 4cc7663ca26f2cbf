"""A pack of clips on its way to another rank of its replica, and the state of an iterator of such packs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from energon_packing.energon.pack_bytes import field_digests, pack_from_bytes, pack_to_bytes
from energon_packing.energon.replica import Replica
from energon_packing.energon.replica_reader import EveryReader, OneReader
from energon_packing.wan.pack import WanPack, WanSample, pack_wan


def pack(seed: int = 0, multiple: int = 4) -> WanPack:
    generator = torch.Generator().manual_seed(seed)
    latent, text = torch.randn(4, 1, 6, 6, generator=generator), torch.randn(5, 8, generator=generator)
    metadata = {"sizes": [1, [2, 3]], "name": "a\ud800", "none": None}
    return pack_wan([WanSample(key=f"v{seed}", latent=latent, text=text, metadata=metadata)], multiple=multiple)


@pytest.mark.parametrize("pixels", [True, False])
@pytest.mark.parametrize("multiple", [1, 4])
def test_a_pack_of_clips_arrives_on_another_rank_as_it_was_sent(pixels: bool, multiple: int) -> None:
    sent = pack(multiple=multiple)
    arrived = pack_from_bytes(pack_to_bytes(sent, pixels=pixels))  # every pipeline stage reads the latents
    assert type(arrived) is WanPack
    assert sent.fillers == (multiple > 1)
    for spec in dataclasses.fields(sent):
        before, after = getattr(sent, spec.name), getattr(arrived, spec.name)
        if isinstance(before, torch.Tensor):
            assert (after.dtype, after.shape) == (before.dtype, before.shape), spec.name
            assert torch.equal(after, before), spec.name
        else:
            assert (type(after), after) == (type(before), before), spec.name
    assert field_digests(arrived) == field_digests(sent)


def test_digests_of_packs_with_other_latents_differ() -> None:
    assert field_digests(pack(0)) != field_digests(pack(1))


@pytest.mark.parametrize("reader", [OneReader, EveryReader])
def test_readers_hand_on_packs_of_clips_and_their_state(reader: type) -> None:
    class Source:
        number = 0

        def __next__(self) -> WanPack:
            self.number += 1
            return pack(self.number)

        def save_state(self) -> int:
            return self.number

        def restore_state(self, state: int) -> None:
            self.number = state

    first = reader(Source(), Replica())
    assert next(first).sample_keys == ("v1",)
    again = reader(Source(), Replica())
    again.restore_state(first.save_state())
    assert next(again).keys == next(first).keys == ("v2",)
