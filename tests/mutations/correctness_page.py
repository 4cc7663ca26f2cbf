"""Writes the tables of docs/correctness.md from the tables that run: traps, bugs put back, published chat templates.

    python tests/mutations/correctness_page.py

Run it after a change to a mutation table or to what a template shows; tests hold the page to the tables.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "correctness.md"
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "tests"), str(ROOT / "tests" / "chat")]


def is_numbered(line: str) -> bool:
    """Whether the line is a row of one of the two tables whose first column is a trap."""
    return line.startswith("| ") and line.split("|")[1].strip().isdigit()


def with_block(lines: list[str], start: int, belongs: Callable[[str], bool], rows: Sequence[str]) -> list[str]:
    """`lines` with the rows from `start` on, as long as ``belongs(line)``, replaced by `rows`."""
    end = start
    while end < len(lines) and belongs(lines[end]):
        end += 1
    return [*lines[:start], *rows, *lines[end:]]


def page(text: str) -> str:
    """The page `text` with its three tables made anew."""
    from published_templates import table
    from test_mutations import ALL, ALL_TRAPS, table_row

    lines = text.split("\n")
    first = next(at for at, line in enumerate(lines) if is_numbered(line))
    lines = with_block(lines, first, is_numbered, [f"| {number} | {trap} |" for number, trap in ALL_TRAPS.items()])
    second = next(at for at in range(first + len(ALL_TRAPS), len(lines)) if is_numbered(lines[at]))
    lines = with_block(lines, second, is_numbered, [table_row(mutation) for mutation in ALL])
    templates = lines.index("## Published chat templates")
    start = next(at for at in range(templates, len(lines)) if lines[at].startswith("| "))
    lines = with_block(lines, start, lambda line: line.startswith("| "), table([]).splitlines())
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
