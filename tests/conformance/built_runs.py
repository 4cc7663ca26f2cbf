"""What Megatron-Core and Bridge build after ``validate()`` for runs of `drawn_runs`: who refuses, what a model trains.

Everything is built for real on the CPU, once for all runs that agree in what it depends on: process groups of rank 0 of
the run on a backend that sends nothing, the calculator of micro-batches, the wrapper that reduces gradients, and tiny
models of the families that see.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from support.bridge_cpu import stand_ins, tiny_models, training_run

from energon_packing.validate.rules.rule import Rule
from energon_packing.validate.run_view import RunView

FAMILIES = {"Qwen25VL": "qwen2_5_vl", "Qwen3VL": "qwen3_vl", "Qwen35VL": "qwen3_vl"}
"""Drawn models that see, with a tiny one; Qwen3.5-VL has the class of Qwen3-VL (`FAMILY_TABLE`)."""

TOKENS = tiny_models.SpecialTokens(vision_start=1, vision_end=2, image=3, video=4)


@contextlib.contextmanager
def groups(world: int, **sizes: Any) -> Iterator[None]:
    """The process groups of a run's first rank, on a backend that sends nothing."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def one_rank_on_the_cpu() -> Iterator[None]:
    """The groups of a run of one rank, with stand-ins for what needs CUDA, which ``validate()`` shall not see."""
    stand_ins.install()
    try:
        with stand_ins.without_warnings(), groups(1):
            yield
    finally:
        stand_ins.uninstall()


@functools.cache
def layout_refused(world: int, tensor: int, pipeline: int, context: int, expert: int, inside: int | None) -> str:
    """Why Megatron-Core makes no groups; with the size of expert groups that Bridge sets before it asks for them."""
    from types import SimpleNamespace

    from megatron.bridge.models.transformer_config import _set_moe_expert_tensor_parallel_default

    config: Any = SimpleNamespace(expert_tensor_parallel_size=inside, expert_model_parallel_size=expert)
    _set_moe_expert_tensor_parallel_default(config)
    try:
        with groups(
            world,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        ):
            return ""
    except (RuntimeError, AssertionError) as error:
        return str(error)


@functools.cache
def batch_refused(rows: int, micro: int, replicas: int) -> str:
    """Why Megatron-Core divides no global batch into micro-batches."""
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator

    try:
        ConstantNumMicroBatchesCalculator(rows, micro, replicas, False, 0)
    except AssertionError as error:
        return str(error)
    return ""


@functools.cache
def wrapper_refused(per_token: bool, average: bool) -> str:
    """Why Megatron-Core's wrapper takes no model; that of Megatron-FSDP, another class, does not ask."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=2, num_attention_heads=1, calculate_per_token_loss=per_token)
    settings = DistributedDataParallelConfig(average_in_collective=average)
    try:
        with one_rank_on_the_cpu():
            DistributedDataParallel(config, settings, torch.nn.Linear(2, 2))
    except AssertionError as error:
        return str(error)
    return ""


def refusal(view: RunView) -> str:
    """Who stops a run that ``validate()`` accepts, before its first step; empty if nobody does."""
    sizes = (view.tensor_parallel, view.pipeline_parallel, view.context_parallel)
    return (
        layout_refused(view.world_size, *sizes, view.expert_parallel, view.expert_tensor_parallel)
        or batch_refused(view.global_batch_size, view.micro_batch_size, view.data_parallel)
        or ("" if view.megatron_fsdp else wrapper_refused(view.calculate_per_token_loss, view.average_in_collective))
    )


@functools.cache
def trained(family: str, frozen: bool) -> frozenset[str]:
    """Names of the trained parameters outside the language model, of the model that the provider builds."""
    with one_rank_on_the_cpu():
        made = tiny_models.provider(family, vocab_size=64, tokens=TOKENS)
        made.freeze_vision_model = made.freeze_vision_projection = frozen
        model = training_run.build_model(made)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return frozenset(name for name in names if "language_model" not in name)


def justified(rule: Rule, view: RunView) -> bool:
    """Whether the model that is built has the reason of a rule that refuses a run alone.

    Rules whose reason no model shows are justified by their lines of source, which a test looks up.
    """
    family = FAMILIES.get(view.model or "")
    seen = trained(family, view.vision_frozen) if family else frozenset()
    return {
        "core/global-batch-size": False,  # what is built has not refused it
        "core/expert-world-size": False,
        "core/no-average-with-token-loss": False,
        "ours/packs-without-media": bool(seen) and not view.dummy_image,
        "ours/deepstack-gradient": any("deepstack" in name for name in seen),
        "ours/one-packed-row-over-context-parallelism": view.do_validation or view.do_test,
    }.get(rule.id, True)
