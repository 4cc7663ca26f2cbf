"""Packs as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from energon_packing.report.excerpt import visible
from energon_packing.report.page import data_block, escaped, packed_block, page

ASSETS = Path(__file__).parent / "assets"
TEXT = 2 * 2**20
"""Characters of text on a page; samples share them."""
LONGEST, SHORTEST = 20_000, 80
"""Characters of a sample, at most and at least."""


def text_per_sample(samples: int) -> int:
    """Characters of text that each sample may show, so that a page of that many stays small."""
    return min(LONGEST, max(SHORTEST, TEXT // max(samples, 1)))


def preview_page(packs: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """The page.

    Args:
        packs: from `energon_packing.report.drawn_pack.drawn_pack`.
        facts: ``path, seq_length, multiple, context_parallel``, as plain values.
    """
    real, tokens = sum(pack["real"] for pack in packs), sum(pack["tokens"] for pack in packs)
    room = len(packs) * facts["seq_length"]
    samples = sum(segment["kind"] == "sample" for pack in packs for segment in pack["segments"])
    ranks = f", {facts['context_parallel']} context-parallel ranks" if facts["context_parallel"] > 1 else ""
    sentence = (
        f"{len(packs):,} packs with {samples:,} samples and {real:,} tokens, in rows of {facts['seq_length']:,} "
        f"(multiple {facts['multiple']}{ranks}). Fill {real / max(room, 1):.2%}, padding in rows {tokens - real:,} "
        "tokens."
    )
    pictures: dict[str, int] = {}
    packs = [_with_numbers(pack, pictures) for pack in packs]
    body = f"""<header><h1>Packs of {escaped(visible(str(facts["path"])))}</h1>
<p class="soft">{escaped(sentence)}</p>
<ul class="legend" aria-label="Colours">
<li><i class="key text"></i>text<li><i class="key trained"></i>trained text<li><i class="key image"></i>image
<li><i class="key video"></i>video<li><i class="key align"></i>alignment padding<li><i class="key tail"></i>masked tail
<li><i class="key dummy"></i>dummy image<li><i class="key free"></i>unused: the row ends before it</ul>
<p class="soft">Open a sample with a click or Enter. Arrow keys move between samples and packs; Escape closes.</p>
<noscript><p>This page draws its packs with its own script; allow it, or use <code>--json</code>.</p></noscript>
</header>
<main id="packs"></main>
{data_block("pictures", list(pictures))}
{packed_block("data", {"facts": dict(facts), "packs": packs})}"""
    style = (ASSETS / "preview.css").read_text(encoding="utf-8")
    script = (ASSETS / "preview.js").read_text(encoding="utf-8")
    return page(f"Packs of {visible(str(facts['path']))}", body, style=style, script=script)


def _with_numbers(pack: Mapping[str, Any], pictures: dict[str, int]) -> dict[str, Any]:
    """The pack with numbers in place of pictures: a sample that comes again brings none a second time."""
    segments = [
        {
            **segment,
            "media": [
                {**media, "pictures": [pictures.setdefault(each, len(pictures)) for each in media["pictures"]]}
                for media in segment["media"]
            ],
        }
        for segment in pack["segments"]
    ]
    return {**pack, "segments": segments}
