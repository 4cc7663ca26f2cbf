"""Writes the demo's data set: conversation files and media, in the form that users have.

OUT/conversations/sharegpt.json     a JSON array, `conversations` of `from`/`value`
OUT/conversations/openai.jsonl      JSON Lines, `messages` of `role`/`content`
OUT/conversations/images, videos    the media that they name
OUT/conversations/broken            the media of the records that are wrong on purpose
OUT/expected_defects.json           those records, and what each should lead to
OUT/made.json                       what was asked for, and how many conversations of each kind there are
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from energon_packing.demo.conversations import RECORDS, Record, kinds_of, small_talk, story, write_draft
from energon_packing.demo.media import Clip, Picture, save_sound
from energon_packing.errors import UserError

DATA_VERSION = 2  # raise it when the same arguments give other data; otherwise old copies would pass for new ones
SOURCES = ("sharegpt.json", "openai.jsonl")

# name: the class that `AutoProcessor` (for "text": `AutoTokenizer`) returns for it
PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor", "text": "Qwen2Tokenizer"}

_MISMATCH = "placeholder_mismatch"
_ASK, _TWO, _FILM, _GOOD = "<image>What is this?", "<image><image>What is this?", "<video>Hm?", "broken/good.jpg"
_WRONG_MEDIA: tuple[tuple[str, str, str, str, list[str]], ...] = (
    ("missing", "missing_media", "The image file does not exist.", _ASK, ["broken/nowhere.jpg"]),
    ("empty", "corrupt_media", "The image file has no bytes.", _ASK, ["broken/empty.jpg"]),
    ("cut", "corrupt_media", "The JPEG is cut off in the middle.", _ASK, ["broken/truncated.jpg"]),
    ("more-media", _MISMATCH, "The record names two images, but its text has one placeholder.", _ASK, [_GOOD] * 2),
    ("more-placeholders", _MISMATCH, "The text has two placeholders, but the record names one image.", _TWO, [_GOOD]),
    ("outside", "media_outside_root", "The path leaves the folder.", _ASK, ["../outside.jpg"]),
    ("absolute", "media_outside_root", "The path is absolute.", _ASK, ["/etc/hostname"]),
    ("sound", "corrupt_media", "The video file contains only audio.", _FILM, ["broken/sound.mp4"]),
    ("video", "corrupt_media", "The video file is cut off.", _FILM, ["broken/damaged.mp4"]),
)
"""Of ShareGPT records whose media are wrong: id, reason, what is wrong, question and names."""


def processor_path(name: str) -> Path:
    """The directory to give to ``AutoProcessor.from_pretrained`` (``"text"``: to ``AutoTokenizer.from_pretrained``),
    for a name of `PROCESSORS`; there are no others."""
    if name not in PROCESSORS:
        raise UserError(f"there is no demo processor {name!r}; known: {', '.join(PROCESSORS)}")
    return Path(__file__).parent / "processors" / name


def make_data(
    out: Path,
    *,
    conversations: int = 400,
    seed: int = 0,
    defects: bool = True,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Path:
    """Makes the demo's conversation files and media; does nothing if the same ones exist already. Returns the directory
    ``out/conversations``, which is the source to convert and the root of its media paths. The same arguments give the
    same records and the same pixels; the bytes of videos depend on the FFmpeg build. Raises UserError: `conversations`
    is below 1, or `out` holds files that are not the demo's.

    Args:
        out: directory, created if missing; replaced if an earlier call with other arguments filled it.
        conversations: number of valid ones, at least 1.
        defects: add the records of `make_defects`, listed in ``out/expected_defects.json``.
        progress: called as ``progress(done, total)`` with the number of conversations written.
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
    for index, kind in enumerate(kinds):
        draft = write_draft(seed, index, kind)
        for order in {each.name: each for each in (*draft.images, *draft.videos)}.values():
            path = folder / order.name
            path.parent.mkdir(parents=True, exist_ok=True)
            order.shows.save(path, order.width, order.height, **order.options)
        # Alternating, so that every kind is written in both layouts if it occurs often enough.
        records[SOURCES[index % 2]].append(RECORDS[index % 2](draft, Random(f"layout {seed} {index}")))
        progress(index + 1, conversations)
    wrong: list[dict[str, Any]] = []
    if defects:
        rng = Random(f"defects {seed}")
        twin = (records["openai.jsonl"] or records["sharegpt.json"])[0]
        assert isinstance(twin, dict)
        wrong = make_defects(folder, rng, twin["id"])
        for defect in wrong:
            rows = records[defect["source"]]
            # Between the valid ones: errors in the middle of a file are the hard case. Of two equal ids the later one
            # is renamed, so the defect must not come first.
            rows.insert(len(rows) if defect["outcome"] == "warned" else rng.randint(0, len(rows)), defect.pop("record"))
    _write_json(folder / "sharegpt.json", records["sharegpt.json"])
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in records["openai.jsonl"]]
    (folder / "openai.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    _write_json(out / "expected_defects.json", wrong)
    _write_json(out / "made.json", request | {"complete": True, "kinds": dict(sorted(Counter(kinds).items()))})
    return folder


def _prepare(out: Path, folder: Path, request: dict[str, Any]) -> bool:
    """Whether the data exist already; otherwise creates an empty `folder` and claims `out`."""
    note = out / "made.json"
    if note.is_file():
        with suppress(ValueError):
            found = json.loads(note.read_text(encoding="utf-8"))
            if found.get("complete") and request.items() <= found.items():
                return True
        shutil.rmtree(folder, ignore_errors=True)
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty and was not made by the demo; name another directory")
    folder.mkdir(parents=True)
    _write_json(note, request | {"complete": False})
    return False


def make_defects(folder: Path, rng: Random, twin: str) -> list[dict[str, Any]]:
    """Writes media that are wrong on purpose below `folder`, and returns the records that are. Returns for each ``id``
    (None for a line that is not JSON), the ``source``, ``stage`` (``convert``: the file or its media are wrong;
    ``measure``: the sample is too long to be packed), ``outcome`` (``rejected``: never becomes a sample; ``warned``:
    becomes one, under another key; ``dropped``: no pack of 4096 tokens can hold it), ``reason``: the word under which
    the project counts it, ``what`` is wrong for a reader, and the ``record``: the JSON object, or the text of a line
    that does not parse.

    Args:
        folder: where the conversation files go; one image is written next to it, where no record may look.
        rng: decides what the images and the video show.
        twin: the ``id`` of a valid record, which one of the defects reuses.
    """
    media = folder / "broken"
    media.mkdir(parents=True)
    picture = Picture.draw(rng)
    for path in (media / "good.jpg", folder.parent / "outside.jpg"):
        picture.save(path, 224, 224)
    (media / "empty.jpg").touch()
    picture.save(media / "truncated.jpg", 320, 240)
    Clip.draw(rng).save(media / "damaged.mp4", 96, 96, fps=10, frames=20)
    whole = (media / "truncated.jpg").read_bytes()
    (media / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    # Keeps the start of the MP4 and loses the index at its end, so that only reading the file shows the damage.
    (media / "damaged.mp4").write_bytes((media / "damaged.mp4").read_bytes()[:600])
    save_sound(media / "sound.mp4")
    answer = picture.description()
    user = {"role": "user", "content": "What is this?"}

    def openai(key: str, question: str, said: Any) -> Record:
        return {"id": key, "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": said}]}

    def human(name: str, question: str, named: list[str]) -> Record:
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        return {"id": f"bad-{name}", "conversations": turns, "videos" if question == _FILM else "images": named}

    narrated = {"id": "bad-role", "messages": [user, {"role": "narrator", "content": answer}]}
    twice = "Two records have one id; both are kept, the later one under another key."
    long = openai("bad-long", "Write a very long story.", story(rng, 30_000)[0])
    cut = '{"id": "bad-json", "messages": [{"role": "us'
    empty = {"id": "bad-no-turns", "messages": []}
    number = openai("bad-value", "What is this?", 42)
    jsonl, rejected = "openai.jsonl", ("convert", "rejected")
    rows: list[tuple[Any, ...]] = [
        (f"bad-{name}", "sharegpt.json", *rejected, reason, what, human(name, question, named))
        for name, reason, what, question, named in _WRONG_MEDIA
    ]
    rows += [
        ("bad-role", jsonl, *rejected, "unknown_role", "A turn has an unknown role.", narrated),
        ("bad-no-turns", jsonl, *rejected, "empty_conversation", "The list of messages is empty.", empty),
        ("bad-value", jsonl, *rejected, "non_string_value", "A turn contains a number instead of text.", number),
        (None, jsonl, *rejected, "bad_json", "The line is cut off and is not JSON.", cut),
        (twin, jsonl, "convert", "warned", "duplicate_id", twice, openai(twin, *small_talk(rng))),
        ("bad-long", jsonl, "measure", "dropped", "oversize", "The sample has far more than 4096 tokens.", long),
    ]
    names = ("id", "source", "stage", "outcome", "reason", "what", "record")
    return [dict(zip(names, row, strict=True)) for row in rows]


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
