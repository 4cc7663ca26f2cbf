"""Benchmark of measuring: samples a second and core beside the bare tokenizer, images a second beyond their text, and
two processes beside one.

Every figure is of processes that run alone, one after the other, in several rounds; medians count, and seconds are
those of the CPU, so that other load disturbs little. The line names the load of the machine.

* ``text``: samples of the demo's conversations without media. ``tokenizer`` is the time in which the same tokenizer
  encodes the same rendered texts, one call each, and nothing else.
* ``media``: the same texts with images whose sizes are in their records. ``images_per_second`` are those beyond the
  text: images over the difference between the seconds with them and the seconds without.
* ``processes``: wall seconds of two processes beside one, over many shards.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.demo import processor_path

FAMILY = "qwen2_5_vl"
IMAGES = 4
"""Of each sample of ``media``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one JSON line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000, help="of text; a quarter of them for images")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        for row in figures(Path(name), given.samples, given.rounds):
            print(json.dumps({"bench": "offline measure", **row}), flush=True)
    return 0


def figures(work: Path, samples: int, rounds: int) -> list[dict[str, Any]]:
    """All rows, see the module's docstring."""
    text, plain, pictures = work / "text", work / "plain", work / "pictures"
    write_dataset(text, samples, images=0)
    write_dataset(plain, samples // 4, images=0)
    write_dataset(pictures, samples // 4, images=IMAGES)
    load = os.getloadavg()[0]
    alone = median(measured, text, 0, rounds=rounds)
    bare = median(tokenized, text, rounds=rounds)
    base, media = median(measured, plain, 0, rounds=rounds), median(measured, pictures, 0, rounds=rounds)
    walls = {workers: median(measured, text, workers, wall=True, rounds=rounds) for workers in (1, 2)}
    images = samples // 4 * IMAGES
    common = {"load_before": round(load, 2), "cores": os.cpu_count(), "rounds": rounds}
    return [
        {
            "part": "text",
            "samples": samples,
            "samples_per_second": round(samples / alone),
            "tokenizer_per_second": round(samples / bare),
            "of_tokenizer": round(bare / alone, 3),
            **common,
        },
        {
            "part": "media",
            "samples": samples // 4,
            "images": images,
            "images_per_second": round(images / max(media - base, 1e-9)),
            "samples_per_second": round(samples // 4 / media),
            **common,
        },
        {
            "part": "processes",
            "samples": samples,
            "seconds_1": round(walls[1], 2),
            "seconds_2": round(walls[2], 2),
            "two_of_one": round(walls[1] / walls[2], 2),
            **common,
        },
    ]


def median(function: Any, *arguments: Any, rounds: int, **named: Any) -> float:
    """The middle of several runs, each in a fork of its own."""
    return statistics.median(in_a_fork(function, *arguments, **named) for _ in range(rounds))


def in_a_fork(function: Any, *arguments: Any, **named: Any) -> float:
    """Runs a function in a process of its own; returns what it returns."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, repr(function(*arguments, **named)).encode())
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        said = stream.read()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"{function.__name__} failed")
    return float(said)


def config_of(path: Path) -> RunConfig:
    """A run on a data set, whose drops do not matter."""
    return RunConfig(
        data=DataConfig(path=str(path)),
        encoder=EncoderConfig(processor=str(processor_path(FAMILY))),
        packing=PackingConfig(seq_length=8192, drop_budget=1.0),
    )


def measured(path: Path, workers: int, wall: bool = False) -> float:
    """Seconds of measuring a data set, of the CPU or by the clock; the processor is loaded before.

    Without workers it is the measurer of one process, from the open index to the finished files.
    """
    from energon_packing.offline.measure import MeasureConfig, measure
    from energon_packing.offline.measuring import ShardMeasurer
    from energon_packing.offline.source_part import source_parts

    config = config_of(path)
    with tempfile.TemporaryDirectory() as out:
        if wall:
            start = time.perf_counter()
            measure(MeasureConfig(paths=(path,), out=Path(out) / "index", workers=workers), config)
            return time.perf_counter() - start
        measurer = ShardMeasurer(config.encoder)
        (part,) = source_parts(path, "train")
        cpu = time.process_time()
        for shard in part.shards:
            measurer.measure(part, shard, Path(out) / "index")
        return time.process_time() - cpu


def tokenized(path: Path) -> float:
    """CPU seconds in which the tokenizer encodes the rendered text of every sample, one call each."""
    from transformers import AutoTokenizer

    from energon_packing.offline.shard_index import ShardIndex
    from energon_packing.offline.source_part import source_parts

    (part,) = source_parts(path, "train")
    tokenizer = AutoTokenizer.from_pretrained(str(processor_path(FAMILY)))
    texts = []
    index = ShardIndex(Path(part.root))
    for shard in part.shards:
        with (Path(part.root) / shard).open("rb") as tar:
            for _, offset, size in index.records(shard):
                tar.seek(offset or 0)
                record = json.loads(tar.read(size or 0))
                texts.append(rendered(tokenizer, record))
    cpu = time.process_time()
    for text in texts:
        tokenizer(text, add_special_tokens=False)
    return time.process_time() - cpu


def rendered(tokenizer: Any, record: dict[str, Any]) -> str:
    """The text of a record as the chat template writes it."""
    messages = [{"role": turn["role"], "content": "".join(turn["parts"])} for turn in record["turns"]]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def write_dataset(path: Path, samples: int, *, images: int) -> None:
    """Converts generated conversations of two to eight turns, each with that many images."""
    from PIL import Image

    from energon_packing.convert import ConvertConfig, convert

    source = path.with_name(f"{path.name}-source")
    source.mkdir()
    random = Random(7)
    names = []
    for number in range(16 if images else 0):
        names.append(f"{number}.jpg")
        Image.new("RGB", (random.randrange(200, 1600), random.randrange(200, 1600))).save(source / names[-1])
    words = (
        "the",
        "model",
        "reads",
        "what",
        "a",
        "page",
        "says",
        "and",
        "answers",
        "in",
        "its",
        "own",
        "numbers",
        "3.14",
    )
    with (source / "records.jsonl").open("w", encoding="utf-8") as stream:
        for number in range(samples):
            messages = []
            for turn in range(2 * random.randrange(1, 5)):
                text = " ".join(random.choice(words) for _ in range(random.randrange(5, 120)))
                messages.append({"role": ("user", "assistant")[turn % 2], "content": text})
            messages[0]["content"] = "<image>" * images + messages[0]["content"]
            record: dict[str, Any] = {"id": f"s{number}", "messages": messages}
            if images:
                record["images"] = [random.choice(names) for _ in range(images)]
            stream.write(json.dumps(record) + "\n")
    convert(
        ConvertConfig(
            sources=(source / "records.jsonl",),
            media_root=source,
            out=path,
            split={"train": 1.0},
            samples_per_shard=max(1, samples // 16),
            workers=2,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
