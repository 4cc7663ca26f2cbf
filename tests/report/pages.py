"""What a page says to a browser, read by Python's own parser."""

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

DATA = "application/gzip"
"""Type of an element whose content no browser runs."""


class ReadPage(HTMLParser):
    """Elements, attributes and text of a page.

    Attributes:
        elements: name and attributes of each element.
        inside: text of each ``style`` and ``script`` element, by kind.
        text: all other text.
    """

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, dict[str, str | None], str]] = []
        self.text = ""
        self._raw: tuple[str, dict[str, str | None]] | None = None
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("style", "script"):
            self._raw = tag, dict(attrs)
            self.inside.append((*self._raw, ""))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("style", "script"):
            self._raw = None

    def handle_data(self, data: str) -> None:
        if self._raw is None:
            self.text += data
        else:
            tag, attributes, before = self.inside[-1]
            self.inside[-1] = tag, attributes, before + data

    def names(self) -> set[str]:
        """Of all elements."""
        return {name for name, _ in self.elements}


def data_of(source: str) -> dict[str, Any]:
    """What a page holds for its script."""
    (packed,) = (text for _, attributes, text in ReadPage(source).inside if attributes.get("type") == DATA)
    values: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return values


def check_closed(source: str) -> ReadPage:
    """Asserts that a page reaches no network, and runs and styles only what its policy names by digest."""
    found = ReadPage(source)
    (policy,) = (
        attributes["content"] or ""
        for name, attributes in found.elements
        if name == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    allowed = dict(re.findall(r"(style|script)-src '(?:sha256-)?([^']+)'", policy))
    for name, attributes, text in found.inside:
        if attributes.get("type") == DATA:
            continue
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() == allowed[name]
    for name, attributes in found.elements:
        assert not any(key.startswith("on") for key in attributes), (name, attributes)
        assert "style" not in attributes, "the policy forbids it"
        for key in ("src", "href", "action", "srcset", "data"):
            assert (attributes.get(key) or "data:").startswith(("data:", "#")), (name, attributes)
    assert not found.names() & {"link", "iframe", "object", "embed", "base", "form"}
    return found
