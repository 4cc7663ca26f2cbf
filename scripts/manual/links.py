"""Follows the links of pages inside the checkout: to files, and to headings as GitHub and the site name them."""

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from manual import ROOT
from manual.blocks import FENCE

LINK = re.compile(r"(?<!\\)\[(?:[^\[\]]|\[[^\]]*\])*\]\((?P<target>[^()\s]+)\)")
HEADING = re.compile(r"^(#{1,6}) (.+?)\s*$", re.M)
CODE = re.compile(r"`+[^`\n]*`+")


def broken_links(pages: Iterable[Path]) -> tuple[int, list[str]]:
    """How many links stay in the checkout, and a line about each that leads nowhere."""
    followed, broken = 0, []
    for page in pages:
        text = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), page.read_text(encoding="utf-8"))
        text = CODE.sub(lambda code: " " * len(code[0]), text)
        for link in LINK.finditer(text):
            target = link["target"]
            if re.match(r"[a-z]+:", target):
                continue
            followed += 1
            if trouble := _trouble(page, target):
                line = text.count("\n", 0, link.start()) + 1
                broken.append(f"{page.relative_to(ROOT)}:{line}: {target}: {trouble}")
    return followed, broken


def _trouble(page: Path, target: str) -> str:
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return "no such file"
    if not file.is_relative_to(ROOT):
        return "leads out of the checkout"
    if page.parent.name == "docs" and not file.is_relative_to(ROOT / "docs"):
        return "leads out of docs, which the site does not have"
    if anchor and (file.suffix != ".md" or anchor not in anchors(file)):
        return "no such heading"
    return ""


@cache
def anchors(page: Path) -> frozenset[str]:
    """Names of the headings of a page: lower case, without punctuation, hyphens for spaces."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    seen: Counter[str] = Counter()
    found = set()
    for heading in HEADING.finditer(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[2]).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return frozenset(found)
