"""A `RunView` holds what rules read in groups, and a change names a field alone."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_packing.errors import PackingError
from energon_packing.validate.run_view import GROUP_OF, RunView


def read(view: RunView, name: str) -> object:
    group = GROUP_OF[name]
    return getattr(view if group is None else getattr(view, group), name)


def test_every_field_of_every_group_can_be_named_and_no_name_stands_in_two_groups() -> None:
    groups = [
        part.name for part in dataclasses.fields(RunView) if dataclasses.is_dataclass(getattr(RunView(), part.name))
    ]
    inside = [entry.name for group in groups for entry in dataclasses.fields(getattr(RunView(), group))]
    own = {part.name for part in dataclasses.fields(RunView)} - set(groups)
    assert sorted(GROUP_OF) == sorted([*inside, *own])
    assert len(groups) >= 8
    assert max(len(dataclasses.fields(getattr(RunView(), group))) for group in groups) <= 12


@given(st.dictionaries(st.sampled_from(sorted(GROUP_OF)), st.integers(2, 64), max_size=12))
def test_a_change_changes_the_fields_that_it_names_and_no_others(changes: dict[str, int]) -> None:
    before = RunView.of(tensor_parallel=8, global_batch_size=128, step="vlm_step")
    after = before.changed(**changes)
    assert {name: read(after, name) for name in GROUP_OF} == {name: read(before, name) for name in GROUP_OF} | changes
    assert read(before, "tensor_parallel") == 8


@pytest.mark.parametrize("name", ["tensor_parallell", "parallel", "multiple", "parallel.tensor_parallel"])
def test_a_field_that_no_group_has_is_refused_by_name(name: str) -> None:
    with pytest.raises(PackingError, match=name):
        RunView.of(**{name: 2})
