"""``validate --measure``: runs the encoder on part of the data set, without pixels, and packs the measured samples."""

from __future__ import annotations

import dataclasses
from typing import Any

from energon_packing.config import ParallelConfig, RunConfig
from energon_packing.errors import ConfigError, UserError
from energon_packing.validate.run_facts import DataFacts
from energon_packing.validate.run_view import RunView
from energon_packing.validate.verdict import without_output


def measure_quietly(config: RunConfig, parallel: ParallelConfig, samples: int, view: RunView) -> DataFacts:
    """Calls `measure_data` quietly, with samples read as the view's run reads them.

    Raises:
        UserError: as there, or a package that measuring needs is not installed.
    """
    try:
        with without_output():
            return measure_data(config, parallel, samples=samples, one_a_row=not view.packing.enable_offline_packing)
    except ImportError as error:
        raise UserError(f"--measure needs Energon, torch and transformers: {error}.") from error


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
    from energon_packing.energon.task_encoder import PackingTaskEncoder
    from energon_packing.packing.whole_list import pack_lengths

    class Measuring(PackingTaskEncoder):
        """Yields measured samples instead of packing them."""

        def build_batch(self, dataset: Any, **_unused: Any) -> Any:
            """Returns the data set of samples itself; Energon calls it in place of batching."""
            return dataset

    packing = dataclasses.replace(config.packing, oversize="drop", ledger=None)
    once = dataclasses.replace(
        config, packing=packing, parallel=parallel, data=dataclasses.replace(config.data, repeat=False, workers=0)
    )
    encoder = Measuring(once.encoder, packing, parallel)
    loader = get_loader(build_dataset(once, task_encoder=encoder, workers=0))
    lengths, aligned, measured, too_long, longest = [], [], 0, 0, 0
    for sample in loader:
        measured += 1
        if sample.problem is not None and sample.problem.fatal is not None:
            raise sample.problem.fatal
        if sample.measured is not None:
            if one_a_row and len(sample.measured.segments) > 1:
                raise two_rows(sample.__key__)
            lengths.append(sample.measured.length)
            aligned.append(encoder.limits.aligned(sample.measured))
        elif sample.problem is not None and sample.problem.reason == "oversize":
            too_long += 1
            longest = max(longest, sample.problem.length or 0)
        if measured >= samples:
            break
    if not lengths:
        raise ConfigError(f"None of the first {measured} samples of {config.data.path} can be packed; see `preview`.")
    packs = pack_lengths(aligned, packing.seq_length, packing.policy, window=packing.window)
    return DataFacts(
        samples=len(loader),
        measured=measured,
        dropped=measured - len(lengths),
        too_long=too_long,
        longest=max(longest, *lengths),
        mean=sum(lengths) / len(lengths),
        fill=sum(lengths) / (len(packs) * packing.seq_length),
        packs=len(packs),
    )
