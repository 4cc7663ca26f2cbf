#!/usr/bin/env python3
"""Makes the screenshots in ``docs/images`` from the demo data: statistics and packs, light and dark, and terminals.

python scripts/pictures.py            # needs Chromium (Debian: apt-get install chromium)
"""

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headless import Browser, chromium

from energon_packing.cli.main import cli
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"
CONVERSATIONS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the pictures; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=IMAGES, help="directory of the pictures")
    given = parser.parse_args(arguments)
    if chromium() is None:
        print("Chromium is not installed; Debian: apt-get install chromium", file=sys.stderr)
        return 2
    given.out = given.out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # pages show the path as it was given
        source = make_data(Path("demo"), conversations=CONVERSATIONS, seed=5, defects=False)
        convert(ConvertConfig(sources=(source,), out=Path("data"), split={"train": 1.0}, workers=0))
        settings = ("--set", f"encoder.processor={processor_path('qwen2_5_vl')}", "--set", "packing.drop_budget=1.0")
        run("stats", "data", *settings, "--seq-length", "2048", "--seq-length", "4096", "--html", "stats.html")
        parallel = ("--set", "packing.seq_length=2048", "--set", "parallel.context_parallel=2")
        run("preview", "data", *settings, *parallel, "--packs", "8", "--html", "packs.html")
        for width in (80, 200):
            text = run("preview", "data", *settings, *parallel, "--packs", "1", columns=width)
            (given.out / f"preview-{width}-columns.txt").write_text(text, encoding="utf-8")
        for dark in (False, True):
            name = "dark" if dark else "light"
            with Browser(dark=dark, height=1000) as browser:
                browser.open(Path("stats.html"))
                browser.picture(given.out / f"stats-{name}.png")
                browser.open(Path("packs.html"))
                browser.wait("document.querySelector('.row button')")
                # A sample with an image, so that its picture is seen.
                browser.evaluate(
                    "[...document.querySelectorAll('.row button')].find(b => b.title.includes('image')).click()"
                )
                browser.wait("document.querySelector('.detail')")
                browser.evaluate("new Promise(done => setTimeout(done, 300))")
                browser.picture(given.out / f"packs-{name}.png")
                if browser.problems:
                    print(f"the page has problems: {browser.problems}", file=sys.stderr)
                    return 1
    return 0


def run(*arguments: str, columns: int = 80) -> str:
    """What a command prints; ends the program where it fails."""
    os.environ["COLUMNS"] = str(columns)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        cli(list(arguments), standalone_mode=False)
    return said.getvalue()


if __name__ == "__main__":
    raise SystemExit(main())
