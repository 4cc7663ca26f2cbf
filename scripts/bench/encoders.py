"""Benchmark of the encoders: CPU seconds of *measure* and *render* as ratios to what cannot be saved.

Everything runs in one process on one thread. Ours and what it is compared with take turns, pass by pass; each figure is
the median over the passes of the ratio within a pass. In the same run, every sample's tokens and pixels are compared
with those of the family's processor called on the whole sample, whose media other code than ours opens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.offline_processors import PROCESSORS

from bench import encoder_samples
from bench.encoder_samples import BenchSample
from energon_packing.errors import PackingError, UserError

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "internvl", "llava_next", "llava_onevision")
PIXELS = {"qwen2_5_vl": (200_704, 1_003_520), "qwen3_vl": (262_144, 1_310_720)}
"""Pixel limits of images, 256 to 1,280 tokens, as Bridge's recipes set them. The shipped processors' are smaller."""
SHARES = {"text": 0.45, "image": 0.45, "video": 0.10}
FASTER, TEXT, ROAD, CLOSE = 20.0, 1.32, 1.4, 1e-3
"""Targets: how many times faster measuring is, ratio of text, ratio of the whole path, difference of pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderBench:
    """What is measured.

    Attributes:
        families: names of `PROCESSORS`.
        samples: of each family, in the shares of `SHARES`; without videos for a family that takes none.
        sizes: ``camera`` (640x480 to 1920x1080) or ``demo`` (56x56 to 1920x1080, most of them small).
        repeat: passes over the samples.
        seed: of the samples.
    """

    families: tuple[str, ...] = FAMILIES
    samples: int = 80
    sizes: tuple[str, ...] = ("camera", "demo")
    repeat: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.families:
            if name not in PROCESSORS:
                raise UserError(f"there is no family {name!r} with media; known: {', '.join(PROCESSORS)}")
        for name in self.sizes:
            if name not in ("camera", "demo"):
                raise UserError(f"sizes is {name!r}; it must be camera or demo")
        if self.samples < 10 or self.repeat < 1:
            raise UserError(f"{self.samples} samples and {self.repeat} passes; at least 10 and 1 are needed")


def run(bench: EncoderBench, work: Path) -> Iterator[dict[str, Any]]:
    """Makes the samples and measures them.

    Args:
        bench: what is measured.
        work: directory for the data.

    Yields:
        One ``encoders.text``; then for each choice of sizes and each family an ``encoders.road`` and, for its images
        and its videos, an ``encoders.measure``.

    Raises:
        UserError: torchvision, which decodes the images of the floor, is not installed.
    """
    import torch

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number, sizes in enumerate(bench.sizes):
            samples = encoder_samples.make(
                work / sizes, bench.samples, SHARES, camera=sizes == "camera", seed=bench.seed
            )
            if number == 0:
                yield text_result(encoder_samples.make_text(work / sizes), bench.repeat)
            for family in bench.families:
                yield from family_results(family, samples, sizes, bench.repeat)
    finally:
        torch.set_num_threads(threads)


