"""Groups of data sets that never share a pack: ``group`` in the ``subflavors`` of a data set in a blend.

In the metadataset::

    blend:
      - {weight: 3, path: chats, subflavors: {group: text}}
      - {weight: 1, path: more-chats, subflavors: {group: text}}
      - {weight: 1, path: charts, subflavors: {group: charts}}

Data sets without a group are one group together. Energon's development branch has the same word as a key of the entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from energon_packing.errors import ConfigError

SUBFLAVOR = "group"


def group_name(subflavors: Mapping[str, Any] | None) -> str:
    """The group of a data set; empty if it names none.

    Raises:
        ConfigError: the group is no name.
    """
    found = (subflavors or {}).get(SUBFLAVOR)
    if found is None:
        return ""
    if not isinstance(found, str | int) or isinstance(found, bool):
        raise ConfigError(f"subflavors.{SUBFLAVOR} is {found!r}; it must be a name.")
    return str(found)


def by_group(samples: Sequence[Any]) -> dict[str, list[int]]:
    """Positions of the samples of each group, ascending; groups are in the order of their oldest sample.

    Args:
        samples: with Energon's subflavors, oldest first.
    """
    found: dict[str, list[int]] = {}
    for position, sample in enumerate(samples):
        found.setdefault(group_name(sample.__subflavors__), []).append(position)
    return found
