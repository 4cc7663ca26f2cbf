"""``python -m manual.page_process PAGE RESULT``: runs the blocks of one page, one after another, in this directory.

Python blocks share their names, as in one session; each shell block is one shell, which stops at its first failure.
RESULT gets a JSON list with ``line`` and ``seconds`` of every block, and ``error`` of the one that ended the page.
"""

import json
import subprocess
import sys
import time
import traceback
from pathlib import Path

from manual.blocks import Block, read_page


def run_bash(block: Block) -> None:
    """Pastes a block into a shell.

    Raises:
        RuntimeError: a command failed.
    """
    done = subprocess.run(["bash", "-c", f"set -euo pipefail\n{block.text}"], stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise RuntimeError(f"the shell ended with exit code {done.returncode}")


def run_python(block: Block) -> None:
    """Pastes a block into the session of the page; tracebacks show the page's own lines."""
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
    exec(code, sys.modules["__main__"].__dict__)


def main() -> int:
    """Runs the page; 1 where a block failed."""
    page, result = read_page(Path(sys.argv[1])), Path(sys.argv[2])
    told = []
    for block in page.blocks:
        if not block.runs_here:
            continue
        print(f"== {block.place} ({block.language})", flush=True)
        began, error = time.monotonic(), ""
        try:
            (run_python if block.language == "python" else run_bash)(block)
        except BaseException as raised:
            traceback.print_exc()
            error = "".join(traceback.format_exception_only(raised)).strip()
        sys.stdout.flush()
        told.append({"line": block.line, "seconds": time.monotonic() - began, "error": error})
        result.write_text(json.dumps(told), encoding="utf-8")
        if error:
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
