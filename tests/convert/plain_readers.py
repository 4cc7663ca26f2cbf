"""What files of conversations say, by rules written from their makers' documentation, for `known_files`."""

from __future__ import annotations

import base64
import io
import json
import pickle
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import zstandard
from heard import Heard, Said, call_text

Read = Callable[[Path], list[Heard | None]]


@dataclass(frozen=True, kw_only=True)
class KnownFile:
    """A file, and what an independent reader makes of it.

    Attributes:
        name: in the table.
        layout: what the report must call its records.
        source: the kind of file, for the table.
        reader: whose rules `read` follows, for the table.
        make: puts the file into an empty directory, or finds it; None if it is not on this machine.
        read: the samples of the file in order; None for one that must be rejected.
        rejected: the reason of those.
        options: of the conversion.
        swift: reads it with ms-swift too, if that is there.
    """

    name: str
    layout: str
    source: str
    reader: str
    make: Callable[[Path], Path | None]
    read: Read
    rejected: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    swift: bool = False


def json_records(path: Path) -> list[Any]:
    """Records of a JSON array, of JSON Lines, or of a text file with a document per line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".txt":
        return [{"text": line} for line in text.split("\n") if line]
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.split("\n") if line]


def each(read: Callable[..., Heard | None]) -> Read:
    return lambda path: [read(record) for record in json_records(path)]


def files_of(record: dict[str, Any], root: Path) -> tuple[tuple[str, Any], ...]:
    """Kind and bytes of what the columns of a record name."""
    found: list[tuple[str, Any]] = []
    for kind in ("image", "video"):
        given = record.get(kind) or record.get(f"{kind}s") or []
        for entry in [given] if isinstance(given, str) else given:
            if isinstance(entry, dict) and "bytes" in entry:
                found.append((kind, entry["bytes"]))
            elif isinstance(entry, list):
                found.append((kind, [(root / frame).read_bytes() for frame in entry]))
            else:
                found.append((kind, (root / entry).read_bytes()))
    return tuple(found)


NAMES = {"human": "user", "gpt": "assistant", "observation": "tool"}


def openai(record: dict[str, Any], root: Path = Path(), **more: Any) -> Heard:
    """OpenAI's and ShareGPT's messages, from OpenAI's reference of chats and Responses, and axolotl's of ``train``."""
    said: Said = []
    media = list(files_of(record, root))
    weights = []
    if record.get("system"):
        said.append(("system", record["system"]))
    for message in record.get("messages") or record["conversations"]:
        role = message.get("role") or message["from"]
        content = message.get("content", message.get("value"))
        if role == "function_call":
            calls = json.loads(content)
            said += [("call", call_text(call)) for call in (calls if isinstance(calls, list) else [calls])]
            continue
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        text = ""
        if thought := message.get("reasoning_content"):
            text = f"<think>\n{thought}\n</think>\n\n"
        for part in parts:
            if "image" not in part["type"]:
                text += part["text"]
                continue
            text += "<image>"
            address = part.get("image_url")
            address = address["url"] if isinstance(address, dict) else address
            if address:
                media.append(("image", base64.b64decode(address.partition(",")[2])))
        if text:
            said.append((NAMES.get(role, role), text))
        said += [("call", call_text(call["function"])) for call in message.get("tool_calls") or []]
        weight = next((message[name] for name in ("weight", "loss", "train") if message.get(name) is not None), None)
        if weight is not None and NAMES.get(role, role) == "assistant":
            weights.append(float(weight))
    return Heard(said, media=media, tools=record.get("tools"), weights=weights, **more)


def rejected_response(record: dict[str, Any]) -> Heard:
    """ms-swift's pairs: the last message is the wanted answer."""
    heard = openai(record)
    rejected = [("assistant", record["rejected_response"])]
    return Heard(heard.said[:-1], chosen=heard.said[-1:], rejected=rejected)


def query_response(record: dict[str, Any]) -> Heard:
    """ms-swift's questions and answers."""
    said: Said = [("system", record["system"])] if record.get("system") else []
    for question, answer in [*(record.get("history") or []), [record["query"], record["response"]]]:
        said += [("user", question), ("assistant", answer)]
    return Heard(said)


def alpaca(record: dict[str, Any]) -> Heard:
    """Stanford Alpaca, whose input follows the instruction; LLaMA-Factory's system prompts, earlier turns and pairs."""
    said: Said = [("system", record["system"])] if record.get("system") else []
    for question, answer in record.get("history") or []:
        said += [("user", question), ("assistant", answer)]
    said.append(("user", "\n".join(record[name] for name in ("instruction", "input") if record.get(name))))
    if "chosen" in record:
        answers = {name: [("assistant", record[name])] for name in ("chosen", "rejected")}
        return Heard(said, **answers)
    return Heard([*said, ("assistant", record["output"])])


def qwen_vl(record: dict[str, Any], root: Path) -> Heard:
    """Qwen-VL's own finetuning reads the path between the tags; ``tokenizer.from_list_format`` writes them."""
    said, media = [], []
    for turn in record["conversations"]:
        text = turn["value"]
        while "<img>" in text:
            before, _, rest = text.partition("<img>")
            path, _, after = rest.partition("</img>")
            media.append(("image", (root / path).read_bytes()))
            text = f"{before}<image>{after}"
        said.append(({"user": "user", "assistant": "assistant"}[turn["from"]], text))
    return Heard(said, media=media)


