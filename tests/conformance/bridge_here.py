"""Skips the file that imports this where Megatron-Bridge is missing (``megatron`` alone may be Energon)."""

import importlib.util

import pytest

pytest.importorskip("megatron.core", reason="Megatron-Bridge is not installed")
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)
