"""Limits on arrays are those of `PackLimits`, sample by sample."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from energon_packing.offline import samples as array_limits
from energon_packing.offline.samples import Sizes
from energon_packing.packing.balance import pack_cost
from energon_packing.packing.constraints import PackLimits
from energon_packing.thd.assembly import hides_padding

numbers = st.integers(1, 200)
samples = st.lists(
    st.tuples(numbers, st.one_of(st.just(0), numbers), st.integers(0, 9), st.integers(0, 400)), min_size=1, max_size=20
)
optional = st.one_of(st.none(), st.integers(1, 300))


@st.composite
def pack_limits(draw: st.DrawFn) -> PackLimits:
    multiple = draw(st.sampled_from([1, 2, 3, 8, 16]))
    return PackLimits(
        tokens=multiple * draw(st.integers(1, 40)),
        multiple=multiple,
        images=draw(optional),
        patches=draw(optional),
        segments=draw(optional),
        cost=draw(st.one_of(st.none(), st.floats(1, 300))),
        lone_room=draw(st.booleans()),
    )


@given(rows=samples, limits=pack_limits())
def test_every_number_is_that_of_pack_limits(rows: list[tuple[int, int, int, int]], limits: PackLimits) -> None:
    sizes = Sizes(
        length=np.array([row[0] for row in rows], np.int32),
        second=np.array([row[1] for row in rows], np.int32),
        images=np.array([row[2] for row in rows], np.int32),
        patches=np.array([row[3] for row in rows], np.int64),
    )
    each = [sizes.at(index) for index in range(len(rows))]
    aligned = [sum(-(-length // limits.multiple) for length in row.segment_lengths) for row in each]
    assert limits.length_units(sizes).tolist() == aligned == [limits.length_units(row) for row in each]
    hidden = [limits.lone_room and hides_padding(row.segment_lengths, limits.multiple) for row in each]
    assert limits.masked_units(sizes).tolist() == hidden == [limits.masked_units(row) for row in each]
    assert array_limits.holds(limits, sizes).tolist() == [limits.holds(row) for row in each]
    found = {name: cost.tolist() for name, cost in sizes.costs(limits).items()}
    assert found == limits.costs(each)
    if limits.cost is not None:
        assert found["cost"] == [pack_cost(row.segment_lengths, patches=row.patches) for row in each]


def test_lengths_of_millions_of_tokens_do_not_overflow() -> None:
    sizes = Sizes(
        length=np.array([2**30 - 1], np.int32),
        second=np.array([2**30 - 1], np.int32),
        images=np.array([1], np.int32),
        patches=np.array([2**40], np.int64),
    )
    limits = PackLimits(tokens=2**33, multiple=8, cost=1e12)
    assert sizes.costs(limits)["cost"].tolist() == limits.costs([sizes.at(0)])["cost"]
    assert int(limits.length_units(sizes)[0]) == limits.length_units(sizes.at(0))