def texts(record: dict[str, Any]) -> Heard:
    """As nanoVLM reads the_cauldron and FineVision: the images, then the first question."""
    said: Said = []
    for text in record["texts"]:
        said += [("user", text["user"]), ("assistant", text["assistant"])]
    said[0] = ("user", "<image>" * len(record["images"]) + said[0][1])
    return Heard(said, media=[("image", image["bytes"]) for image in record["images"]])


def indexed(record: dict[str, Any]) -> Heard:
    """As TRL's collators read HuggingFaceH4's sets: an image part stands for ``images[index]``."""
    said, media = [], []
    for message in record["messages"]:
        text = ""
        for part in message["content"]:
            text += part["text"] if part["type"] == "text" else "<image>"
            media += [] if part["type"] == "text" else [("image", record["images"][part["index"]]["bytes"])]
        said.append((message["role"], text))
    return Heard(said, media=media)


def packed_samples(path: Path) -> list[Heard | None]:
    """Qwen's finetuning reads a list of samples in place of one."""
    return [openai(sample, path.parent) for pack in json_records(path) for sample in pack]


def whole_caption(record: dict[str, Any], root: Path) -> Heard:
    """ShareGPT4Video's caption of the whole video, which has the index -1."""
    caption = next(each["content"] for each in record["captions"] if each["idx"] == "-1")
    video = (root / record["video_path"]).read_bytes()
    return Heard([("user", "<video>"), ("assistant", caption)], media=[("video", video)])


def captioned(path: Path) -> list[Heard | None]:
    """img2dataset's samples."""
    return [
        Heard([("user", "<image>"), ("assistant", sample["txt"].decode())], media=[("image", sample["jpg"])])
        for sample in members(path)
    ]


def chosen_and_rejected(record: dict[str, Any]) -> Heard:
    """UltraFeedback, binarized: two conversations with one question."""
    answers = {name: [("assistant", record[name][1]["content"])] for name in ("chosen", "rejected")}
    return Heard([("user", record["prompt"])], **answers)


def cells_of(path: Path) -> list[Heard | None]:
    """Rows as pandas reads them."""
    table = pd.read_csv(path, sep="\t" if path.suffix == ".tsv" else ",", dtype=str, keep_default_na=False)
    rows = table.to_dict("records")
    media = [[("image", (path.parent / row["image"]).read_bytes())] for row in rows]
    heard = [alpaca(row) for row in rows]
    return [
        Heard([("user", "<image>" + each.said[0][1]), each.said[1]], media=found)
        for each, found in zip(heard, media, strict=True)
    ]


def v1(record: dict[str, Any]) -> Heard | None:
    """LLaMA-Factory v1: its Qwen3 renderer, restated."""

    def read(messages: list[dict[str, Any]]) -> Said:
        said: Said = []
        for message in messages:
            of = {kind: [p["value"] for p in message["content"] if p["type"] == kind] for kind in ("text", "reasoning")}
            text = "".join(of["text"])
            if of["reasoning"]:
                thought = "".join(of["reasoning"]).strip("\n")
                text = f"<think>\n{thought}\n</think>\n\n{text}"
            if text:
                said.append((message["role"], text))
            calls = [json.loads(part["value"]) for part in message["content"] if part["type"] == "tool_call"]
            said += [("call", call_text(call)) for call in calls]
        return said

    lists = [record[name] for name in ("messages", "chosen_messages") if name in record]
    for message in lists[0]:
        kinds = {part["type"] for part in message["content"]}
        if "reasoning" in kinds and any("think>" in p["value"] for p in message["content"] if p["type"] == "text"):
            return None  # its renderer would write thinking twice
    if "messages" in record:
        trained = [message for message in record["messages"] if message["role"] == "assistant"]
        weights = [message["loss_weight"] for message in trained if "loss_weight" in message]
        return Heard(read(record["messages"]), tools=record.get("tools"), weights=weights)
    pair = [record["chosen_messages"], record["rejected_messages"]]
    same = next(at for at, (one, other) in enumerate(zip(*pair, strict=False)) if one != other)
    answers = {name: read(messages[same:]) for name, messages in zip(("chosen", "rejected"), pair, strict=True)}
    return Heard(read(pair[0][:same]), **answers)


def parquet_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file without nulls, which stand for columns that a row lacks."""
    rows = pq.read_table(path).to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def members(path: Path) -> list[dict[str, bytes]]:
    """Suffix -> bytes of each sample of a tar."""
    samples: dict[str, dict[str, bytes]] = {}
    content = path.read_bytes()
    content = zstandard.ZstdDecompressor().stream_reader(content).read() if path.suffix == ".zst" else content
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for member in tar:
            key, _, suffix = member.name.partition(".")
            samples.setdefault(key, {})[suffix] = tar.extractfile(member).read()  # type: ignore[union-attr]
    return list(samples.values())


def web_dataset(path: Path) -> list[Heard | None]:
    """A conversation beside its images, in the order of the tar."""
    found: list[Heard | None] = []
    for sample in members(path):
        images = [content for suffix, content in sample.items() if suffix.endswith(("jpg", "png"))]
        record = json.loads(sample["json"])
        found.append(openai({**record, "images": [{"bytes": content} for content in images]}))
    return found


def chatml(path: Path) -> list[Heard | None]:
    """Bridge's ChatML samples: turns, a pickled list of images, and a pickled list of lists of frames."""
    found: list[Heard | None] = []
    for sample in members(path):
        media = [("image", content) for content in pickle.loads(sample["jpgs"])]
        media += [("video", frames) for frames in pickle.loads(sample["videos"])]
        heard = openai({"conversations": json.loads(sample["json"])})
        found.append(Heard(heard.said, media=media))
    return found
