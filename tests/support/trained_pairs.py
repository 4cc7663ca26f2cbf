"""Four data sets with answers that nobody wants, and everybody who could train them."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from energon_packing.config import DataConfig, EncoderConfig, LimitsConfig, PackingConfig, RunConfig
from energon_packing.demo import processor_path

COUNT = 8
"""Records of a made data set."""
Record = dict[str, Any]


def ask(n: int) -> str:
    return f"Why is number {n} odd?"


def good(n: int) -> str:
    return f"Because two does not divide {n}, which is the reason."


def bad(n: int) -> str:
    return f"Nobody knows anything about {n}, go away."


def said(*texts: str) -> list[Record]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=False)]


def ranking(n: int) -> Record:
    answers = {"chosen": {"from": "gpt", "value": good(n)}, "rejected": {"from": "gpt", "value": bad(n)}}
    return {"conversations": [{"from": "human", "value": ask(n)}], **answers}


def labelled(n: int) -> Record:
    return {"messages": said(ask(n), bad(n) if n % 2 else good(n)), "label": not n % 2}


def swift(n: int) -> Record:
    return {"messages": said(ask(n), good(n)), "rejected_response": bad(n)}


def implicit(n: int) -> Record:
    return {"chosen": said(ask(n), good(n)), "rejected": said(ask(n), bad(n))}


LLAMA_FACTORY = {
    "dpo": {
        "file_name": "dpo.json",
        "formatting": "sharegpt",
        "ranking": True,
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "kto": {
        "file_name": "kto.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
}
DATA_SETS: Mapping[str, Callable[[int], Record]] = {
    "LLaMA-Factory dpo": ranking,
    "LLaMA-Factory kto": labelled,
    "ms-swift rejected_response": swift,
    "TRL implicit prompt": implicit,
}


def conversion(name: str, folder: Path) -> list[str]:
    """Writes the files of a data set, and returns the arguments of ``convert`` without any choice about labels."""
    folder.mkdir(parents=True, exist_ok=True)
    entry = name.removeprefix("LLaMA-Factory ")
    records = [DATA_SETS[name](n) for n in range(COUNT)]
    if entry != name:
        (folder / f"{entry}.json").write_text(json.dumps(records))
        (folder / "dataset_info.json").write_text(json.dumps(LLAMA_FACTORY))
        return ["--dataset-info", str(folder / "dataset_info.json"), "--dataset", entry]
    (folder / "some.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return [str(folder / "some.jsonl")]


def run_of(data: Path, pairs: str | None = None, *, repeat: bool = False) -> RunConfig:
    """A run on a data set; without a choice, with the default."""
    chosen: dict[str, Any] = {} if pairs is None else {"pairs": pairs}
    return RunConfig(
        data=DataConfig(path=str(data), workers=0, shuffle_buffer=1, repeat=repeat),
        encoder=EncoderConfig(
            processor=str(processor_path("text")), modality="text", limits=LimitsConfig(min_active_ratio=0.0)
        ),
        packing=PackingConfig(seq_length=2048, window=4, **chosen),
    )


def trained(tokenizer: Any, labels: torch.Tensor, weights: torch.Tensor) -> Iterator[str]:
    """The texts that a batch trains: each run of positions with a weight, decoded."""
    for row, weight in zip(labels.reshape(-1, labels.shape[-1]), weights.reshape(-1, labels.shape[-1]), strict=True):
        for learned, group in itertools.groupby(
            zip(row.tolist(), (weight > 0).tolist(), strict=True), lambda at: at[1]
        ):
            if learned:
                yield tokenizer.decode([token for token, _ in group]).strip().removesuffix("<|im_end|>")


def bridge(run: RunConfig, scratch: Path, mode: Any = "packs") -> Iterator[Mapping[str, Any]]:
    from megatron.bridge.data.base import DatasetBuildContext

    from energon_packing.bridge import PackedEnergonDatasetConfig

    made = PackedEnergonDatasetConfig(
        path=run.data.path,
        processor=run.encoder.processor,
        seq_length=run.packing.seq_length,
        mode=mode,
        micro_batch_size=1 if mode == "packs" else 2,
        num_workers=0,
        do_validation=False,
    )
    made.encoder.modality, made.encoder.limits.min_active_ratio = "text", 0.0
    if mode == "packs":
        made.packing.window = run.packing.window
    made.packing.pairs = run.packing.pairs
    if mode != "packs":
        made._run_layout = (False, None)
    context = DatasetBuildContext(train_samples=100, valid_samples=0, test_samples=0, pg_collection=None)
    iterator: Any = made.build_datasets(context)[0]
    return itertools.islice(iterator, COUNT if mode == "packs" else 5 * COUNT)


def megatron_lm(run: RunConfig, scratch: Path) -> Iterator[Mapping[str, Any]]:
    from energon_packing.energon.replica import Replica
    from energon_packing.megatron_lm.dataloader import PackDataloader

    loader = PackDataloader(
        run_of(Path(run.data.path), run.packing.pairs, repeat=True), Replica.of(None), split="train"
    )
    return (batch.to_bridge() for batch in itertools.islice(loader, 3))


def energon(run: RunConfig, task_encoder: Any, **arguments: Any) -> Any:
    """A training loop of one's own, which knows our task encoder alone: nobody looks at the data before."""
    from megatron.energon import WorkerConfig, get_loader, get_train_dataset

    from energon_packing.convert.layout import dataset_entry

    dataset = get_train_dataset(
        dataset_entry(run.data.path),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=task_encoder,
        repeat=False,
        **arguments,
    )
    return get_loader(dataset)


