"""One batch of a run through its forward step, without its model: what ``scripts/train.py --check`` does at the end.

The first row is read in this process, by the run's own data set, processor and alignment. The step gets it with a model
of the recipe's class, layers and sizes on torch's meta device, in one piece whatever the layout of ranks, whose
``forward`` checks the names of its arguments and returns zeros. So no weight is read or made.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from energon_packing.config.run import MetricsConfig
from energon_packing.errors import ConfigError, UserError
from energon_packing.ledger import without_ledger
from support import wan_on_cpu
from support.bridge_cpu import stand_ins, training_run

_SPREAD = ("tensor", "context", "pipeline", "expert")
_KERNELS = ("gradient_accumulation_fusion", "moe_permute_fusion", "moe_router_fusion", "apply_rope_fusion")
"""Settings of a model that need kernels of a GPU when it is built; nothing of it is computed."""


def feed(container: Any, step: Any, name: str) -> str:
    """Reads a row, gives it to the step, and says in a sentence what was done.

    Args:
        container: Bridge's ``ConfigContainer`` with a data set of ours, not yet validated by Bridge; unchanged.
        step: Bridge's forward step, called ``name`` in sentences.

    Raises:
        ConfigError: no row can be read, or the step or the model does not take it.
    """
    batch, row = first_row(container)
    with contextlib.ExitStack() as changed:
        changed.enter_context(mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}))
        changed.enter_context(training_run.process_groups())
        if stand_ins.needed():
            changed.enter_context(stand_ins.without_warnings())
        if hasattr(container.model, "patch_spatial") and stand_ins.needed():
            wan_on_cpu.install(changed.enter_context(wan_on_cpu.Replaced()))
        try:
            model = hollow(container.model)
        except Exception as error:
            if not stand_ins.needed():
                raise
            where = "without Transformer Engine" if isinstance(error, ImportError) else "here"
            return (
                f"read {row}; it was not given to {name}, because the model cannot be built {where} "
                f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason'})"
            )
        from megatron.bridge.training.state import GlobalState

        state = GlobalState()
        state.cfg = container
        try:
            output, loss_function = step(state, iter((batch,)), model)
            _, trained, *_ = loss_function(output)
        except UserError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{name} does not take a row of this data set: {type(error).__name__}: {error}. Leave --step out, or "
                "name the step of this kind of data."
            ) from error
    return f"{name} took {row}, {int(trained)} of them trained"


def first_row(container: Any) -> tuple[dict[str, Any], str]:
    """Returns what the run's step reads first, and what it is in words.

    Raises:
        UserError: as the data set itself raises it; or it gives no row.
    """
    dataset, model = container.dataset, container.model
    sizes = {"tp": "tensor_model", "cp": "context", "pp": "pipeline_model"}
    groups = {
        short: SimpleNamespace(size=functools.partial(getattr, model, f"{name}_parallel_size", 1))
        for short, name in sizes.items()
    }
    dataset.follow(container)
    config = dataset.run_config(dataset.parallel_config(SimpleNamespace(**groups)))
    # A run that trained, or still does, has its ledger and its metrics.
    config = without_ledger(replace(config, data=replace(config.data, workers=0), metrics=MetricsConfig()))
    with mock.patch.object(dataset, "_run", None):  # its rules were asked already, with the number of ranks
        pack = next(iter(dataset.make_loader(config)), None)
    if pack is None:
        raise ConfigError(f"dataset.path {dataset.path} gives no row; `energon-packing stats` tells why.")
    batch = pack.batch
    what = "patches" if hasattr(batch, "video_latents") else "tokens"
    row = f"a row of {len(pack.batch.sample_keys)} samples with {batch.total_tokens} {what}"
    return dataset.make_form(config)(batch), row


def hollow(provider: Any) -> Any:
    """Returns the model of a provider on the meta device for one rank, without its ``forward``."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    provider = copy.deepcopy(provider)
    for name in _SPREAD:
        for field in (f"{name}_model_parallel_size", f"{name}_parallel_size"):
            if hasattr(provider, field):
                setattr(provider, field, 1)
    stages = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    for field in ("sequence_parallel", "perform_initialization", *stages, *_KERNELS):
        if hasattr(provider, field):
            setattr(provider, field, False)
    for field in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if hasattr(provider, field):
            setattr(provider, field, None)
    provider.expert_tensor_parallel_size = 1
    provider.virtual_pipeline_model_parallel_size = provider.pipeline_model_parallel_layout = None
    provider.use_cpu_initialization = provider.init_model_with_meta_device = True
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    with torch.device("meta"):
        model = provider.provide(pre_process=True, post_process=True)
    takes = inspect.signature(model.forward)

    def forward(*arguments: Any, **named: Any) -> torch.Tensor:
        given = takes.bind(*arguments, **named).arguments
        like = given["x"] if given.get("labels") is None else given["labels"]
        return torch.zeros(like.shape, device=like.device)

    forward.__signature__ = takes  # type: ignore[attr-defined]  # steps ask for it
    model.forward = forward
    return model
