"""Any policy on a sliding window: it packs what is held, and the pack of the oldest sample is taken.

``window`` is made for this. The others pack a list, so each time the whole window is packed and one pack of it is used:

* ``next_fit`` and ``first_fit`` give the packs that they give on a whole list, as long as no pack outgrows the window;
* ``best_fit`` and ``balanced`` fill worse than on a whole list, because a pack that later samples would have filled up
  is taken as it is;
* ``internvl`` keeps open packs from one sample to the next, which a window of samples cannot hold: whole lists only;
* policies that users register get the window's samples in stream order.

Measured, 256 held, fill on text of an eighth of the capacity / of half of it: ``window`` 1.00 / 0.996, ``first_fit``
0.995 / 0.980, ``best_fit`` 0.987 / 0.994, ``balanced`` 0.96, ``next_fit`` 0.89 / 0.78; the others take 5 to 150 times
the time of ``window``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from energon_packing.errors import ConfigError
from energon_packing.packing.policy import get_policy, pack_lengths
from energon_packing.packing.window import Number, drain_window, select_from_window

WHOLE_LISTS_ONLY = ("internvl",)


def check_online_policy(name: str) -> None:
    """Raises `ConfigError` where no policy of that name is known, or it cannot pack a sliding window."""
    get_policy(name)
    if name in WHOLE_LISTS_ONLY:
        raise ConfigError(
            f"packing.policy {name!r} keeps packs open that no window of samples holds; it packs whole lists "
            "(pack_lengths, plan). Online, use 'window', best_fit, next_fit, first_fit, balanced or a registered one."
        )


def next_pack(
    policy: str,
    lengths: Sequence[int],
    capacity: int,
    costs: Mapping[str, Sequence[Number]] | None = None,
    limits: Mapping[str, Number] | None = None,
    *,
    ended: bool = False,
) -> list[int]:
    """The next pack of a sliding window: positions, ascending, position 0 (the oldest sample) among them.

    Args:
        policy: a name that `check_online_policy` accepts.
        lengths, capacity, costs, limits: as `select_from_window`.
        ended: the stream has ended and nothing comes after what is held.

    Raises:
        PackingError: as `select_from_window`; a policy's packs are no partition, or break a limit.
    """
    if policy == "window":
        if ended:  # the first pack of a drained window; draining the rest gives the others
            return drain_window(lengths, capacity, costs, limits)[0]
        return select_from_window(lengths, capacity, costs, limits)
    pairs = {name: ((costs or {})[name], limit) for name, limit in (limits or {}).items()}
    groups = pack_lengths(lengths, capacity, policy, constraints=pairs, window=max(len(lengths), 1))
    oldest = next(group for group in groups if 0 in group)
    return sorted(oldest.tolist())
