"""The three ways to the packs of a plan, on any conversation files: whether all of them give the same epoch.

Each file of a directory is converted to a data set of its own; all are measured, planned together, packed as tokens,
with copied media and as pixels, and verified with every pack made anew. Then the epoch is read from the plan and from
each packed directory, and every field of every pack is compared. Without a directory, generated conversations with
images, videos and defects are read. With ``--train-steps``, a tiny model of Megatron-Bridge is trained on each of them
from the same weights, and its losses are compared bit for bit.

A directory like ``data`` of LLaMA-Factory is read as LLaMA-Factory does: where its ``dataset_info.json`` has an entry
for a file, the entry says what the columns mean. Files of which no record can be read, such as those with sound, are
counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.parity.models import tiny_family

from bench.loader import start
from bench.offline_steps import StepsJob
from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, PlanConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.convert.dataset_info import read_dataset_info
from energon_packing.demo import make_data, processor_path
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.energon.loader import build_task_encoder
from energon_packing.energon.pack_bytes import field_digests
from energon_packing.errors import UserError
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.pack import PackConfig, pack
from energon_packing.offline.packs import SampleRemeasurer
from energon_packing.offline.planner import make_plan
from energon_packing.offline.verify import VerifyConfig, verify

STORED: dict[str, dict[str, Any]] = {"tokens": {}, "copied": {"media": "copy"}, "pixels": {"store": "pixels"}}
INFO = "dataset_info.json"
RECORDS = (".json", ".jsonl", ".txt", ".parquet")
SAMPLES_PER_SHARD = 500
SHARD_PACKS = 16


def ways(
    place: Path,
    source: Path,
    *,
    processor: str,
    seq_length: int,
    oversize: Any = "drop",
    workers: int = 0,
    train_steps: int = 0,
    train_batch: int = 1,
) -> dict[str, Any]:
    """Goes the whole road from the files of `source`, in the directory `place`, and compares the epochs.

    Returns:
        Counts of records, samples and packs; what was rejected and dropped, by reason; ``findings`` of `verify`;
        ``same``: way -> whether its packs are those of the plan; a digest of the epoch; and the seconds of each part.
        With `train_steps`, the ``losses`` of the steps on the plan, of `train_batch` packs each, and ``same_losses``.

    Raises:
        UserError: no record can be read, or no tiny model can be trained.
    """
    if train_steps and not has_bridge():
        raise UserError("--train-steps needs Megatron-Bridge; install the extra 'bridge', or leave it out")
    seconds: dict[str, float] = {}
    with _timed(seconds, "convert"):
        data, rejected, unread = _converted(place, source, workers)
    run = RunConfig(
        data=DataConfig(path=str(data[0]), workers=0, repeat=False),
        encoder=EncoderConfig(processor=processor),
        packing=PackingConfig(seq_length=seq_length, oversize=oversize, drop_budget=1.0, pairs="both"),
        plan=PlanConfig(max_data_parallel=8),
    )
    encoder = build_task_encoder(run)
    own = encoder.encoder
    if train_steps and not (isinstance(own, ConversationEncoder) and tiny_family(own)):
        raise UserError(f"--train-steps: there is no tiny model for the family of {processor}; leave it out")
    with _timed(seconds, "measure"):
        index = measure(MeasureConfig(paths=tuple(data), out=place / "index", workers=workers), run).index
    assert index is not None, "one command measures all"
    with _timed(seconds, "plan"):
        remeasure = SampleRemeasurer(encoder, [place / "index"])
        facts = make_plan([place / "index"], run, place / "plan.parquet", limits=encoder.limits, remeasure=remeasure)
    paths = {"planned": place / "plan.parquet"} | {way: place / way for way in STORED}
    findings: list[str] = []
    for way, settings in STORED.items():
        with _timed(seconds, f"pack {way}"):
            options = {"out": paths[way], "workers": workers, "shard_packs": SHARD_PACKS, **settings}
            pack(PackConfig(plan=paths["planned"], **options))
        with _timed(seconds, f"verify {way}"):
            found = verify(VerifyConfig(directory=paths[way], share=1, workers=workers)).findings
        findings += [f"{way}: {finding}" for finding in found]
    epochs = {}
    for way, path in paths.items():
        with _timed(seconds, f"read {way}"):
            on_path = dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(path)))
            epochs[way] = list(_identities(open_loader(on_path)))
    keys = [key for _, keys, *_ in epochs["planned"] for key in keys]
    trained: dict[str, Any] = {}
    if train_steps:
        job = StepsJob(
            ways={way: str(path) for way, path in paths.items()},
            processor=processor,
            seq_length=seq_length,
            oversize=oversize,
            steps=train_steps,
            batch=train_batch,
        )
        with _timed(seconds, "train"):
            losses = start(job, place / "training.log", module="offline_steps", name="training")
        trained["losses"] = losses["planned"]
        trained["same_losses"] = {way: losses[way] == losses["planned"] for way in STORED}
    return {
        "datasets": len(data),
        "unread_files": unread,
        "rejected": dict(rejected),
        "samples": sum(shard.samples for part in index.datasets for shard in part.shards),
        "dropped": dict(facts.drops),
        "in_packs": len(keys),
        "images": facts.summary["images"],
        "tokens": facts.summary["tokens"],
        "packs": len(epochs["planned"]),
        "findings": findings,
        "same": {way: epochs[way] == epochs["planned"] for way in STORED},
        **trained,
        "epoch": hashlib.sha256(repr(epochs["planned"]).encode()).hexdigest()[:16],
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
    }


def has_bridge() -> bool:
    """Whether Megatron-Bridge is installed, which trains the tiny model."""
    return importlib.util.find_spec("megatron.bridge") is not None


def _converted(place: Path, source: Path, workers: int) -> tuple[list[Path], Counter[str], list[str]]:
    """Data sets of the files that have records, reasons of rejected records, and files without any usable one."""
    files = sorted(file for file in source.iterdir() if file.suffix in RECORDS and file.name != INFO)
    entries: dict[str, str] = {}
    if (source / INFO).is_file():
        listed = json.loads((source / INFO).read_text(encoding="utf-8"))
        entries = {entry["file_name"]: name for name, entry in listed.items() if "file_name" in entry}
    made, rejected, unread = [], Counter[str](), []
    for file in files:
        named = read_dataset_info(source / INFO, entries[file.name]) if file.name in entries else None
        options: dict[str, Any] = {}
        if named is not None:
            options = {"format": named.format, "column_map": named.column_map, "kto_label": named.kto_label}
        out = place / "data" / file.stem
        try:
            report = convert(
                ConvertConfig(
                    sources=(file,),
                    out=out,
                    media_root=source,
                    split={"train": 1.0},
                    samples_per_shard=SAMPLES_PER_SHARD,
                    workers=workers,
                    **options,
                )
            )
        except UserError:  # not one record
            unread.append(file.name)
            continue
        rejected.update(report.rejected)
        made.append(out)
    if not made:
        raise UserError(f"{source} has no file with conversations; name a directory of JSON files with --data")
    return made, rejected, unread


def _identities(packs: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Of each pack: global position, samples in order, a digest of every field, and what was dropped or changed."""
    for made in packs:
        dropped = tuple((entry.key, entry.reason) for entry in made.dropped)
        yield made.index, made.keys, sorted(field_digests(made.batch.finished()).items()), dropped


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one JSON line; 1 if a way gives another epoch or other losses, or `verify` finds something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given_data = os.environ.get("LLAMAFACTORY_DATA")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(given_data) if given_data else None,
        help="directory with conversation files; default: LLAMAFACTORY_DATA, else generated conversations",
    )
    parser.add_argument("--conversations", type=int, default=60, help="generated without --data")
    parser.add_argument("--processor", default=str(processor_path("qwen3_vl")), help="directory or name")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--oversize", default="drop", choices=("drop", "truncate", "split"))
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--train-steps", type=int, default=0, help="of a tiny model on each of them; 20 are enough")
    parser.add_argument("--train-batch", type=int, default=1, help="packs of a step")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        source = given.data or make_data(place / "made", conversations=given.conversations, seed=1)
        try:
            found = ways(
                place,
                source.absolute(),
                processor=given.processor,
                seq_length=given.seq_length,
                oversize=given.oversize,
                workers=given.workers,
                train_steps=given.train_steps,
                train_batch=given.train_batch,
            )
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    print(json.dumps({"bench": "offline ways", **found}), flush=True)
    same = [*found["same"].values(), *found.get("same_losses", {}).values()]
    return 0 if all(same) and not found["findings"] else 1


if __name__ == "__main__":
    sys.exit(main())
