"""One reader a replica and its alternative, in four processes; what Bridge makes of it is in tests/conformance."""

from __future__ import annotations

import dataclasses

import pytest
import replica_ranks
import torch

from energon_packing import thd
from energon_packing.energon.pack_bytes import field_digests, pack_from_bytes, pack_to_bytes
from energon_packing.energon.replica import Replica
from energon_packing.energon.replica_reader import EveryReader, OneReader
from energon_packing.errors import ConfigError, PackingError


@pytest.fixture(scope="module", params=[0, 2], ids=["at_once", "two_ahead"])
def said(tmp_path_factory, request):
    """What every rank of every case said, without packs ahead and with two of them."""
    return replica_ranks.run(tmp_path_factory.mktemp("replica"), request.param)


def read(count, *, pixels=True, first=0):
    return [[100 * number, pixels] for number in range(first, first + count)]


def test_every_rank_gets_the_pack_that_was_read_in_every_field(said):
    assert all(all(fields) for case in ("whole", "whole_in_a_pipeline") for fields in said[case])
    assert len(said["whole"][0]) == len(dataclasses.fields(thd.PackedBatch))


@pytest.mark.parametrize("case", ["large_whole", "large_whole_in_a_pipeline", "from_a_worker"])
def test_pixels_in_shared_memory_arrive_on_every_rank_as_they_were_read(case, said):
    assert all(all(fields) for rank in said[case] for fields in rank)


def test_a_rank_that_writes_to_its_pack_changes_no_other_ranks_pack(said):
    assert said["written_to"][0] == [200_000 * 3 * 7.0, 7]
    assert said["written_to"][1:] == [[0.0, 0]] * 3


def test_another_host_gets_its_packs_by_collectives_once_and_shares_them_there(said):
    for rank, (*packs, end, bytes_sent) in enumerate(said["on_two_hosts"]):
        assert all(all(fields) for fields in packs)
        assert end == ["end"]
        assert bytes_sent == [[4, 4], [0, 0], [4, 0], [0, 0]][rank]


def test_data_end_on_all_ranks_at_the_same_pack(said):
    assert said["the_end"] == [[*read(3), "end"]] * 4


def test_a_pipeline_stage_that_asks_late_holds_nobody_up_and_gets_every_pack_without_pixels(said):
    assert said["a_late_stage"] == [read(20), read(20), read(20, pixels=False), read(20, pixels=False)]


def test_a_mistake_that_the_reader_finds_is_told_on_every_rank_as_the_same_mistake(said):
    mistake = ["ConfigError", "no such prompt."]
    assert said["a_mistake"] == [[*read(2), mistake]] * 4
    late = [*read(2, pixels=False), mistake]
    assert said["a_mistake_in_a_pipeline"] == [[*read(2), mistake], [*read(2), mistake], late, late]


def test_a_crash_of_the_reader_stops_every_rank_and_says_which_one_read(said):
    reader, *others = said["a_crash"]
    assert reader[-1][0] == "ZeroDivisionError"
    for other in others:
        assert other[-1][0] == "PackingError"
        assert "rank 0, which reads for this replica, failed with ZeroDivisionError" in other[-1][1]


@pytest.mark.parametrize("case", ["two_restored", "two_restored_in_a_pipeline"])
def test_a_rank_that_was_not_restored_with_the_others_is_found_at_its_first_pack(case, said):
    for rank, (first, again) in enumerate(said[case]):
        pixels = rank < 2 or case == "two_restored"
        assert first == read(3, pixels=pixels)
        if rank != 2:
            assert again == [[300, pixels]] if case == "two_restored" or rank < 2 else again
    name, message = said[case][2][1][0]
    assert name == "PackingError"
    assert "rank 2 is at pack 0, but rank 0, which reads for its replica, is at pack 3" in message


@pytest.mark.parametrize("case", ["two_readers", "two_readers_in_a_pipeline"])
def test_two_readers_of_one_replica_never_take_each_others_packs(case, said):
    for rank, found in enumerate(said[case]):
        pixels = rank < 2 or case == "two_readers"
        assert found == [read(20, pixels=pixels), read(20, pixels=pixels, first=50)]


@pytest.mark.parametrize("case", ["all_alike", "all_alike_in_a_pipeline"])
def test_ranks_that_read_for_themselves_keep_their_own_packs_where_all_are_alike(case, said):
    assert said[case] == [read(5)] * 4


def test_another_sample_on_one_rank_stops_all_with_both_samples_named(said):
    for rank in range(4):
        *before, (name, message) = said["another_sample"][rank]
        assert len(before) == 2
        assert name == "PackingError"
        assert (
            "pack 2 differs inside a replica from sample 1 on: rank 0 has 'sample-2-1', rank 2 has 'stranger'"
            in message
        )


