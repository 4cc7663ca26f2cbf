"""Writes the demo's data set: conversation files and media, in the form that users have.

OUT/conversations/sharegpt.json     a JSON array, `conversations` of `from`/`value`
OUT/conversations/openai.jsonl      JSON Lines, `messages` of `role`/`content`
OUT/conversations/images, videos    the media that they name
OUT/conversations/broken            the media of the records that are wrong on purpose
OUT/expected_defects.json           those records, and what each should lead to
OUT/made.json                       what was asked for, and how many conversations of each kind there are
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from energon_packing.demo.clips import save_clip
from energon_packing.demo.defects import Defect, make_defects
from energon_packing.demo.drafts import Draft, kinds_of, write_draft
from energon_packing.demo.layouts import Record, openai_record, sharegpt_record
from energon_packing.demo.pictures import save_picture
from energon_packing.errors import UserError

DATA_VERSION = 1  # raise it when the same arguments give other data; otherwise old copies would pass for new ones
SOURCES = ("sharegpt.json", "openai.jsonl")


def make_data(
    out: Path,
    *,
    conversations: int = 400,
    seed: int = 0,
    defects: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Makes the demo's conversation files and media; does nothing if the same ones exist already.

    The same arguments give the same records and the same pixels; the bytes of videos depend on the FFmpeg build.

    Args:
        out: directory, created if missing; replaced if an earlier call with other arguments filled it.
        conversations: number of valid conversations, at least 1.
        seed: another seed gives other conversations.
        defects: add the records of `defects.make_defects`, listed in ``out/expected_defects.json``.
        progress: called as ``progress(done, total)`` with the number of conversations written.

    Returns:
        The directory ``out/conversations``, which is the source to convert and the root of its media paths.

    Raises:
        UserError: `conversations` is below 1, or `out` holds files that are not the demo's.
    """
    if conversations < 1:
        raise UserError(f"the demo needs at least 1 conversation, but {conversations} were asked for")
    out = Path(out)
    folder = out / "conversations"
    request = {"version": DATA_VERSION, "conversations": conversations, "seed": seed, "defects": defects}
    if _prepare(out, folder, request):
        return folder
    kinds = kinds_of(conversations, Random(f"kinds {seed}"))
    records: dict[str, list[Record | str]] = {name: [] for name in SOURCES}
    twin = ""
    for index, kind in enumerate(kinds):
        draft = write_draft(seed, index, kind)
        if index <= 1:  # the first one of openai.jsonl, if there is one
            twin = draft.key
        _save_media(draft, folder)
        rng = Random(f"layout {seed} {index}")
        # Alternating, so that every kind is written in both layouts if it occurs often enough.
        if index % 2:
            records["openai.jsonl"].append(openai_record(draft, rng))
        else:
            records["sharegpt.json"].append(sharegpt_record(draft, rng))
        if progress is not None:
            progress(index + 1, conversations)
    wrong: list[Defect] = []
    if defects:
        rng = Random(f"defects {seed}")
        wrong = make_defects(folder, rng, twin=twin)
        _scatter(wrong, records, rng)
    _write_sources(folder, records)
    _write_json(out / "expected_defects.json", [defect.expectation() for defect in wrong])
    _write_json(out / "made.json", request | {"complete": True, "kinds": dict(sorted(Counter(kinds).items()))})
    return folder


def _prepare(out: Path, folder: Path, request: dict[str, Any]) -> bool:
    """Whether the data exist already; otherwise creates an empty `folder` and claims `out`."""
    note = out / "made.json"
    if note.is_file():
        try:
            found = json.loads(note.read_text(encoding="utf-8"))
        except ValueError:
            found = {}
        if found.get("complete") and all(found.get(name) == value for name, value in request.items()):
            return True
        shutil.rmtree(folder, ignore_errors=True)
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty and was not made by the demo; name another directory")
    for name in ("images", "videos"):
        (folder / name).mkdir(parents=True)
    _write_json(note, request | {"complete": False})
    return False


def _save_media(draft: Draft, folder: Path) -> None:
    for image in dict.fromkeys(draft.images):  # a file that is named twice is written once
        path = folder / image.name
        path.parent.mkdir(exist_ok=True)
        save_picture(
            image.picture,
            path,
            image.width,
            image.height,
            mode=image.mode,
            exif_orientation=image.exif_orientation,
        )
    for video in draft.videos:
        save_clip(video.clip, folder / video.name, video.width, video.height, fps=video.fps, frames=video.frames)


def _scatter(wrong: list[Defect], records: dict[str, list[Record | str]], rng: Random) -> None:
    """Puts the wrong records between the valid ones: errors in the middle of a file are the hard case."""
    for defect in wrong:
        rows = records[defect.source]
        # Of two equal ids the later one is renamed, so the defect must not come first.
        rows.insert(len(rows) if defect.outcome == "warned" else rng.randint(0, len(rows)), defect.record)


def _write_sources(folder: Path, records: dict[str, list[Record | str]]) -> None:
    _write_json(folder / "sharegpt.json", records["sharegpt.json"])
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in records["openai.jsonl"]]
    (folder / "openai.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
