"""The configuration that a YAML file, the command line and the Python classes share. Imports neither torch nor Energon.

A file has up to seven sections, each a frozen dataclass. An unknown key is an error that names the nearest known key::

    data:     {path: out/demo, workers: 2}
    encoder:  {processor: path/or/name, train_on: assistant}
    packing:  {seq_length: 8192, window: 256}
    parallel: {tensor_parallel: 2, context_parallel: 2, sequence_parallel: true}
    training: {micro_batch_size: 1, global_batch_size: 32}
    plan:     {epochs: 3, max_data_parallel: 512}
    metrics:  {directory: run/metrics, interval: 10}
"""

from energon_packing.config.encoder import MODALITIES, EncoderConfig, LimitsConfig
from energon_packing.config.run import (
    PACK_LIMITS,
    DataConfig,
    MetricsConfig,
    PackingConfig,
    ParallelConfig,
    PlanConfig,
    RunConfig,
    TrainingConfig,
    load_config,
    load_values,
)
from energon_packing.config.setting import from_mapping, to_mapping

__all__ = [
    "MODALITIES",
    "PACK_LIMITS",
    "DataConfig",
    "EncoderConfig",
    "LimitsConfig",
    "MetricsConfig",
    "PackingConfig",
    "ParallelConfig",
    "PlanConfig",
    "RunConfig",
    "TrainingConfig",
    "from_mapping",
    "load_config",
    "load_values",
    "to_mapping",
]
