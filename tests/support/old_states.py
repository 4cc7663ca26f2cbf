"""States of versions that lacked an entry of the fingerprint."""

from collections.abc import Mapping
from typing import Any

from energon_packing.energon.states import check_fingerprint
from energon_packing.errors import ConfigError


def refused_without(own: Mapping[str, Any]) -> set[str]:
    """The entries of a run's fingerprint without which the fingerprint of a saved state is refused."""
    refused = set()
    for name in own:
        try:
            check_fingerprint({entry: value for entry, value in own.items() if entry != name}, own)
        except ConfigError:
            refused.add(name)
    return refused
