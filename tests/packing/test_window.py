"""The step function of streams, its storage, and packing an endless stream."""

import itertools
import json
import tracemalloc

import numpy as np
import pytest
from bench.length_lists import look_alike

from energon_packing.errors import ConfigError, PackingError, UserError
from energon_packing.packing import (
    Constraints,
    WindowPacker,
    check_groups,
    drain_window,
    lower_bound,
    pack_lengths,
    pack_stream,
    select_from_window,
)
from energon_packing.packing.online import next_pack
from energon_packing.packing.policies import best_fit, window
from energon_packing.packing.policies.best_fit import pack_limited


def _mix(count: int, seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Text, images and videos as a multimodal data set has them: tokens and image counts."""
    random = np.random.default_rng(seed)
    kind = random.random(count)
    tokens = random.lognormal(6, 1, count)
    images = np.ones(count, dtype=np.int64)
    pictures, videos = (kind > 0.6) & (kind < 0.95), kind >= 0.95
    images[pictures] = random.integers(1, 5, pictures.sum())
    images[videos] = random.integers(8, 61, videos.sum())
    tokens[pictures] += images[pictures] * random.integers(200, 1500, pictures.sum())
    tokens[videos] = images[videos] * random.integers(60, 400, videos.sum())
    return np.clip(tokens.astype(np.int64), 8, 32768), images


def test_a_window_of_256_reaches_the_bound_on_a_multimodal_mix() -> None:
    lengths, _ = _mix(20_000)
    groups = pack_lengths(lengths, 32768, "window", window=256)
    assert len(groups) <= 1.0005 * lower_bound(lengths, 32768) + 1


TILED = [(18, 6016), (24, 8192), (48, 16384), (18, 5000), (60, 16384), (18, 5600)]


@pytest.mark.parametrize(("tile_limit", "capacity"), TILED)
def test_packs_under_two_limits_are_at_the_bound_whatever_the_window(tile_limit: int, capacity: int) -> None:
    made = look_alike(4_000)
    tokens, tiles = made.lengths, made.images
    constraints = {"tiles": (tiles, tile_limit)}
    bound = lower_bound(tokens, capacity, Constraints.from_pairs(constraints, tokens.size))
    counts = [
        len(pack_lengths(tokens, capacity, "window", constraints=constraints, window=held)) for held in (64, 256, 1024)
    ]
    assert max(counts) <= 1.003 * bound + 1
    assert max(counts[1:]) <= counts[0] + 1


@pytest.mark.parametrize(("tile_limit", "capacity"), TILED)
def test_a_long_list_under_two_limits_is_packed_at_the_bound(
    tile_limit: int, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_fit, "LEAST", 8_192)  # samples, from twice as many of which one is packed for several
    made = look_alike(40_000)
    tokens, tiles = made.lengths, made.images
    constraints = Constraints(costs={"tiles": tiles}, limits={"tiles": tile_limit})
    packs = pack_limited(tokens, capacity, constraints)
    check_groups(packs, tokens, capacity, constraints)
    assert len(packs) <= 1.002 * lower_bound(tokens, capacity, constraints) + 2


def test_with_three_limits_at_once_the_window_stays_within_eight_percent_of_the_bound() -> None:
    lengths, images = _mix(4_000)
    constraints = {"images": (images, 64), "patches": (images * 700, 50_000.0), "segments": (np.ones(4_000), 30)}
    bound = lower_bound(lengths, 32768, Constraints.from_pairs(constraints, lengths.size))
    assert len(pack_lengths(lengths, 32768, "window", constraints=constraints)) <= 1.08 * bound


def test_the_next_pack_is_ascending_and_holds_the_oldest() -> None:
    assert select_from_window([4, 1, 3, 4], 8) == [0, 1, 2]
    assert select_from_window([4, 3, 3, 4], 8) == [0, 3]
    assert select_from_window([8, 3], 8) == [0]


def test_costs_without_a_limit_do_not_count() -> None:
    assert select_from_window([4, 4], 8, {"images": [9, 9]}, {}) == [0, 1]
    assert select_from_window([4, 4], 8, {"images": [9, 9]}, {"images": 9}) == [0]


def test_samples_that_fit_no_pack_are_left_alone_unless_oldest() -> None:
    assert select_from_window([4, 9, 4], 8) == [0, 2]
    limited = ({"images": [5, 1]}, {"images": 4})
    for lengths, limits, message in (
        ([9, 1], (), "9 tokens"),
        ([1, 1], limited, "5 images, limit 4"),
        ([], (), "empty"),
    ):
        with pytest.raises(PackingError, match=message):
            select_from_window(lengths, 8, *limits)


def test_a_limit_of_zero_keeps_samples_that_cost_something_out() -> None:
    assert select_from_window([4, 2, 2], 8, {"images": [0, 1, 0]}, {"images": 0}) == [0, 2]


def test_the_drain_is_best_fit_decreasing_and_starts_with_the_oldest() -> None:
    # Oldest first would pair 2 and 6 too, but 3 with 4; best fit decreasing finds two packs.
    assert drain_window([3, 6, 2, 5], 8) == [[0, 3], [1, 2]]
    assert drain_window([], 8) == []


def test_the_next_pack_under_limits_costs_no_packing_of_the_rest_at_the_end_of_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window of 1,024 took 13 s to empty: each pack was the first of all that were left."""
    lengths, images = [3, 6, 2, 5, 1], {"images": [1, 1, 1, 0, 1]}
    expected = drain_window(lengths, 8, images, {"images": 2})[0]
    monkeypatch.setattr(window, "drain_window", None)
    assert next_pack("window", lengths, 8, images, {"images": 2}, ended=True) == expected


def test_the_state_of_a_packer_is_plain_json() -> None:
    packer: WindowPacker[str] = WindowPacker(8, 4, {"images": 3})
    packer.add("a", 5, {"images": 1})
    packer.add("b", 3, {"images": 2})
    other: WindowPacker[str] = WindowPacker(8, 4, {"images": 3})
    other.load_state(json.loads(json.dumps(packer.state())))
    assert other.next_pack() == ["a", "b"]
    with pytest.raises(PackingError, match="costs"):
        WindowPacker[str](8, 4).load_state(packer.state())


def test_a_packer_refuses_what_it_cannot_hold() -> None:
    packer: WindowPacker[str] = WindowPacker(8, 1, {"images": 3})
    refused = (
        (9, {"images": 1}, "length 9, capacity 8"),
        (1, {"images": 4}, "4 images, limit 3"),
        (1, {}, "None images"),
    )
    for length, costs, message in refused:
        with pytest.raises(PackingError, match=message):
            packer.add("a", length, costs)
    packer.add("a", 1, {"images": 1})
    with pytest.raises(PackingError, match="already holds 1"):
        packer.add("b", 1, {"images": 1})
    with pytest.raises(ConfigError, match="window"):
        WindowPacker(8, 0)


def test_an_endless_stream_is_packed_without_reading_ahead_of_the_window() -> None:
    read = 0

    def endless():  # type: ignore[no-untyped-def]
        nonlocal read
        for read in itertools.count(1):
            yield "x" * (read % 7 + 1)

    packs = itertools.islice(pack_stream(endless(), 16, window=32), 50)
    emitted = 0
    for pack in packs:
        emitted += len(pack)
        assert sum(map(len, pack)) <= 16
        assert read - emitted < 32


def test_a_stream_names_the_sample_that_fits_no_pack_or_reports_each_dropped_one() -> None:
    with pytest.raises(UserError, match="sample 1 of the stream does not fit into a pack: length 9, capacity 8"):
        list(pack_stream(["ab", "c" * 9], 8))
    dropped = []
    packs = list(pack_stream(["ab", "c" * 9, "", "d"], 8, oversize="drop", on_drop=lambda *args: dropped.append(args)))
    assert packs == [["ab", "d"]]
    assert dropped == [("c" * 9, "length 9, capacity 8"), ("", "length 0, capacity 8")]
    with pytest.raises(ConfigError, match="split"):
        pack_stream(["ab"], 8, oversize="split")  # type: ignore[arg-type]


def test_a_stream_keeps_limits_of_its_samples() -> None:
    packs = list(
        pack_stream([(4, 3), (4, 3), (4, 1)], 8, length=lambda s: s[0], constraints={"i": (lambda s: s[1], 4)})
    )
    assert packs == [[(4, 3), (4, 1)], [(4, 3)]]


@pytest.mark.parametrize("extra", ["tokens scarce", "images scarce"])
def test_packs_under_limits_of_a_row_of_a_million_tokens_cost_what_those_of_8192_do(extra: str) -> None:
    random = np.random.default_rng(7)
    short = np.clip(random.lognormal(6.5, 0.8, 400).astype(np.int64), 8, 8192)
    long = short * 128 - random.integers(0, 128, 400)
    images = np.where(random.random(400) < 0.4, random.integers(1, 6, 400), 0)
    constraints = {"images": (images, 100 if extra == "tokens scarce" else 10)}
    memory, packs = [], []  # tables have an entry for each place
    for lengths, capacity in ((short, 8192), (long, 1 << 20)):
        tracemalloc.start()
        groups = pack_lengths(lengths, capacity, "window", constraints=constraints, window=256)
        memory.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        packs.append(len(groups))
        assert sorted(np.concatenate(groups).tolist()) == list(range(400))
        assert all(
            lengths[group].sum() <= capacity and images[group].sum() <= constraints["images"][1] for group in groups
        )
    bound = lower_bound(short, 8192, Constraints.from_pairs(constraints, 400))
    assert max(packs) <= bound + 1
    assert packs[1] <= packs[0] + (extra == "images scarce")  # what is left of long rooms is cut in parts
    assert memory[1] < 3 * memory[0]
