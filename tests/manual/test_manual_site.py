"""The manual becomes a site, strictly, whose pages load nothing from other hosts."""

import pytest
from manual import pages
from manual.site import build_site


@pytest.mark.full
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    count, problems = build_site(tmp_path / "site")
    assert not problems, "\n".join(problems)
    # Every page of docs, and MkDocs' page for addresses that are not there.
    assert count == sum(path.parent.name == "docs" for path in pages()) + 1
    reference = (tmp_path / "site" / "api.html").read_text()
    assert "Tokens of a row, alignment padding included" in reference, "docstrings of fields are in the reference"
    assert (tmp_path / "site" / "search" / "search_index.json").is_file()