def take_turns(repeat: int, **calls: Callable[[], Any]) -> dict[str, list[float]]:
    """Returns the CPU seconds of each call in each pass; an additional first pass is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeat + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if number:
                seconds[name].append(time.process_time() - start)
    return seconds


def each[Entry](entries: Sequence[Entry], call: Callable[[Entry], Any]) -> None:
    """Calls and forgets: results that are kept take new memory, whose pages cost as much as some of the work."""
    for entry in entries:
        call(entry)


def ratio(seconds: dict[str, list[float]], over: str, under: str) -> float:
    """Returns the median ratio over the passes."""
    return round(statistics.median(a / b for a, b in zip(seconds[over], seconds[under], strict=True)), 3)


def milliseconds(seconds: Sequence[float], samples: int) -> float:
    """Returns the median over the passes, per sample."""
    return round(statistics.median(seconds) * 1e3 / samples, 3)


def _no_media(name: str) -> bytes:
    raise KeyError(name)


def text_result(samples: Sequence[BenchSample], repeat: int) -> dict[str, Any]:
    """Compares measuring and rendering text with tokenizing the rendered strings.

    They are tokenized by transformers' call, and by the tokenizers library under it, which gives no list of ids.

    Raises:
        PackingError: our tokens differ from the tokenizer's.
    """
    encoder = encoder_samples.build_encoder("text", None)
    conversations = [sample.conversation for sample in samples]
    texts = [encoder.template.render(conversation).text for conversation in conversations]
    tokenizer, backend = encoder.tokenizer, encoder.tokenizer.backend_tokenizer
    for text, conversation in zip(texts, conversations, strict=True):
        row = encoder.render(encoder.measure(conversation), _no_media)
        if row["input_ids"].tolist() != tokenizer(text, add_special_tokens=False)["input_ids"]:
            raise PackingError(f"{conversation.key}: our tokens differ from the tokenizer's")
    seconds = take_turns(
        4 * repeat,
        ours=lambda: each(conversations, lambda entry: encoder.render(encoder.measure(entry), _no_media)),
        tokenizer=lambda: each(texts, lambda text: tokenizer(text, add_special_tokens=False)),
        library=lambda: each(texts, lambda text: backend.encode(text, add_special_tokens=False)),
        template=lambda: each(conversations, encoder.template.render),
    )
    return {
        "benchmark": "encoders.text",
        "samples": len(samples),
        "tokens": round(statistics.mean(len(tokenizer(text)["input_ids"]) for text in texts)),
        "ours_ms": milliseconds(seconds["ours"], len(samples)),
        "template_ms": milliseconds(seconds["template"], len(samples)),
        "tokenizer_ms": milliseconds(seconds["tokenizer"], len(samples)),
        "library_ms": milliseconds(seconds["library"], len(samples)),
        "ratio": ratio(seconds, "ours", "tokenizer"),
        "ratio_to_library": ratio(seconds, "ours", "library"),
        "target": TEXT,
        "tokens_equal": True,
    }


def family_results(family: str, samples: Sequence[BenchSample], sizes: str, repeat: int) -> Iterator[dict[str, Any]]:
    """Yields the results of one family: the whole path (``encoders.road``), then measuring each kind of media."""
    from bench.encoder_floor import Floor

    encoder = encoder_samples.build_encoder(family, PIXELS.get(family))
    kinds = set(encoder.family.placeholders)
    samples = encoder_samples.shown_by(encoder, samples)
    floor = Floor(encoder, samples)
    compared = floor.compare()
    seconds = take_turns(
        repeat,
        ours=lambda: each(samples, lambda entry: encoder.render(encoder.measure(entry.conversation), entry.read)),
        floor=floor.run,
    )
    found = ratio(seconds, "ours", "floor")
    yield {
        "benchmark": "encoders.road",
        "family": family,
        "sizes": sizes,
        "samples": len(samples),
        "images": floor.count("image"),
        "videos": floor.count("video"),
        "ours_ms": milliseconds(seconds["ours"], len(samples)),
        "floor_ms": milliseconds(seconds["floor"], len(samples)),
        "ratio": found,
        "target": ROAD,
        **compared,
    }
    for kind in sorted(kinds):
        chosen = [entry for entry in samples if any(media.kind == kind for media in entry.conversation.media)]
        part = Floor(encoder, chosen)
        pixels = part.pixels()
        seconds = take_turns(
            repeat,
            measure=lambda: each(chosen, lambda entry: encoder.measure(entry.conversation)),  # noqa: B023
            tokenizer=part.tokenize,
            pixels=pixels.run,
            our_pixels=pixels.run_ours,
            decoding=part.decode,
        )
        seconds["media"] = [a + b for a, b in zip(seconds["pixels"], seconds["decoding"], strict=True)]
        yield {
            "benchmark": "encoders.measure",
            "family": family,
            "sizes": sizes,
            "kind": kind,
            "samples": len(chosen),
            "measure_ms": milliseconds(seconds["measure"], len(chosen)),
            "tokenizer_ms": milliseconds(seconds["tokenizer"], len(chosen)),
            "pixels_ms": milliseconds(seconds["pixels"], len(chosen)),
            "our_pixels_ms": milliseconds(seconds["our_pixels"], len(chosen)),
            "pixels_ratio": ratio(seconds, "our_pixels", "pixels"),
            "decoding_ms": milliseconds(seconds["decoding"], len(chosen)),
            "times_faster": ratio(seconds, "pixels", "measure"),
            "with_decoding": ratio(seconds, "media", "measure"),
            "target": FASTER,
        }


def verdict(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns which targets hold in every result, and the worst figure of each."""
    by = {name: [row for row in results if row["benchmark"] == f"encoders.{name}"] for name in ("text", "road")}
    measure = [row["times_faster"] for row in results if row["benchmark"] == "encoders.measure"]
    image = [row["times_faster"] for row in results if row.get("kind") == "image"]
    text, road = (max((row["ratio"] for row in by[name]), default=math.nan) for name in ("text", "road"))
    return {
        "benchmark": "encoders.verdict",
        "text_ratio": text,
        "text_holds": text <= TEXT,
        "road_ratio": road,
        "road_holds": road <= ROAD,
        "measure_times_faster": min(measure, default=math.nan),
        "measure_holds": bool(image) and min(image) >= FASTER,
        "equal": bool(by["road"]) and all(row["tokens_equal"] and row["pixels_within"] <= CLOSE for row in by["road"]),
    }


