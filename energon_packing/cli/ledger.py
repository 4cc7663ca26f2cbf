"""`energon-packing ledger`: what a run emitted and dropped, over all its workers and restarts."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from energon_packing.cli.options import PATH, json_option
from energon_packing.cli.terminal import answer, counted
from energon_packing.report.excerpt import visible

_SHOWN = 10
_EXAMPLES = """\b
Examples:
  energon-packing ledger run/ledger
  energon-packing ledger run/ledger --json
  energon-packing ledger run/ledger --release chat-17@data/packed

Exit code 1 if a sample came more often than the data were read.
"""


@click.command(epilog=_EXAMPLES)
@click.argument("directory", metavar="DIR", type=PATH)
@click.option("--release", "keys", metavar="KEY", multiple=True, help="Let a sample out of quarantine; repeatable.")
@json_option
@click.pass_context
def ledger(ctx: click.Context, directory: Path, keys: tuple[str, ...], as_json: bool) -> None:
    """Merge the ledger in DIR (packing.ledger): samples emitted, dropped by reason and data set, and duplicates.

    Packs that were made again after a restart count once. A run may be running; its last packs are made ahead of use.
    Samples in quarantine are listed: `energon-packing explain KEY DATASET` decodes one again,
    --release KEY@DATASET lets it go, and --release KEY those of all data sets.
    """
    from energon_packing.ledger import merged, release

    if keys:
        release(directory, keys)
    report = merged(directory)

    def show(_: Any) -> None:
        click.echo(
            f"{counted(report.emitted, 'sample')} emitted in {counted(report.packs, 'pack')}, "
            f"{report.dropped.total():,} dropped, by {counted(report.workers, 'worker')} with "
            f"{counted(report.restarts, 'restart')}; {counted(len(report.duplicates), 'duplicate')}"
        )
        read, dropped, of_late, late = report.shares
        if dropped:
            click.echo(f"  {dropped / read:.2%} dropped in all, {late / of_late:.2%} of the last {of_late:,} read")
        for data, reasons in sorted(report.dropped_by_data.items()):
            for reason, count in reasons.most_common():
                click.echo(visible(f"  dropped {count:>9,}  {reason}{f'  {data}' if data else ''}"))
        for how, count in report.changed.most_common():
            click.echo(visible(f"  changed {count:>9,}  {how}"))
        for key in report.duplicates[:_SHOWN]:
            click.echo(visible(f"  twice: {key}"))
        for entry in report.quarantined[:_SHOWN]:
            click.echo(visible(f"  quarantined: {entry.get('key')}  {entry.get('data')}  {entry.get('detail')}"))
        for count, what in (
            (len(report.quarantined), "samples in quarantine, which later runs skip"),
            (report.abandoned, "runs of a worker that nobody continued are not counted"),
            (report.foreign, "lines that no ledger writes are not counted"),
            (report.cut, "lines that a kill cut off are set aside in *.cut"),
        ):
            if count:
                click.echo(f"  {count:,} {what}")

    answer({entry.name: getattr(report, entry.name) for entry in dataclasses.fields(report)}, as_json, show)
    if report.duplicates:
        ctx.exit(1)
