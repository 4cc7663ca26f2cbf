"""Builds the site with MkDocs, strictly, and looks for what a browser would load from elsewhere."""

import re
import subprocess
import sys
from pathlib import Path

from manual import ROOT

TAG = re.compile(r"<(?P<tag>script|link|img|iframe|source|video|audio|object|embed)\b(?P<rest>[^>]*)>", re.I)
ADDRESS = re.compile(r"\b(?:src|href|data|srcset)=[\"']?(?P<address>(?:https?:)?//[^\"'\s>]+)", re.I)
IN_STYLE = re.compile(r"(?:@import\s+[\"']?|url\([\"']?)(?P<address>(?:https?:)?//[^\"')\s]+)", re.I)
LOADED = ("stylesheet", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload", "icon", "manifest")


def build_site(out: Path) -> tuple[int, list[str]]:
    """Builds the manual into a directory.

    Returns:
        The number of pages, and a line per problem: a warning of MkDocs, an address of another host that a browser
        would load.
    """
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(ROOT / "mkdocs.yml")]
    done = subprocess.run([*words, "--site-dir", str(out)], capture_output=True, text=True, check=False)
    if done.returncode:
        return 0, [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    found = sorted(out.rglob("*.html"))
    problems = [f"{path.relative_to(out)}: loads {address}" for path in found for address in loaded(path.read_text())]
    for path in sorted(out.rglob("*.css")):
        problems += [f"{path.relative_to(out)}: loads {hit['address']}" for hit in IN_STYLE.finditer(path.read_text())]
    return len(found), problems


def loaded(page: str) -> list[str]:
    """Addresses of other hosts that a browser would ask for when it shows a page."""
    addresses = [
        hit["address"] for style in re.findall(r"<style.*?</style>", page, re.S) for hit in IN_STYLE.finditer(style)
    ]
    for tag in TAG.finditer(page):
        if tag["tag"].lower() == "link" and not any(word in tag["rest"].lower() for word in LOADED):
            continue
        addresses += [hit["address"] for hit in ADDRESS.finditer(tag["rest"])]
    return addresses
