"""Work in a fork of the calling process, which has imported what it needs: what the soak and the resume matrix kill."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def fork(work: Callable[[], None], log: Path) -> int:
    """Runs `work` in a process of its own, whose output is appended to `log`; returns its id.

    Its exit code is 0, or 1 if `work` raised.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with log.open("a") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
