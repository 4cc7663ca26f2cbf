"""The encoder on part of the data set, without pixels: for ``validate --measure`` and for the look at samples."""

from __future__ import annotations

import dataclasses
from typing import Any

from energon_packing.config import ParallelConfig, RunConfig
from energon_packing.errors import ConfigError
from energon_packing.validate.run_facts import DataFacts


def measuring_encoder(
    config: RunConfig, parallel: ParallelConfig, *, processor: Any = None, deals: bool = False
) -> Any:
    """Returns the run's task encoder, changed to yield measured samples instead of packing them.

    Args:
        config: of the run. Samples that are too long are dropped, and no ledger is written.
        parallel: determines the alignment multiple.
        processor: loaded; None loads it.
        deals: whether samples come in the places that a run's readers share out.
    """
    from energon_packing.energon.reader_shares import deal_samples
    from energon_packing.energon.task_encoder import PackingTaskEncoder

    class Measuring(PackingTaskEncoder):
        """Ends where packing begins."""

        def build_batch(self, dataset: Any, *, worker_config: Any, **_unused: Any) -> Any:
            """Returns the data set of samples itself; Energon calls it in place of batching."""
            if deals:
                deal_samples(dataset, worker_config)
            return dataset

    packing = dataclasses.replace(config.packing, oversize="drop", ledger=None)
    return Measuring(config.encoder, packing, parallel, processor=processor)


def measure_data(config: RunConfig, parallel: ParallelConfig, *, samples: int, one_a_row: bool = False) -> DataFacts:
    """Measures the first samples of the training split as the loader would, and packs them.

    Args:
        config: data set, processor and packing.
        parallel: determines the alignment multiple.
        samples: how many are measured; the whole split if it has fewer.
        one_a_row: the run reads single samples, where a preference pair cannot be two rows.

    Raises:
        UserError: the data set or the processor cannot be used.
        ConfigError: none of the samples can be used.
    """
    from megatron.energon import get_loader

    from energon_packing.energon.loader import build_dataset
    from energon_packing.energon.sample_task_encoder import two_rows
    from energon_packing.packing.whole_list import pack_lengths

    encoder = measuring_encoder(config, parallel)
    packing = dataclasses.replace(config.packing, oversize="drop", ledger=None)
    data = dataclasses.replace(config.data, repeat=False, workers=0)
    once = dataclasses.replace(config, packing=packing, parallel=parallel, data=data)
    loader = get_loader(build_dataset(once, task_encoder=encoder, workers=0))
    lengths, aligned, too_long = [], [], [0]
    number = 0
    for number, sample in enumerate(loader, 1):
        if sample.problem is not None and sample.problem.fatal is not None:
            raise sample.problem.fatal
        if sample.measured is not None:
            if one_a_row and len(sample.measured.segments) > 1:
                raise two_rows(sample.__key__)
            lengths.append(sample.measured.length)
            aligned.append(encoder.limits.aligned(sample.measured))
        elif sample.problem is not None and sample.problem.reason == "oversize":
            too_long.append(sample.problem.length or 0)
        if number >= samples:
            break
    if not lengths:
        raise ConfigError(f"None of the first {number} samples of {config.data.path} can be packed; see `preview`.")
    packs = pack_lengths(aligned, packing.seq_length, packing.policy, window=packing.window)
    return DataFacts(
        samples=len(loader),
        measured=number,
        dropped=number - len(lengths),
        too_long=len(too_long) - 1,
        longest=max(too_long + lengths),
        mean=sum(lengths) / len(lengths),
        fill=sum(lengths) / (len(packs) * packing.seq_length),
        packs=len(packs),
    )
