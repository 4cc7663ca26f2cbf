"""Energon's own ``info`` and ``lint`` on what `convert` writes, and why they need its second description."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from megatron.energon.tools import info, lint
from source_files import openai, run, write_image, write_json, write_video

OPTION = ("--dataset-config", "lint.yaml")


def chats(folder: Path, layout: str) -> Path:
    records: list[dict[str, Any]] = [openai(f"k{number}", question="<image>?", images=["a.png"]) for number in range(9)]
    turns = [{"role": "user", "content": "?"}]
    pair = {"id": "pair", "prompt": turns, "chosen": "Yes.", "rejected": "No."}
    write_image(folder / "src/a.png")
    run(write_json(folder / "src/a.json", [*records, pair]), folder / "out", layout=layout, split={"train": 1.0})
    return folder / "out/text" if layout == "polylithic" else folder / "out"


def clips(folder: Path) -> Path:
    write_video(folder / "src/a.mp4")
    source = write_json(
        folder / "src/a.json", [{"id": f"c{number}", "caption": "?", "video": "a.mp4"} for number in range(2)]
    )
    run(source, folder / "out", format="text-to-video", split={"train": 1.0})
    return folder / "out/text"


def tools(path: Path, *options: str) -> tuple[Result, Result]:
    runner = CliRunner()
    splits = ("--split-parts", "train", "--parallel", "0")
    return (
        runner.invoke(info.command, [str(path), *options]),
        runner.invoke(lint.command, [str(path), *splits, *options]),
    )


@pytest.mark.parametrize("made", ["polylithic", "monolithic", "clips"])
def test_both_accept_every_kind_of_data_set_with_its_second_description(made: str, tmp_path: Path) -> None:
    path = clips(tmp_path) if made == "clips" else chats(tmp_path, made)
    told, linted = tools(path, *OPTION)
    assert (told.exit_code, linted.exit_code) == (0, 0), (told.output, linted.output, linted.exception)
    assert re.search(rf"\({2 if made == 'clips' else 10} samples", told.output)
    assert "TextSample" in told.output
    (shard,) = path.glob("train-*.tar")
    content = shard.read_bytes()
    shard.write_bytes(content.replace(b'{"', b"{!", 1))  # the first record is no JSON any more
    assert "JSONDecodeError" in tools(path, *OPTION)[1].output, "every record is read"


def test_neither_takes_crude_samples_which_is_what_the_page_says(tmp_path: Path) -> None:
    told, linted = tools(chats(tmp_path, "polylithic"))
    assert isinstance(told.exception, KeyError), "if Energon takes them now, docs/convert.md can say less"
    assert "No cookers registered" in str(linted.exception)
