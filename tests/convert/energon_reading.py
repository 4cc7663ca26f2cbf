"""Reads a converted data set back through Energon's own loader, with a cooker as small as it can be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megatron.energon import (
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    edataclass,
    get_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from megatron.energon.task_encoder.cooking import Cooker


@edataclass
class ReadSample(Sample):
    record: dict[str, Any]
    media: list[bytes]
    metadata: list[Any]


@dataclass
class Read:
    """One sample as it came out of Energon."""

    key: str
    record: dict[str, Any]
    media: list[bytes]
    metadata: list[Any]


def _cook(sample: dict, store: Any) -> ReadSample:
    record = json.loads(sample["json"])
    names = [entry["name"] for entry in record.get("media", [])]
    return ReadSample(
        **basic_sample_keys(sample),
        record=record,
        media=[store[name][0] for name in names],
        metadata=[store.get_media_metadata(name) for name in names],
    )


@stateless
def cook_polylithic(sample: dict, media: Any = None) -> ReadSample:
    return _cook(sample, media)


@stateless
@cooker(need_primary=True)
def cook_monolithic(sample: dict, primary: Any) -> ReadSample:
    return _cook(sample, primary)


class _Encoder(DefaultTaskEncoder):
    decoder = None

    def __init__(self, cook: Any) -> None:
        super().__init__()
        self.cookers = [Cooker(cook, has_subflavors={"energon_packing": "v1"})]


def read_dataset(entry: str, split: str = "train") -> dict[str, Read]:
    """Every sample of a split, by key; fails on a key that comes twice."""
    encoder = _Encoder(cook_polylithic if entry.endswith(".yaml") else cook_monolithic)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    if split == "val":
        dataset: Any = get_val_dataset(
            entry, split_part="val", worker_config=config, batch_size=None, task_encoder=encoder
        )
    else:
        dataset = get_train_dataset(
            entry,
            split_part=split,
            worker_config=config,
            batch_size=None,
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
            repeat=False,
            task_encoder=encoder,
        )
    found: dict[str, Read] = {}
    for sample in get_loader(dataset):
        assert sample.__key__ not in found
        found[sample.__key__] = Read(
            key=sample.__key__, record=sample.record, media=sample.media, metadata=sample.metadata
        )
    return found