def parser() -> argparse.ArgumentParser:
    """Returns the options of ``scripts/bench.py encoders``."""
    options = argparse.ArgumentParser(prog="bench.py encoders", description=__doc__)
    options.add_argument("--family", action="append", help=f"family; may be repeated; {', '.join(FAMILIES)} by default")
    options.add_argument("--samples", type=int, default=EncoderBench().samples, help="samples per family")
    options.add_argument("--sizes", action="append", choices=("camera", "demo"), help="image sizes; both by default")
    options.add_argument("--repeat", type=int, default=EncoderBench().repeat, help="passes; figures are medians")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--work", type=Path, help="keep the data here; a temporary directory by default")
    options.add_argument(
        "--video-decode", type=float, metavar="SECONDS", help="only decode eight frames of clips of this length"
    )
    options.add_argument(
        "--jpeg-scaling", type=Path, metavar="PHOTOS", help="only decode the photographs of this directory at a part"
    )
    return options


def print_video_decode(seconds: float, repeat: int) -> int:
    """Prints the results of `bench.video_decode`.

    Raises:
        UserError: the clips are too short to have eight frames, or there is no pass.
        PackingError: our frames differ.
    """
    from bench import video_decode

    if seconds * video_decode.RATE < video_decode.WANTED or repeat < 1:
        raise UserError(f"{seconds} seconds and {repeat} passes; at least 1 of each is needed")
    for result in video_decode.run(seconds, repeat):
        print(json.dumps(result), flush=True)
    return 0


def print_jpeg_scaling(photos: Path, repeat: int) -> int:
    """Prints the results of `bench.jpeg_scaling`.

    Raises:
        UserError: there is no directory of photographs, or no pass.
    """
    from bench import jpeg_scaling

    if not photos.is_dir() or repeat < 1:
        raise UserError(f"{photos} and {repeat} passes; a directory and at least 1 are needed")
    for result in jpeg_scaling.run(photos, repeat):
        print(json.dumps(result), flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON line per result; 1 if our tokens or pixels differ, 2 on unusable input."""
    given = parser().parse_args(argv)
    default = EncoderBench()
    try:
        if given.video_decode is not None:
            return print_video_decode(given.video_decode, given.repeat)
        if given.jpeg_scaling is not None:
            return print_jpeg_scaling(given.jpeg_scaling, given.repeat)
        bench = EncoderBench(
            families=tuple(given.family or default.families),
            samples=given.samples,
            sizes=tuple(given.sizes or default.sizes),
            repeat=given.repeat,
            seed=given.seed,
        )
        results: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory(prefix="bench-encoders-") as temporary:
            for result in run(bench, given.work or Path(temporary)):
                results.append(result)
                print(json.dumps(result), flush=True)
        found = verdict(results)
        print(json.dumps(found), flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except PackingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if found["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
