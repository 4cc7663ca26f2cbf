"""Peers of the offline road: Bridge's packed Parquet writer on the same text, LoongForge's planner on the same lengths.

* ``bridge``: conversations of text become packed Parquet files. Bridge tokenizes them with the model's chat template,
  packs and writes (``prepare_gpt_sft_packed_data``, one process, as shipped); ours measures, plans, and packs with
  ``--format bridge-parquet``. Conversion to a data set is given apart: it is done once for any number of plans.
* ``loongforge``: lengths of a mix of text, images and videos become packs. It packs each medium by itself, ours packs
  all together. Its best-fit decreasing is read from a checkout: ``--loongforge DIR``, the directory that holds
  ``wds_pack`` (``tools/data_preprocess/vlm/offline_packing`` of its repository).

Times are CPU seconds of one process after its imports.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from bench.offline_index import drawn_mix
from energon_packing.demo import processor_path
from energon_packing.demo.conversations import story
from energon_packing.packing.bound import lower_bound

SEARCH_PATH = os.pathsep.join(str(Path(__file__).resolve().parents[up]) for up in (2, 1))
"""Where a peer's process finds the package and the benchmarks."""


def write_texts(path: Path, samples: int) -> None:
    """Conversations of one question and answer, of log-normal length: median 900 characters (sigma 1.1)."""
    rng = Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(samples):
            question, answer = story(rng, max(40, int(rng.lognormvariate(6.8, 1.1))))
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": f"text-{number:06}", "messages": turns}) + "\n")


def by_bridge(place: Path, seq_length: int) -> dict[str, Any]:
    """Bridge's writer; its packs, tokens and CPU seconds.

    Raises:
        ImportError: Megatron-Bridge is not installed.
    """
    from energon_packing.bridge_cpu import stand_ins

    if stand_ins.needed():
        stand_ins.install()
    offline = import_module("megatron.bridge.data.packing.offline")
    builder = import_module("megatron.bridge.data.builders.gpt_sft")
    tokenizers = import_module("megatron.bridge.training.tokenizers.tokenizer")
    config = import_module("megatron.bridge.training.tokenizers.config").TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(processor_path("text"))
    )
    tokenizer = tokenizers.build_tokenizer(config)
    out = place / "bridge.parquet"
    start = time.process_time()
    offline.prepare_gpt_sft_packed_data(
        input_path=place / "texts.jsonl",
        output_path=out,
        output_metadata_path=place / "bridge.json",
        packed_sequence_size=seq_length,
        tokenizer=tokenizer,
        max_seq_length=seq_length,
        dataset_kwargs={"chat": True, "use_hf_tokenizer_chat_template": True},
        dataset_builder=builder.build_gpt_sft_split,
    )
    seconds = time.process_time() - start
    return {"cpu_seconds": round(seconds, 2), **_written([out])}


def by_ours(place: Path, seq_length: int) -> dict[str, Any]:
    """Our commands, one after the other."""
    from energon_packing.config import DataConfig, EncoderConfig, LimitsConfig, PackingConfig, RunConfig
    from energon_packing.convert import ConvertConfig, convert
    from energon_packing.executors.choice import ExecutorConfig
    from energon_packing.offline.bridge_parquet import pack_parquet
    from energon_packing.offline.measure import MeasureConfig, measure
    from energon_packing.offline.pack import SHARD_PACKS
    from energon_packing.offline.plan import Plan
    from energon_packing.offline.planner import make_plan

    import_module("transformers")
    run = RunConfig(
        data=DataConfig(path=str(place / "data")),
        # Bridge keeps samples of which hardly anything is learned.
        encoder=EncoderConfig(processor=str(processor_path("text")), limits=LimitsConfig(min_active_ratio=0.0)),
        packing=PackingConfig(seq_length=seq_length, drop_budget=1.0),
    )
    marks = [time.process_time()]
    convert(ConvertConfig(sources=(place / "texts.jsonl",), out=place / "data", split={"train": 1.0}, workers=0))
    marks.append(time.process_time())
    measure(MeasureConfig(paths=(place / "data",), out=place / "index", workers=0), run)
    marks.append(time.process_time())
    facts = make_plan([place / "index"], run, place / "plan.parquet")
    marks.append(time.process_time())
    plan = Plan.open(place / "plan.parquet")
    pack_parquet(plan, run, place / "packed", shard_packs=SHARD_PACKS, executor=ExecutorConfig(workers=0))
    marks.append(time.process_time())
    names = ("convert", "measure", "plan", "pack")
    parts = {name: round(seconds, 2) for name, seconds in zip(names, np.diff(marks).tolist(), strict=True)}
    written = _written(sorted((place / "packed").glob("[!.]*.parquet")))
    dropped = dict(facts.drops)
    return {"cpu_seconds": round(marks[-1] - marks[1], 2), "parts": parts, "dropped": dropped, **written}


