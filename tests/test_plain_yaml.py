"""`load_yaml` against PyYAML itself: the same values, and bounds on what a few bytes can become."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.plain_yaml import FAST_FROM, LARGEST_TEXT, load_yaml

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(value=VALUES, flow=st.booleans())
def test_what_pyyaml_writes_has_the_value_that_pyyaml_reads(value, flow):
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True)
    assert load_yaml(text) == yaml.safe_load(text)


@settings(max_examples=400, deadline=None)
@given(text=st.text(st.sampled_from("ab1:-{}[]&*,!<? \n\t'\"|>#%@"), max_size=40))
def test_any_text_has_the_value_that_pyyaml_gives_it_or_is_refused(text):
    try:
        found = load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return
    assert found == yaml.safe_load(text)


@pytest.mark.parametrize("long", [False, True])
def test_aliases_and_merged_mappings_of_an_ordinary_file_work_and_duplicates_do_not(long):
    filler = "# " + "x" * FAST_FROM + "\n" if long else ""
    text = "base: &base {window: 7, policy: best_fit}\npacking:\n  <<: *base\n  window: 8\nagain: *base\n"
    assert load_yaml(filler + text) == yaml.safe_load(text)
    with pytest.raises(yaml.YAMLError, match="'window' occurs twice"):
        load_yaml(filler + "packing: {window: 1, window: 2}")


@pytest.mark.parametrize("text", ["[", "- ", "{a: ", "? "])
def test_a_text_of_any_depth_is_refused_and_does_not_end_the_process(text):
    with pytest.raises(RecursionError):
        load_yaml(text * FAST_FROM)


def test_a_text_of_any_length_is_bounded():
    with pytest.raises(ValueError, match="longer than"):
        load_yaml("#" * (LARGEST_TEXT + 1))
    assert load_yaml("a: [" + ", ".join(["x"] * 90_000) + "]")["a"][-1] == "x"
    with pytest.raises(yaml.YAMLError, match="more than 100,000 values"):
        load_yaml("[" + ", ".join(["x"] * 100_000) + "]")
