"""A reader of the user's own has the audit of every other source; ids and addresses mean what their makers mean."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from source_files import openai, rejects, run, sharegpt, write_image, write_lines
from test_convert_workers import converted

from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.convert.media_files import resolve_media
from energon_packing.convert.records import parse_conversation
from energon_packing.errors import ConfigError, SampleRejected, UserError

READER = """
import xml.etree.ElementTree as ET


def rows(path):
    for chat in ET.parse(path).getroot():
        turns = [{"role": turn.get("by"), "content": turn.text} for turn in chat]
        yield {"id": chat.get("id"), "messages": turns, "images": chat.get("images", "").split()}
"""
MADE = """
from energon_packing.conversation import Conversation, Media, MediaPart, Turn


def rows(path):
    for number, line in enumerate(path.read_text().splitlines()):
        if line == "stop":
            raise KeyError("stop")
        question = Turn(role="user", parts=(MediaPart(index=0), line))
        answer = Turn(role="assistant", parts=("Yes.",) if line != "silent" else ())
        yield Conversation(key=line, turns=(question, answer), media=(Media(kind="image", name=f"{number % 3}.png"),))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with two readers and three images."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, code in (("xml_reader", READER), ("made_reader", MADE)):
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
    for number in range(3):
        write_image(tmp_path / f"{number}.png", seed=number)
    return tmp_path


def xml(path: Path, count: int) -> Path:
    turns = '<turn by="user">&lt;image&gt;{0}?</turn><turn by="{1}">It.</turn>'
    chats = [
        f'<chat id="{at % 50}" images="{at % 3}.png">{turns.format(at, "assistant" if at % 7 else "nobody")}</chat>'
        for at in range(count)
    ]
    path.write_text(f"<chats>{''.join(chats)}</chats>")
    return path


def test_a_reader_of_ten_lines_has_the_audit_of_json_lines_with_any_number_of_workers(folder: Path) -> None:
    """Samples, keys, splits, media, rejects and warnings of the same records as JSON Lines."""
    count = 120
    source = xml(folder / "chats.xml", count)
    read, alone = converted(source, folder / "out", reader="xml_reader:rows", workers=1)
    assert converted(source, folder / "out", reader="xml_reader:rows", workers=3)[1] == alone
    lines = [
        openai(str(at % 50), f"<image>{at}?", "It.", images=[f"{at % 3}.png"])
        if at % 7
        else {
            **openai(str(at % 50), f"<image>{at}?", "It.", images=[f"{at % 3}.png"]),
            "messages": [{"role": "user", "content": f"<image>{at}?"}, {"role": "nobody", "content": "It."}],
        }
        for at in range(count)
    ]
    same, as_lines = converted(write_lines(folder / "chats.jsonl", lines), folder / "out")
    assert (read.read, read.written, read.rejected, read.warnings, read.splits) == (
        (same.read, same.written, same.rejected, same.warnings, same.splits)
    )
    assert read.rejected == {"unknown_role": 18}
    tars = [name for name in alone if name.endswith(".tar")]
    assert len(tars) >= 3
    assert {name: alone[name] for name in tars} == {name: as_lines[name] for name in tars}


def test_conversations_of_a_reader_are_stored_as_they_are_and_resumed_by_its_code(folder: Path) -> None:
    source = folder / "lines.txt"
    source.write_text("One\nsilent\n<image> is a word here\nOne\nöä\n")
    options: dict[str, Any] = {"reader": "made_reader:rows", "split": {"train": 1.0}}
    report = run(source, folder / "out", **options)
    assert (report.read, report.written, report.rejected) == (5, 4, {"empty_turn": 1})
    assert report.warnings == {"duplicate_id": 1, "sanitised_id": 2}
    assert rejects(folder / "out")[0]["record"] == 1
    with tarfile.open(folder / "out/text/train-000000.tar") as tar:
        samples = {member.name: json.loads(tar.extractfile(member).read()) for member in tar}  # type: ignore[union-attr]
    assert [sample["turns"][0]["parts"][1] for sample in samples.values()] == [
        "One",
        "<image> is a word here",
        "One",
        "öä",
    ]
    assert [sample["media"][0]["width"] for sample in samples.values()] == [40] * 4
    assert next(iter(samples)) == "One.json"
    assert run(source, folder / "out", resume=True, **options).skipped
    (folder / "made_reader.py").write_text(MADE + "\n")
    with pytest.raises(UserError, match="reader_code was"):
        run(source, folder / "out", resume=True, **options)


