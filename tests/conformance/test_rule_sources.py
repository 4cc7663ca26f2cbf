"""Every rule that nobody raises before GPUs are taken names a line of source, and the line is there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from bridge_sources import BridgeSource, sources

from energon_packing.validate.rules.registry import RULES
from energon_packing.validate.rules.rule import Rule
from energon_packing.validate.run_view import RunView, installed_version

NOT_RAISED = [rule for rule in RULES if rule.origin != "bridge"]
HERE = RunView.of(bridge_version=installed_version("megatron-bridge")).bridge_release


def folder_of(package: str) -> Path | None:
    """Where the folder of a package stands, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def has_line(file: Path, says: str) -> bool:
    return file.is_file() and any(says in line for line in file.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("rule", NOT_RAISED, ids=lambda rule: rule.id)
def test_a_rule_of_ours_names_lines_that_the_installed_programs_have(rule: Rule) -> None:
    assert rule.sources
    spoken = [line for line in rule.sources if line.speaks_of(HERE)]
    assert spoken or not rule.speaks_of(HERE)
    missing = set[str]()
    for line in rule.sources:
        parts = line.file.split("/")
        depth = 2 if parts[0] == "megatron" else 1
        folder = folder_of(".".join(parts[:depth]))
        if folder is None:
            missing.add(".".join(parts[:depth]))
            continue
        file = folder.joinpath(*parts[depth:])
        assert not line.speaks_of(HERE) or has_line(file, line.says), line
    if missing and len(missing) == len(rule.sources):
        pytest.skip(f"not installed: {', '.join(sorted(missing))}")


@pytest.mark.parametrize("source", sources())
def test_lines_of_bridge_are_there_in_the_versions_that_they_speak_of(source: BridgeSource) -> None:
    release = RunView.of(bridge_version=source.version).bridge_release
    lines = [line for rule in RULES for line in rule.sources if line.file.startswith("megatron/bridge/")]
    assert len(lines) >= 15
    for line in lines:
        file = source.folder / line.file.removeprefix("megatron/bridge/")
        assert not line.speaks_of(release) or has_line(file, line.says), line


@pytest.mark.parametrize("source", sources())
def test_what_validate_says_is_in_the_source_of_the_versions_that_have_the_rule(source: BridgeSource) -> None:
    release = RunView.of(bridge_version=source.version).bridge_release
    files = ("training/config.py", "data/builders/energon.py", "utils/cuda_graph.py", "data/packing/config.py")
    text = "".join(" ".join(source.text(file).replace('"\n', "").split()) for file in files)
    for rule in RULES:
        if rule.since > (0, 6):
            assert all((part in text) == rule.speaks_of(release) for part in rule.bridge_says), rule.id
