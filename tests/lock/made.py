"""The lock's own conversations, images, videos and clips: the same bytes whatever the demo makes."""

import json
from pathlib import Path
from random import Random
from typing import Any

import av
import numpy as np
from PIL import Image

WORDS = (  # noqa: SIM905  (a sentence is easier to read)
    "river stone lamp house green seven boats carry bread over the quiet bridge while old clocks count rain "
    "naïve 東京 übermäßig λ 🙂 don't 3.14 x=2 <b> over-and-over"
).split()
TOOL = {"name": "weather", "description": "of a town", "parameters": {"type": "object", "properties": {"town": {}}}}
CALL = {"name": "weather", "arguments": {"town": "Åre"}}


def image(path: Path, random: Random, width: int, height: int, mode: str = "RGB", turned: int = 1) -> str:
    """Writes a picture of smooth colours and noise; returns the name of its file.

    Args:
        path: its suffix is the format.
        random: of the noise.
        width, height: pixels as stored.
        mode: of Pillow.
        turned: EXIF orientation, 1 to 8.
    """
    noise = np.random.default_rng(random.randrange(1 << 30)).integers(0, 40, (height, width, 3))
    ramp = np.add.outer(np.linspace(0, 120, height), np.linspace(0, 90, width))[..., None]
    picture = Image.fromarray((ramp + noise).astype(np.uint8)).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = turned
    picture.save(path, **({} if turned == 1 else {"exif": exif}))
    return path.name


def video(path: Path, random: Random, width: int, height: int, frames: int, rate: int) -> str:
    """Writes an MPEG-4 clip of a moving square, ``rate`` frames per second; returns the name of its file."""
    place = random.randrange(8)
    with av.open(str(path), mode="w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt, stream.codec_context.thread_count = width, height, "yuv420p", 1
        for number in range(frames):
            pixels = np.full((height, width, 3), 40 + 5 * number, np.uint8)
            pixels[place : place + 12, number : number + 12] = (220, 30, 10 * place)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path.name


def conversations(folder: Path, count: int = 30, seed: int = 40) -> None:
    """Writes ``sharegpt.json``, ``openai.jsonl`` and their media: good records of all kinds, and bad ones."""
    random = Random(seed)
    folder.mkdir(parents=True)

    def words(least: int, most: int) -> str:
        return " ".join(random.choice(WORDS) for _ in range(random.randint(least, most)))

    pictures = [
        image(folder / "wide.jpg", random, 224, 112),
        image(folder / "turned.jpg", random, 96, 160, turned=6),
        image(folder / "clear.png", random, 90, 70, mode="RGBA"),
        image(folder / "grey.png", random, 56, 56, mode="L"),
        image(folder / "tiny.webp", random, 30, 44),
    ]
    clips = [
        video(folder / "short.mp4", random, 64, 48, 9, 8),
        video(folder / "long.avi", random, 96, 64, 40, 15),
    ]
    (folder / "broken.png").write_bytes((folder / "clear.png").read_bytes()[:200])
    sharegpt: list[dict[str, Any]] = []
    openai: list[dict[str, Any]] = []
    for number in range(count):
        shown = random.sample(pictures, number % 3)
        seen = random.sample(clips, 1) if number % 5 == 4 else []
        question = "<image>" * len(shown) + "<video>" * len(seen) + words(3, 60)
        media = {"images": shown} if shown else {}
        media |= {"videos": seen} if seen else {}
        answers = [words(5, 150 if number % 4 else 700), words(4, 40)]
        system = [words(4, 9)] if number % 6 == 0 else []
        if number % 2:
            turns = [{"from": "system", "value": text} for text in system]
            turns += [{"from": "human", "value": question}, {"from": "gpt", "value": answers[0]}]
            turns += [{"from": "human", "value": words(2, 20)}]
            tools: dict[str, Any] = {}
            if number % 8 == 1:
                turns += [{"from": "function_call", "value": json.dumps(CALL)}]
                turns += [{"from": "observation", "value": '{"sky": "grey"}'}]
                tools = {"tools": json.dumps([TOOL])}
            turns += [{"from": "gpt", "value": answers[1]}]
            sharegpt.append({"id": f"s-{number}", "conversations": turns, **tools, **media})
        else:
            messages = [{"role": "system", "content": text} for text in system]
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answers[0]}]
            thought = f"<think>\n{words(3, 9)}\n</think>\n\n" if number % 10 == 2 else ""
            messages += [{"role": "user", "content": words(2, 9)}]
            messages += [{"role": "assistant", "content": thought + answers[1]}]
            openai.append({"id": f"o-{number}", "messages": messages, **media})
    sharegpt.append({"id": "s-missing", "conversations": sharegpt[0]["conversations"], "images": ["nowhere.png"]})
    sharegpt.append({"id": "s-role", "conversations": [{"from": "nobody", "value": "x"}]})
    long = [{"from": "human", "value": "and in full?"}, {"from": "gpt", "value": words(6000, 6000)}]
    sharegpt.append({"id": "s-long", "conversations": long})
    picture = [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "broken"}]
    openai.append({"id": "o-broken", "messages": picture, "images": ["broken.png"]})
    openai.append({"id": "o-outside", "messages": picture, "images": ["../outside.png"]})
    openai.append({"id": "o-empty", "messages": []})
    openai.append({"id": "o-twice", "messages": openai[0]["messages"]})
    openai.append({"id": "o-twice", "messages": openai[1]["messages"]})
    (folder / "sharegpt.json").write_text(json.dumps(sharegpt, ensure_ascii=False))
    lines = [json.dumps(record) for record in openai]
    (folder / "openai.jsonl").write_text("\n".join([*lines[:5], "{broken", *lines[5:]]) + "\n")


def clips(folder: Path, count: int = 8, seed: int = 7) -> None:
    """Writes ``clips.jsonl`` with latents and embeddings beside it, for Wan, one of them not finite."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        frames, side = 1 + number % 3, 4 + 2 * (number % 4)
        latents = random.standard_normal((16, frames, side, 6), np.float32)
        latents[0, 0, 0, 0] = np.nan if number == 5 else 0
        np.save(folder / f"{number}.latents.npy", latents)
        np.save(folder / f"{number}.context.npy", random.standard_normal((3 + number, 32), np.float32))
        rows.append({"caption": f"clip {number}", "latents": f"{number}.latents.npy"})
        rows[-1]["context"] = f"{number}.context.npy"
    (folder / "clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
