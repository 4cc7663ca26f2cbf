"""Counts of pages and blocks: run, run by a test, and not run, with the reasons."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from manual.blocks import Page
from manual.runner import Outcome


def counted(pages: Sequence[Page], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Plain counts over pages and blocks."""
    blocks = [block for page in pages for block in page.blocks]
    return {
        "pages": len(pages),
        "pages with blocks": sum(bool(page.blocks) for page in pages),
        "blocks": len(blocks),
        "for the runner": sum(block.runs_here for block in blocks),
        "ran": sum(outcome.ran for outcome in outcomes),
        "failed": sum(bool(outcome.error) for outcome in outcomes),
        "by a test": dict(Counter(block.run_by for block in blocks if block.run_by)),
        "not run": [{"place": block.place, "why": block.not_run} for block in blocks if block.not_run],
    }


def told(counts: dict[str, Any]) -> str:
    """The counts for a reader."""
    by_test = sum(counts["by a test"].values())
    lines = [
        f"{counts['pages']} pages, {counts['pages with blocks']} with {counts['blocks']} shell and Python blocks: "
        f"{counts['for the runner']} for this runner ({counts['ran']} ran, {counts['failed']} failed), "
        f"{by_test} run by tests of their own, {len(counts['not run'])} not run",
        *(f"  {count} by {test}" for test, count in sorted(counts["by a test"].items())),
        *(f"  not run: {entry['place']}: {entry['why']}" for entry in counts["not run"]),
    ]
    return "\n".join(lines)
