"""Packing an endless stream of anything that has a length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from energon_packing.errors import ConfigError, UserError
from energon_packing.packing.policies.window import Number, WindowPacker


def pack_stream[Sample](
    samples: Iterable[Sample],
    capacity: int,
    *,
    length: Callable[[Sample], int] = len,  # type: ignore[assignment]  # the default needs sized samples
    constraints: Mapping[str, tuple[Callable[[Sample], Number], Number]] | None = None,
    window: int = 256,
    oversize: Literal["raise", "drop"] = "raise",
    on_drop: Callable[[Sample, str], Any] | None = None,
) -> Iterator[list[Sample]]:
    """Yields packs of samples, each sample in exactly one, oldest first inside a pack.

    Memory and delay are bounded: at most `window` samples are held, and every pack contains the oldest, so a sample is
    emitted after at most `window` packs. The last partial window is packed as a whole when the stream ends.

    Args:
        samples: finite or endless; read one by one, never ahead of the window.
        capacity: tokens of a pack.
        length: tokens of a sample; with an alignment multiple, its aligned length.
        constraints: name -> (cost of a sample, limit per pack).
        window: samples held.
        oversize: ``"raise"`` stops at a sample that fits no pack alone, ``"drop"`` skips it.
        on_drop: called with each dropped sample and the reason, one sentence.

    Raises:
        UserError: an oversize or empty sample under ``"raise"``; names its place in the stream, length and capacity.
        ConfigError: capacity or window below 1, an unknown oversize mode.
    """
    if oversize not in ("raise", "drop"):
        raise ConfigError(
            f"pack_stream supports oversize 'raise' and 'drop', not {oversize!r}; shorten samples before it"
        )
    measures = {name: pair[0] for name, pair in (constraints or {}).items()}
    packer: WindowPacker[Sample] = WindowPacker(
        capacity, window, {name: pair[1] for name, pair in (constraints or {}).items()}
    )
    return _packs(samples, packer, length, measures, oversize, on_drop)


def _packs[Sample](
    samples: Iterable[Sample],
    packer: WindowPacker[Sample],
    length: Callable[[Sample], int],
    measures: Mapping[str, Callable[[Sample], Number]],
    oversize: str,
    on_drop: Callable[[Sample, str], Any] | None,
) -> Iterator[list[Sample]]:
    for number, sample in enumerate(samples):
        tokens = length(sample)
        costs = {name: measure(sample) for name, measure in measures.items()}
        problem = _problem(tokens, costs, packer)
        if problem is None:
            packer.add(sample, tokens, costs)
            if packer.full:
                yield packer.next_pack()
        elif oversize == "raise":
            raise UserError(f"sample {number} of the stream does not fit into a pack: {problem}")
        elif on_drop is not None:
            on_drop(sample, problem)
    yield from packer.drain()


def _problem(tokens: int, costs: Mapping[str, Number], packer: WindowPacker[Any]) -> str | None:
    if not 0 < tokens <= packer.capacity:
        return f"length {tokens}, capacity {packer.capacity}"
    for name, limit in packer.limits.items():
        if not 0 <= costs[name] <= limit:
            return f"{costs[name]} {name}, limit {limit}"
    return None
