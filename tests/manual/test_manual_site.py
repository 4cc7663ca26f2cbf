"""The manual becomes a site, strictly, whose pages load nothing from other hosts."""

from __future__ import annotations

import pytest
from manual import pages
from manual.site import build_site, loaded


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


@pytest.mark.parametrize(
    ("page", "addresses"),
    [
        ('<script src="https://a.example/x.js"></script>', ["https://a.example/x.js"]),
        ("<img alt=x src='//a.example/x.png'>", ["//a.example/x.png"]),
        ('<link rel="stylesheet" href="https://a.example/x.css">', ["https://a.example/x.css"]),
        ('<style>@import "https://a.example/y.css"</style>', ["https://a.example/y.css"]),
        ("<style>b {background: url(https://a.example/z.png)}</style>", ["https://a.example/z.png"]),
        ('<a href="https://a.example">out</a> <img src="images/x.png">', []),
        ('<link rel="canonical" href="https://a.example/"><script src="x.js"></script>', []),
    ],
)
def test_an_address_that_a_browser_would_ask_for_is_found(page, addresses):
    assert loaded(f"<html>{page}</html>") == addresses