def test_another_sample_in_a_later_pipeline_stage_stops_that_stage(said):
    for rank in (2, 3):
        assert said["another_sample_in_a_pipeline"][rank][2][0] == "PackingError"
        assert "rank 0 has 'sample-2-1', rank 2 has 'stranger'" in said["another_sample_in_a_pipeline"][rank][2][1]


def test_other_pixels_of_the_same_samples_stop_all_with_the_tensor_named(said):
    for rank in range(4):
        message = said["another_pixel"][rank][2][1]
        assert "in 'visual_inputs/pixel_values' of the samples sample-2-0, sample-2-1" in message
        assert "rank 0 and rank 2" in message


def test_packs_between_two_comparisons_are_not_compared(said):
    assert said["another_pixel_between_comparisons"] == [read(5)] * 4


def test_data_that_end_early_on_one_rank_stop_all(said):
    for rank in range(4):
        assert said["one_ends_early"][rank][:2] == read(2)
        assert "rank 2 says 'the data have ended'" in said["one_ends_early"][rank][2][1]


def test_a_crash_on_one_rank_that_reads_stops_all(said):
    for rank in range(4):
        assert "rank 2 says 'ZeroDivisionError" in said["one_crashes"][rank][-1][1]


def test_replicas_are_the_ranks_of_one_data_parallel_rank(said):
    # data, then pipeline ranks: 0 and 2 are the stages of the first replica, 1 and 3 of the second.
    assert said["who_is_who"] == [
        [0, 2, 0, 0, [0], [0, 2]],
        [1, 2, 0, 1, [1], [1, 3]],
        [0, 2, 1, 0, [2], [0, 2]],
        [1, 2, 1, 1, [3], [1, 3]],
    ]


def test_a_process_alone_reads_without_any_group():
    reader = OneReader(replica_ranks.Source(end=2), Replica())
    assert replica_ranks.told(reader, 5) == [*read(2), "end"]
    assert reader.save_state() == {"packs": 2, "source": {"next": 2}}


def test_a_state_of_something_else_is_refused():
    reader = OneReader(replica_ranks.Source(), Replica())
    with pytest.raises(ConfigError, match="not saved by PackedEnergonDatasetConfig"):
        reader.restore_state({"worker_states": []})
    with pytest.raises(ConfigError, match="does not read"):
        reader.restore_state({"packs": 3, "source": None})


def test_impossible_readers_are_refused():
    with pytest.raises(PackingError, match="wrong source"):
        OneReader(None, Replica())
    with pytest.raises(ConfigError, match="compare_every is 0"):
        EveryReader(replica_ranks.Source(), Replica(), compare_every=0)


@pytest.mark.parametrize("width", [None, 32])
@pytest.mark.parametrize("multiple", [1, 8])
def test_bytes_of_a_pack_give_the_pack_back(multiple, width):
    rows = [
        {
            "input_ids": torch.arange(n),
            "labels": torch.tensor([*range(1, n), -100]),
            "loss_mask": torch.tensor([1.0] * (n - 1) + [0.0]),
            "position_ids": torch.arange(n),
            "preference": torch.rand(n),
            "key": f"ключ/{n}",
        }
        for n in (3, 9)
    ]
    batch = thd.assemble(rows, multiple=multiple, width=width, extra_fields={"preference": 0.0})
    back = pack_from_bytes(pack_to_bytes(batch))
    assert field_digests(back) == field_digests(batch)
    for spec in dataclasses.fields(batch):
        ours, theirs = getattr(back, spec.name), getattr(batch, spec.name)
        if not isinstance(theirs, torch.Tensor) and spec.name != "extra":
            assert ours == theirs
    assert thd.check_thd(back, multiple=multiple) == []
    back.tokens[0, 0] = 77
    assert int(batch.tokens[0, 0]) == 0  # another memory


def test_a_tensor_with_other_values_or_another_shape_has_another_digest():
    batch = replica_ranks.pack(1)
    digests = field_digests(batch)
    other = field_digests(replica_ranks.pack(1, pixel=1e-3))
    assert {name for name in digests if digests[name] != other[name]} == {"visual_inputs/pixel_values"}
    pixels = batch.visual_inputs["pixel_values"]
    reshaped = dataclasses.replace(batch, visual_inputs={**batch.visual_inputs, "pixel_values": pixels.view(3, 4)})
    assert field_digests(reshaped)["visual_inputs/pixel_values"] != digests["visual_inputs/pixel_values"]
