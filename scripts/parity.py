"""Does a model compute the same for a pack of your data as for its samples alone? See the examples of ``--help``."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from energon_packing.config import load_config
from energon_packing.errors import UserError

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # `support`

_EXAMPLES = """
Examples:

\b
  python scripts/parity.py --config run.yaml
  python scripts/parity.py --config run.yaml --model path/or/name --packs 4
  python scripts/parity.py --config run.yaml --cp 2
  python scripts/parity.py --config run.yaml --break boundaries     the control: must exit with 1

Exit codes: 0 packed and alone agree, 1 they differ, 2 unusable input.
"""


@click.command(epilog=_EXAMPLES)
@click.option("--config", "config_path", metavar="CFG", type=click.Path(), help="YAML configuration of the run.")
@click.option("--set", "overrides", metavar="SECTION.KEY=VALUE", multiple=True, help="Change a value; may be repeated.")
@click.option("--model", metavar="PATH", help="Hugging Face model. Default: a tiny random one of the family.")
@click.option("--packs", default=2, show_default=True, type=click.IntRange(min=1), help="Packs to compare.")
@click.option("--cp", "cp_size", type=click.IntRange(min=1), help="Context-parallel ranks. Default: as in CFG.")
@click.option(
    "--attention",
    type=click.Choice(["mask", "positions"]),
    default="mask",
    show_default=True,
    help="How the Hugging Face model separates samples: by a block-diagonal mask, or by positions that restart.",
)
@click.option("--device", default="cpu", show_default=True, help="Device of the Hugging Face model.")
@click.option(
    "--tolerance", type=click.FloatRange(min=0, min_open=True), help="Largest difference allowed. [default: 1e-4]"
)
@click.option(
    "--break",
    "break_",
    type=click.Choice(["boundaries", "positions", "labels"]),
    help="The control: make this mistake on purpose, on the Hugging Face model; parity must find it.",
)
@click.option("--bfloat16", is_flag=True, help="Compare distances from float32 in bfloat16 too, of the first pack.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.pass_context
def parity(
    ctx: click.Context,
    config_path: str | None,
    overrides: tuple[str, ...],
    model: str | None,
    packs: int,
    cp_size: int | None,
    attention: Any,
    device: str,
    tolerance: float | None,
    break_: Any,
    bfloat16: bool,
    as_json: bool,
) -> None:
    """Compare packs of the data set with their samples alone: logits, loss and gradient of each segment.

    Then change one segment of each pack and check that no other segment changes.
    """
    from support.parity.run import compare_run

    config = load_config(config_path, overrides)
    if cp_size is not None:
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, context_parallel=cp_size))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, workers=0))
    outcome = compare_run(
        config,
        model=model,
        packs=packs,
        attention=attention,
        device=device,
        tolerance=tolerance,
        break_=break_,
        bfloat16=bfloat16,
    )
    if as_json:
        click.echo(json.dumps(outcome, indent=2))
    else:
        _print(outcome)
    if outcome["failures"]:
        ctx.exit(1)


def _print(outcome: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"{outcome['model']}; attention: {outcome['attention']}; context parallel {outcome['context_parallel']}, "
        f"multiple {outcome['multiple']}" + (f"; broken on purpose: {outcome['broken']}" if outcome["broken"] else ""),
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("pack.seg", "key", "tokens", "logits", "at", "loss", "diff", "gradient", "diff"):
        table.add_column(name, justify="left" if name == "key" else "right", no_wrap=name != "key")
    for row in outcome["segments"]:
        table.add_row(
            *(f"{row['pack']}.{row['index']}", escape(row["key"]), str(row["tokens"])),
            *(f"{row['logits']:.1e}", str(row["at"]), f"{row['loss']:.4f}"),
            f"{abs(row['loss'] - row['loss_alone']):.1e}",
            *(f"{row['gradient_norm']:.3f}", f"{row['gradient']:.1e}"),
        )
    console.print(table)
    for row, ignored in zip(outcome["perturbations"], outcome["boundaries_ignored"], strict=True):
        console.print(
            f"pack {row['pack']}: segment {row['index']} changed, its logits move by {row['own']:.1e}, all others by "
            f"{row['others']:.1e}" + ("" if ignored is None else f"; boundaries ignored: {ignored:.1e}"),
            highlight=False,
        )
    for name, (logits, gradient) in outcome["bfloat16"].items():
        console.print(
            f"bfloat16, {name}: logits {logits:.1e} and gradient {gradient:.1e} from float32", highlight=False
        )
    worst = max(outcome["segments"], key=lambda row: row["logits"])
    console.print(
        f"largest difference of a logit: {worst['logits']:.1e} in pack {worst['pack']}, segment {worst['index']} "
        f"({escape(worst['key'])}), token {worst['at']}",
        highlight=False,
    )
    for sentence in outcome["failures"]:
        console.print(f"[red]differs[/red]  {escape(sentence)}", highlight=False)
    console.print("[bold red]not equal[/bold red]" if outcome["failures"] else "[green]packed equals alone[/green]")


def main() -> None:
    """Runs the command; a user's mistake is one sentence and exit code 2."""
    try:
        parity()
    except UserError as error:
        as_json = "--json" in sys.argv
        click.echo(json.dumps({"error": str(error)}) if as_json else f"Error: {error}", err=not as_json)
        sys.exit(2)


if __name__ == "__main__":
    main()
