"""A command of ``energon-packing`` in a fork of this process: it starts without the seconds of its imports."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence


class ForkedCommand:
    """What the benchmarks need of a ``subprocess.Popen``; the command leads a session of its own.

    Args:
        words: of the command line, without ``energon-packing``.

    Attributes:
        pid: of the process.
        returncode: exit code, or the negative number of the signal that ended it; None while it runs.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._said = os.memfd_create("said")
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _be_command(list(words), self._said)

    def poll(self) -> int | None:
        """Whether it has ended."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        """Sends SIGKILL, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Waits for its end; returns all that it wrote, and an empty text.

        Raises:
            TimeoutError: it has not ended.
        """
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended in {timeout:g} s")
            time.sleep(0.01)
        with os.fdopen(self._said, "rb") as said:
            said.seek(0)
            return said.read().decode(errors="replace"), ""


def _be_command(words: list[str], output: int) -> None:
    """In the fork; never returns."""
    code = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        from energon_packing.cli.main import cli

        cli.main(words, prog_name="energon-packing")
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)
