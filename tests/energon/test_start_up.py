"""What a start costs at scale: who opens shards, and how many process groups are made. ``start_up.py`` prints it."""

from __future__ import annotations

import start_up

from energon_packing.energon.loader import identity_of


def test_one_rank_opens_the_shards_and_tells_the_others_what_they_are(tmp_path):
    config = start_up.run_on(start_up.many_shards(tmp_path / "data", 300))
    first, _, opened = start_up.built(config)
    assert opened == 300
    identity = identity_of(config.data.path, "train")
    other, _, opened = start_up.built(config, identity)
    assert opened == 0
    assert other.alike() == first.alike()


def test_a_rank_whose_data_set_was_prepared_anew_differs_from_the_one_that_told_it(tmp_path):
    config = start_up.run_on(start_up.many_shards(tmp_path / "data", 3))
    identity = identity_of(config.data.path, "train")
    (tmp_path / "data" / ".nv-meta" / "index.uuid").write_text("another")
    other, _, opened = start_up.built(config, identity)
    assert opened == 0
    assert other.alike()["data set"] not in identity.values()


def test_a_replica_of_4096_ranks_makes_one_group_by_its_leaders_alone_and_hears_of_its_own_ranks_only():
    made, new_groups, own, told = start_up.replicas_made()
    assert (new_groups, own) == (0, 1)
    assert told < 10_000
    for rank, replica in made.items():
        place = start_up.place_of(rank)
        stage = [other for other in made if start_up.place_of(other)["pp"] == place["pp"]]
        assert replica.members == tuple(sorted(stage))
        assert replica.leaders == tuple(
            min(other for other in made if start_up.place_of(other)["pp"] == number) for number in range(8)
        )
        assert (replica.rank, replica.world_size, replica.stage, replica.size) == (0, 32, place["pp"], 128)
