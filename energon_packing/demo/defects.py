"""Records that are wrong on purpose, so that the demo shows what happens to them, each with its expected outcome."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from energon_packing.demo import prose, scenes
from energon_packing.demo.clips import save_clip, save_sound
from energon_packing.demo.layouts import Record
from energon_packing.demo.pictures import save_picture

SourceName = Literal["sharegpt.json", "openai.jsonl"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Defect:
    """One wrong record.

    Attributes:
        id: the record's ``id``; None for a line that is not JSON.
        source: the conversation file that holds it.
        stage: ``convert`` (the file or its media are wrong) or ``measure`` (the sample is too long to be packed).
        outcome: ``rejected`` (never becomes a sample), ``warned`` (becomes one, under another key), ``dropped`` (is a
            sample of the data set that no pack at `seq_length` 4096 can hold).
        reason: the word under which the project counts it.
        what: what is wrong, in one sentence for a reader.
        record: the JSON object, or the text of a line that does not parse.
    """

    id: str | None
    source: SourceName
    stage: Literal["convert", "measure"]
    outcome: Literal["rejected", "warned", "dropped"]
    reason: str
    what: str
    record: Record | str

    def expectation(self) -> dict[str, Any]:
        """Its entry in `expected_defects.json`."""
        return {name: value for name, value in asdict(self).items() if name != "record"}


def make_defects(folder: Path, rng: Random, twin: str) -> list[Defect]:
    """Writes the media of the defects below `folder` and returns the defects.

    Args:
        folder: where the conversation files go; one image is written next to it, where no record may look.
        rng: decides what the images and the video show.
        twin: the ``id`` of a valid record, which one of the defects reuses.
    """
    media = folder / "broken"
    media.mkdir(parents=True)
    picture = scenes.draw_picture(rng)
    save_picture(picture, media / "good.jpg", 224, 224)
    save_picture(picture, folder.parent / "outside.jpg", 224, 224)
    (media / "empty.jpg").touch()
    save_picture(picture, media / "whole.jpg", 320, 240)
    whole = (media / "whole.jpg").read_bytes()
    (media / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    (media / "whole.jpg").unlink()
    save_sound(media / "sound.mp4")
    save_clip(scenes.draw_clip(rng), media / "whole.mp4", 96, 96, fps=10, frames=20)
    # Keeps the start of the MP4 and loses the index at its end, so that only reading the file shows the damage.
    (media / "damaged.mp4").write_bytes((media / "whole.mp4").read_bytes()[:600])
    (media / "whole.mp4").unlink()
    answer = picture.description()

    def sharegpt(key: str, reason: str, what: str, question: str, **columns: list[str]) -> Defect:
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        record: Record = {"id": key, "conversations": turns, **columns}
        return Defect(
            id=key,
            source="sharegpt.json",
            stage="convert",
            outcome="rejected",
            reason=reason,
            what=what,
            record=record,
        )

    def openai(key: str | None, reason: str, what: str, record: Record | str) -> Defect:
        if isinstance(record, dict):
            record = {"id": key, **record}
        return Defect(
            id=key,
            source="openai.jsonl",
            stage="convert",
            outcome="rejected",
            reason=reason,
            what=what,
            record=record,
        )

    ask = "<image>What is this?"
    user = {"role": "user", "content": "What is this?"}
    story, _ = prose.story(rng, 30_000)
    question, reply = prose.about_animal(rng)
    return [
        sharegpt("bad-missing", "missing_media", "The image file does not exist.", ask, images=["broken/nowhere.jpg"]),
        sharegpt("bad-empty", "corrupt_media", "The image file has no bytes.", ask, images=["broken/empty.jpg"]),
        sharegpt(
            "bad-cut", "corrupt_media", "The JPEG is cut off in the middle.", ask, images=["broken/truncated.jpg"]
        ),
        sharegpt(
            "bad-more-media",
            "placeholder_mismatch",
            "The record names two images, but its text has one placeholder.",
            ask,
            images=["broken/good.jpg", "broken/good.jpg"],
        ),
        sharegpt(
            "bad-more-placeholders",
            "placeholder_mismatch",
            "The text has two placeholders, but the record names one image.",
            f"<image>{ask}",
            images=["broken/good.jpg"],
        ),
        sharegpt("bad-outside", "media_outside_root", "The path leaves the folder.", ask, images=["../outside.jpg"]),
        sharegpt("bad-absolute", "media_outside_root", "The path is absolute.", ask, images=["/etc/hostname"]),
        sharegpt(
            "bad-sound",
            "corrupt_media",
            "The video file contains only audio.",
            "<video>Hm?",
            videos=["broken/sound.mp4"],
        ),
        sharegpt(
            "bad-video", "corrupt_media", "The video file is cut off.", "<video>Hm?", videos=["broken/damaged.mp4"]
        ),
        openai(
            "bad-role",
            "unknown_role",
            "A turn has an unknown role.",
            {"messages": [user, {"role": "narrator", "content": answer}]},
        ),
        openai("bad-no-turns", "empty_conversation", "The list of messages is empty.", {"messages": []}),
        openai(
            "bad-value",
            "non_string_value",
            "A turn contains a number instead of text.",
            {"messages": [user, {"role": "assistant", "content": 42}]},
        ),
        openai(
            None, "bad_json", "The line is cut off and is not JSON.", '{"id": "bad-json", "messages": [{"role": "us'
        ),
        Defect(
            id=twin,
            source="openai.jsonl",
            stage="convert",
            outcome="warned",
            reason="duplicate_id",
            what="Two records have one id; both are kept, the later one under another key.",
            record={
                "id": twin,
                "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": reply}],
            },
        ),
        Defect(
            id="bad-long",
            source="openai.jsonl",
            stage="measure",
            outcome="dropped",
            reason="oversize",
            what="The sample has far more than 4096 tokens.",
            record={
                "id": "bad-long",
                "messages": [
                    {"role": "user", "content": "Write a very long story."},
                    {"role": "assistant", "content": story},
                ],
            },
        ),
    ]
