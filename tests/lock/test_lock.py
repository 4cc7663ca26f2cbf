"""Rows, plans, converted data, reports and verdicts are those that were recorded before the package was rewritten."""

import importlib.util
import json

import pytest
from lock import LEFT_TO_THE_COMMAND, STORED, TESTS, differences, made_by


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason="Megatron-Bridge is not installed")
def test_everything_recorded_is_as_it_was():
    stored = {
        key: value for key, value in json.loads(STORED.read_text()).items() if not LEFT_TO_THE_COMMAND.search(key)
    }
    assert len(stored) > 600
    assert not differences(stored, made_by(TESTS.parent, part="tested"))
