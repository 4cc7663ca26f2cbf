"""Indexes for tests, written through the real format, with sizes that the test chooses."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from energon_packing.config import EncoderConfig, to_mapping
from energon_packing.offline.data_paths import INDEX_FILE
from energon_packing.offline.files import write_table
from energon_packing.offline.index import SCHEMA, Index, IndexedDataset, IndexedShard, rows_file

Row = dict[str, Any]


def row(
    length: int,
    *,
    second: int = 0,
    images: int = 0,
    patches: int = 0,
    reason: str | None = None,
    frames: int = 0,
    turns: int = 2,
    targets: int | None = None,
) -> Row:
    """One sample; `made_index` adds its key and position."""
    detail = None if reason is None else f"because of {reason}"
    found = {"length": length, "second": second, "images": images, "patches": patches}
    found |= {"turns": turns, "stills": images, "videos": int(frames > 0), "frames": frames}
    found["pixels"] = 100 * (images + frames)
    return {**found, "targets": length // 2 if targets is None else targets, "reason": reason, "detail": detail}


def made_index(
    directory: Path,
    datasets: dict[str, Sequence[Sequence[Row]]],
    *,
    encoder: EncoderConfig | None = None,
    fingerprint: dict[str, str] | None = None,
) -> Path:
    """An index of data sets, each a list of shards, each a list of rows."""
    made = []
    for name, shards in datasets.items():
        (directory / name).mkdir(parents=True)
        indexed = []
        for number, rows in enumerate(shards):
            identity = {"bytes": 512 * (len(rows) + 1), "changed_ns": number, "index_uuid": f"uuid of {name}"}
            shard = IndexedShard(
                name=f"shard_{number}.tar",
                samples=len(rows),
                dropped=sum(each["reason"] is not None for each in rows),
                tokens=sum(each["length"] + each["second"] for each in rows if each["reason"] is None),
                identity=identity,
            )
            full = [
                {
                    **each,
                    "key": f"{name}-{number}-{at}",
                    "offset": 512 * at,
                    "size": 100 + at,
                    "media": [
                        {"name": f"{at}.{image}.jpg", "shard": 0, "offset": 1024 * image + at, "size": 7}
                        for image in range(each["images"])
                    ],
                }
                for at, each in enumerate(rows)
            ]
            table = pa.Table.from_pylist(full, schema=SCHEMA)
            write_table(directory / name / rows_file(shard.name), SCHEMA, [table], {"identity": identity})
            indexed.append(shard)
        made.append(
            IndexedDataset(
                name=name,
                path=f"/data/{name}",
                split="train",
                root=f"/data/{name}",
                media_root=f"/data/{name}/media",
                media_shards=("media_0.tar",),
                shards=tuple(indexed),
            )
        )
    Index(
        directory=directory,
        datasets=tuple(made),
        encoder=to_mapping(encoder or EncoderConfig()),
        fingerprint=fingerprint or {"processor": "one"},
    ).save()
    return directory


def before_splits_were_noted(directory: Path) -> None:
    """Makes an index one of the versions that did not note which split was asked for."""
    content = json.loads((directory / INDEX_FILE).read_text())
    for each in content["datasets"]:
        del each["asked"]
    (directory / INDEX_FILE).write_text(json.dumps(content))


def drawn_rows(count: int, *, seed: int = 0, most: int = 900) -> list[Row]:
    """Log-normal lengths, a third of the samples with images."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(4.5, 1.0, count), 1, most).astype(int)
    images = np.where(random.random(count) < 0.33, random.integers(1, 5, count), 0)
    return [
        row(int(length), images=int(image), patches=int(image) * 16)
        for length, image in zip(lengths, images, strict=True)
    ]
