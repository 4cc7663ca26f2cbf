"""A training run on the CPU through Bridge's own code: validate, data iterators, setup, train, evaluate.

The calls follow ``megatron.bridge.training.pretrain.pretrain``, which itself cannot be imported without NVIDIA's
resiliency extension: ``runtime_config_update`` (which calls ``ConfigContainer.validate``), ``get_dataset_provider``,
``setup``, ``train``, ``evaluate``. All of these are Bridge's, unmodified;
`support.bridge_cpu.stand_ins.REPLACED` lists what is replaced underneath them.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from energon_packing.errors import UserError
from support.bridge_cpu import stand_ins

ForwardStep = Literal["vlm", "gpt"] | Callable[..., Any]
"""Bridge's own step by its name, or any other, such as `energon_packing.bridge.step.forward_step`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What Bridge reports after one optimiser step.

    Attributes:
        step: number in the whole run, from 1; a run that continues goes on counting.
        loss: sum of the token losses of the step divided by its trained tokens.
        grad_norm: norm of the whole gradient before clipping; None if Bridge reports none.
    """

    step: int
    loss: float
    grad_norm: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """A finished run: its steps, and the loss on held-out rows before the first and after the last of them; None
    without ``eval_iters``."""

    steps: tuple[StepReport, ...]
    held_out_before: float | None
    held_out_after: float | None

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [report.loss for report in self.steps]


def backend() -> str:
    """Name of the backend of all groups: gloo on the CPU. On a GPU NCCL too, because gloo's coalesced all-reduce, with
    which Megatron-Core reduces gradients, takes no CUDA tensors."""
    return "gloo" if stand_ins.needed() else "cpu:gloo,cuda:nccl"


@contextlib.contextmanager
def process_groups() -> Iterator[None]:
    """Opens a process group of `backend` for the block, and removes all of Megatron's global state after it.

    The environment sets the world (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``, as from ``torchrun``);
    without them it is one process.

    Raises:
        UserError: a process group exists already.
    """
    stand_ins.install()
    from megatron.bridge.training.initialize import destroy_global_state
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine

    if torch.distributed.is_initialized():
        raise UserError("torch.distributed is initialised already; such a run makes its own groups.")
    if not stand_ins.needed():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group(backend())
    else:
        torch.distributed.init_process_group(backend(), store=torch.distributed.HashStore(), rank=0, world_size=1)
    destroy_rerun_state_machine()  # Bridge's loss makes one wherever it is called, and its setup then refuses to
    try:
        yield
    finally:
        destroy_global_state()
        torch.distributed.destroy_process_group()
        _release_models()


def _release_models() -> None:
    """Frees the models of a run, and with them some twenty gloo groups.

    Each group has three threads that wake a hundred times per second for as long as an object refers to it. Models
    refer to theirs in cycles, two of which the garbage collector cannot see: the tokens that a dispatcher of experts
    keeps lead to the model through their gradient functions, and a rotary embedding is in a cache of its own method.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    for method in vars(RotaryEmbedding).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()
    # By type: `isinstance` asks an object for its class, and a deprecated one of torch answers with a warning.
    for dispatcher in [each for each in gc.get_objects() if issubclass(type(each), MoETokenDispatcher)]:
        for name, value in vars(dispatcher).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                setattr(dispatcher, name, None)
    gc.collect()


def build_model(provider: Any, *, seed: int = 1234) -> Any:
    """The provider's model with random weights and without a data-parallel wrapper, inside `process_groups`.

    Sets up Megatron's model-parallel groups with the provider's sizes if there are none yet.
    """
    stand_ins.install()
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=provider.tensor_model_parallel_size,
            pipeline_model_parallel_size=provider.pipeline_model_parallel_size,
            context_parallel_size=provider.context_parallel_size,
            create_gloo_process_groups=False,
        )
    torch.manual_seed(seed)
    provider.finalize()
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False)
    return model


def make_config(
    model: Any,
    dataset: Any,
    *,
    steps: int,
    global_batch_size: int = 1,
    learning_rate: float = 1e-3,
    eval_iters: int = 0,
    seed: int = 1234,
) -> Any:
    """A `ConfigContainer` for a short fp32 run with Adam and a constant learning rate.

    Args:
        model: a Bridge model provider (`support.bridge_cpu.tiny_models`).
        dataset: a Bridge ``DatasetProvider`` whose rows are packs.
        global_batch_size: rows per step over all data-parallel ranks; a micro-batch is always one row.
        eval_iters: global batches of held-out rows; 0 evaluates nothing.
        seed: of the weights.
    """
    stand_ins.install()
    from megatron.bridge.training import config as bridge
    from megatron.bridge.training.tokenizers.config import TokenizerConfig

    return bridge.ConfigContainer(
        model=model,
        dataset=dataset,
        train=bridge.TrainingConfig(
            micro_batch_size=1, global_batch_size=global_batch_size, train_iters=steps, manual_gc=False
        ),
        validation=bridge.ValidationConfig(eval_iters=eval_iters, eval_interval=steps + 1 if eval_iters else None),
        optimizer=bridge.OptimizerConfig(
            optimizer="adam",
            lr=learning_rate,
            min_lr=0.0,
            weight_decay=0.0,
            clip_grad=1.0,
            use_distributed_optimizer=False,
        ),
        scheduler=bridge.SchedulerConfig(
            lr_decay_style="constant",
            lr_warmup_iters=0,
            lr_decay_iters=steps,
            start_weight_decay=0.0,
            end_weight_decay=0.0,
            weight_decay_incr_style="constant",
        ),
        ddp=bridge.DistributedDataParallelConfig(
            use_distributed_optimizer=False, overlap_grad_reduce=False, average_in_collective=False
        ),
        # Bridge builds a tokenizer in setup(); the rows hold token ids already.
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=model.vocab_size - 1),
        logger=bridge.LoggerConfig(log_interval=steps + 1, tensorboard_dir=None),
        checkpoint=bridge.CheckpointConfig(save=None, load=None),
        rng=bridge.RNGConfig(seed=seed),
        dist=bridge.DistributedInitConfig(
            distributed_backend="gloo" if stand_ins.needed() else "nccl", use_gloo_process_groups=False
        ),
    )


