"""A rule is one definition: what it says of itself agrees with what it does, and nothing else has to be written."""

from __future__ import annotations

import dataclasses
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from energon_packing.errors import ConfigError, PackingError
from energon_packing.validate import rules
from energon_packing.validate.rules import rule as registry
from energon_packing.validate.rules.rule import LAST, all_rules, judge
from energon_packing.validate.run_view import RunView

ROOT = Path(__file__).resolve().parents[2]
BRIDGES = [rule for rule in all_rules() if rule.origin == "bridge"]


def test_a_file_in_the_folder_is_all_that_a_rule_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = """from energon_packing.validate.rules.rule import Finding, SourceLine, rule
@rule(id="ours/even", checks="", place="", sources=(SourceLine(file="", says=""),), applies=lambda view: view.packed)
def _even(view):
    return Finding(why="odd", fix="make it even")
"""
    (tmp_path / "even.py").write_text(own)
    monkeypatch.setattr(rules, "__path__", [*rules.__path__, str(tmp_path)])
    monkeypatch.delitem(vars(registry._REGISTRY), "_entries")
    registry.all_rules.cache_clear()
    try:
        last = judge(RunView(enable_offline_packing=True))[-1]
        assert (last.rule.id, last.outcome) == ("ours/even", "error")
    finally:
        monkeypatch.undo()
        registry.all_rules.cache_clear()
        sys.modules.pop("energon_packing.validate.rules.even", None)


def test_all_rules_are_there_whatever_module_is_imported_first() -> None:
    """A module of rules that is imported first was taken for one without rules."""
    program = (
        "import energon_packing.validate.rules.packing\n"
        "from energon_packing.validate.rules.rule import all_rules\n"
        "print(len(all_rules()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(all_rules())


def test_a_rule_of_another_package_is_judged_last_and_its_id_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = dataclasses.replace(all_rules()[-1], id="ours/theirs", order=LAST)
    monkeypatch.setattr(registry._REGISTRY, "_entries", dict(registry._REGISTRY._entries))
    registry.register_rule(theirs)
    try:
        assert judge(RunView())[-1].rule is theirs
        with pytest.raises(ConfigError, match="ours/theirs"):
            registry.register_rule(theirs)
    finally:
        monkeypatch.undo()
        registry.all_rules.cache_clear()


def test_no_rule_is_named_elsewhere_in_the_package_by_an_id_that_does_not_exist() -> None:
    known = {rule.id for rule in all_rules()}
    named = {}
    for file in [*(ROOT / "energon_packing").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        for found in re.findall(r"[`\"(](?:rule )?((?:bridge|core|ours)/[a-z0-9-]+)[`\")]", file.read_text()):
            named[found] = file.name
    assert {name: file for name, file in named.items() if name not in known and not name.endswith("-")} == {}
    assert known <= set(named)


def test_bridges_rules_come_first_in_bridges_own_order() -> None:
    assert [rule.order for rule in all_rules()] == sorted({rule.order for rule in all_rules()})
    assert all((rule.order < 1000) == (rule.origin == "bridge") for rule in all_rules())
    sources = "".join(file.read_text() for file in (ROOT / "energon_packing/validate/rules").glob("*.py"))
    assert len(re.findall('^    id="', sources, re.MULTILINE)) == len(all_rules()), "an id is used twice"
    assert all(re.fullmatch("(bridge|core|ours)/[a-z0-9-]+", rule.id) for rule in all_rules())
    with pytest.raises(PackingError, match="no source line"):
        dataclasses.replace(BRIDGES[0], id="ours/length")


def provider_runs() -> list[RunView]:
    """Runs of another ``DatasetProvider``, in all layouts, batches and packing modes that a rule asks for."""
    draw = random.Random(5)
    return [
        RunView(
            dataset_kind="provider",
            context_parallel=draw.choice([1, 2]),
            pipeline_parallel=draw.choice([1, 2]),
            expert_parallel=draw.choice([1, 2]),
            eval_context_parallel=draw.choice([None, 2]),
            dataset_micro_batch_size=draw.choice([None, 1]),
            enable_offline_packing=draw.random() < 0.5,
            has_offline_packing_specs=draw.random() < 0.5,
            enable_in_batch_packing=draw.random() < 0.3,
            cuda_graph_impl=draw.choice(["none", "local"]),
            packing_buffer_size=draw.choice([None, 8]),
            num_epochs=draw.choice([None, 2]),
            dataloader_type=draw.choice([None, "batch"]),
            task_encoder=draw.choice([None, "QwenVLEnergonTaskEncoderConfig"]),
            bridge_version="0.7.0",
        )
        for _ in range(400)
    ]


def test_a_rule_says_of_itself_whether_a_provider_escapes_it() -> None:
    runs = provider_runs()
    for rule in BRIDGES:
        assert any(rule.applies(view) for view in runs) != rule.provider_escapes, rule.id
        assert any(rule.concerns(view) for view in runs) != rule.provider_escapes, rule.id
