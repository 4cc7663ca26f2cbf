"""The loader's state in Megatron-LM's checkpoints: where it is stored, and what the run reads from there on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from energon_packing.energon.states import read_state
from energon_packing.errors import ConfigError

MISSING = (
    "the world size or --dataloader-save differs from the run that saved it. Give --packing-restart-data to start the "
    "data over."
)


def packs_left(args: Any, ranks: int) -> int | None:
    """Packs that the run has still to read, over all ranks; None if its batch grows.

    Args:
        args: of Megatron-LM, which has read its checkpoint and set ``train_iters``.
        ranks: data-parallel.
    """
    if not args.train_iters or args.rampup_batch_size:
        return None
    # Megatron-LM may round the batch down to what the ranks divide (``decrease_batch_size_if_needed``).
    return int(max(args.train_iters - args.iteration, 0) * (args.global_batch_size // ranks) * ranks)


def saved_state(args: Any, *, data_parallel_rank: int | None) -> Any:
    """Returns the loader's state for the checkpoint that this run continues from; None for a new run.

    Every rank of a replica reads the file of its data-parallel rank, which ``maybe_save_dataloader_state`` of
    ``megatron.training.checkpointing`` wrote under ``--dataloader-save``.

    Args:
        args: of Megatron-LM.
        data_parallel_rank: whose file is read. None takes the first rank's, which of a plan is that of all ranks, and
            the one that a run with or without pipeline stages saved if there is none with this run's name.

    Raises:
        ConfigError: the run continues and there is no state, unless ``--packing-restart-data`` allows this; or the file
            contains something else.
    """
    if not args.iteration or args.packing_restart_data:
        return None
    if not args.dataloader_save:
        raise ConfigError(
            f"The run continues at iteration {args.iteration}, but --dataloader-save is not given, so the data would "
            "start over; give the folder of the loader's states, or --packing-restart-data."
        )
    from megatron.training.checkpointing import get_checkpoint_name

    own, *others = (
        Path(
            get_checkpoint_name(
                args.dataloader_save,
                args.iteration,
                pipeline_parallel=pipeline_parallel,
                tensor_rank=0,
                pipeline_rank=0,
                expert_parallel=False,
                expert_rank=0,
                basename=f"train_dataloader_dprank{data_parallel_rank or 0:03d}.pt",
            )
        )
        for pipeline_parallel in ((None, False, True) if data_parallel_rank is None else (None,))
    )
    path = next((path for path in (own, *others) if path.is_file()), own)
    return read_state(path, missing=MISSING)
