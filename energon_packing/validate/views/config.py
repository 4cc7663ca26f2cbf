"""Our YAML as a `RunView`. Imports neither torch nor Bridge."""

from __future__ import annotations

from pathlib import Path

from energon_packing.config import RunConfig
from energon_packing.validate.run_facts import DataFacts, model_facts, processor_facts
from energon_packing.validate.run_view import RunView, installed_version, smallest_world_size


def view_of_config(
    config: RunConfig, *, world_size: int | None = None, model_config: Path | None = None, data: DataFacts | None = None
) -> RunView:
    """The view of our YAML: a run that trains on a `PackedEnergonDatasetConfig` made from it.

    Args:
        config: the configuration.
        world_size: GPUs; None takes the smallest number that holds one replica.
        model_config: the model's ``config.json``, if there is one.
        data: measurements of the data set.
    """
    parallel, packing, training = config.parallel, config.packing, config.training
    packed = not training.enable_in_batch_packing
    view = RunView.of(
        dataset_kind="packed_energon",
        tensor_parallel=parallel.tensor_parallel,
        context_parallel=parallel.context_parallel,
        pipeline_parallel=parallel.pipeline_parallel,
        expert_parallel=parallel.expert_parallel,
        sequence_parallel=parallel.sequence_parallel,
        eval_context_parallel=parallel.eval_context_parallel,
        world_size=world_size
        or smallest_world_size(
            parallel.tensor_parallel,
            parallel.pipeline_parallel,
            parallel.context_parallel,
            parallel.eval_context_parallel,
        ),
        cp_comm_type=parallel.cp_comm_type,
        hierarchical_context_parallel_sizes=parallel.hierarchical_context_parallel_sizes,
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
        eval_micro_batch_size=training.eval_micro_batch_size,
        eval_global_batch_size=training.eval_global_batch_size,
        dataset_micro_batch_size=training.micro_batch_size,
        dataset_seq_length=packing.seq_length,
        model_seq_length=training.model_seq_length or packing.seq_length,
        # Our data set declares its rows as packed ones, so that every pipeline stage gets their boundaries.
        enable_offline_packing=packed,
        has_offline_packing_specs=packed,
        packed_sequence_size=packing.seq_length if packed else None,
        enable_in_batch_packing=training.enable_in_batch_packing,
        pad_to_max_length=packing.pad_to_max_length,
        calculate_per_token_loss=training.calculate_per_token_loss,
        average_in_collective=training.average_in_collective,
        model=training.model,
        step=training.step,
        megatron_core_version=installed_version("megatron-core"),
        bridge_version=installed_version("megatron-bridge"),
        processor_tokens=processor_facts(config.encoder.processor),
        loss_weighting=config.encoder.loss_weighting,
        window=packing.window if packed else None,
        balance_window=packing.balance_window,
        workers=config.data.workers,
        data=data,
        **({} if model_config is None else model_facts(model_config)),
    )
    if view.model_forces_sequence_parallel and view.parallel.tensor_parallel > 1:
        return view.changed(sequence_parallel=True)
    return view
