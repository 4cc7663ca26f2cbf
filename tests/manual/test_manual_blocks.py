"""Every shell and Python block of README and the manual runs as pasted, from a clean directory."""

import pytest
from forking_python import quick_python
from manual import pages
from manual.blocks import read_page
from manual.runner import Runner

PAGES = {path.stem: read_page(path) for path in pages()}
RUN = [name for name, page in PAGES.items() if any(block.runs_here for block in page.blocks)]


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return Runner(tmp_path_factory.mktemp("manual") / "run", python=quick_python())


@pytest.mark.full
@pytest.mark.parametrize("name", RUN)
def test_every_block_of_the_page_runs_as_pasted(name, runner):
    outcome = runner.run(PAGES[name])
    assert not outcome.error, outcome.error
    assert outcome.ran == sum(block.runs_here for block in PAGES[name].blocks)
