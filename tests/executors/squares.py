"""What the workers of these tests do. A module of its own: each worker imports it, and it needs next to nothing."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from energon_packing.errors import SampleRejected


class Particular(Exception):
    """It can be pickled, but not read back."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"{number}: {why}")


@dataclass
class Squares:
    """Squares a number, after what the task's word says happened to the worker."""

    notes: Path
    begun: bool = False

    def begin(self) -> None:
        self.begun = True

    def do(self, task: tuple[int, str]) -> tuple[int, int | str]:
        assert self.begun
        number, word = task
        note = self.notes / str(number)
        first = not note.exists()
        note.open("a").write("x")
        if word == "dies" or (word == "dies once" and first):
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "stalls" and first:
            time.sleep(1000)
        while word == "waits" and not (self.notes / "go").exists():
            time.sleep(0.02)
        deadline = time.monotonic() + 60
        while word == "meets" and len([*self.notes.glob("5?")]) < 2:  # two workers at once
            assert time.monotonic() < deadline, "it is alone"
            time.sleep(0.02)
        while word in ("is beaten", "fails late") and not (self.notes / "90").exists():
            time.sleep(0.02)
        if word == "fails late":
            raise OSError("the network of this node is gone")
        if word == "again":
            (self.notes / "90").touch()
        if word == "fails in its own way":
            raise Particular(number, "a matter of its own")
        if word == "ends early":  # what a pipe that is closed raises, too
            raise EOFError("the file ended")
        if word == "fails":
            raise SampleRejected("bad", f"number {number}")
        if word.startswith("large"):
            return number * number, len(word) * "."
        time.sleep(0.3 if word == "slow" else 3 if word == "slowest" else 0)
        return number * number, os.getpid()

    def name(self, task: tuple[int, str]) -> str:
        return f"squaring {task[0]}"


class ApartSquares(Squares):
    """Tasks of which two workers may do the same, and which may be given up."""

    def again(self, task: tuple[int, str]) -> tuple[int, str]:
        return task[0], "again"
