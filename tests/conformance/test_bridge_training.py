"""Optimiser steps through Megatron-Bridge's own validate, data iterators, setup, train and evaluate, on packed rows."""

from __future__ import annotations

import functools
import itertools

import bridge_here  # noqa: F401
import pytest
import torch
from support.bridge_cpu import attention as cpu_attention
from support.bridge_cpu import row_parity as parity
from support.bridge_cpu import tiny_models, training_run

from energon_packing import thd
from energon_packing.config import ParallelConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.energon.loader import build_loader

pytestmark = pytest.mark.usefixtures("stand_ins")


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

    def run(family, batches, *, steps, rows_a_step=1):
        with training_run.process_groups():
            provider, dataset = tiny_provider(family, seq_length=512), ready_batches(train=batches)
            config = training_run.make_config(
                provider, dataset, steps=steps, global_batch_size=rows_a_step, learning_rate=2e-3
            )
            return training_run.run(config, forward_step="gpt" if family == "text" else "vlm")

    return run


@pytest.mark.parametrize(("family", "multiple"), [("qwen2_5_vl", 1), ("qwen3_vl", 8), ("text", 8)])
def test_the_first_losses_equal_those_of_the_same_samples_one_a_row(family, multiple, train, make_samples):
    packs = packs_of(make_samples, family, 4, seed=50)
    singles, size = parity.one_a_row(packs)
    packed = train(family, [thd.assemble(rows, multiple=multiple).to_bridge() for rows in packs], steps=4)
    alone = train(family, singles, steps=4, rows_a_step=size)
    assert packed.losses == pytest.approx(alone.losses, abs=1e-4)
    assert max(packed.losses) - min(packed.losses) > 0.01  # equal numbers would prove nothing
    norms = [[step.grad_norm for step in run.steps] for run in (packed, alone)]
    assert norms[0] == pytest.approx(norms[1], abs=1e-4)


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
    assert together.losses == pytest.approx(apart.losses, abs=1e-4)
    norms = [[step.grad_norm for step in run.steps] for run in (together, apart)]
    assert norms[0] == pytest.approx(norms[1], abs=1e-4)


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


VISION = ("qwen2_5_vl", "qwen3_vl")
SEQ_LENGTH = 1024
model_of = functools.partial(tiny_models.shipped_provider, seq_length=SEQ_LENGTH)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """Conversations with images and videos as an Energon data set."""
    folder = tmp_path_factory.mktemp("bridge")
    source = make_data(folder / "made", conversations=40, defects=False)
    convert(ConvertConfig(sources=(source,), out=folder / "dataset", split={"train": 0.8, "val": 0.2}, workers=0))
    return folder / "dataset"


@pytest.fixture
def online(conversations):
    """Makes the configuration anew: the same packs in the same order each time."""
    from energon_packing.bridge import PackedEnergonDatasetConfig

    def make(family):
        made = PackedEnergonDatasetConfig(
            path=str(conversations), processor=str(processor_path(family)), seq_length=SEQ_LENGTH, num_workers=0
        )
        made.encoder.min_pixels = made.encoder.video_min_pixels = 32 * 32
        made.encoder.max_pixels = made.encoder.video_max_pixels = 160 * 160
        made.packing.window = 32
        made.packing.drop_budget = 0.5
        return made

    return make


@pytest.mark.parametrize("family", VISION)
def test_steps_on_online_packs_learn_as_the_same_samples_one_a_row(family, online, ready_batches):
    loader = build_loader(online(family).run_config(ParallelConfig()))
    packs = [thd.unpack(pack.batch) for pack in itertools.islice(loader, 4)]
    assert sum(len(rows) for rows in packs) > 8
    assert any("visual_inputs" in row for rows in packs for row in rows)
    singles, size = parity.one_a_row(packs)
    results, seen = [], []
    for batches, steps, rows_a_step in ((online(family), 8, 1), (ready_batches(train=singles), 4, size)):
        with training_run.process_groups():
            config = training_run.make_config(
                model_of(family),
                batches,
                steps=steps,
                global_batch_size=rows_a_step,
                eval_iters=rows_a_step == 1,
                learning_rate=4e-3,
            )
            results.append(training_run.run(config, forward_step="vlm", on_step=seen.append))
    packed, alone = results
    assert [report.step for report in seen] == [*range(1, 9), *range(1, 5)]
    assert packed.losses[:4] == pytest.approx(alone.losses, abs=1e-4)
    assert packed.losses[-1] < packed.losses[0] - 0.5
    assert packed.held_out_after < packed.held_out_before - 0.5


def noting(losses):
    """A callback that appends the loss of each evaluation."""
    from megatron.bridge.training.callbacks import Callback

    class Losses(Callback):
        def on_eval_end(self, context):
            losses.append(float(context.total_loss_dict["lm loss"]))

    return Losses()


def test_every_evaluation_of_bridge_reports_the_loss_on_the_same_packs_and_so_does_the_next_run(online):
    """The weights never change, so the loss does only where the packs do."""
    found = {}
    for name in ("run", "next run"):
        losses = found[name] = []
        with training_run.process_groups():
            made = online("text")
            made.packing.drop_budget, made.validation_split = 1.0, "train"  # of several packs
            config = training_run.make_config(model_of("text"), made, steps=2, learning_rate=0.0)
            config.validation.eval_iters, config.validation.eval_interval = 2, 1
            training_run.run(config, forward_step="gpt", callbacks=[noting(losses)])
        assert len(losses) == 2
        assert losses[0] == losses[1]
    assert found["run"] == found["next run"]


def test_the_loss_on_the_whole_split_is_that_of_its_samples_one_a_row_whatever_packs_them(conversations):
    """Micro-batches without samples follow in every mode; a row for each sample is the oracle."""
    from energon_packing.bridge import PackedEnergonDatasetConfig

    found = {}
    for mode, size in (("packs", 1), ("in_batch", 2), ("padded", 3), ("padded", 1)):
        losses = found[mode, size] = []
        made = PackedEnergonDatasetConfig(
            path=str(conversations),
            processor=str(processor_path("text")),
            seq_length=SEQ_LENGTH,
            num_workers=0,
            mode=mode,
        )
        made.micro_batch_size, made.packing.drop_budget = size, 1.0
        model = model_of("text")
        with training_run.process_groups():
            config = training_run.make_config(model, made, steps=1, global_batch_size=2 * size, learning_rate=0.0)
            config.train.micro_batch_size = size
            config.validation.eval_iters, config.validation.eval_interval = 5, 1
            training_run.run(config, forward_step="gpt", callbacks=[noting(losses)])
    alone = found.pop(("padded", 1))
    assert all(losses == pytest.approx(alone, rel=1e-6) for losses in found.values())


@pytest.mark.parametrize("family", VISION)
def test_losses_and_gradients_of_pixels_as_bytes_are_those_of_floats_bit_for_bit(family, online):
    results = []
    for pixels in ("bytes", "float32"):
        made = online(family)
        made.encoder.pixels = pixels
        with training_run.process_groups():
            config = training_run.make_config(model_of(family), made, steps=2)
            results.append(training_run.run(config, forward_step="vlm"))
    carried, floats = results
    assert len(carried.losses) == 2
    assert carried.losses == floats.losses
    assert [step.grad_norm for step in carried.steps] == [step.grad_norm for step in floats.steps]
