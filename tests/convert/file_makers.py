"""Makes files of conversations as the tools that write them make them, for `made_files`."""

from __future__ import annotations

import base64
import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import zstandard
from heard import Heard
from plain_readers import Read, openai, parquet_rows
from source_files import write_image, write_json, write_lines, write_video

TOOL = {"name": "weather", "description": "?", "parameters": {"type": "object", "properties": {"city": {}}}}
CALLS = [
    {"id": f"call_{city}", "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
    for city in ("Bern", "Oslo")
]
PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def lines(name: str, records: list[Any]) -> Callable[[Path], Path]:
    return lambda folder: write_lines(folder / f"{name}.jsonl", records)


def array(name: str, records: list[Any], images: int = 0) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for number in range(images):
            write_image(folder / f"images/{number}.jpg", 48 + number, seed=number)
        return write_json(folder / f"{name}.json", records)

    return make


def parquet(name: str, records: list[Any], images: bool = False) -> Callable[[Path], Path]:
    """Rows that `datasets` writes; images become its struct of bytes and path."""

    def make(folder: Path) -> Path:
        import datasets

        path = folder / f"{name}.parquet"
        if images:
            for number in range(3):
                write_image(folder / f"images/{number}.jpg", 48 + number, seed=number)
            filled = [
                {
                    **record,
                    "images": [{"bytes": (folder / name).read_bytes(), "path": name} for name in record["images"]],
                }
                for record in records
            ]
            made = datasets.Dataset.from_list(filled)
            made.cast_column("images", datasets.List(datasets.Image())).to_parquet(str(path))
        else:
            datasets.Dataset.from_list(records).to_parquet(str(path))
        return path

    return make


def rows(read: Callable[..., Heard]) -> Read:
    return lambda path: [read(record) for record in parquet_rows(path)]


PLAIN = [{"messages": [*PROMPT, answer(f"Rayleigh {number}. \u2028 {number} times.")]} for number in range(40)]


def saved(folder: Path) -> Path:
    import datasets

    parts = {name: datasets.Dataset.from_list(PLAIN[at : at + 20]) for at, name in ((0, "train"), (20, "test"))}
    datasets.DatasetDict(parts).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def stream(folder: Path) -> Path:
    table = pa.Table.from_pylist(PLAIN)
    with pa.ipc.new_stream(str(folder / "data.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=16)
    return folder / "data.arrow"


def packed(suffix: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        if suffix == ".json.zst":
            (folder / f"data{suffix}").write_bytes(zstandard.compress(json.dumps(PLAIN, indent=1).encode()))
        else:
            (folder / f"data{suffix}").write_bytes(gzip.compress("\n".join(map(json.dumps, PLAIN)).encode()))
        return folder / f"data{suffix}"

    return make


def unpacked(path: Path) -> list[Heard | None]:
    content = path.read_bytes()
    text = gzip.decompress(content) if path.suffix == ".gz" else zstandard.decompress(content)
    records = json.loads(text) if path.suffix == ".zst" else [json.loads(line) for line in text.splitlines()]
    return [openai(record) for record in records]


def tar(folder: Path) -> Path:
    """What webdataset's writer makes of conversations and their images."""
    import webdataset

    with webdataset.TarWriter(str(folder / "data-000.tar")) as writer:
        for number in range(6):
            images = [write_image(folder / "x.jpg", 40 + at, seed=at).read_bytes() for at in range(number % 3)]
            question = {"role": "user", "content": "<image>" * len(images) + "What?"}
            sample: dict[str, Any] = {"__key__": f"s{number}", "json": {"messages": [question, answer("A.")]}}
            writer.write({**sample, **{f"{at}.jpg": image for at, image in enumerate(images)}})
    return folder / "data-000.tar"


def bridge_tar(folder: Path) -> Path:
    import webdataset

    frames = [write_image(folder / "x.jpg", seed=seed).read_bytes() for seed in range(4)]
    with webdataset.TarWriter(str(folder / "chatml.tar")) as writer:
        for number in range(4):
            text = "<image>" * (number % 2) + "<video>" * (number // 2) + "What?"
            turns = [{"from": "human", "value": text}, {"from": "gpt", "value": "That."}]
            sample = {"__key__": f"c{number}", "json": turns, "jpgs": pickle.dumps(frames[: number % 2])}
            writer.write({**sample, "videos": pickle.dumps([frames] * (number // 2))})
    return folder / "chatml.tar"


def packed_tar(suffix: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        content = tar(folder).read_bytes()
        path = folder / f"packed.tar{suffix}"
        path.write_bytes(gzip.compress(content) if suffix == ".gz" else zstandard.compress(content))
        return path

    return make


def data_address(folder: Path) -> str:
    image = write_image(folder / "in-text.png").read_bytes()
    return "data:image/png;base64," + base64.b64encode(image).decode()


def vision(form: str) -> Callable[[Path], Path]:
    """OpenAI's two ways to send an image: chats, and Responses."""

    def make(folder: Path) -> Path:
        address = data_address(folder)
        if form == "chat":
            parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": address}}]
        else:
            parts = [{"type": "input_image", "image_url": address}, {"type": "input_text", "text": "What?"}]
        answers = "It." if form == "chat" else [{"type": "output_text", "text": "It."}]
        record = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answers}]}
        return write_lines(folder / f"{form}.jsonl", [record, *PLAIN[:1]])

    return make


def clips(folder: Path) -> Path:
    for number in range(4):
        write_image(folder / f"frames/{number}.jpg", seed=number)
    write_video(folder / "clip.mp4")
    videos: list[Any] = [[f"frames/{number}.jpg" for number in range(4)], "clip.mp4"]
    turns = [{"role": "user", "content": "<video>Which of them?"}, answer("This.")]
    return write_lines(folder / "clips.jsonl", [{"messages": turns, "videos": [video]} for video in videos])


def fine_tuning() -> list[Any]:
    first = [*PROMPT, answer("No.", weight=0), {"role": "user", "content": "Look."}]
    first += [{"role": "assistant", "content": None, "tool_calls": CALLS, "weight": 1}]
    first += [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in CALLS]
    whole = {"messages": [*first, answer("Both 7.", weight=1)], "tools": [{"type": "function", "function": TOOL}]}
    return [whole, {"messages": [*PROMPT, answer("So.", name="bot")], "user": "u1"}]


LLAVA = [
    {
        "id": f"0000{number}",
        "image": f"images/{number % 2}.jpg",
        "conversations": [
            {"from": "human", "value": "<image>\nWhat is it?" if number % 2 else "What is it?\n<image>"},
            {"from": "gpt", "value": "A bus."},
            {"from": "human", "value": "Which colour?"},
            {"from": "gpt", "value": "Red."},
        ],
    }
    for number in range(5)
]
SHAREGPT = [
    {
        "id": "abc_0",
        "system": "Use tools.",
        "tools": json.dumps([TOOL]),
        "conversations": [
            {"from": "human", "value": "Bern?"},
            {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": {"city": "Bern"}})},
            {"from": "observation", "value": "7"},
            {"from": "gpt", "value": "7 degrees."},
        ],
    },
    {"id": "abc_1", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hi."}]},
]
FROM_VALUE = [{"conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Hi."}]}]
LOST = {"id": "abc_2", "conversations": [{"from": "human", "value": "Bern?"}]}
PAIR = {"prompt": PROMPT, "chosen": [answer("Scattering.")], "rejected": [answer("Magic.")]}
WHOLE_PAIR = {"chosen": [*PROMPT, answer("Scattering.")], "rejected": [*PROMPT, answer("Magic.")]}
KTO = [{"prompt": PROMPT, "completion": [answer(text)], "label": text == "Yes."} for text in ("Yes.", "No.")]
VLM = [
    {
        "messages": [{"role": "user", "content": f"What about {number}?"}, answer("Fine.")],
        "images": [f"images/{at}.jpg" for at in range(number)],
    }
    for number in (1, 2, 3)
]
SWIFT = [
    {"query": "q", "response": "r"},
    {"system": "s", "query": "q", "response": "r", "history": [["a", "b"], ["c", "d"]]},
]
SWIFT_MEDIA = [
    {"messages": [{"role": "user", "content": "<image>and<image>?"}, answer("Two.")], "images": ["0.jpg", "1.jpg"]},
    {"messages": [{"role": "user", "content": "<image>?"}, answer("One.", loss=True)], "images": ["0.jpg"]},
]
for _record in SWIFT_MEDIA:
    _record["images"] = [f"images/{name}" for name in _record["images"]]
QWEN = [
    {
        "id": "identity_0",
        "conversations": [
            {"from": "user", "value": "Picture 1: <img>images/0.jpg</img>\nPicture 2: <img>images/1.jpg</img>\nBoth?"},
            {"from": "assistant", "value": "<ref>A bus</ref><box>(536,509),(588,602)</box>"},
        ],
    }
]
THINKING = [{"messages": [*PROMPT, answer("Rayleigh.", reasoning_content="It scatters.")]}]
ALPACA = [
    {"instruction": "Add.", "input": "1 1", "output": "2", "text": "Below is an instruction ..."},
    {"instruction": "Name a tree.", "input": "", "output": "Oak."},
    {"instruction": "Empty.", "input": "", "output": ""},
]
AXOLOTL = [
    {
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b", "train": False},
            {"from": "human", "value": "c", "train": False},
            {"from": "gpt", "value": "d", "train": True},
        ]
    }
]


# As the cards of HuggingFaceM4/the_cauldron, HuggingFaceM4/FineVision and HuggingFaceH4's sets show their rows.
CAULDRON = [
    {
        "images": [f"images/{at}.jpg" for at in range(count)],
        "texts": [
            {"user": f"Question {turn}?\n", "assistant": f" Answer {turn}.", "source": "vqa"} for turn in range(3)
        ],
    }
    for count in (1, 3, 2)
]
FINE_VISION = [
    {
        "images": ["images/0.jpg", "images/1.jpg"],
        "texts": [{"user": "Which?", "assistant": "Both."}, {"user": "Why?", "assistant": "So."}],
        "source": "ai2d",
        "relevance_ratings": [4, 5],
        "relevance_min": 4,
    }
]


def _indexed(*parts: Any) -> list[dict[str, Any]]:
    return [
        {"index": part, "text": None, "type": "image"}
        if isinstance(part, int)
        else {"index": None, "text": part, "type": "text"}
        for part in parts
    ]


VSFT = [
    {
        "messages": [
            {"role": "user", "content": _indexed("Compare ", *order, " now.\n")},
            {"role": "assistant", "content": _indexed("Done.")},
        ],
        "images": ["images/0.jpg", "images/1.jpg"],
    }
    for order in ((0, 1), (1, 0), (1, " and ", 0, 1))
]
QWEN_PACKED = [[{key: value for key, value in record.items() if key != "id"} for record in LLAVA[:3]], LLAVA[3:]]
ULTRAFEEDBACK = [
    {
        "prompt": PROMPT[1]["content"],
        "prompt_id": f"{number:064x}",
        "chosen": [PROMPT[1], answer(f"Scattering {number}.")],
        "rejected": [PROMPT[1], answer("Magic.")],
        "messages": [PROMPT[1], answer(f"Scattering {number}.")],
        "score_chosen": 8.5,
        "score_rejected": 3.0,
    }
    for number in range(3)
]
CELLS = [
    {"instruction": text, "input": "", "output": f'{text[::-1]}, "quoted"\r\n\tend', "image": f"images/{at}.jpg"}
    for at, text in enumerate(("Plain?", 'A "quote", a comma', "Zeilen\numbruch \u2028 \u00e9"))
]


def cells(suffix: str) -> Callable[[Path], Path]:
    """What `datasets` makes of rows with line breaks, quotes and delimiters in their cells."""

    def make(folder: Path) -> Path:
        import datasets

        for number in range(3):
            write_image(folder / f"images/{number}.jpg", 48 + number, seed=number)
        path = folder / f"cells{suffix}"
        datasets.Dataset.from_list(CELLS).to_csv(str(path), sep="\t" if suffix == ".tsv" else ",")
        return path

    return make


def share_gpt_4_video(folder: Path) -> Path:
    """Lines of ``sharegpt4video_40k.jsonl``."""
    write_video(folder / "panda/1.mp4")
    record = {
        "video_id": "1",
        "video_path": "panda/1.mp4",
        "timestamp": ["0.0", "2.0"],
        "keyframe": [0, 48],
        "captions": [{"idx": "1", "content": "A cup."}, {"idx": "2", "content": "It falls."}],
        "zip_folder": "panda_videos_1.zip",
    }
    record["captions"].append({"idx": "-1", "content": "A cup falls."})
    return write_lines(folder / "sharegpt4video_40k.jsonl", [record])


def img2dataset(folder: Path) -> Path:
    """What `WebDatasetSampleWriter` of img2dataset writes: image, caption, and what is known of both."""
    import webdataset

    with webdataset.TarWriter(str(folder / "00000.tar")) as writer:
        for number in range(4):
            image = write_image(folder / "x.jpg", 40 + number, seed=number).read_bytes()
            caption = f"Caption {number}, \u00e9"
            meta = {"url": "https://x.org/1", "key": f"00000000{number}", "caption": caption, "status": "success"}
            meta |= {"error_message": None, "width": 40, "height": 30, "sha256": "0" * 64}
            sample = {"__key__": meta["key"], "jpg": image, "txt": caption}
            writer.write(sample if number == 3 else {**sample, "json": json.dumps(meta, indent=4)})
    return folder / "00000.tar"


def saved_rows(path: Path) -> list[Any]:
    import datasets

    parts = datasets.load_from_disk(str(path))
    return [row for name in sorted(parts) for row in parts[name]]
