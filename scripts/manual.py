#!/usr/bin/env python3
"""The manual: builds it, follows its links, and runs its blocks.

python scripts/manual.py blocks                 # runs every shell and Python block of README and docs, as pasted
python scripts/manual.py blocks docs/see.md     # those of a page
python scripts/manual.py links                  # follows every internal link and anchor
python scripts/manual.py write                  # writes the pages that are made from code: commands, settings, rules
python scripts/manual.py build --out site       # builds the site; needs pip install '.[docs]', no network
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package, if it is not installed

import click
import manual
from manual.blocks import PageError, read_page


@click.group(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """One door to all of it."""


@main.command()
@click.argument("pages", nargs=-1, type=click.Path(path_type=Path, exists=True))
@click.option("--list", "only_list", is_flag=True, help="Count, and run nothing.")
@click.option("--python", default=sys.executable, help="The interpreter that runs them.")
@click.option("--json", "as_json", type=click.Path(path_type=Path), help="Write the counts to this file.")
def blocks(pages: tuple[Path, ...], only_list: bool, python: str, as_json: Path | None) -> None:
    """Run every block of PAGES (all pages) from clean directories, and count them."""
    from manual.report import counted, told
    from manual.runner import Runner

    read = [read_page(path.resolve()) for path in pages or manual.pages()]
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder) / "run", python=python)
        for page in read:
            if only_list or not any(block.runs_here for block in page.blocks):
                continue
            outcome = runner.run(page)
            click.echo(f"{outcome.page.path.name}: {outcome.ran} blocks, {outcome.seconds:.1f} s")
            if outcome.error:
                click.echo(outcome.error, err=True)
            outcomes.append(outcome)
    counts = counted(read, outcomes)
    click.echo(told(counts))
    if as_json is not None:
        as_json.write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    sys.exit(any(outcome.error for outcome in outcomes))


@main.command()
def links() -> None:
    """Follow every link of README, CONTRIBUTING and docs that stays in the checkout."""
    from manual.links import broken_links

    followed, broken = broken_links(manual.pages())
    for line in broken:
        click.echo(line, err=True)
    click.echo(f"{followed} links, {len(broken)} broken")
    sys.exit(bool(broken))


@main.command()
def write() -> None:
    """Write the pages that are made from code."""
    from manual.written import written

    for path, content in written().items():
        path.write_text(content(), encoding="utf-8")
        click.echo(f"Written: {path.relative_to(manual.ROOT)}")


@main.command()
@click.option("--out", default="site", type=click.Path(path_type=Path, file_okay=False), help="Directory of the site.")
def build(out: Path) -> None:
    """Build the site, strictly and without a network, and check that its pages load nothing from elsewhere."""
    from manual.site import build_site

    count, problems = build_site(out.resolve())
    for line in problems:
        click.echo(line, err=True)
    click.echo(f"{out}: {count} pages, {len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    try:
        main(standalone_mode=True)
    except PageError as error:
        sys.exit(f"Error: {error}")
