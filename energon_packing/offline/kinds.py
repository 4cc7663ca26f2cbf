"""The kinds of sample that offline commands read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon_packing.offline.clips import Clips
from energon_packing.offline.conversations import Conversations
from energon_packing.offline.index import Kind
from energon_packing.offline.sample_kind import SampleKind
from energon_packing.wan.config import TextToVideoConfig, TextToVideoRunConfig

KINDS: Mapping[Kind, SampleKind] = {"conversations": Conversations(), "clips": Clips()}


def kind_of_config(config: Any) -> SampleKind:
    """The kind of a run's configuration, or of its ``encoder`` section."""
    return KINDS["clips" if isinstance(config, TextToVideoConfig | TextToVideoRunConfig) else "conversations"]
