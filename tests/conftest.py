"""Fixtures that several test directories share: the shipped processors, and encoders on them."""

from __future__ import annotations

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import HealthCheck, settings

from energon_packing.config import EncoderConfig
from energon_packing.demo import processor_path

# No test is judged by the clock: a busy machine must not turn a property red.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

VISION = ("qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="session")
def encoders():
    """Family name -> encoder on the shipped processor of that family (``text`` included)."""
    from energon_packing.encoders.encoder import ConversationEncoder

    return {name: ConversationEncoder(EncoderConfig(processor=str(processor_path(name)))) for name in (*VISION, "text")}
