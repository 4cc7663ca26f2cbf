"""Images x largest height x largest width of a pack stay within a limit, which is no sum over its samples."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.packing import Constraints, PackGroups, check_groups
from energon_packing.packing.constraints import PackLimits, Size, shape_of
from energon_packing.packing.online import next_pack
from energon_packing.packing.whole_list import pack_lengths_flat, within_padding

ROOM = 40
LENGTHS = st.integers(1, 6) | st.integers(1, ROOM)
SIDES = st.sampled_from([1, 2, 3, 5, 8, 13])
TEXTS = st.tuples(LENGTHS, st.just(0), st.just(0), st.just(0))
SAMPLES = st.lists(st.tuples(LENGTHS, st.integers(1, 3), SIDES, SIDES) | TEXTS, min_size=1, max_size=40)
MOST = st.integers(1, 4000)


def area(samples: Any) -> int:
    """What a model's tensor holds of these samples, a loop over each image."""
    images = [(height, width) for _, count, height, width in samples for _ in range(count)]
    if not images:
        return 0
    return len(images) * max(height for height, _ in images) * max(width for _, width in images)


@settings(max_examples=150, deadline=None)
@given(
    samples=SAMPLES,
    most=MOST,
    policy=st.sampled_from(["window", "best_fit", "next_fit"]),
    segments=st.none() | st.integers(1, 6),
    window=st.integers(1, 40),
)
def test_every_pack_of_a_stream_is_within_the_limit_has_the_oldest_sample_and_no_sample_is_lost(
    samples: Any, most: int, policy: str, segments: int | None, window: int
) -> None:
    most = max([most, *(area([sample]) for sample in samples)])  # each fits alone
    limits = {} if segments is None else {"segments": segments}
    left, held, emitted = list(range(len(samples))), list[int](), list[int]()
    while left or held:
        while left and len(held) < window:
            held.append(left.pop(0))
        lengths = [samples[at][0] for at in held]
        arguments = (policy, lengths, ROOM, dict.fromkeys(limits, [1] * len(held)), limits)
        shapes = np.array([samples[at][1:] for at in held]).T
        free = next_pack(*arguments, ended=not left)
        chosen = next_pack(*arguments, ended=not left, padding=(shapes, most))
        assert chosen == sorted({*chosen})
        assert chosen[0] == 0
        pack = [samples[held[at]] for at in chosen]
        assert area(pack) <= most
        assert sum(length for length, *_ in pack) <= ROOM
        assert len(pack) <= (segments or len(pack))
        if area([samples[held[at]] for at in free]) <= most:
            assert chosen == free
        emitted += [held[at] for at in chosen]
        held = [at for at in held if at not in emitted]
    assert sorted(emitted) == list(range(len(samples)))


@settings(max_examples=150, deadline=None)
@given(samples=SAMPLES, most=MOST, segments=st.none() | st.integers(1, 6))
def test_packs_of_a_whole_list_are_within_the_limit_and_hold_every_sample_once(
    samples: Any, most: int, segments: int | None
) -> None:
    most = max([most, *(area([sample]) for sample in samples)])
    lengths = np.array([length for length, *_ in samples])
    pairs = {} if segments is None else {"segments": (np.ones(lengths.size, dtype=np.int64), segments)}
    constraints = Constraints.from_pairs(pairs, lengths.size)
    before = pack_lengths_flat(lengths, ROOM, constraints=pairs)
    shapes = np.array([sample[1:] for sample in samples]).T
    made = within_padding(before, lengths, ROOM, constraints, (shapes, most))
    check_groups(made, lengths, ROOM, constraints)
    assert all(area([samples[at] for at in pack]) <= most for pack in made)
    assert all(np.all(np.diff(pack) > 0) for pack in made)
    assert within_padding(before, lengths, ROOM, constraints, None) is before
    if all(area([samples[at] for at in pack]) <= most for pack in before):
        assert made is before


