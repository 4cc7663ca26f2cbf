"""Following a metadataset's references finds the same directories as Energon does."""

from __future__ import annotations

import tempfile
from pathlib import Path

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.energon import traverse_metadataset

from energon_packing.validate.looks.data import leaves_of

SPLITS = ("train", "val")
HEAD = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
SUBFLAVORS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), max_size=2)


@st.composite
def references(draw, files):
    """One reference: to a directory, or to one of the metadatasets that are there already."""
    made = {"subflavors": draw(SUBFLAVORS)}
    if draw(st.booleans()):
        made["split_part"] = draw(st.sampled_from(SPLITS))
    if files and draw(st.booleans()):
        return {**made, "path": draw(st.sampled_from(files))}
    if draw(st.booleans()):
        made["aux"] = {"media": "../media", "raw": "filesystem://raw"}
    return {**made, "path": draw(st.sampled_from(["./one", "../two", "/three/four"]))}


@st.composite
def trees(draw):
    """Files of metadatasets, each of which may refer to those before it; the last one is the root."""
    files: list[str] = []
    contents = []
    blend = draw(st.sampled_from(["blend", "blend_epochized"]))  # Energon's loader refuses both in one tree
    for number in range(draw(st.integers(1, 4))):
        splits = {}
        for split in SPLITS:
            kind = draw(st.sampled_from(["one", blend]))
            several = draw(st.lists(references(tuple(files)), min_size=1, max_size=3))
            splits[split] = several[0] if kind == "one" else {kind: several}
        contents.append({**HEAD, "splits": splits})
        files.append(f"inner{number}.yaml")
    return dict(zip(files, contents, strict=True))


@settings(max_examples=40)
@given(tree=trees(), split=st.sampled_from(SPLITS))
def test_leaves_parts_media_stores_and_subflavors_are_those_that_energon_finds(tree, split):
    with tempfile.TemporaryDirectory() as folder:
        for name, content in tree.items():
            (Path(folder) / name).write_text(yaml.safe_dump(content))
        root = Path(folder) / list(tree)[-1]
        own, flaws = leaves_of(str(root), split)
        theirs = traverse_metadataset(root, split_part=split)
    assert not flaws
    assert [
        (leaf.path, leaf.split, {k: v.removeprefix("filesystem://") for k, v in leaf.aux.items()}, leaf.subflavors)
        for leaf in own
    ] == [
        (str(leaf.path), leaf.split_part, {k: str(v) for k, v in leaf.aux.items()}, leaf.subflavors) for leaf in theirs
    ]


def test_joined_data_sets_and_those_of_the_first_version_are_followed(tmp_path):
    joined = {"join": {"text": {"path": "a"}, "more": {"path": "b", "split_part": "x"}}, "split_part": "y"}
    (tmp_path / "joined.yaml").write_text(yaml.safe_dump({**HEAD, "splits": {"train": joined}}, sort_keys=False))
    leaves, flaws = leaves_of(str(tmp_path / "joined.yaml"), "train")
    assert not flaws
    assert [(Path(leaf.path).name, leaf.split, leaf.joined) for leaf in leaves] == [("a", "y", True), ("b", "x", True)]
    first = {"__class__": "Metadataset", "splits": {"train": {"datasets": [{"path": "a"}, {"path": "b"}]}}}
    (tmp_path / "first.yaml").write_text(yaml.safe_dump({"__module__": "megatron.energon", **first}))
    leaves, flaws = leaves_of(str(tmp_path / "first.yaml"), "train")
    assert [Path(leaf.path).name for leaf in leaves] == ["a", "b"]
    theirs = traverse_metadataset(tmp_path / "first.yaml", split_part="train")
    assert [str(leaf.path) for leaf in theirs] == [leaf.path for leaf in leaves]
