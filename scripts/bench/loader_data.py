"""The data of the loader benchmark: the demo's conversations, converted once, in the form that each path reads.

Both paths get the same conversations with the same bytes of media. A conversion with ``check_media=header`` cannot see
the planted defects, so the loaders meet them: a JPEG that ends too early, and a conversation longer than a row.
"""

import hashlib
import json
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from energon_packing.conversation import Conversation
from energon_packing.convert import ConvertConfig, convert
from energon_packing.convert.layout import MEDIA_DIRECTORY, TEXT_DIRECTORY
from energon_packing.demo import make_data
from energon_packing.errors import PackingError

OVERLONG = 150_000
"""Characters of a planted overlong turn: more tokens than the rows of any sensible benchmark."""
CAMERA_SIZES = ((640, 480), (1024, 768), (1280, 720), (1600, 1200), (1920, 1080))
"""Sizes of the enlarged images in pixels; each is also used in portrait orientation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchData:
    """A converted data set, of one split: its directory, and the keys of samples with a planted defect."""

    root: Path
    samples: int
    defective: frozenset[str]


def prepare_data(
    work: Path,
    *,
    conversations: int,
    seed: int = 0,
    defects: int = 0,
    camera_images: bool = False,
) -> BenchData:
    """Makes and converts the conversations.

    Args:
        defects: how many samples get a planted defect; half of them a cut JPEG, half a turn of `OVERLONG` characters.
        camera_images: enlarge every image to a size of `CAMERA_SIZES`.

    Raises:
        PackingError: the conversion rejected a conversation.
    """
    made = make_data(work / "demo", conversations=conversations, seed=seed, defects=False)
    raw, random = work / "raw", Random(f"bench {seed}")
    shutil.rmtree(raw, ignore_errors=True)
    shutil.copytree(made, raw)
    if camera_images:
        _enlarge(raw, random)
    cut = _plant(raw, defects, random)
    report = convert(
        ConvertConfig(
            sources=(raw,), out=work / "ours", split={"train": 1.0}, workers=1, check_media="header", overwrite=True
        )
    )
    if report.rejected:
        raise PackingError(f"{report.rejected} conversations of the benchmark were rejected at conversion")
    found = [(conversation.key, _is_defective(conversation, cut)) for conversation in read_conversations(work / "ours")]
    return BenchData(
        root=work / "ours", samples=len(found), defective=frozenset(key for key, defective in found if defective)
    )


def read_conversations(root: Path) -> Iterator[Conversation]:
    """Yields the conversations of a converted polylithic data set, in the order of its shards."""
    for shard in sorted((root / TEXT_DIRECTORY).glob("*.tar")):
        for name, content in _members(shard):
            yield Conversation.from_record(name.removesuffix(".json"), json.loads(content))


def read_media(root: Path) -> dict[str, bytes]:
    """Returns all media of a converted polylithic data set: name -> bytes."""
    shards = sorted((root / MEDIA_DIRECTORY).glob("*.tar"))
    return {name: content for shard in shards for name, content in _members(shard)}


def _members(shard: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(shard) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None:
                yield member.name, file.read()


def _is_defective(conversation: Conversation, cut: set[str]) -> bool:
    return any(len(turn.text) > OVERLONG // 2 for turn in conversation.turns) or any(
        media.name.partition(".")[0] in cut for media in conversation.media
    )


def _enlarge(raw: Path, random: Random) -> None:
    """Enlarges every image to a camera's size and adds grain: smooth areas decode faster than any photograph."""
    grain = np.random.default_rng(0).integers(-12, 13, size=(1920, 1920, 3), dtype=np.int16)
    for path in sorted(path for path in (raw / "images").rglob("*") if path.is_file()):
        with Image.open(path) as image:
            image.load()
        wide = sorted(random.choice(CAMERA_SIZES), reverse=True)
        width, height = wide if image.width >= image.height else wide[::-1]
        large = np.asarray(image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
        drawn = Image.fromarray((large + grain[:height, :width]).clip(0, 255).astype(np.uint8))
        if path.suffix == ".jpg":
            drawn.save(path, exif=image.getexif(), quality=85)
        else:
            drawn.save(path)


def _plant(raw: Path, defects: int, random: Random) -> set[str]:
    """Plants the defects; returns the names (without extension) of the cut files in the converted data set."""
    files = sorted((raw / "images").rglob("*.jpg"))
    cut: set[str] = set()
    for path in random.sample(files, min(len(files), defects // 2)):
        content = path.read_bytes()
        content = content[: max(len(content) // 2, _scan_start(content) + 64)]
        path.write_bytes(content)
        cut.add(hashlib.sha256(content).hexdigest()[:32])
    source = raw / "sharegpt.json"
    records = json.loads(source.read_text(encoding="utf-8"))
    for record in random.sample(records, defects - defects // 2):
        turn = next(turn for turn in record["conversations"] if turn["from"] == "gpt")
        turn["value"] = (f"{turn['value']} " * OVERLONG)[:OVERLONG]
    source.write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")
    return cut


def _scan_start(content: bytes) -> int:
    """Returns where the pixels of a JPEG begin; a file cut before that lacks the header that a conversion reads."""
    return content.rindex(b"\xff\xda")
