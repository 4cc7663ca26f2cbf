"""Rows, plans, converted data, reports and verdicts are those that were recorded before the package was rewritten."""

import importlib.util
import json

import pytest
from forking_python import quick_python
from lock import SHARED, STORED, TESTS, made_by


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason="Megatron-Bridge is not installed")
def test_everything_recorded_is_as_it_was():
    found, stored = made_by(TESTS.parent, "tested", quick_python()), json.loads(STORED.read_text())
    assert len(found) == (223 if SHARED.is_dir() else 180)
    assert [key for key, digest in found.items() if stored.get(key) != digest] == []
