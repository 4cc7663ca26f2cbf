"""One idiom for all that can be added: a file in a folder, an entry point, or a call."""

import importlib
import sys

import pytest

from energon_packing.errors import ConfigError
from energon_packing.registry import Registry, _entry_points


@pytest.fixture
def registry(tmp_path, monkeypatch):
    folder = tmp_path / "things_of_test"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "square.py").write_text("SIDES = {'square': 4}\n")
    (folder / "helpers.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield Registry(
        "thing", folder="things_of_test", declared=lambda module: getattr(module, "SIDES", {}), setting="a.thing"
    )
    for name in [name for name in sys.modules if name.startswith("things_of_test")]:
        del sys.modules[name]


def test_a_file_in_the_folder_is_all_that_a_new_entry_takes(registry, tmp_path):
    (tmp_path / "things_of_test" / "triangle.py").write_text("SIDES = {'triangle': 3}\n")
    assert registry.names() == ["square", "triangle"]
    assert registry.find("triangle") == 3


def test_a_package_outside_declares_an_entry_point_or_calls(registry, tmp_path, monkeypatch):
    info = tmp_path / "others-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[things_of_test]\nstar = others:STAR\nlost = others:LOST\n")
    (tmp_path / "others.py").write_text("STAR = 10\n")
    importlib.invalidate_caches()
    monkeypatch.setattr("energon_packing.registry._entry_points", _entry_points.__wrapped__)  # read afresh
    registry.add("circle", 0)
    assert registry.names() == ["square", "circle", "star", "lost"]
    assert registry.find("circle") == 0
    assert registry.find("star") == 10
    with pytest.raises(ConfigError, match=r"'lost' \(others:LOST\) cannot be imported"):
        registry.find("lost")


def test_unknown_and_taken_names_are_refused_by_name(registry, tmp_path):
    with pytest.raises(ConfigError, match=r"a\.thing is 'sqare'.*known: square\. Did you mean 'square'"):
        registry.find("sqare")
    with pytest.raises(ConfigError, match="'square' exists already"):
        registry.add("square", 5)
    (tmp_path / "things_of_test" / "other.py").write_text("SIDES = {'square': 5}\n")
    with pytest.raises(ConfigError, match="Two files"):
        Registry(
            "thing", folder="things_of_test", declared=lambda module: getattr(module, "SIDES", {}), setting="a"
        ).names()
