"""Every shell and Python block of README and the manual runs as pasted, from a clean directory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from forking_python import quick_python
from manual import pages
from manual.blocks import read_page
from manual.runner import Outcome, Runner

PAGES = {path.stem: read_page(path) for path in pages()}
RUN = [name for name, page in PAGES.items() if any(block.runs_here for block in page.blocks)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Callable[[str], Outcome]:
    """Runs a page by name, once."""
    runner = Runner(tmp_path_factory.mktemp("manual") / "run", python=quick_python())
    outcomes: dict[str, Outcome] = {}

    def run(name: str) -> Outcome:
        if name not in outcomes:
            outcomes[name] = runner.run(PAGES[name])
        return outcomes[name]

    return run


@pytest.mark.full
@pytest.mark.parametrize("name", RUN)
def test_every_block_of_the_page_runs_as_pasted(name, ran):
    outcome = ran(name)
    assert not outcome.error, outcome.error
    assert outcome.ran == sum(block.runs_here for block in PAGES[name].blocks)


@pytest.mark.full
def test_the_page_on_plain_energon_fills_rows_and_blends_both_data_sets(ran):
    printed = ran("energon").printed
    assert printed.count("% full") == 3
    (blend,) = [line for line in printed.splitlines() if line.startswith("blend of")]
    assert {"/data/" in blend, "/data2/" in blend} == {True}


@pytest.mark.full
def test_the_plan_and_the_packed_directory_of_the_page_on_plans_hold_the_same_packs(ran, monkeypatch):
    from energon_packing.config import load_config
    from energon_packing.offline.open_loader import open_loader
    from energon_packing.offline.plan import Plan

    outcome = ran("offline")
    assert not outcome.error, outcome.error
    monkeypatch.chdir(outcome.folder)
    config = load_config("run.yaml", ("data.path=plan.parquet", "data.repeat=false", "data.workers=0"))
    packs = list(open_loader(config))
    assert len(packs) == len(Plan.open("plan.parquet"))
    assert len({key for pack in packs for key in pack.keys}) == sum(len(pack.keys) for pack in packs) > 20
    stored = open_loader(load_config("run.yaml", ("data.path=packed", "data.repeat=false", "data.workers=0")))
    assert [pack.keys for pack in stored] == [pack.keys for pack in packs]


def test_a_block_that_fails_is_named_with_its_line_and_ends_its_page(tmp_path, monkeypatch):
    page = tmp_path / "strange.md"
    page.write_text(
        "# A\n\n```python\nx = 2\n```\n\n```python\n\nassert x == 3, 'not three'\n```\n\n```bash\nls\n```\n"
    )
    outcome = Runner(tmp_path / "run", python=quick_python()).run(read_page(page))
    assert outcome.ran == 1
    assert outcome.error.startswith("strange.md:8: AssertionError: not three")
    assert 'strange.md", line 9' in outcome.error