def run(
    config: Any,
    *,
    forward_step: ForwardStep,
    on_step: Callable[[StepReport], None] = lambda _report: None,
    callbacks: Sequence[Any] = (),
) -> RunResult:
    """Trains ``config.train.train_iters`` optimiser steps on the CPU, once per block of `process_groups`.

    What Bridge prints and logs about itself, and Megatron's and torch's warnings, stay off the terminal.

    Args:
        config: a `ConfigContainer`, for example from `make_config`; validated here by Bridge.
        on_step: called after each step, with the caller's standard output.
        callbacks: Bridge's, such as `energon_packing.bridge.metrics.PackingMetrics`.

    Raises:
        UserError: Bridge ends the process instead of raising an error; with what it printed last.
    """
    stand_ins.install()
    disabled, terminal, printed = logging.root.manager.disable, sys.stdout, io.StringIO()
    logging.disable(max(disabled, logging.INFO))
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(megatron\.(core|training|bridge)|torch)\b")
            return _run(config, forward_step, on_step, callbacks, terminal)
    except SystemExit as ended:
        if ended.code is not None:  # Bridge's own, of a run that it ends on purpose (a signal, ``exit_interval``)
            raise
        last = next((line for line in reversed(printed.getvalue().splitlines()) if line.strip()), "it printed nothing")
        raise UserError(f"Megatron-Bridge ended the run without an error: {last.strip()}") from ended
    finally:
        logging.disable(disabled)


def _run(
    config: Any,
    forward_step: ForwardStep,
    on_step: Callable[[StepReport], None],
    callbacks: Sequence[Any],
    terminal: Any,
) -> RunResult:
    from megatron.bridge.data.utils import get_dataset_provider
    from megatron.bridge.training import gpt_step, vlm_step
    from megatron.bridge.training.callbacks import CallbackManager
    from megatron.bridge.training.config import runtime_config_update
    from megatron.bridge.training.eval import evaluate
    from megatron.bridge.training.setup import setup
    from megatron.bridge.training.state import GlobalState
    from megatron.bridge.training.train import train
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # another run of this process left one of another shape
    bridges_own = {"vlm": vlm_step.forward_step, "gpt": gpt_step.forward_step}
    step_function = bridges_own[forward_step] if isinstance(forward_step, str) else forward_step
    runtime_config_update(config)
    state = GlobalState()
    state.cfg = config
    ready = setup(state, get_dataset_provider(config.dataset))

    reports: list[StepReport] = []

    def record(context: Any) -> None:
        """Bridge's callback at the end of an optimiser step."""
        norm = context.grad_norm
        report = StepReport(
            step=state.train_state.step + 1,  # Bridge counts a step after its callbacks
            loss=_from_last_stage(context.loss_dict, ready.pg_collection),
            grad_norm=None if norm is None else float(norm),
        )
        reports.append(report)
        with contextlib.redirect_stdout(terminal):
            on_step(report)

    called = CallbackManager()
    called.register("on_train_step_end", record)
    called.add(list(callbacks))

    # Both evaluations use one set of rows: an endless held-out stream would compare different rows.
    held_out: list[Any] = []
    if state.train_state.do_valid:
        rows = config.validation.eval_iters * config.validation.eval_global_batch_size // config.data_parallel_size
        held_out = [next(ready.valid_data_iterator) for _ in range(rows)]

    def held_out_loss() -> float | None:
        """Mean loss over the held-out rows; None if there are none."""
        if not held_out:
            return None
        losses, _, _ = evaluate(state, step_function, RerunDataIterator(iter(held_out)), ready.model, None, config)
        return _from_last_stage(losses, ready.pg_collection)

    before = held_out_loss()
    train(
        step_function,
        ready.model,
        ready.optimizer,
        ready.scheduler,
        ready.train_data_iterator,
        ready.valid_data_iterator,
        state,
        ready.checkpoint_manager,
        ready.pg_collection,
        callback_manager=called,
    )
    return RunResult(steps=tuple(reports), held_out_before=before, held_out_after=held_out_loss())


def _from_last_stage(losses: Any, groups: Any) -> float:
    """Returns the language model's loss on every rank; Bridge knows it on the last pipeline stage only."""
    last = groups.pp.size() - 1
    loss = torch.zeros(1)
    if groups.pp.rank() == last:
        loss[0] = float(losses["lm loss"])
    if last:
        torch.distributed.broadcast(loss, torch.distributed.get_global_rank(groups.pp, last), group=groups.pp)
    return float(loss)
