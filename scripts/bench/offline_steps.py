"""Steps of a tiny model of Megatron-Bridge on the packs of one plan, read in several ways; in its own process.

Every way is a run from the same random weights, with Bridge's own training loop and data iterators.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsJob:
    """What is trained.

    Attributes:
        ways: name -> plan or packed directory.
        processor: directory or name; of a family that has a tiny model.
        seq_length, oversize: of the plan.
        steps: optimiser steps.
        batch: packs of a step.
    """

    ways: dict[str, str]
    processor: str
    seq_length: int
    oversize: str
    steps: int
    batch: int


def losses(job: StepsJob) -> dict[str, list[float]]:
    """Way -> the loss of each step."""
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    from support.bridge_cpu import tiny_models, training_run
    from support.parity.models import special_tokens, tiny_family

    from energon_packing.bridge import PackedEnergonDatasetConfig
    from energon_packing.bridge.step import forward_step
    from energon_packing.config import EncoderConfig
    from energon_packing.encoders.encoder import ConversationEncoder

    encoder = ConversationEncoder(EncoderConfig(processor=job.processor))
    size = max(encoder.tokenizer.get_vocab().values()) + 1
    found = {}
    for way, path in job.ways.items():
        with training_run.process_groups():
            model = tiny_models.provider(
                str(tiny_family(encoder)),
                vocab_size=size,
                tokens=special_tokens(encoder),
                seq_length=job.seq_length,
            )
            dataset: Any = PackedEnergonDatasetConfig(
                path=path, processor=job.processor, seq_length=job.seq_length, num_workers=0
            )
            dataset.packing.drop_budget, dataset.packing.oversize = 1.0, job.oversize
            dataset.do_validation = False
            config = training_run.make_config(model, dataset, steps=job.steps, global_batch_size=job.batch)
            found[way] = training_run.run(config, forward_step=forward_step).losses
    return found


def main() -> None:
    """Runs the `StepsJob` that the first argument holds as JSON; writes the result to the file of the second."""
    torch.set_num_threads(1)
    Path(sys.argv[2]).write_text(json.dumps(losses(StepsJob(**json.loads(sys.argv[1])))), encoding="utf-8")


if __name__ == "__main__":
    main()
