"""A storage whose reads fail for a while, by a clock that only pauses move."""

import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from energon_packing import errors


class Storage:
    """Stands in for a storage whose reads fail from the ``after``-th on for ``seconds`` of a clock that only pauses
    move."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        places: Sequence[tuple[Any, str]],
        error: Callable[[], Exception],
        *,
        after: int = 10,
        seconds: float = 0.0,
    ) -> None:
        self.now, self.reads, self.failed = 1000.0, 0, 0
        self.pauses: list[float] = []
        self.until: float | None = None
        self.after, self.seconds, self.error = after, seconds, error
        monkeypatch.setattr(errors, "time", types.SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        for owner, name in places:
            monkeypatch.setattr(owner, name, self.failing(getattr(owner, name)))

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def failing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(*given: Any, **named: Any) -> Any:
            self.reads += 1
            if self.reads == self.after:
                self.until = self.now + self.seconds
            if self.until is not None and self.now < self.until:
                self.failed += 1
                raise self.error()
            return original(*given, **named)

        return read