def test_a_reader_that_fails_or_yields_nothing_useful_is_one_sentence(folder: Path) -> None:
    source = folder / "lines.txt"
    source.write_text("One\ntwo\nstop\n")
    with pytest.raises(
        UserError, match=r"made_reader:rows failed on lines.txt after 2 records, at made_reader.py:8: Key"
    ):
        run(source, folder / "out", reader="made_reader:rows")
    assert not (folder / "out").exists()
    for name, words in (
        ("made_reader.py:rows", "write MODULE:NAME"),
        ("made_reader", "write MODULE:NAME, such as my_module:rows"),
        ("no_such_module:rows", "cannot be imported: ModuleNotFoundError"),
        ("made_reader:columns", "cannot be imported: AttributeError"),
        ("made_reader:Turn.__slots__", "name a function that takes a path and yields records"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            run(source, folder / "out", reader=name)
    (folder / "odd.py").write_text("def rows(path):\n    yield 1\n    yield {'messages': ({'role': {1, 2}},)}\n")
    with pytest.raises(UserError, match=r"holds no usable record.*expected an object"):
        run(source, folder / "out", reader="odd:rows")


def test_conversations_without_a_key_are_named_by_their_place(folder: Path) -> None:
    code = "from energon_packing.conversation import Conversation\n\n\ndef rows(path):\n    for word in 'ab':\n"
    said = "[{'role': 'user', 'content': word}, {'role': 'assistant', 'content': word}]"
    (folder / "keyless.py").write_text(f"{code}        yield Conversation.from_messages({said})\n")
    (folder / "lines.txt").write_text("One\n")
    report = run(folder / "lines.txt", folder / "out", reader="keyless:rows", split={"train": 1.0})
    assert (report.written, report.warnings) == (2, {})


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([Turn(role="user", parts=("Hi",))], "nothing_to_learn"),
        ([Turn(role="user", parts=("Hi",)), Turn(role="assistant", parts=(" ",))], "empty_turn"),
        ([Turn(role="user", parts=("Hi", 3)), Turn(role="assistant", parts=("A",))], "bad_record"),  # type: ignore[arg-type]
    ],
)
def test_a_conversation_that_python_lets_pass_is_rejected_as_a_record_would_be(turns: list[Turn], reason: str) -> None:
    with pytest.raises(SampleRejected, match=reason):
        parse_conversation(Conversation(key="a", turns=tuple(turns)))


def test_a_file_of_a_conversation_may_be_a_path_and_odd_times_are_rejected() -> None:
    turns = (Turn(role="user", parts=(MediaPart(index=0),)), Turn(role="assistant", parts=("A.",)))
    image = Media(kind="image", name=Path("a.png"))  # type: ignore[arg-type]
    assert parse_conversation(Conversation(key="a", turns=turns, media=(image,))).references[0].paths == ("a.png",)
    odd = Media(kind="video", name="a", frame_names=("a", "b"), frame_times=("0", "1"))  # type: ignore[arg-type]
    with pytest.raises(SampleRejected, match="bad_frames"):
        parse_conversation(Conversation(key="a", turns=turns, media=(odd,)))


def test_lists_of_frames_of_a_conversation_stay_lists_and_texts_stay_texts() -> None:
    frames = Media(
        kind="video", name="a.jpg", frames=2, fps=4.0, frame_names=("a.jpg", "b.jpg"), frame_times=(0.0, 0.5)
    )
    turns = (Turn(role="user", parts=(MediaPart(index=0), "Hi")), Turn(role="assistant", parts="A."))  # type: ignore[arg-type]
    parsed = parse_conversation(Conversation(key="a", turns=turns, media=(frames,)))
    (reference,) = parsed.references
    assert (reference.paths, reference.is_frames, reference.fps, reference.times) == (
        (("a.jpg", "b.jpg"), True, 4.0, (0.0, 0.5))
    )
    assert parsed.turns[1].parts == ("A.",)
    unstated = dataclasses.replace(frames, fps=None, frame_times=())
    parsed = parse_conversation(Conversation(key="a", turns=turns, media=(unstated,)), frame_fps=8.0)
    assert parsed.references[0].fps == 8.0


def test_ids_that_are_not_ascii_become_unlike_readable_keys_and_stay_in_the_samples(tmp_path: Path) -> None:
    ids = ["問題一", "問題二", "größe/1", "große/1", "plain", "a/b"]
    source = write_lines(tmp_path / "a.jsonl", [sharegpt(name) for name in ids])
    report = run(source, tmp_path / "out", split={"train": 1.0})
    assert report.warnings == {"sanitised_id": 5}
    with tarfile.open(tmp_path / "out/text/train-000000.tar") as tar:
        samples = [(member.name, json.loads(tar.extractfile(member).read())) for member in tar]  # type: ignore[union-attr]
    names = [re.sub(r"-[0-9a-f]{8}\.json", "-*", name) for name, _ in samples]
    assert names == ["554f984c4e00-*", "554f984c4e8c-*", "grose_1-*", "grose_1-*", "plain.json", "a_b.json"]
    assert len({name for name, _ in samples}) == 6
    assert [sample.get("id") for _, sample in samples] == [*ids[:4], None, None]
    first = samples[0]
    assert Conversation.from_record(first[0], first[1]).source_id == ids[0]
    assert Conversation.from_record(first[0], first[1]).to_record() == first[1]


@pytest.mark.parametrize("form", ["file://{path}", "file://localhost{path}", "FILE://{quoted}", "file://a b%20c.png"])
def test_file_addresses_below_the_media_root_are_paths(tmp_path: Path, form: str) -> None:
    root = tmp_path.resolve()
    for name in ("a b.png", "a b%20c.png"):
        write_image(root / name)
    name = "a b.png" if "quoted" in form else "a b%20c.png"
    address = form.format(path=root / name, quoted=quote(str(root / name)))
    assert resolve_media(address, root) == str(root / name)
    for outside in ("file:///etc/passwd", f"file://{root}/../x.png", "file:///%65tc/passwd"):
        with pytest.raises(SampleRejected, match="media_outside_root"):
            resolve_media(outside, root)
    with pytest.raises(SampleRejected, match="remote_media"):
        resolve_media("https://x.org/a.png", root)
