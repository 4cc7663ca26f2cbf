"""All stages in one run, nothing faked: conversations, an Energon data set, packs, a Bridge model that learns.

``scripts/demo.sh`` starts it. It ends with one table and exit code 0; a mistake ends it with one sentence and code 2.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, ParallelConfig, RunConfig
from energon_packing.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # `support`
TRAINED = ("qwen2_5_vl", "qwen3_vl")
console = Console()


def say(message: str) -> None:
    """Prints one line of progress."""
    console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {message}", highlight=False, soft_wrap=True)


class Steps:
    """A progress bar on a terminal, a line every few steps in a log."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.every = what, total, max(1, total // 4)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> Steps:
        self.bar.start()
        self.task = self.bar.add_task(self.what, total=self.total)
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def done(self, count: int, note: str) -> None:
        """Shows that step ``count``, from 1, is done."""
        self.bar.update(self.task, completed=count)
        if not console.is_terminal and (count % self.every == 0 or count == self.total):
            say(f"{self.what}: step {count}/{self.total}, {note}")


@dataclasses.dataclass(kw_only=True)
class Epoch:
    """Counts of one epoch of packs."""

    packs: int = 0
    emitted: int = 0
    real: int = 0
    real_without_flush: int = 0
    packs_without_flush: int = 0
    longest_row: int = 0
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    keys: Counter[str] = dataclasses.field(default_factory=Counter)


def read_epochs(*configs: RunConfig) -> list[Epoch]:
    """Reads one epoch of each configuration, all at once, and checks every pack.

    Raises:
        UserError: the first configuration gives no pack.
    """
    from energon_packing.energon.loader import build_loader

    once = [dataclasses.replace(config, data=dataclasses.replace(config.data, repeat=False)) for config in configs]
    epochs = [Epoch() for _ in once]
    for packs in itertools.zip_longest(*map(build_loader, once)):
        for epoch, config, pack in zip(epochs, configs, packs, strict=True):
            if pack is not None:
                count(epoch, config, pack)
    if not epochs[0].packs:
        raise UserError("The epoch has no packs: no sample was usable. See the reasons above and in rejects.jsonl.")
    return epochs


def count(epoch: Epoch, config: RunConfig, pack: Any) -> None:
    """Checks one pack and adds it to the epoch."""
    from energon_packing import thd

    if broken := thd.check_thd(pack.batch, multiple=config.parallel.multiple):
        raise SystemExit(f"pack {pack.index} breaks an invariant: {broken}")
    batch = pack.batch
    epoch.packs += 1
    epoch.emitted += batch.num_samples
    epoch.real += batch.real_tokens
    epoch.longest_row = max(epoch.longest_row, batch.total_tokens)
    epoch.keys.update(batch.sample_keys)
    epoch.dropped.update(entry.reason for entry in pack.dropped)
    if not pack.flush:
        epoch.packs_without_flush += 1
        epoch.real_without_flush += batch.real_tokens


def train(config: RunConfig, steps: int, learning_rate: float) -> tuple[str, Any]:
    """Trains a tiny, randomly initialised Bridge model on the packs; returns the family and Bridge's report."""
    from support.bridge_cpu import stand_ins, tiny_models, training_run

    stand_ins.install()
    from energon_packing.bridge import PackedEnergonDatasetConfig
    from energon_packing.encoders.encoder import ConversationEncoder

    encoder = ConversationEncoder(config.encoder)
    family = encoder.family.name
    if family not in tiny_models.FAMILIES:
        raise UserError(f"The demo has no tiny Bridge model for the family {family}; use --steps 0 for packs only.")
    tokens = None
    if family != "text":
        ids = [encoder.family.check_token(f"<|{name}|>") for name in ("vision_start", "vision_end")]
        media = encoder.family.placeholder_ids
        tokens = tiny_models.SpecialTokens(
            vision_start=ids[0], vision_end=ids[1], image=media["image"], video=media["video"]
        )
    length = config.packing.seq_length
    model = tiny_models.provider(family, vocab_size=len(encoder.tokenizer), tokens=tokens, seq_length=length)
    dataset = PackedEnergonDatasetConfig(
        path=config.data.path,
        processor=config.encoder.processor,
        seq_length=length,
        num_workers=1,
        num_val_workers=0,
    )
    dataset.packing.window = config.packing.window
    dataset.packing.drop_budget = config.packing.drop_budget
    step = "gpt" if family == "text" else "vlm"
    with Steps(f"training {family} ({step}_step)", steps) as progress, training_run.process_groups():
        run = training_run.make_config(model, dataset, steps=steps, eval_iters=2, learning_rate=learning_rate)
        result = training_run.run(
            run,
            forward_step=step,
            on_step=lambda report: progress.done(report.step, f"loss {report.loss:.4f}"),
        )
    return family, result


