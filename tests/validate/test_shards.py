"""What `validate` says of a damaged data set is what our loader does with it."""

from __future__ import annotations

import shutil
import sqlite3

import pytest
import yaml

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.energon.loader import build_loader
from energon_packing.validate.looks.data import look_at_data
from energon_packing.validate.run_source import PLACES


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Layout -> a data set of 12 conversations with images, in one split."""
    folder = tmp_path_factory.mktemp("shards")
    source = make_data(folder / "made", conversations=12, seed=3, defects=False)
    sets = {layout: folder / layout for layout in ("polylithic", "monolithic")}
    for layout, out in sets.items():
        convert(ConvertConfig(sources=(source,), out=out, layout=layout, split={"train": 1.0}, workers=0))
    return sets


@pytest.fixture
def copy(made, tmp_path):
    def of(layout):
        return shutil.copytree(made[layout], tmp_path / "data")

    return of


def loader_fails(path):
    """Whether the loader gives no whole epoch of packs, whatever it raises."""
    config = RunConfig(
        data=DataConfig(path=str(path), workers=0, repeat=False),
        encoder=EncoderConfig(processor=str(processor_path("qwen2_5_vl"))),
        packing=PackingConfig(seq_length=8192, drop_budget=0.0),
    )
    try:
        keys = [key for pack in build_loader(config) for key in pack.keys]
    except Exception:
        return True
    return len(keys) != 12


def wrong(path, split="train"):
    """Id of each look that ended with an error -> its sentences."""
    found: dict[str, str] = {}
    for look in look_at_data(str(path), split, PLACES, {}).looks:
        if look.outcome == "error":
            assert look.fix
            found[look.id] = f"{found.get(look.id, '')} {look.why}"
    return found


def without(*names):
    def damage(folder):
        for name in names:
            place = folder / name
            shutil.rmtree(place) if place.is_dir() else place.unlink()

    return damage


def split(train, exclude=()):
    def damage(folder):
        content = {"split_parts": {"train": list(train)}, "exclude": list(exclude)}
        (folder / ".nv-meta" / "split.yaml").write_text(yaml.safe_dump(content))

    return damage


def garbage(name):
    def damage(folder):
        (folder / name).write_bytes(b"\x00\xff{[")

    return damage


DAMAGES = [
    ("monolithic", without(".nv-meta"), "data-path", "is not a data set"),
    ("monolithic", without(".nv-meta/.info.json"), "data-index", ".info.json"),
    ("monolithic", without(".nv-meta/split.yaml"), "data-index", "lacks split.yaml"),
    ("monolithic", without(".nv-meta/dataset.yaml"), "data-index", "lacks dataset.yaml"),
    ("monolithic", without(".nv-meta/index.sqlite"), "data-index", "index.sqlite"),
    ("monolithic", without("train-000000.tar"), "data-index", "lacks train-000000.tar"),
    ("monolithic", without("train-000000.tar.idx"), "data-index", "lacks train-000000.tar.idx"),
    ("monolithic", garbage(".nv-meta/split.yaml"), "data-index", "split.yaml cannot be read"),
    ("monolithic", garbage(".nv-meta/.info.json"), "data-index", ".info.json cannot be read"),
    ("monolithic", garbage(".nv-meta/index.sqlite"), "data-index", "index.sqlite cannot be read"),
    ("monolithic", split([]), "data-split", "no sample in split 'train'"),
    (
        "monolithic",
        split(["train-000000.tar"], ["train-{000000..000003}.tar"]),
        "data-split",
        "no sample in split 'train'",
    ),
    ("monolithic", split(["train-000000.tar", "train-000009.tar"]), "data-index", "does not count train-000009.tar"),
    ("polylithic", without("text"), "data-path", "text does not exist (named in"),
    ("polylithic", without("text/.nv-meta"), "data-path", "neither dataset.yaml nor .nv-meta"),
    ("polylithic", without("media"), "data-media", "auxiliary data set 'media'"),
    ("polylithic", without("media/.nv-meta/index.sqlite"), "data-media", "cannot be opened"),
    ("polylithic", without("media/media-000000.tar"), "data-media", "lacks media-000000.tar"),
    ("polylithic", garbage("dataset.yaml"), "data-path", "dataset.yaml cannot be read"),
    ("polylithic", without("dataset.yaml"), "data-path", "is not a data set"),
]


@pytest.mark.parametrize(
    ("layout", "damage", "look", "words"), DAMAGES, ids=[f"{layout}-{words}" for layout, _, _, words in DAMAGES]
)
def test_what_stops_or_starves_the_loader_is_an_error(copy, layout, damage, look, words):
    data = copy(layout)
    damage(data)
    found = wrong(data)
    assert words in found[look]
    assert loader_fails(data)


@pytest.mark.parametrize("layout", ["monolithic", "polylithic"])
def test_a_sound_data_set_is_ok_and_the_loader_reads_it(made, layout):
    looks = look_at_data(str(made[layout]), "train", PLACES, {}).looks
    assert [look.outcome for look in looks] == ["ok"] * 4
    assert "12 samples in 1 shard" in [look.why for look in looks]
    assert not loader_fails(made[layout])


def test_missing_media_metadata_are_a_note_where_the_loader_gets_along_without_them(copy):
    data = copy("polylithic")
    with sqlite3.connect(data / "media" / ".nv-meta" / "index.sqlite") as connection:
        connection.execute("DROP TABLE media_metadata")
    looks = look_at_data(str(data), "train", PLACES, {}).looks
    assert [look.outcome for look in looks] == ["ok", "ok", "ok", "note"]
    assert "has no media metadata" in looks[-1].why
    assert "prepare-media" in looks[-1].fix
    assert not loader_fails(data)


def test_a_file_that_is_no_metadataset_is_an_error(tmp_path, made):
    for name, text, words in (
        ("a.yaml", "hello: 1\n", "no mapping 'splits'"),
        ("b.yaml", "splits: {train: {blend: []}}\n", "lists no references"),
        ("c.yaml", "splits: {train: {pth: x}}\n", "has no path (pth)"),
        ("d.yaml", "splits: {train: {path: d.yaml}}\n", "refers to itself"),
        ("h.yaml", "splits: {train: {path: x, aux: [media]}}\n", "'aux' of"),
        ("e.txt", "", "not .yaml"),
        ("g.yaml", f"splits: {{train: {{path: {made['polylithic']}}}}}", "which a metadataset must name itself"),
        ("f.yml", "splits: {train: {path: data}}", "neither a metadataset (.yaml)"),
    ):
        (tmp_path / name).write_text(text)
        assert words in wrong(tmp_path / name)["data-path"]


def test_data_on_another_machine_are_not_looked_at(tmp_path, made):
    looks = look_at_data("msc://bucket/data", "train", PLACES, {}).looks
    assert {look.outcome for look in looks} == {"not looked at"}
    blend = tmp_path / "blend.yaml"
    inner = [{"path": "msc://bucket/data"}, {"path": str(made["polylithic"] / "dataset.yaml")}]
    blend.write_text(yaml.safe_dump({"splits": {"train": {"blend": inner}}}))
    looks = look_at_data(str(blend), "train", PLACES, {}).looks
    assert [(look.id, look.outcome) for look in looks][:2] == [("data-path", "not looked at"), ("data-path", "ok")]
    assert "msc://bucket/data is not on this machine" in looks[0].why


def test_the_size_of_an_evaluation_part_is_looked_at_too(made):
    looks = look_at_data(str(made["polylithic"]), "train", PLACES, {"dataset.validation_split": "val"}).looks
    (look,) = [look for look in looks if look.outcome == "error"]
    assert look.at == "dataset.validation_split: val"
    assert "no split 'val'; it has 'train'" in look.why
