"""Runs the blocks of pages, each page in a directory of its own that holds what its reader has and nothing else."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from manual import ROOT
from manual.blocks import Page
from manual.given import Given

SECONDS = 280
"""A page may take no longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one page.

    Attributes:
        page: the page.
        folder: where it ran.
        ran: blocks that ended well.
        seconds: of all its blocks, by the clock.
        error: where and how the page failed, with the end of what was printed; empty for success.
        printed: all that its blocks printed.
    """

    page: Page
    folder: Path
    ran: int
    seconds: float
    error: str
    printed: str


class Runner:
    """Runs pages one after another.

    Args:
        folder: is made, gets a directory per page, and keeps them.
        python: the interpreter of the pages and of the commands in them.
    """

    def __init__(self, folder: Path, *, python: str = sys.executable) -> None:
        self.folder = folder
        self.commands = folder / "bin"
        self.commands.mkdir(parents=True)
        (folder / "given").mkdir()
        self.given = Given(folder / "given")
        for name, words in (("python", ""), ("python3", ""), ("energon-packing", " -m energon_packing.cli.main")):
            command = self.commands / name
            command.write_text(f'#!/bin/sh\nexec {shlex.quote(python)}{words} "$@"\n')
            command.chmod(0o755)

    def run(self, page: Page) -> Outcome:
        """Runs all blocks of a page that run here, up to the first that fails."""
        folder = self.folder / page.path.stem
        folder.mkdir()
        self.given.put(page.given, folder)
        return _run(page, folder, self.commands)


def _run(page: Page, folder: Path, commands: Path) -> Outcome:
    result, log = folder.with_suffix(".json"), folder.with_suffix(".log")
    environment = os.environ | {
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}:{ROOT / 'tests'}",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "COLUMNS": "120",
    }
    words = [str(commands / "python"), "-m", "manual.page_process", str(page.path), str(result)]
    ended = ""
    with log.open("w") as out:
        process = subprocess.Popen(
            words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait()
            ended = f"it was stopped after {SECONDS} s"
    printed = log.read_text(encoding="utf-8", errors="replace")
    told = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else []
    failed = next((entry for entry in told if entry["error"]), None)
    error = ""
    if code:
        where = f"{page.path.name}:{failed['line']}" if failed else page.path.name
        error = f"{where}: {failed['error'] if failed else ended or f'exit code {code}'}\n{printed[-3000:]}"
    ran = sum(not entry["error"] for entry in told)
    seconds = sum(entry["seconds"] for entry in told)
    return Outcome(page=page, folder=folder, ran=ran, seconds=seconds, error=error, printed=printed)
