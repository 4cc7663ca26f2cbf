"""Copies of a record share a split, and more data moves no record, whatever names, places and layouts they have."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from source_files import openai, run, sharegpt, write_image, write_lines

SPLIT = {"train": 0.7, "val": 0.3}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def splits_of(out: Path) -> dict[str, str]:
    """Key -> split, read from the tars."""
    found: dict[str, str] = {}
    for path in (out / "text" if (out / "text").is_dir() else out).glob("*.tar"):
        with tarfile.open(path) as tar:
            found |= {name[:-5]: path.name.rpartition("-")[0] for name in tar.getnames() if name.endswith(".json")}
    return found


def records(form: Any, name: str, images: Mapping[int, str], **columns: Any) -> list[dict[str, Any]]:
    """Sixty records, each third with an image."""
    return [
        form(f"{name}{at}", f"{'<image>' * (at in images)}What is {at}?", f"It is {at}.")
        | ({"images": [images[at]]} if at in images else {})
        | columns
        for at in range(60)
    ]


@pytest.mark.parametrize("layout", ["polylithic", "monolithic"])
def test_copies_share_a_split_and_more_data_moves_none(tmp_path: Path, layout: str) -> None:
    images = {at: f"{at}.png" for at in range(0, 60, 3)}
    copies = {at: f"again/{at}.jpeg" for at in images}  # a name is no content
    for at in images:
        (tmp_path / copies[at]).parent.mkdir(exist_ok=True)
        (tmp_path / copies[at]).write_bytes(write_image(tmp_path / images[at], seed=at).read_bytes())
    twins = [*records(openai, "a", images), *records(sharegpt, "b", copies, tools=TOOLS, note="kept elsewhere")]
    write_lines(tmp_path / "some.jsonl", twins)
    report = run(tmp_path / "some.jsonl", tmp_path / "out", layout=layout, split=SPLIT)
    found = splits_of(tmp_path / "out")
    assert (report.written, min(report.splits.values()) > 20) == (120, True)
    assert [found[f"a{at}"] for at in range(60)] == [found[f"b{at}"] for at in range(60)]
    pictures = [found[f"a{at}"] for at in images]
    assert {"train", "val"} == set(pictures)
    # Alone, without ids and after other records, in the other layout, by two workers.
    (tmp_path / "more").mkdir()
    plain = [{name: value for name, value in record.items() if name != "id"} for record in twins[:60]]
    write_lines(tmp_path / "more.jsonl", [openai("new", "Who are you?"), *plain])
    other = "monolithic" if layout == "polylithic" else "polylithic"
    run(tmp_path / "more.jsonl", tmp_path / "more/out", layout=other, split=SPLIT, workers=2)
    later = splits_of(tmp_path / "more/out")
    assert [later[f"more-{at + 2}"] for at in range(60)] == [found[f"a{at}"] for at in range(60)]


def test_one_image_or_answer_more_is_another_content(tmp_path: Path) -> None:
    for at in range(40):
        write_image(tmp_path / f"{at}.png", seed=at)
    same = [openai(f"i{at}", "<image>What is it?", images=[f"{at}.png"]) for at in range(40)]
    pairs = [
        openai(f"p{at}", "Hi?", messages=None, prompt="Hi?", chosen=f"Yes {at}", rejected="No") for at in range(40)
    ]
    run(write_lines(tmp_path / "a.jsonl", [*same, *pairs]), tmp_path / "out", split=SPLIT)
    found = splits_of(tmp_path / "out")
    for name in "ip":
        assert {found[f"{name}{at}"] for at in range(40)} == {"train", "val"}


def test_a_split_that_would_stay_empty_gets_a_content_with_all_its_copies(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [openai(None, f"What is {at % 5}?") for at in range(20)])
    report = run(source, tmp_path / "out", split={"train": 1 - 1e-9, "val": 1e-9})
    assert report.splits == {"train": 16, "val": 4}
    found = splits_of(tmp_path / "out")
    assert len({key for key, split in found.items() if split == "val"}) == 4
    assert len({(int(key.partition("-")[2]) - 1) % 5 for key, split in found.items() if split == "val"}) == 1
    same = write_lines(tmp_path / "b.jsonl", [openai(None)] * 9)
    assert sorted(run(same, tmp_path / "same").splits.values()) == [0, 9]


def test_what_an_older_release_split_by_keys_is_not_resumed(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [openai()])
    run(source, tmp_path / "out")
    path = tmp_path / "out/conversion.json"
    report = json.loads(path.read_text())
    report["fingerprint"]["version"] = 6
    path.write_text(json.dumps(report))
    with pytest.raises(Exception, match=r"version was 6 and is 7 now .*splits followed keys.* add --overwrite"):
        run(source, tmp_path / "out", resume=True)
