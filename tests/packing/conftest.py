"""What a test registers is gone after it: the benchmark's test runs every policy that is known."""

import pytest

from energon_packing.packing.policies import POLICIES


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(POLICIES, "_entries", dict(POLICIES._entries))
