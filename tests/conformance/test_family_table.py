"""Every line of the table of families holds in the Bridge that it speaks of, and the page shows the table."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridge_sources import BridgeSource, sources

from energon_packing.validate.family_table import FAMILY_TABLE, FamilyLine, line_of, markdown_rows
from energon_packing.validate.rules.registry import violations
from energon_packing.validate.run_view import RunView

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"


def release_of(source: BridgeSource) -> tuple[int, int]:
    major, minor, *_ = source.version.split(".")
    return int(major), int(minor)


@pytest.mark.parametrize("source", sources())
@pytest.mark.parametrize("line", FAMILY_TABLE, ids=lambda line: f"{line.prefix}-{line.since[0]}.{line.since[1]}")
def test_a_line_holds_in_the_versions_that_it_speaks_of_and_in_no_other(source: BridgeSource, line: FamilyLine) -> None:
    text = source.text(line.source)
    fits = all(part in text for part in line.holds) and not any(part in text for part in line.lacks)
    assert fits == (line_of(line.prefix, release_of(source)) is line)


@pytest.mark.parametrize("source", sources())
def test_every_family_of_the_table_has_a_provider_by_whose_name_a_run_finds_it(source: BridgeSource) -> None:
    text = " ".join(path.read_text(encoding="utf-8") for path in (source.folder / "models").rglob("*.py"))
    classes = {word.split("(")[0].rstrip(":").lower() for word in text.split() if "Provider" in word}
    for line in FAMILY_TABLE:
        assert any(name.startswith(line.prefix) and "provider" in name for name in classes), line.name


@pytest.mark.parametrize("line", FAMILY_TABLE, ids=lambda line: f"{line.prefix}-{line.since[0]}.{line.since[1]}")
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("in_batch", [False, True])
def test_a_run_is_refused_for_its_family_exactly_where_the_table_says_no(
    line: FamilyLine, cp: int, in_batch: bool
) -> None:
    view = RunView.of(
        model=line.prefix,
        bridge_version=f"{line.since[0]}.{line.since[1]}.0",
        context_parallel=cp,
        world_size=cp,
        enable_offline_packing=not in_batch,
        has_offline_packing_specs=not in_batch,
        enable_in_batch_packing=in_batch,
        micro_batch_size=1 + in_batch,
        global_batch_size=2,
        eval_global_batch_size=2,
    )
    found = {judgement.rule.id for judgement in violations(view)}
    expected = set[str]()
    if not line.packed or (in_batch and not line.in_batch):
        expected = {"ours/family-takes-packs"}
    elif cp > 1 and not line.context_parallel:
        expected = {"ours/family-context-parallel"}
    assert found == expected


def test_the_page_shows_the_table_that_the_rules_read() -> None:
    if not PAGE.exists():
        pytest.skip("the documentation is not installed")
    page = PAGE.read_text(encoding="utf-8")
    _, _, rest = page.partition("<!-- made from energon_packing/validate/family_table.py -->\n")
    shown, _, _ = rest.partition("<!-- end -->")
    assert shown.strip().splitlines() == list(markdown_rows())


def test_a_family_that_is_not_in_the_table_is_not_judged() -> None:
    assert line_of("nosuchmodel", (0, 6)) is None
    assert line_of("glm45air", (0, 6)) is None  # not GLM-4.5V
