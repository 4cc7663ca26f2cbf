"""The section ``metrics`` of a configuration: what a training run writes about its packs."""

from __future__ import annotations

from dataclasses import dataclass

from energon_packing.config.setting import check_bounds, setting
from energon_packing.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig:
    """What a training run writes about its packs while it trains; see docs/see.md."""

    directory: str | None = None
    """Directory of the metrics of a run, one file of JSON lines per data-parallel rank; all ranks should see it. They
    also go to the trainer's TensorBoard and Weights & Biases writers if it has them. None measures nothing."""
    interval: int = setting(10, unit="steps", least=1)
    """A line sums up this many optimiser steps."""

    def __post_init__(self) -> None:
        if self.directory == "":
            raise ConfigError("metrics.directory is empty; name one, or leave it out to measure nothing.")
        check_bounds("metrics", self)
