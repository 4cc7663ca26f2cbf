"""The compiled best-fit decreasing: the packs of the one in numpy, sample for sample."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.packing import compiled, decreasing, pack_lengths
from energon_packing.packing.pack_groups import PackGroups

MANY = settings(max_examples=int(os.environ.get("ENERGON_PACKING_EXAMPLES", "300")), deadline=None)
needs_numba = pytest.mark.skipif(compiled.find_spec("numba") is None, reason="numba is not installed")


@st.composite
def lists(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    capacity, factor = draw(st.integers(1, 150)), draw(st.sampled_from([1, 1, 8]))
    lengths = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=120))
    return np.array(lengths, dtype=np.int64) * factor, capacity * factor


def in_numpy(lengths: np.ndarray, capacity: int) -> PackGroups:
    return PackGroups.of(decreasing._bins(lengths, capacity))


@given(lists())
@MANY
def test_the_plain_functions_that_numba_compiles_give_the_packs_of_numpy(problem: tuple[np.ndarray, int]) -> None:
    """Holds without numba too: what it compiles is Python."""
    lengths, capacity = problem
    order, offsets = compiled._group(*compiled._place(lengths, min(capacity, int(lengths.sum()))))
    expected = in_numpy(lengths, capacity)
    assert np.array_equal(order, expected.order)
    assert np.array_equal(offsets, expected.offsets)


@needs_numba
@given(lists())
@MANY
def test_the_compiled_functions_give_the_packs_of_numpy(problem: tuple[np.ndarray, int]) -> None:
    lengths, capacity = problem
    order, offsets = compiled.best_fit_groups(lengths, capacity)
    expected = in_numpy(lengths, capacity)
    assert np.array_equal(order, expected.order)
    assert np.array_equal(offsets, expected.offsets)


@needs_numba
def test_a_long_list_has_the_same_packs_with_and_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(1, 32_769, 200_000)
    found = []
    for choice in ("0", "1"):
        monkeypatch.setenv(compiled.SWITCH, choice)
        found.append(pack_lengths(lengths, 32_768, "best_fit"))
    assert len(found[0]) == len(found[1])
    assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("choice", "loaded", "samples", "expected"),
    [
        (None, False, 10, False),
        (None, True, 10, True),
        (None, False, compiled.COMPILED_FROM, True),
        ("1", False, 10, True),
        ("0", True, compiled.COMPILED_FROM, False),
        ("1", True, 1 << 31, False),
    ],
)
def test_numba_is_used_where_it_repays_its_import_or_was_asked_for(monkeypatch, choice, loaded, samples, expected):
    monkeypatch.setattr(compiled, "find_spec", lambda name: object())
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    if choice is not None:
        monkeypatch.setenv(compiled.SWITCH, choice)
    if loaded:
        monkeypatch.setitem(sys.modules, "numba", object())
    assert compiled.wanted(samples, 8192) is expected
    assert not compiled.wanted(samples, compiled.LARGEST_CAPACITY + 1)


def test_without_numba_nothing_is_missed() -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from energon_packing.packing import pack_lengths\n"
        "print([group.tolist() for group in pack_lengths([3, 5, 2], 8, 'best_fit')])"
    )
    environment = os.environ | {compiled.SWITCH: "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "[[0, 1], [2]]", done.stderr