def test_one_large_image_does_not_pad_all_small_ones_of_its_pack_and_the_pack_is_filled_with_others() -> None:
    lengths = [4100, *[24] * 150, *[80] * 50]
    shapes = np.array([[1] * 151 + [0] * 50, [1024, *[32] * 150, *[0] * 50], [1024, *[32] * 150, *[0] * 50]])
    free = next_pack("window", lengths, 8192)
    assert len(free) * 1024 * 1024 > 100_000_000
    first = next_pack("window", lengths, 8192, padding=(shapes, 50_000_000))
    assert shapes[0, first].sum() == 47
    assert sum(lengths[at] for at in first) > 8100  # texts need no image
    rest = [at for at in range(201) if at not in first]
    assert next_pack("window", [lengths[at] for at in rest], 8192, padding=(shapes[:, rest], 50_000_000)) == list(
        range(len(rest))
    )


def test_tall_images_and_wide_ones_that_would_pad_each_other_are_in_packs_of_their_own() -> None:
    shapes = np.array([[1] * 40, [10, 1] * 20, [1, 10] * 20])
    assert next_pack("window", [1] * 40, 40) == list(range(40))
    assert next_pack("window", [1] * 40, 40, padding=(shapes, 250)) == list(range(0, 40, 2))
    assert next_pack("window", [1] * 40, 40, padding=(shapes, 3999)) == list(range(39))


def test_texts_fill_the_packs_whose_images_were_parted() -> None:
    random = np.random.default_rng(3)
    sides = random.integers(1, 60, (2, 2000)) * (random.random(2000) < 0.2)
    shapes = np.stack([sides[0] > 0, *sides]).astype(np.int64)
    lengths = sides.prod(axis=0) // 4 + random.integers(1, 200, 2000)
    before = pack_lengths_flat(lengths, 4000)
    assert sum(area([(1, *shapes[:, at]) for at in pack]) > 9_000 for pack in before) > len(before) / 4
    made = within_padding(before, lengths, 4000, Constraints(), (shapes, 9_000))
    check_groups(made, lengths, 4000, Constraints())
    assert len(made) <= 1.03 * lengths.sum() / 4000


def test_a_long_list_of_images_needs_few_more_packs_than_without_the_limit() -> None:
    random = np.random.default_rng(3)
    sides = random.integers(1, 30, (2, 6000))
    shapes = np.stack([np.ones(6000, dtype=np.int64), *sides])
    lengths = sides.prod(axis=0)
    before = pack_lengths_flat(lengths, 4000)
    made = within_padding(before, lengths, 4000, Constraints(), (shapes, 9000))
    check_groups(made, lengths, 4000, Constraints())
    assert max(int(shapes[0, pack].sum() * sides[0, pack].max() * sides[1, pack].max()) for pack in made) <= 9000
    assert len(made) <= 1.1 * len(before)
    assert isinstance(made, PackGroups)


def test_a_policy_that_keeps_an_order_keeps_the_packs_that_are_within_the_limit() -> None:
    random = np.random.default_rng(3)
    sides = random.integers(1, 40, (2, 2000)) * (random.random(2000) < 0.2)
    shapes = np.stack([sides[0] > 0, *sides]).astype(np.int64)
    lengths = sides.prod(axis=0) // 4 + random.integers(1, 200, 2000)
    before = pack_lengths_flat(lengths, 4000, "next_fit")
    within = {tuple(pack) for pack in before if area([(1, *shapes[:, at]) for at in pack]) <= 9_000}
    assert 0 < len(within) < len(before)
    made = within_padding(before, lengths, 4000, Constraints(), (shapes, 9_000), policy="next_fit")
    assert within <= {tuple(pack) for pack in made}


@pytest.mark.parametrize(("images", "fits"), [(2, True), (3, False)])
def test_a_sample_over_the_limit_by_itself_is_told_with_both_numbers(images: int, fits: bool) -> None:
    limits = PackLimits(tokens=64, padded_pixels=2048)
    size = Size(segment_lengths=(9,), images=images, height=16, width=64)
    assert shape_of(size) == {"images": images, "height": 16, "width": 64}
    said = "3072 padded pixels; a pack holds packing.max_padded_pixels_per_pack=2048"
    assert limits.exceeded(size) == (None if fits else said)
    assert limits.holds(size) == fits
    assert PackLimits(tokens=64).holds(size)
