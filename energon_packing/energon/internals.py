"""Every name used from Megatron-Energon that is not part of its documented API, in one place.

All of them exist since 7.3.2. If Energon moves one, only this file has to change.
"""
# ruff: noqa: F401  other modules import these names from here

from typing import Any

from megatron.energon import dataset_config
from megatron.energon.errors import FatalSampleError
from megatron.energon.flavors.base_dataset import SavableDataset, add_sample_restore_key, set_sample_restore_key
from megatron.energon.flavors.webdataset.indexing import JoinIndexReader
from megatron.energon.flavors.webdataset.itar_reader import ITarReader, ShardInfosITarReader
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from megatron.energon.flavors.webdataset.sharder import Sharder
from megatron.energon.flavors.webdataset.structs import FilteredSample
from megatron.energon.rng import WorkerRng
from megatron.energon.savable import Savable
from megatron.energon.state import FlexState
from megatron.energon.task_encoder.base import get_failure_tolerance, get_stateless
from megatron.energon.wrappers import BatchDataset, BlendDataset, MapDataset, RepeatDataset, ShuffleBufferDataset
from megatron.energon.wrappers.base import BaseWrapperDataset, SampleIndex, get_sample_restore_key
from megatron.energon.wrappers.buffer import SavableSampleBuffer

from energon_packing.trust import check_data_set

_load_yaml = dataset_config.load_yaml


def _read_yaml(stream: Any) -> Any:
    """Stands in for Energon's only reader of YAML that can name code: the check sees the values that Energon does, of
    every file that a data set leads to (blends, joins, ``dataset_config``, addresses)."""
    content = stream if isinstance(stream, bytes) else stream.read()
    values = _load_yaml(content)
    check_data_set(str(getattr(stream, "name", "the data set")), content, values)
    return values


dataset_config.load_yaml = _read_yaml
