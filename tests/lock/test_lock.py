"""Rows, plans, converted data, reports and verdicts are those that were recorded before the package was rewritten."""

from __future__ import annotations

import importlib.util
import json

import pytest
from lock import STORED, TESTS, differences, made_by


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason="Megatron-Bridge is not installed")
def test_everything_recorded_is_as_it_was():
    assert not differences(json.loads(STORED.read_text()), made_by(TESTS.parent))