def _written(files: Sequence[Path]) -> dict[str, Any]:
    import pyarrow.parquet as pq

    tokens = packs = 0
    for file in files:
        column = pq.read_table(file, columns=["input_ids"]).column("input_ids")
        packs += len(column)
        tokens += sum(len(chunk.values) for chunk in column.chunks)
    return {"packs": packs, "stored_tokens": tokens, "bytes": sum(file.stat().st_size for file in files)}


def by_loongforge(place: Path, seq_length: int) -> dict[str, Any]:
    """Its best-fit decreasing, medium by medium, from lengths in memory to bins."""
    logging.disable(logging.CRITICAL)
    processor_of = import_module("wds_pack.algorithms.hashbucket").HashBucketProcessor
    item_of = import_module("wds_pack.core.types").PackItem
    length, medium = _mix(place)
    packs = samples = 0
    seconds = 0.0
    for each in range(3):
        items = [item_of(sample_id=str(at), token_len=int(length[at])) for at in np.flatnonzero(medium == each)]
        start = time.process_time()
        boxes = processor_of.from_items(items).pack_best_fit_decreasing(box_capacity=seq_length)
        seconds += time.process_time() - start
        packs += len(boxes)
        samples += sum(len(box) for box in boxes)
    return {"cpu_seconds": round(seconds, 2), "packs": packs, "samples": samples}


def by_our_planner(place: Path, seq_length: int) -> dict[str, Any]:
    """Our packer on the same lengths."""
    from energon_packing import pack_lengths

    length, _ = _mix(place)
    pack_lengths(length[:1000], seq_length, "best_fit")  # imports, and what is compiled once
    start = time.process_time()
    groups = pack_lengths(length, seq_length, "best_fit")
    seconds = time.process_time() - start
    return {"cpu_seconds": round(seconds, 2), "packs": len(groups), "samples": sum(len(group) for group in groups)}


def _mix(place: Path) -> tuple[np.ndarray, np.ndarray]:
    """Lengths, and media: 0 text, 1 images, 2 a video."""
    made = np.load(place / "mix.npz")
    return made["length"], made["medium"]


def write_mix(place: Path, samples: int, seq_length: int) -> int:
    """Draws lengths that fit a row; returns the fewest rows that can hold them."""
    mix = drawn_mix(samples)
    fits = mix.length <= seq_length
    length = mix.length[fits]
    medium = np.where(mix.images == 0, 0, np.where(mix.files == mix.images, 1, 2))[fits]
    np.savez(place / "mix.npz", length=length, medium=medium)
    return lower_bound(length, seq_length)


PEERS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "bridge": by_bridge,
    "ours, Bridge's form": by_ours,
    "loongforge": by_loongforge,
    "ours, lengths": by_our_planner,
}


def _in_its_own_process(name: str, place: Path, seq_length: int, path: Path | None = None) -> dict[str, Any]:
    paths = [SEARCH_PATH, *([str(path)] if path else [])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", __name__, name, str(place), str(seq_length)],
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["it failed"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def results(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each peer and each of ours."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_texts(place / "texts.jsonl", given.texts)
        for name in ("bridge", "ours, Bridge's form"):
            row = _in_its_own_process(name, place, given.seq_length)
            yield {"packer": name, "samples": given.texts, "seq_length": given.seq_length, **row}
        bound = write_mix(place, given.samples, given.seq_length)
        names = ["ours, lengths"] if given.loongforge is None else ["loongforge", "ours, lengths"]
        for name in names:
            row = _in_its_own_process(name, place, given.seq_length, given.loongforge)
            yield {"packer": name, "seq_length": given.seq_length, "bound": bound, **row}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one JSON line per packer; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=4000, help="conversations of text")
    parser.add_argument("--samples", type=int, default=1_000_000, help="lengths")
    parser.add_argument("--seq-length", type=int, default=32768)
    parser.add_argument("--loongforge", type=Path, help="directory that holds its wds_pack")
    right = True
    for row in results(parser.parse_args(arguments)):
        print(json.dumps({"bench": "offline peers", **row}), flush=True)
        right = right and "error" not in row
    return 0 if right else 1


if __name__ == "__main__":
    print(json.dumps(PEERS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))))
