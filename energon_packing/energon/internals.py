"""Every name used from Megatron-Energon that is not part of its documented API, in one place.

All of them exist since 7.3.2. If Energon moves one, only this file has to change.
"""

from __future__ import annotations

from megatron.energon.errors import FatalSampleError as FatalSampleError
from megatron.energon.flavors.base_dataset import SavableDataset as SavableDataset
from megatron.energon.flavors.base_dataset import add_sample_restore_key as add_sample_restore_key
from megatron.energon.flavors.base_dataset import set_sample_restore_key as set_sample_restore_key
from megatron.energon.flavors.webdataset.indexing import JoinIndexReader as JoinIndexReader
from megatron.energon.flavors.webdataset.itar_reader import ITarReader as ITarReader
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader as ShardInfosITarReader
from megatron.energon.flavors.webdataset.sample_loader import (
    WebdatasetSampleLoaderDataset as WebdatasetSampleLoaderDataset,
)
from megatron.energon.flavors.webdataset.sharder import Sharder as Sharder
from megatron.energon.flavors.webdataset.structs import FilteredSample as FilteredSample
from megatron.energon.rng import WorkerRng as WorkerRng
from megatron.energon.savable import Savable as Savable
from megatron.energon.state import FlexState as FlexState
from megatron.energon.task_encoder.base import get_failure_tolerance as get_failure_tolerance
from megatron.energon.task_encoder.base import get_stateless as get_stateless
from megatron.energon.wrappers import BatchDataset as BatchDataset
from megatron.energon.wrappers import BlendDataset as BlendDataset
from megatron.energon.wrappers import MapDataset as MapDataset
from megatron.energon.wrappers import PackingDataset as PackingDataset
from megatron.energon.wrappers import RepeatDataset as RepeatDataset
from megatron.energon.wrappers import ShuffleBufferDataset as ShuffleBufferDataset
from megatron.energon.wrappers.base import BaseWrapperDataset as BaseWrapperDataset
from megatron.energon.wrappers.base import SampleIndex as SampleIndex
from megatron.energon.wrappers.base import get_sample_restore_key as get_sample_restore_key
from megatron.energon.wrappers.buffer import SavableSampleBuffer as SavableSampleBuffer
