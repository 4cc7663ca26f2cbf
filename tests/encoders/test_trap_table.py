"""The table of traps in docs/encoders.md names tests that are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "encoders.md"
TRAPS = {2, 3, 16, *range(19, 29), 38}


def rows() -> list[tuple[int, str, str]]:
    """Trap, file and test of every row."""
    pattern = re.compile(r"\| (\d+) \| [^|]+ \| `(test_\w+\.py)`: `(test_\w+)` \|")
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    numbered = [line for line in lines if re.match(r"\| \d", line)]
    found = [pattern.fullmatch(line) for line in numbered]
    assert all(found), [line for line, match in zip(numbered, found, strict=True) if match is None]
    return [(int(match[1]), match[2], match[3]) for match in found if match is not None]


@cache
def functions_of(file: str) -> frozenset[str]:
    (path,) = ROOT.glob(f"tests/**/{file}")
    return frozenset(
        node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)
    )


def test_every_trap_of_text_and_media_has_a_test_that_exists():
    if not PAGE.exists():
        pytest.skip("the documentation is not installed")
    table = rows()
    assert {trap for trap, _, _ in table} == TRAPS
    assert len(set(table)) == len(table)
    assert [(file, test) for _, file, test in table if test not in functions_of(file)] == []
