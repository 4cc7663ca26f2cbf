"""Builds the manual, follows its links, and runs its blocks, for ``scripts/manual.py``. Not part of the package."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def pages() -> list[Path]:
    """README, CONTRIBUTING and every page of ``docs``, in that order."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