def plain_energon(run: RunConfig, scratch: Path, **arguments: Any) -> Iterator[Mapping[str, Any]]:
    from energon_packing.energon.task_encoder import PackingTaskEncoder

    encoder = PackingTaskEncoder(run.encoder, run.packing)
    return (pack.batch.to_bridge() for pack in energon(run, encoder, batch_size=None, **arguments))


def single_rows(run: RunConfig, scratch: Path) -> Iterator[Mapping[str, Any]]:
    from energon_packing.energon.sample_task_encoder import TextTaskEncoder

    encoder = TextTaskEncoder(run.encoder, max_length=512, pairs=run.packing.pairs)
    return ({"labels": batch.labels, "loss_mask": batch.loss_mask} for batch in energon(run, encoder, batch_size=2))


def planned(run: RunConfig, scratch: Path, *, packed: bool = False) -> Iterator[Mapping[str, Any]]:
    import dataclasses

    from energon_packing.offline.measure import MeasureConfig, measure
    from energon_packing.offline.open_loader import open_loader
    from energon_packing.offline.pack import PackConfig, pack
    from energon_packing.offline.planner import make_plan

    measure(MeasureConfig(paths=(Path(run.data.path),), out=scratch / "index", workers=0), run)
    make_plan([scratch / "index"], run, scratch / "plan.parquet")
    place = scratch / "plan.parquet"
    if packed:
        pack(PackConfig(plan=place, out=scratch / "packed", workers=0))
        place = scratch / "packed"
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(place)))
    return (pack.batch.to_bridge() for pack in open_loader(run))


Consumer = Callable[[RunConfig, Path], Iterator[Mapping[str, Any]]]
CONSUMERS: Mapping[str, Consumer] = {
    "Bridge, packs": bridge,
    "Bridge, in_batch": lambda run, scratch: bridge(run, scratch, "in_batch"),
    "Bridge, padded": lambda run, scratch: bridge(run, scratch, "padded"),
    "Megatron-LM": megatron_lm,
    "plain Energon": plain_energon,
    "plain Energon, disjoint buffers": lambda run, scratch: plain_energon(run, scratch, packing_buffer_size=4),
    "plain Energon, single rows": single_rows,
    "from a plan": planned,
    "from packed rows": lambda run, scratch: planned(run, scratch, packed=True),
}
ONE_ROW_PER_SAMPLE = ("Bridge, in_batch", "Bridge, padded", "plain Energon, single rows")


def texts(consumer: str, data: Path, pairs: str | None, scratch: Path) -> set[str]:
    """What a consumer trains of a data set."""
    run = run_of(data, pairs)
    tokenizer = AutoTokenizer.from_pretrained(run.encoder.processor)
    found: set[str] = set()
    for batch in CONSUMERS[consumer](run, scratch):
        found.update(trained(tokenizer, batch["labels"], batch["loss_mask"]))
    return found
