"""The Python blocks of docs/energon.md, run as they stand there, one after another, in an empty directory."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "energon.md"


def test_the_blocks_of_the_page_run_in_an_empty_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names = {"__name__": "page"}
    for number, block in enumerate(blocks):
        # A test starts no processes that it does not need: workers are Energon's own business.
        exec(compile(block.replace("workers=2", "workers=0"), f"{PAGE.name} block {number}", "exec"), names)
    said = capsys.readouterr().out
    assert said.count("% full") == 3
    assert "samples of both data sets share a row" in said
    packs = [pack for pack, _ in zip(names["packed_loader"]("blend.yaml"), range(6), strict=False)]
    sources = {str(source.dataset_path) for pack in packs for source in pack.__sources__}
    assert {"data2" in source for source in sources} == {True, False}, "both data sets are in the packs"
