"""Optimiser steps through Megatron-Bridge's own validate, data iterators, setup, train and evaluate, on packed rows."""

from __future__ import annotations

import bridge_here  # noqa: F401
import pytest
import torch
from support.bridge_cpu import attention as cpu_attention
from support.bridge_cpu import row_parity as parity
from support.bridge_cpu import training_run

from energon_packing import thd

pytestmark = pytest.mark.usefixtures("stand_ins")

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "text")
STEPS = 24


def packs_of(make_samples, family, count, seed=0):
    """Rows of `count` packs, every pack with text, images and videos (text only for ``text``)."""
    packs = []
    for index in range(count):
        samples = make_samples(family, seed + index)
        if family == "text":
            packs.append([samples.draw("text", length) for length in (31, 12, 40 + index)[: 2 + index % 2]])
        else:
            packs.append(samples.variety()[index % 3 :])
    return packs


@pytest.fixture
def train(tiny_provider, ready_batches):
    """Runs a family's tiny model over batches in a world of its own."""

    def run(family, batches, *, held_out=None, steps=STEPS, rows_a_step=1, learning_rate=2e-3, on_step=None):
        with training_run.process_groups():
            config = training_run.make_config(
                tiny_provider(family, seq_length=512),
                ready_batches(train=batches, held_out=held_out),
                steps=steps,
                global_batch_size=rows_a_step,
                learning_rate=learning_rate,
                eval_iters=len(held_out) if held_out else 0,
            )
            return training_run.run(config, forward_step="gpt" if family == "text" else "vlm", on_step=on_step)

    return run


@pytest.mark.parametrize("family", FAMILIES)
def test_training_on_packs_lowers_the_loss_on_held_out_packs(family, train, make_samples):
    packs = [thd.assemble(rows, multiple=8).to_bridge() for rows in packs_of(make_samples, family, STEPS)]
    held_out = [thd.assemble(rows).to_bridge() for rows in packs_of(make_samples, family, 3, seed=1000)]
    seen = []
    result = train(family, packs, held_out=held_out, on_step=seen.append)
    print(
        f"\n{family}: loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f} in {len(result.losses)} steps, "
        f"held out {result.held_out_before:.3f} -> {result.held_out_after:.3f}"
    )
    assert [report.step for report in seen] == list(range(1, STEPS + 1))
    assert seen == list(result.steps)
    assert result.losses[-1] < result.losses[0]
    assert result.held_out_after < result.held_out_before - 0.3
    assert all(report.grad_norm > 0 for report in result.steps)


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_ten_losses_equal_those_of_the_same_samples_one_a_row(family, multiple, train, make_samples):
    packs = packs_of(make_samples, family, 10, seed=50)
    singles, size = parity.one_a_row(packs)
    packed = train(family, [thd.assemble(rows, multiple=multiple).to_bridge() for rows in packs], steps=10)
    alone = train(family, singles, steps=10, rows_a_step=size)
    differences = [abs(left - right) for left, right in zip(packed.losses, alone.losses, strict=True)]
    print(f"\n{family}, multiple {multiple}: ten losses differ by at most {max(differences):.1e}")
    assert max(differences) < 1e-4
    assert max(packed.losses) - min(packed.losses) > 0.01  # ten equal numbers would prove nothing
    norms = [abs(left.grad_norm - right.grad_norm) for left, right in zip(packed.steps, alone.steps, strict=True)]
    assert max(norms) < 1e-4


def test_ignoring_the_boundaries_changes_the_first_loss(train, make_samples):
    packs = [thd.assemble(rows).to_bridge() for rows in packs_of(make_samples, "qwen3_vl", 1)]
    kept = train("qwen3_vl", packs, steps=1)
    with cpu_attention.ignore_boundaries():
        ignored = train("qwen3_vl", packs, steps=1)
    assert abs(kept.losses[0] - ignored.losses[0]) > 1e-3


def test_two_packs_a_step_weigh_tokens_alike_whatever_pack_they_are_in(train, make_samples):
    rows = [row for pack in packs_of(make_samples, "qwen2_5_vl", 1) for row in pack]
    uneven = [thd.assemble(part).to_bridge() for part in (rows[:1], rows[1:])]
    together = train("qwen2_5_vl", [thd.assemble(rows).to_bridge()], steps=2)
    apart = train("qwen2_5_vl", uneven, steps=2, rows_a_step=2)
    for left, right in zip(together.steps, apart.steps, strict=True):
        assert abs(left.loss - right.loss) < 1e-4
        assert abs(left.grad_norm - right.grad_norm) < 1e-4


def test_a_run_leaves_no_process_group_and_no_megatron_state_behind(train, make_samples):
    from megatron.core import num_microbatches_calculator, parallel_state

    train("text", [thd.assemble(rows).to_bridge() for rows in packs_of(make_samples, "text", 1)], steps=1)
    assert not torch.distributed.is_initialized()
    assert not parallel_state.is_initialized()
    assert num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None


def test_a_run_begins_where_a_loss_of_bridge_was_computed_before():
    """It leaves the machine that repeats steps behind, one of which a process may have."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine, initialize_rerun_state_machine

    get_rerun_state_machine()
    with training_run.process_groups():
        initialize_rerun_state_machine()
