"""A plan of a metadataset mixes its data sets as the metadataset says: weights, repetitions, subsets."""

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from megatron.energon import WorkerConfig
from megatron.energon.metadataset.loader import load_dataset
from support.made_index import before_splits_were_noted

from energon_packing.config import RunConfig, from_mapping
from energon_packing.convert import ConvertConfig, convert
from energon_packing.convert.layout import dataset_entry
from energon_packing.demo import processor_path
from energon_packing.errors import ConfigError, UserError
from energon_packing.offline.explain import changes
from energon_packing.offline.index import Index
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.plan import Plan
from energon_packing.offline.planner import make_plan
from energon_packing.validate.looks.data import leaves_of

SAMPLES = {"a": 60, "b": 30, "c": 12}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three data sets of texts."""
    made = {}
    for seed, (name, count) in enumerate(SAMPLES.items()):
        folder = tmp_path_factory.mktemp("blended")
        (folder / "chats.jsonl").write_text(
            "".join(
                f'{{"id": "{name}{at}", "messages": [{{"role": "user", "content": "{seed} and {at}?"}}, '
                f'{{"role": "assistant", "content": "It is {seed * at}."}}]}}\n'
                for at in range(count)
            )
        )
        made[name] = folder / f"set-{name}"
        convert(ConvertConfig(sources=(folder / "chats.jsonl",), out=made[name], split={"train": 1.0}, workers=0))
    return made


def metadataset(file: Path, split: dict[str, Any]) -> Path:
    file.write_text(
        yaml.safe_dump({"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": split}})
    )
    return file


def entries(parts: dict[str, Path], **values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"path": dataset_entry(str(parts[name])), **each} for name, each in values.items()]


def run(**plan: Any) -> RunConfig:
    values = {
        "encoder": {"processor": str(processor_path("qwen2_5_vl"))},
        "packing": {"seq_length": 512},
        "plan": {"max_data_parallel": 2, **plan},
    }
    return from_mapping(RunConfig, values, where="the test")


def drawn(index: Path, tmp_path: Path, **plan: Any) -> list[dict[str, int]]:
    """For each epoch of a plan, the number of samples by the first letter of their keys."""
    config = run(**plan)
    make_plan([index], config, tmp_path / "plan.parquet", force=True)
    opened = Plan.open(tmp_path / "plan.parquet")
    ends = opened.facts.epoch_ends
    found = []
    for start, end in zip((0, *ends[:-1]), ends, strict=True):
        letters = [
            Path(opened.facts.datasets[sample.dataset].root).parent.name[-1]
            for pack in opened.packs(start, end)
            for sample in pack.samples
        ]
        found.append({letter: letters.count(letter) for letter in SAMPLES})
    return found


@pytest.fixture
def measured(parts, tmp_path):
    def make(split: dict[str, Any]) -> Path:
        file = metadataset(tmp_path / "blend.yaml", split)
        measure(MeasureConfig(paths=(file,), out=tmp_path / "index", workers=0), run())
        return tmp_path / "index"

    return make


def test_a_plan_has_the_weights_of_the_blend_that_was_measured(parts, measured, tmp_path):
    index = measured({"blend": entries(parts, a={"weight": 3}, b={"weight": 1}, c={"weight": 1})})
    (epoch,) = drawn(index, tmp_path)
    assert epoch == {"a": 36, "b": 12, "c": 12}, "the first that is used up ends the epoch"
    total = {letter: sum(each[letter] for each in drawn(index, tmp_path, epochs=5)) for letter in SAMPLES}
    assert total == {"a": 180, "b": 60, "c": 60}


def test_a_plan_has_the_repetitions_of_the_blend_that_was_measured(parts, measured, tmp_path):
    index = measured({"blend_epochized": entries(parts, a={"repetitions": 1}, b={"repetitions": 3}, c={})})
    assert drawn(index, tmp_path) == [{"a": 60, "b": 90, "c": 12}]
    assert drawn(index, tmp_path, datasets={"set-b": {"epochs": 2}}) == [{"a": 60, "b": 60, "c": 12}]


def test_settings_of_the_plan_replace_the_weights_of_the_blend(parts, measured, tmp_path):
    index = measured({"blend": entries(parts, a={"weight": 3}, b={"weight": 1}, c={"weight": 0})})
    assert drawn(index, tmp_path) == [{"a": 60, "b": 20, "c": 0}]
    assert drawn(index, tmp_path, weights_by="none") == [{"a": 60, "b": 30, "c": 12}]
    own = {"set-a": {"weight": 1}, str(parts["b"]): {"weight": 1}, "set-c": {"epochs": 0}}
    assert drawn(index, tmp_path, datasets=own) == [{"a": 30, "b": 30, "c": 0}]
    assert drawn(index, tmp_path, datasets={"set-b": {"group": "apart"}}) == [{"a": 60, "b": 20, "c": 0}]
    with pytest.raises(ConfigError, match="has no weight, but others have"):
        drawn(index, tmp_path, datasets={"set-a": {"weight": 1}})
    with pytest.raises(ConfigError, match=r"set-a has a weight, but plan\.weights_by is none"):
        run(weights_by="none", datasets={"set-a": {"weight": 1}})


def test_weights_of_a_blend_beside_another_data_set_are_refused_until_the_plan_says_how_they_mix(
    parts, measured, tmp_path
):
    index = measured({"blend": entries(parts, a={"weight": 3}, b={"weight": 1})})
    measure(MeasureConfig(paths=(parts["c"],), out=index, workers=0), run())
    with pytest.raises(ConfigError, match=r"blend\.yaml \(train\) gives its data sets weights, and set-c.* has none"):
        drawn(index, tmp_path)
    assert drawn(index, tmp_path, weights_by="none") == [{"a": 60, "b": 30, "c": 12}]
    again = metadataset(tmp_path / "other.yaml", {"blend": entries(parts, c={"weight": 1})})
    shutil.rmtree(index)
    index = measured({"blend": entries(parts, a={"weight": 3}, b={"weight": 1})})
    measure(MeasureConfig(paths=(again,), out=index, workers=0), run())
    with pytest.raises(ConfigError, match=r"blend\.yaml \(train\) gives .* and so does .*other\.yaml"):
        drawn(index, tmp_path)


def test_a_new_weight_measures_nothing_and_counts(parts, measured, tmp_path):
    measured({"blend": entries(parts, a={"weight": 1}, b={"weight": 1})})
    file = metadataset(tmp_path / "blend.yaml", {"blend": entries(parts, a={"weight": 2}, b={"weight": 1})})
    report = measure(MeasureConfig(paths=(file,), out=tmp_path / "index", workers=0), run())
    assert (report.measured, report.reused) == (0, 2)
    assert drawn(tmp_path / "index", tmp_path) == [{"a": 60, "b": 30, "c": 0}]


def test_a_part_that_its_metadataset_no_longer_names_is_in_no_plan(parts, measured, tmp_path):
    index = measured({"blend_epochized": entries(parts, a={}, b={}, c={})})
    assert drawn(index, tmp_path) == [{"a": 60, "b": 30, "c": 12}]
    measured({"blend_epochized": entries(parts, a={}, c={})})
    assert drawn(index, tmp_path) == [{"a": 60, "b": 0, "c": 12}]
    measure(MeasureConfig(paths=(parts["c"],), out=index, workers=0), run())
    assert drawn(index, tmp_path) == [{"a": 60, "b": 0, "c": 12}], "under the name that it was measured by last"


def test_an_edited_metadataset_drops_its_old_parts_also_under_another_name_and_says_so(parts, measured, tmp_path):
    measured({"blend": entries(parts, a={"weight": 1}, b={"weight": 1})})
    file = metadataset(tmp_path / "blend.yaml", {"blend": entries(parts, a={"weight": 1}, c={"weight": 3})})
    report = measure(MeasureConfig(paths=(file,), out=tmp_path / "index", workers=0), run())
    assert report.changes == (f"{parts['b']}/text (train) is no longer in the index: {file} does not name it",)
    assert drawn(tmp_path / "index", tmp_path) == [{"a": 4, "b": 0, "c": 12}]
    file.unlink()
    renamed = metadataset(tmp_path / "new.yaml", {"blend": entries(parts, b={"weight": 1}, c={"weight": 1})})
    report = measure(MeasureConfig(paths=(renamed,), out=tmp_path / "index", workers=0), run())
    assert report.changes == (
        f"{parts['c']}/text (train) is what {renamed} with weight 0.5 says of it now, no longer {file} with weight "
        "0.75",
        f"{parts['a']}/text (train) is no longer in the index: {renamed} does not name it",
    )
    assert drawn(tmp_path / "index", tmp_path) == [{"a": 0, "b": 12, "c": 12}]


@pytest.mark.parametrize("gone", [True, False])
def test_a_part_that_is_measured_alone_leaves_the_others_of_its_metadataset(parts, measured, tmp_path, gone):
    index = measured({"blend_epochized": entries(parts, a={"repetitions": 3}, b={})})
    if gone:
        (tmp_path / "blend.yaml").unlink()
    report = measure(MeasureConfig(paths=(parts["a"],), out=index, workers=0), run())
    (told,) = report.changes
    assert re.fullmatch(
        r"\S*set-a/text \(train\) is what \S*set-a says of it now, no longer \S* with repetitions 3", told
    )
    assert [each.root for each in report.index.datasets] == [f"{parts[name]}/text" for name in "ab"]


def test_weights_are_those_of_the_split_that_was_asked_for_whatever_splits_its_parts_have(parts, measured, tmp_path):
    """`measure --split val` into the same index leaves the parts of train as they are."""
    halves, index = tmp_path / "d" / "set-halves", tmp_path / "index"
    chats = parts["a"].parent / "chats.jsonl"
    convert(ConvertConfig(sources=(chats,), out=halves, split={"train": 0.5, "val": 0.5}, workers=0))
    half = {"path": dataset_entry(str(halves)), "split_part": "val"}
    listed = {"train": {"blend": [half | {"weight": 2}, *entries(parts, b={"weight": 1})]}, "val": half}
    file = metadataset(tmp_path / "blend.yaml", {})
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"splits": listed}))

    def measure_split(split: str) -> None:
        measure(MeasureConfig(paths=(file,), out=index, workers=0, split=split), run())

    def planned(split: str) -> list[tuple[str, str, int]]:
        facts = make_plan([index], run(), tmp_path / "plan.parquet", force=True, splits=[split])
        assert facts.splits == {split}
        opened = Plan.open(tmp_path / "plan.parquet")
        read = Counter(sample.dataset for pack in opened.packs(0, len(opened)) for sample in pack.samples)
        return [(each.asked, each.split, read[number]) for number, each in enumerate(facts.datasets)]

    for split in ("train", "val", "train"):
        measure_split(split)
    size = next(each for each in Index.open(index).datasets if each.asked == "val").shards[0].samples
    train = [("train", "val", size), ("train", "train", size // 2)]
    assert planned("train") == train
    assert planned("val") == [("val", "val", size)]
    before_splits_were_noted(index)
    with pytest.raises(UserError, match=r"older version measured .*blend\.yaml with several splits.* measure' again"):
        planned("train")
    measure_split("train")
    assert planned("train") == train


def test_diff_tells_the_parts_of_a_metadataset_apart(parts, measured, tmp_path):
    index = measured({"blend_epochized": entries(parts, a={}, b={})})
    old, new = (tmp_path / f"{name}.parquet" for name in "ab")
    make_plan([index], run(datasets={"set-b": {"epochs": 0}}), old)
    make_plan([index], run(datasets={"set-a": {"epochs": 0}}), new)
    found = changes(Plan.open(old), Plan.open(new))
    assert [found[name] for name in ("left", "entered", "moved", "kept")] == [60, 30, 0, 0]


@pytest.mark.parametrize("where", ["entry", "list"])
def test_a_subset_is_refused_because_the_whole_data_set_would_be_measured(parts, measured, where):
    subset = {"subset": {"range": ["0%", "50%"]}}
    listed = {"blend": entries(parts, a=subset if where == "entry" else {})} | (subset if where == "list" else {})
    with pytest.raises(UserError, match=r"takes a subset of .*set-a.*convert --split"):
        measured(listed)


def test_shares_that_cannot_be_are_a_sentence(parts, measured):
    for split, said in (
        ({"blend": [{"weight": "three"}]}, "weight is 'three', which is no number of 0 or more"),
        ({"blend": [{"weight": -1}]}, "weight is -1"),
        ({"blend": [{"weight": 0}]}, "every weight is 0"),
        ({"blend_epochized": [{"repetitions": True}]}, "repetitions is True"),
    ):
        ((kind, (share,)),) = split.items()
        with pytest.raises(UserError, match=said):
            measured({kind: entries(parts, a=share)})


def test_a_blend_inside_an_epochized_blend_is_refused_as_energon_does(parts, measured, tmp_path):
    inner = metadataset(tmp_path / "inner.yaml", {"blend": entries(parts, a={}, b={})})
    outer = {"blend_epochized": [{"path": str(inner)}]}
    with pytest.raises(UserError, match="cannot be inside each other"):
        measured(outer)
    with pytest.raises(ValueError, match="Cannot mix blend with blend_epochized"):
        energons(tmp_path / "blend.yaml")


def energons(file: Path) -> dict[str, tuple[float | None, float | None]]:
    """What Energon itself gives each directory: its weight and its repetitions."""
    loaded = load_dataset(file).get_datasets(
        training=True, split_part="train", worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0)
    )
    return {
        str(each.dataset.paths[0] if hasattr(each.dataset, "paths") else each.dataset.path): (
            each.weight,
            each.repetitions,
        )
        for each in loaded.datasets
    }


@given(
    outer=st.lists(st.integers(1, 9) | st.floats(0.1, 9), min_size=2, max_size=2),
    inner=st.lists(st.integers(1, 9) | st.floats(0.1, 9), min_size=2, max_size=2),
    epochized=st.booleans(),
)
@example(outer=[0, 1], inner=[2, 3], epochized=True)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nested_blends_have_the_shares_that_energon_gives_them(parts, tmp_path, outer, inner, epochized):
    kind, name = ("blend_epochized", "repetitions") if epochized else ("blend", "weight")
    below = metadataset(tmp_path / "inner.yaml", {kind: entries(parts, a={name: inner[0]}, b={name: inner[1]})})
    file = metadataset(
        tmp_path / "outer.yaml",
        {kind: [{"path": str(below), name: outer[0]}, *entries(parts, c={name: outer[1]})]},
    )
    leaves, flaws = leaves_of(str(file), "train")
    assert not flaws
    expected = energons(file)
    assert len(expected) == len(leaves) == 3
    for leaf in leaves:
        weight, repetitions = expected[leaf.path]
        assert leaf.weight == (None if weight is None else pytest.approx(weight))
        assert leaf.repetitions == (None if repetitions is None else pytest.approx(repetitions))
