"""Links of the manual lead somewhere, pages made from code are in step, and marks say what is true."""

from __future__ import annotations

import ast
import re

import pytest
from manual import DOCS, ROOT, pages
from manual.blocks import PageError, read_page
from manual.links import broken_links
from manual.report import counted
from manual.written import WRITE, written


def test_every_internal_link_leads_to_a_page_and_a_heading():
    followed, broken = broken_links(pages())
    assert not broken, "\n".join(broken)
    assert followed > 100


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ("[a](nowhere.md)", "no such file"),
        ("[a](b.md#not-there)", "no such heading"),
        ("[a](../outside.md)", "leads out of docs"),
        ("`[a](nowhere.md)`", ""),
        ("```text\n[a](nowhere.md)\n```", ""),
        ("[`a` b](b.md#a-heading-1-of-2)", ""),
    ],
)
def test_a_broken_link_is_named_with_its_place(text, trouble, tmp_path, monkeypatch):
    monkeypatch.setattr("manual.links.ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "outside.md").write_text("# Outside\n")
    (tmp_path / "docs" / "b.md").write_text("# B\n\n## A `heading`: 1 of 2\n")
    page = tmp_path / "docs" / "a.md"
    page.write_text(f"# A\n\n{text}\n")
    _, broken = broken_links([page])
    assert [bool(trouble)] == [bool(broken)]
    assert all(line.startswith("docs/a.md:3: ") and trouble in line for line in broken)


@pytest.mark.parametrize("path", list(written()), ids=lambda path: path.name)
def test_a_page_made_from_code_is_in_step_with_it(path):
    assert path.read_text(encoding="utf-8") == written()[path](), f"run: {WRITE}"


def test_blocks_are_run_here_or_by_a_test_that_is_there_or_say_why_not():
    counts = counted([read_page(path) for path in pages()], [])
    assert counts["for the runner"] >= 25
    assert all(entry["why"] for entry in counts["not run"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```\nls\n```", "of language ''"),
        ("```sh\nls\n```", "of language 'sh'"),
        ("<!-- not run: because -->\n\ntext\n", "stands above no block"),
        ("<!-- run by: tests/nowhere.py -->\n```bash\nls\n```", "is not there"),
        ("<!-- run by: tests/conftest.py -->\n```bash\nls\n```", "does not name"),
    ],
)
def test_a_block_that_nobody_would_run_is_an_error_of_the_page(text, message, tmp_path):
    page = tmp_path / "strange-page.md"
    page.write_text(f"# A\n\n{text}\n")
    with pytest.raises(PageError, match=message):
        read_page(page)


def quoted_messages() -> list[str]:
    """What the first column of the tables by symptom quotes, in pieces without names and numbers."""
    rows = [line for line in (DOCS / "troubleshooting.md").read_text().splitlines() if line.startswith("| ")]
    quoted = [code for row in rows for code in re.findall(r"`([^`]*)`", row.split(" | ")[0])]
    return [piece.strip() for code in quoted for piece in code.split("...") if piece.strip()]


def test_every_message_that_the_page_by_symptom_quotes_is_in_the_code():
    files = [*(ROOT / "energon_packing").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    strings = [
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    whole = "\n".join(strings)
    named = {"validate", "packing.max_*_per_pack", "data.repeat: false"}
    lost = [message for message in quoted_messages() if message not in whole and message not in named]
    assert not lost
    assert len(quoted_messages()) > 35