def summary(
    report: Any, config: RunConfig, epoch: Epoch, aligned: Epoch, runs: list[tuple[str, Any]], began: float
) -> None:
    """Prints the table at the end."""
    length = config.packing.seq_length
    table = Table(title="energon_packing: from conversations to training", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    rows: list[tuple[str, str]] = [("records read", f"{report.read:,}")]
    rows += [("  rejected", f"{sum(report.rejected.values()):,}")]
    rows += [(f"    {reason}", f"{count:,}") for reason, count in sorted(report.rejected.items())]
    rows += [("samples in the data set", ", ".join(f"{name} {count:,}" for name, count in report.splits.items()))]
    rows += [(f"one epoch of {config.data.split}: samples emitted", f"{epoch.emitted:,} (each key once)")]
    rows += [("  dropped", f"{sum(epoch.dropped.values()):,}")]
    rows += [(f"    {reason}", f"{count:,}") for reason, count in sorted(epoch.dropped.items())]
    rows += [("packs", f"{epoch.packs:,} rows of {length:,} tokens")]
    if epoch.packs_without_flush:
        fill = epoch.real_without_flush / epoch.packs_without_flush / length
        rows += [(f"fill, window {config.packing.window}", f"{fill:.2%} ({epoch.packs_without_flush:,} packs)")]
    rows += [("fill with the final flush", f"{epoch.real / epoch.packs / length:.2%}")]
    alone = epoch.emitted * length
    saved = (alone - epoch.packs * length) / (alone - epoch.real) if alone > epoch.real else 0.0
    rows += [
        (
            "padding saved, compared with one sample per row",
            f"{saved:.2%} ({epoch.emitted:,} rows become {epoch.packs:,})",
        )
    ]
    rows += [("longest row at TP 2, CP 2, SP (multiple 4)", f"{aligned.longest_row:,} of {length:,} tokens")]
    for family, result in runs:
        losses = result.losses
        rows += [(f"{family}: loss, first -> last of {len(losses)}", f"{losses[0]:.4f} -> {losses[-1]:.4f}")]
        if result.held_out_before is not None:
            change = f"{result.held_out_before:.4f} -> {result.held_out_after:.4f}"
            rows += [(f"{family}: loss on held-out samples", change)]
    rows += [("seconds", f"{time.monotonic() - began:.0f}")]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def prepare(data: tuple[Path, ...], out: Path, conversations: int, seed: int, overwrite: bool) -> Any:
    """Makes the conversations, or takes those given, and converts them; finished work is kept."""
    from energon_packing.convert import ConvertConfig, convert

    if not data:
        from energon_packing.demo import make_data

        say(f"making {conversations} conversations with images and videos (some broken on purpose)")
        data = (make_data(out / "raw", conversations=conversations, seed=seed),)
    for path in data:
        if not path.exists():
            raise UserError(f"--data {path} does not exist; name conversation files or a directory of them.")
    # Named after its sources, so that the demo on your data does not replace the demo on ours.
    name = hashlib.sha256("\n".join(str(path.resolve()) for path in data).encode()).hexdigest()[:12]
    report = convert(
        ConvertConfig(
            sources=data,
            out=out / f"dataset-{name}",
            split={"train": 0.9, "val": 0.1},
            resume=True,
            overwrite=overwrite or not data[0].is_file(),
        )
    )
    kept = " (kept from the last run)" if report.skipped else ""
    say(f"converted {report.written:,} of {report.read:,} records to {report.out}{kept}")
    for reason, count in sorted(report.rejected.items()):
        say(f"  rejected {count}: {reason}")
    return report


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--data", multiple=True, type=click.Path(path_type=Path), help="Conversation file or directory; may be repeated."
)
@click.option("--processor", help="Directory or hub name of a Hugging Face processor or tokenizer.")
@click.option("--seq-length", default=4096, show_default=True, help="Tokens per row.")
@click.option("--window", default=256, show_default=True, help="Measured samples held for selection.")
@click.option("--steps", default=20, show_default=True, help="Optimizer steps per model; 0 trains nothing.")
@click.option("--learning-rate", default=2e-3, show_default=True)
@click.option("--conversations", default=480, show_default=True, help="Conversations to make, without --data.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--out", default=ROOT / ".demo", type=click.Path(path_type=Path), help="Working directory [default: .demo]."
)
@click.option("--overwrite", is_flag=True, help="Convert again even if the data set is finished.")
@click.option("--json", "as_json", type=click.Path(path_type=Path), help="Write the figures to this file too.")
def main(
    data: tuple[Path, ...],
    processor: str | None,
    seq_length: int,
    window: int,
    steps: int,
    learning_rate: float,
    conversations: int,
    seed: int,
    out: Path,
    overwrite: bool,
    as_json: Path | None,
) -> None:
    """Conversations -> Energon data set -> packs -> loss going down in a real Megatron-Bridge model, on the CPU."""
    began = time.monotonic()
    report = prepare(data, out, conversations, seed, overwrite)

    from energon_packing.demo import processor_path

    processors = [processor] if processor else [str(processor_path(family)) for family in TRAINED]
    base = RunConfig(
        data=DataConfig(path=report.out, workers=1),
        encoder=EncoderConfig(processor=processors[0]),
        packing=PackingConfig(seq_length=seq_length, window=window),
    )
    say(f"packing one epoch at seq_length {seq_length} with {Path(processors[0]).name}, alone and for TP 2, CP 2, SP")
    parallel = ParallelConfig(tensor_parallel=2, context_parallel=2, sequence_parallel=True)
    epoch, aligned = read_epochs(base, dataclasses.replace(base, parallel=parallel))
    if max(epoch.keys.values()) != 1 or epoch.keys != aligned.keys:
        raise SystemExit(f"a sample was emitted twice or not at all: {epoch.keys.most_common(1)}")
    runs = []
    for path in processors if steps else ():
        config = dataclasses.replace(base, encoder=dataclasses.replace(base.encoder, processor=path))
        say(f"training a tiny Bridge model on packs of {Path(path).name}")
        runs.append(train(config, steps, learning_rate))
    summary(report, base, epoch, aligned, runs, began)
    if as_json is not None:
        figures = dataclasses.asdict(epoch) | {"keys": len(epoch.keys), "dropped": dict(epoch.dropped)}
        losses = {
            family: {"losses": run.losses, "held_out": [run.held_out_before, run.held_out_after]}
            for family, run in runs
        }
        as_json.write_text(
            json.dumps({"convert": dataclasses.asdict(report), "epoch": figures, "training": losses}, indent=2)
        )


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except (UserError, click.ClickException) as error:
        console.print(
            f"[bold red]Error:[/bold red] {getattr(error, 'message', error)}", highlight=False, soft_wrap=True
        )
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        console.print("interrupted; finished work is kept, start again to continue")
        # Loader workers still hold queues; nothing is worth waiting for.
        os._exit(130)
