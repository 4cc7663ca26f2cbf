"""A thread that makes things before they are asked for, a bounded number of them."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

EXIT_SECONDS = 10.0
"""How long the end of the interpreter waits for such a thread: one that wakes up in a library afterwards would abort
the process."""

_running: weakref.WeakSet[ReadAhead[Any]] = weakref.WeakSet()


class ReadAhead[T]:
    """Results of a function, made ahead of use in a thread.

    Args:
        make: makes one result; it does not raise.
        is_last: whether nothing follows a result.
        interrupt: called by `stop`; makes a call of ``make`` that waits for another process return.
        finish: called in the thread when it ends, with whether `stop` ended it.
        depth: results that are ready or being made, at least 1.
        name: of the thread.
    """

    def __init__(
        self,
        make: Callable[[], T],
        *,
        is_last: Callable[[T], bool],
        interrupt: Callable[[], None],
        finish: Callable[[bool], None],
        depth: int,
        name: str,
    ) -> None:
        self._make, self._is_last, self._depth = make, is_last, depth
        self._interrupt, self._finish = interrupt, finish
        self._ready: deque[T] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _running.add(self)

    def take(self) -> T:
        """The next result; waits for it if it is not ready. Not to be called after the last one."""
        with self._changed:
            while not self._ready:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait()
            self._changed.notify_all()
            return self._ready.popleft()

    def stop(self) -> None:
        """Tells the thread to end; returns at once."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._interrupt()

    def join(self, seconds: float) -> None:
        """Waits for the thread to end."""
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while self._has_room():
                made = self._make()
                with self._changed:
                    self._ready.append(made)
                    self._changed.notify_all()
                if self._is_last(made):
                    break
        except BaseException as error:  # `make` broke its promise: nobody may wait for the rest
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self._finish(self._stopped)

    def _has_room(self) -> bool:
        with self._changed:
            while len(self._ready) >= self._depth and not self._stopped:
                self._changed.wait()
            return not self._stopped


def _end_all() -> None:
    running = list(_running)
    for each in running:
        each.stop()
    for each in running:
        each.join(EXIT_SECONDS)


atexit.register(_end_all)
