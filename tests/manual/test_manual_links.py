"""Links of the manual lead somewhere, pages made from code are in step, and marks say what is true."""

import ast
import re

import pytest
from manual import DOCS, ROOT, pages
from manual.blocks import read_page
from manual.links import broken_links
from manual.report import counted
from manual.written import WRITE, written

from energon_packing.convert.layouts.layout import LAYOUTS
from energon_packing.executors.work import EXECUTORS
from energon_packing.offline.pack import PACK_FORMATS
from energon_packing.packing.policies import POLICIES
from energon_packing.registry import Registry


def test_every_internal_link_leads_to_a_page_and_a_heading():
    followed, broken = broken_links(pages())
    assert not broken, "\n".join(broken)
    assert followed > 100


@pytest.mark.parametrize("path", list(written()), ids=lambda path: path.name)
def test_a_page_made_from_code_is_in_step_with_it(path):
    assert path.read_text(encoding="utf-8") == written()[path](), f"run: {WRITE}"


@pytest.mark.parametrize(
    ("registry", "page"),
    [(LAYOUTS, "convert.md"), (POLICIES, "packing.md"), (EXECUTORS, "offline.md"), (PACK_FORMATS, "offline.md")],
    ids=lambda value: getattr(value, "what", value),
)
def test_everything_of_the_package_that_a_setting_may_name_is_told_of_on_its_page(registry, page):
    told = (DOCS / page).read_text(encoding="utf-8")
    of_the_package = Registry(registry.what, folder=registry.folder, declared=registry.declared, setting="")
    assert [name for name in of_the_package.names() if not re.search(rf"[` ]{name}`|--\w+ {name}\b", told)] == []


def test_every_name_of_ours_that_a_page_imports_is_public_and_listed_with_its_signature():
    listed = set()
    for section in (DOCS / "api.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        package = section.partition("\n")[0]
        for name, module in re.findall(r"^### (\w+)\n\nIn `([\w.]+)`\.$", section, re.MULTILINE):
            listed |= {(package, name), (module, name)}
    imported = {
        (str(node.module), alias.name): block.place
        for path in pages()
        for block in read_page(path).blocks
        if block.language == "python"
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("energon_packing")
        for alias in node.names
    }
    assert len(imported) > 40
    assert {name: at for name, at in imported.items() if name not in listed | {("energon_packing", "thd")}} == {}


def test_blocks_are_run_here_or_by_a_test_that_is_there_or_say_why_not():
    counts = counted([read_page(path) for path in pages()], [])
    assert counts["for the runner"] >= 25
    assert all(entry["why"] for entry in counts["not run"])


def quoted_messages() -> list[str]:
    """What the first column of the tables by symptom quotes, in pieces without names and numbers."""
    tables = (DOCS / "see.md").read_text().partition("\n## By symptom\n")[2]
    rows = [line for line in tables.splitlines() if line.startswith("| ")]
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
