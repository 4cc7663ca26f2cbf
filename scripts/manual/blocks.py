"""Blocks of a page: what a reader would paste, in order, and the marks that say how each is run.

A mark is an HTML comment in the page's source:

``<!-- given: chats.jsonl run.yaml -->``   what the page's reader has already (names of `manual.given`); once per page
``<!-- run by: tests/... -->``             the next block is run by this test, because something must be replaced for it
``<!-- not run: REASON -->``               the next block is not run
"""

import re
from dataclasses import dataclass
from pathlib import Path

from manual import ROOT

LANGUAGES = ("bash", "python")
"""Languages that are run."""
SHOWN = ("yaml", "json", "text", "jinja", "toml", "dockerfile")
"""Languages that are only shown."""

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```[ ]*$", re.M | re.S)
MARK = re.compile(r"(?<!`)<!-- (?P<kind>given|run by|not run): (?P<text>.*?) -->", re.S)


class PageError(ValueError):
    """A page whose blocks cannot be run as it says; the message names file and line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One fenced block that a reader may paste.

    Attributes:
        page: its file.
        line: number of its first line of code, from 1.
        language: one of `LANGUAGES`.
        text: its code.
        run_by: the test that runs it, relative to the checkout; empty for the others.
        not_run: why nobody runs it; empty for the others.
    """

    page: Path
    line: int
    language: str
    text: str
    run_by: str = ""
    not_run: str = ""

    @property
    def runs_here(self) -> bool:
        """Whether the block runner runs it."""
        return not self.run_by and not self.not_run

    @property
    def place(self) -> str:
        """File and line, as errors name it."""
        return f"{_name(self.page)}:{self.line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """The blocks of one file, and what its reader begins with."""

    path: Path
    given: tuple[str, ...]
    blocks: tuple[Block, ...]


def read_page(path: Path) -> Page:
    """Reads a page.

    Raises:
        PageError: a fence names no language, a mark stands nowhere, or a test that a mark names is not there or does
            not name the page.
    """
    source = path.read_text(encoding="utf-8")
    outside = list(source)
    blocks = []
    used: set[int] = set()
    for fence in FENCE.finditer(source):
        outside[fence.start() : fence.end()] = " " * (fence.end() - fence.start())
        line = source.count("\n", 0, fence.start("text")) + 1
        language = fence["language"].strip()
        if language in SHOWN:
            continue
        if language not in LANGUAGES:
            raise PageError(
                f"{_name(path)}:{line - 1} begins a block of language {language!r}; use one of "
                f"{', '.join(LANGUAGES)} for what a reader may paste, {', '.join(SHOWN)} for the rest."
            )
        mark = _mark_above(source, fence.start())
        marked = {"run_by": "", "not_run": ""}
        if mark is not None:
            used.add(mark.start())
            marked[mark["kind"].replace(" ", "_")] = " ".join(mark["text"].split())
        block = Block(page=path, line=line, language=language, text=_without(fence["indent"], fence["text"]), **marked)
        _check_test(block)
        blocks.append(block)
    given: tuple[str, ...] = ()
    for mark in MARK.finditer("".join(outside)):
        if mark["kind"] == "given":
            given = tuple(mark["text"].split())
        elif mark.start() not in used:
            line = source.count("\n", 0, mark.start()) + 1
            raise PageError(f"{_name(path)}:{line}: the mark '{mark['kind']}' stands above no block.")
    return Page(path=path, given=given, blocks=tuple(blocks))


def _mark_above(source: str, start: int) -> re.Match[str] | None:
    """The mark that ends right above a position, with at most an empty line between."""
    for mark in MARK.finditer(source, max(0, start - 600), start):
        if (
            mark["kind"] != "given"
            and not source[mark.end() : start].strip()
            and source.count("\n", mark.end(), start) < 3
        ):
            return mark
    return None


def _check_test(block: Block) -> None:
    if not block.run_by:
        return
    test = ROOT / block.run_by
    if not test.is_file() or block.page.name not in test.read_text(encoding="utf-8"):
        raise PageError(f"{block.place}: {block.run_by} is not there, or does not name {block.page.name}.")


def _without(indent: str, text: str) -> str:
    return "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
