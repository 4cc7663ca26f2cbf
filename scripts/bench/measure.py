"""Benchmark of measuring: samples a second and core beside the bare tokenizer, images a second beyond their text, and
two processes beside one.

Every figure is of processes that run alone, one after the other, in several rounds; medians count, and seconds are
those of the CPU, so that other load disturbs little. The line names the load of the machine.

* ``text``: conversations whose turns are passages of Python's reference, without media. ``tokenizer`` is the time in
  which the same tokenizer encodes the same rendered texts, one call each, and nothing else.
* ``media``: the same texts with images whose sizes are in their records. ``images_per_second`` are those beyond the
  text: images over the difference between the seconds with them and the seconds without.
* ``processes``: wall seconds of two processes beside one, over many shards, from the call of `measure` to its index.
  Modules are imported before, the processor is loaded by each call. ``cpu_seconds_2`` are those of all processes of the
  call with two, ``parent_cpu_seconds_2`` those of the calling one, while no other works. On a machine with other
  load the wall says how many cores were left; ``two_of_one_by_cpu`` is the ratio if both processes had a core.
"""

import argparse
import gc
import json
import os
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
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
    parser.add_argument(
        "--processor", default=processor_path(FAMILY), type=Path, help="of Qwen2.5-VL, a directory; default: the demo's"
    )
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        for row in figures(Path(name), given.processor.resolve(), given.samples, given.rounds):
            print(json.dumps({"bench": "measure", **row}), flush=True)
    return 0


def figures(work: Path, processor: Path, samples: int, rounds: int) -> list[dict[str, Any]]:
    """All rows, see the module's docstring."""
    text, plain, pictures = work / "text", work / "plain", work / "pictures"
    write_dataset(text, samples, images=0)
    write_dataset(plain, samples // 4, images=0)
    write_dataset(pictures, samples // 4, images=IMAGES)
    _import(processor)
    load = os.getloadavg()[0]
    alone, bare = medians((measured, text, processor), (tokenized, text, processor), rounds=rounds)
    base, media = medians((measured, plain, processor), (measured, pictures, processor), rounds=rounds)
    wall_1, cpu_1, _, wall_2, cpu_2, parent_2 = medians(
        (whole_command, text, processor, 0), (whole_command, text, processor, 2), rounds=rounds
    )
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
            "seconds_1": round(wall_1, 2),
            "seconds_2": round(wall_2, 2),
            "two_of_one": round(wall_1 / wall_2, 2),
            "cpu_seconds_1": round(cpu_1, 2),
            "cpu_seconds_2": round(cpu_2, 2),
            "parent_cpu_seconds_2": round(parent_2, 2),
            "two_of_one_by_cpu": round(cpu_1 / (parent_2 + (cpu_2 - parent_2) / 2), 2),
            **common,
        },
    ]


def _import(processor: Path) -> None:
    """Imports what all forks need, by using it, so that none pays for it."""
    import torch

    import energon_packing.offline.measure  # noqa: F401
    from energon_packing.encoders.tokenized import use_one_thread
    from energon_packing.offline.measure import ShardMeasurer

    use_one_thread()  # as the command does; the bare tokenizer is quicker so, too
    torch.set_num_threads(1)
    ShardMeasurer(config_of(Path(), processor))
    gc.collect()
    gc.freeze()


def medians(*calls: tuple[Any, ...], rounds: int) -> tuple[float, ...]:
    """The middle of each of the numbers that the calls return, function and arguments; they take turns, each in a fork
    of its own."""
    runs = [[number for call in calls for number in in_a_fork(*call)] for _ in range(rounds)]
    return tuple(statistics.median(each) for each in zip(*runs, strict=True))


def in_a_fork(function: Any, *arguments: Any) -> list[float]:
    """Runs a function in a process of its own; returns the number or numbers that it returns."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(function(*arguments)).encode())
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
    found = json.loads(said)
    return found if isinstance(found, list) else [found]


def config_of(path: Path, processor: Path) -> RunConfig:
    """A run on a data set, whose drops do not matter."""
    return RunConfig(
        data=DataConfig(path=str(path)),
        encoder=EncoderConfig(processor=str(processor)),
        packing=PackingConfig(seq_length=8192, drop_budget=1.0),
    )


def whole_command(path: Path, processor: Path, workers: int) -> tuple[float, float, float]:
    """What `measure` of a data set takes: seconds by the clock, CPU seconds of all processes, and of this one alone."""
    from energon_packing.offline.measure import MeasureConfig, measure

    with tempfile.TemporaryDirectory() as out:
        start, cpu = time.perf_counter(), time.process_time()
        measure(MeasureConfig(paths=(path,), out=Path(out) / "index", workers=workers), config_of(path, processor))
        seconds, own = time.perf_counter() - start, time.process_time() - cpu
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, own + others.ru_utime + others.ru_stime, own


def measured(path: Path, processor: Path) -> float:
    """CPU seconds of measuring a data set in this process, from the open index to the finished files.

    The processor is loaded before.
    """
    from energon_packing.offline.measure import ShardMeasurer
    from energon_packing.offline.source import source_parts

    config = config_of(path, processor)
    with tempfile.TemporaryDirectory() as out:
        measurer = ShardMeasurer(config)
        (part,) = source_parts(path, "train")
        cpu = time.process_time()
        for shard in part.shards:
            measurer.measure(part, shard, Path(out) / "index")
        return time.process_time() - cpu


def tokenized(path: Path, processor: Path) -> float:
    """CPU seconds in which the tokenizer encodes the rendered text of every sample, one call each."""
    from transformers import AutoTokenizer

    from energon_packing.offline.source import ShardIndex, source_parts

    (part,) = source_parts(path, "train")
    tokenizer = AutoTokenizer.from_pretrained(str(processor))
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


def prose() -> list[str]:
    """The words of Python's reference, each with the white space after it; a few words drawn over and over would cost
    the tokenizer less than any text that people write."""
    return re.findall(r"\S+\s*", "\n".join(topics[name] for name in sorted(topics)))


def write_dataset(path: Path, samples: int, *, images: int) -> None:
    """Converts conversations of two to eight turns, passages of `prose`, each conversation with that many images."""
    from PIL import Image

    from energon_packing.convert import ConvertConfig, convert

    source = path.with_name(f"{path.name}-source")
    source.mkdir()
    random = Random(7)
    names = []
    for number in range(16 if images else 0):
        names.append(f"{number}.jpg")
        Image.new("RGB", (random.randrange(200, 1600), random.randrange(200, 1600))).save(source / names[-1])
    words = prose()
    with (source / "records.jsonl").open("w", encoding="utf-8") as stream:
        for number in range(samples):
            messages = []
            for turn in range(2 * random.randrange(1, 5)):
                first = random.randrange(len(words) - 120)
                text = "".join(words[first : first + random.randrange(5, 120)]).strip()
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
            samples_per_shard=max(1, samples // 24),  # a file for fewer samples would count for much
            workers=2,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
