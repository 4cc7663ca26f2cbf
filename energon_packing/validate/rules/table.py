"""The table of rules in ``docs/validate.md``, generated from the rules.

    python -m energon_packing.validate.rules.table docs/validate.md

writes it into the page, between the lines that mark it; a test compares the two.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from energon_packing.errors import PackingError
from energon_packing.validate.rules.registry import RULES

BEGIN, END = "<!-- rules: begin -->", "<!-- rules: end -->"


def markdown_rows() -> Iterator[str]:
    """The table, line by line: one row per rule, in the order of `RULES`."""
    yield "| rule | severity | what holds | a provider | versions | place |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for rule in RULES:
        versions = f"{_text(rule.since)} on" if rule.since > (0, 6) else "all"
        if rule.before is not None:
            versions = f"before {_text(rule.before)}"
        provider = "escapes" if rule.provider_escapes else ""
        yield f"| `{rule.id}` | {rule.severity} | {rule.checks} | {provider} | {versions} | {rule.place} |"


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def with_table(page: str) -> str:
    """The page with the current table.

    Raises:
        PackingError: the page does not mark the place of the table.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise PackingError(f"The page has no lines {BEGIN} and {END}.")
    return "\n".join([before + BEGIN, "", *markdown_rows(), "", END + after])


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_table(file.read_text(encoding="utf-8")), encoding="utf-8")
