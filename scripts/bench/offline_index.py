"""An index of samples that do not exist, for benchmarks of what reads indexes: a log-normal mix of texts and media.

Of the samples, 60 % are text, 32 % have one to four images and 8 % have a video of 8 to 48 frames. Text has a
log-normal length of median 220 tokens (sigma 1.1), an image one of median 420 (sigma 0.6), and a frame of a video one
of median 90 (sigma 0.4). A patch is a quarter of a visual token.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from energon_packing.config import EncoderConfig, to_mapping
from energon_packing.offline.files import write_table
from energon_packing.offline.index import MEDIA, SCHEMA, Index, IndexedDataset, IndexedShard, rows_file

SHARD, DISTINCT = 10_000, 1_000_000
"""Samples of a shard, and how many are drawn: shards of a larger index are links to the files of these."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Drawn samples: ``[N]`` tokens, images (frames of a video counted one by one), patches, and files of media."""

    length: np.ndarray
    images: np.ndarray
    patches: np.ndarray
    files: np.ndarray


def drawn_mix(samples: int, seed: int = 0) -> Mix:
    """Draws a mix; see the module's docstring."""
    random = np.random.default_rng(seed)
    kind = random.random(samples)
    text = random.lognormal(np.log(220), 1.1, samples)
    count = random.integers(1, 5, samples)
    frames = random.integers(8, 49, samples)
    image = kind > 0.6
    video = kind > 0.92
    images = np.where(video, frames, np.where(image, count, 0))
    each = np.where(video, random.lognormal(np.log(90), 0.4, samples), random.lognormal(np.log(420), 0.6, samples))
    visual = (images * each).astype(np.int64)
    return Mix(
        length=np.maximum(text.astype(np.int64), 8) + visual,
        images=images,
        patches=4 * visual,
        files=np.where(video, 1, images),
    )


def write_index(directory: Path, samples: int, seed: int = 0, mix: Mix | None = None) -> Mix:
    """Writes an index of `samples` samples, of a mix or drawn, in shards of `SHARD`, and returns what they are."""
    mix = mix or drawn_mix(min(samples, DISTINCT), seed)
    (directory / "mix").mkdir(parents=True)
    shards: list[IndexedShard] = []
    for number in range(-(-samples // SHARD)):
        if number >= DISTINCT // SHARD and samples - number * SHARD >= SHARD:
            known = shards[number % (DISTINCT // SHARD)]
            shards.append(replace(known, name=f"shard_{number}.tar"))
            os.link(*(directory / "mix" / rows_file(each.name) for each in (known, shards[-1])))
            continue
        start = number * SHARD % DISTINCT
        stop = min(start + SHARD, start + samples - number * SHARD)
        table = _table(mix, start, stop, number)
        identity = {"bytes": 1 << 30, "changed_ns": number, "index_uuid": "made"}
        shard = IndexedShard(
            name=f"shard_{number}.tar",
            samples=stop - start,
            dropped=0,
            tokens=int(mix.length[start:stop].sum()),
            identity=identity,
        )
        write_table(directory / "mix" / rows_file(shard.name), SCHEMA, [table], {"identity": identity})
        shards.append(shard)
    root = str(directory / "data")
    dataset = IndexedDataset(
        name="mix",
        path=root,
        split="train",
        root=root,
        media_root=root,
        media_shards=tuple(shard.name for shard in shards),
        shards=tuple(shards),
    )
    Index(directory=directory, datasets=(dataset,), encoder=to_mapping(EncoderConfig()), fingerprint={}).save()
    return mix


def _table(mix: Mix, start: int, stop: int, number: int) -> pa.Table:
    count = stop - start
    files = mix.files[start:stop]
    offsets = np.concatenate([[0], np.cumsum(files)])
    total = int(offsets[-1])
    media = pa.StructArray.from_arrays(
        [
            pa.array([f"{start + at:08}.{place}.jpg" for at, place in _numbered(files)], pa.string()),
            pa.array(np.full(total, number, np.int32)),
            pa.array(np.arange(total, dtype=np.int64) * 200_000),
            pa.array(np.full(total, 150_000, np.int64)),
        ],
        fields=list(MEDIA.value_type),
    )
    columns = {
        "key": pa.array([f"{at:08}" for at in range(start, stop)]),
        "offset": pa.array(np.arange(count, dtype=np.int64) * 4096),
        "size": pa.array(np.full(count, 2000, np.int32)),
        "length": pa.array(mix.length[start:stop].astype(np.int32)),
        "second": pa.array(np.zeros(count, np.int32)),
        "targets": pa.array((mix.length[start:stop] // 3).astype(np.int32)),
        "images": pa.array(mix.images[start:stop].astype(np.int32)),
        "patches": pa.array(mix.patches[start:stop]),
        "turns": pa.array(np.full(count, 2, np.int32)),
        "stills": pa.array((files * (mix.images[start:stop] < 8)).astype(np.int32)),
        "videos": pa.array((mix.images[start:stop] >= 8).astype(np.int32)),
        "frames": pa.array((mix.images[start:stop] * (mix.images[start:stop] >= 8)).astype(np.int32)),
        "pixels": pa.array(mix.patches[start:stop] * 196),
        "media": pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), media, type=MEDIA),
        "reason": pa.nulls(count, pa.string()),
        "detail": pa.nulls(count, pa.string()),
    }
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _numbered(files: np.ndarray) -> list[tuple[int, int]]:
    return [(at, place) for at, count in enumerate(files.tolist()) for place in range(count)]
