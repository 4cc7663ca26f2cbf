"""A rule is one definition: what it says of itself agrees with what it does, and nothing else has to be written."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path

import pytest

from energon_packing.errors import PackingError
from energon_packing.validate import rules
from energon_packing.validate.rules import registry
from energon_packing.validate.rules.registry import RULES, in_order
from energon_packing.validate.rules.rule import Rule
from energon_packing.validate.rules.table import with_table
from energon_packing.validate.run_view import RunView

ROOT = Path(__file__).resolve().parents[2]
BRIDGES = [rule for rule in RULES if rule.origin == "bridge"]


def test_the_table_in_the_documentation_is_the_one_that_the_rules_give() -> None:
    page = (ROOT / "docs" / "validate.md").read_text(encoding="utf-8")
    assert with_table(page) == page, "run python -m energon_packing.validate.rules.table docs/validate.md"


def test_every_file_that_defines_rules_is_read() -> None:
    folder = Path(rules.__file__).parent
    defining = {file.stem for file in folder.glob("*.py") if re.search(r"^@_?rule\($", file.read_text(), re.M)}
    assert {topic.__name__.rpartition(".")[2] for topic in registry.TOPICS} == defining
    written = sum(len(re.findall(r"^    id=\"", file.read_text(), re.M)) for file in folder.glob("*.py"))
    assert len(RULES) == written


def test_no_rule_is_named_elsewhere_in_the_package_by_an_id_that_does_not_exist() -> None:
    known = {rule.id for rule in RULES}
    named = {}
    for file in [*(ROOT / "energon_packing").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        for found in re.findall(r"[`\"(](?:rule )?((?:bridge|core|ours)/[a-z0-9-]+)[`\")]", file.read_text()):
            named[found] = file.name
    assert {name: file for name, file in named.items() if name not in known and not name.endswith("-")} == {}
    assert known <= set(named)


def test_bridges_rules_come_first_in_bridges_own_order() -> None:
    orders = [rule.order for rule in RULES]
    placed = [order for order in orders if order is not None]
    assert orders == placed + [None] * (len(RULES) - len(placed))
    assert placed == sorted(placed)
    assert in_order(reversed(RULES))[: len(placed)] == RULES[: len(placed)]


@pytest.mark.parametrize("changes", [{"id": "bridge/another"}, {"order": 15}])
def test_two_rules_with_one_order_or_one_id_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(PackingError, match=BRIDGES[0].id):
        in_order([*RULES, dataclasses.replace(BRIDGES[0], **changes)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"id": "bridge-07-length"}, "not a rule id"),
        ({"id": "theirs/length"}, "not a rule id"),
        ({"order": None}, "have an order"),
        ({"id": "ours/length"}, "have an order"),
        ({"id": "ours/length", "order": None, "provider_escapes": True}, "only a rule of Bridge's"),
        ({"id": "ours/length", "order": None}, "no source line"),
    ],
)
def test_a_rule_that_contradicts_itself_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(PackingError, match=says):
        dataclasses.replace(BRIDGES[0], **changes)  # type: ignore[arg-type]


def provider_runs() -> list[RunView]:
    """Runs of another ``DatasetProvider``, in all layouts, batches and packing modes that a rule asks for."""
    draw = random.Random(5)
    return [
        RunView.of(
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


@pytest.mark.parametrize("rule", BRIDGES, ids=lambda rule: rule.id)
def test_a_rule_says_of_itself_whether_a_provider_escapes_it(rule: Rule) -> None:
    runs = provider_runs()
    assert any(rule.applies(view) for view in runs) != rule.provider_escapes
    assert any(rule.concerns(view) for view in runs) != rule.provider_escapes
