"""`PackedEnergonDatasetConfig` in Megatron-Bridge: from conversation files to optimiser steps, with nothing faked."""

from __future__ import annotations

import importlib.util

import pytest

from energon_packing import thd
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path

pytest.importorskip("megatron.core", reason="Megatron-Bridge is not installed")
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)

from support.bridge_cpu import row_parity as parity
from support.bridge_cpu import tiny_models, training_run

pytestmark = pytest.mark.usefixtures("stand_ins")

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
SEQ_LENGTH = 1024


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Conversations with images and videos as an Energon data set."""
    folder = tmp_path_factory.mktemp("bridge")
    source = make_data(folder / "made", conversations=40, defects=False)
    convert(ConvertConfig(sources=(source,), out=folder / "dataset", split={"train": 0.8, "val": 0.2}, workers=0))
    return folder / "dataset"


@pytest.fixture
def dataset(data):
    """Makes the configuration anew: the same packs in the same order each time."""
    from energon_packing.bridge import PackedEnergonDatasetConfig

    def make(family):
        made = PackedEnergonDatasetConfig(
            path=str(data), processor=str(processor_path(family)), seq_length=SEQ_LENGTH, num_workers=0
        )
        made.encoder.min_pixels = made.encoder.video_min_pixels = 32 * 32
        made.encoder.max_pixels = made.encoder.video_max_pixels = 160 * 160
        made.packing.window = 32
        made.packing.drop_budget = 0.5
        return made

    return make


@pytest.fixture
def provider():
    """The family's tiny model with the vocabulary of the shipped processor."""
    from transformers import AutoTokenizer

    def make(family):
        vocabulary = AutoTokenizer.from_pretrained(processor_path(family)).get_vocab()
        tokens = tiny_models.SpecialTokens(
            vision_start=vocabulary["<|vision_start|>"],
            vision_end=vocabulary["<|vision_end|>"],
            image=vocabulary["<|image_pad|>"],
            video=vocabulary["<|video_pad|>"],
        )
        return tiny_models.provider(family, vocab_size=len(vocabulary), tokens=tokens, seq_length=SEQ_LENGTH)

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_steps_on_online_packs_lower_the_loss_on_held_out_conversations(family, dataset, provider):
    with training_run.process_groups():
        config = training_run.make_config(provider(family), dataset(family), steps=20, eval_iters=2, learning_rate=2e-3)
        result = training_run.run(config, forward_step="vlm")
    print(f"\n{family}: held out {result.held_out_before:.3f} -> {result.held_out_after:.3f}")
    assert len(result.losses) == 20
    assert result.losses[-1] < result.losses[0] - 0.5
    assert result.held_out_after < result.held_out_before - 0.5


def test_every_evaluation_of_bridge_reports_the_loss_on_the_same_packs_and_so_does_the_next_run(dataset, provider):
    """The weights never change, so the loss does only where the packs do; a larger evaluation adds padding alone."""
    from megatron.bridge.training.callbacks import Callback

    class Losses(Callback):
        def on_eval_end(self, context):
            losses.append(float(context.total_loss_dict["lm loss"]))

    found = {}
    for name, eval_iters in (("run", 2), ("next run", 2), ("split", 16), ("more than the split", 20)):
        losses = found[name] = []
        with training_run.process_groups():
            made = dataset("qwen2_5_vl")
            made.validation_split = "train"  # of several packs
            config = training_run.make_config(provider("qwen2_5_vl"), made, steps=4, learning_rate=0.0)
            config.validation.eval_iters, config.validation.eval_interval = eval_iters, 2
            training_run.run(config, forward_step="vlm", callbacks=[Losses()])
        assert len(losses) == 2
        assert losses[0] == losses[1]
    assert found["run"] == found["next run"]
    assert found["split"] == found["more than the split"] != found["run"]


def test_the_loss_on_the_whole_split_is_that_of_its_samples_one_a_row_whatever_packs_them(data):
    """Micro-batches without samples follow in every mode; a row for each sample is the oracle."""
    from megatron.bridge.training.callbacks import Callback
    from transformers import AutoTokenizer

    from energon_packing.bridge import PackedEnergonDatasetConfig

    class Losses(Callback):
        def on_eval_end(self, context):
            losses.append(float(context.total_loss_dict["lm loss"]))

    found = {}
    vocabulary = len(AutoTokenizer.from_pretrained(processor_path("text")).get_vocab())
    for mode, size in (("packs", 1), ("in_batch", 2), ("padded", 3), ("padded", 1)):
        losses = found[mode, size] = []
        made = PackedEnergonDatasetConfig(
            path=str(data), processor=str(processor_path("text")), seq_length=SEQ_LENGTH, num_workers=0, mode=mode
        )
        made.micro_batch_size, made.packing.drop_budget, made.validation_split = size, 1.0, "train"
        model = tiny_models.provider("text", vocab_size=-(-vocabulary // 8) * 8, tokens=None, seq_length=SEQ_LENGTH)
        with training_run.process_groups():
            config = training_run.make_config(model, made, steps=1, global_batch_size=2 * size, learning_rate=0.0)
            config.train.micro_batch_size = size
            config.validation.eval_iters, config.validation.eval_interval = 20, 1
            training_run.run(config, forward_step="gpt", callbacks=[Losses()])
    alone = found.pop(("padded", 1))
    assert all(losses == pytest.approx(alone, rel=1e-6) for losses in found.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_ten_losses_on_online_packs_equal_those_of_the_same_samples_one_a_row(
    family, dataset, provider, ready_batches
):
    from energon_packing.config import ParallelConfig
    from energon_packing.energon.loader import build_loader

    packs = []
    for pack in build_loader(dataset(family).run_config(ParallelConfig())):
        packs.append(thd.unpack(pack.batch))
        if len(packs) == 10:
            break
    assert sum(len(rows) for rows in packs) > 20
    assert any("visual_inputs" in row for rows in packs for row in rows)
    singles, size = parity.one_a_row(packs)
    results = []
    for batches, rows_a_step in ((dataset(family), 1), (ready_batches(train=singles), size)):
        with training_run.process_groups():
            config = training_run.make_config(provider(family), batches, steps=10, global_batch_size=rows_a_step)
            results.append(training_run.run(config, forward_step="vlm"))
    packed, alone = results
    differences = [abs(left - right) for left, right in zip(packed.losses, alone.losses, strict=True)]
    print(f"\n{family}: ten losses on online packs differ by at most {max(differences):.1e}")
    assert max(differences) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_of_pixels_as_bytes_are_those_of_floats_bit_for_bit(family, dataset, provider):
    results = []
    for pixels in ("bytes", "float32"):
        made = dataset(family)
        made.encoder.pixels = pixels
        with training_run.process_groups():
            config = training_run.make_config(provider(family), made, steps=4)
            results.append(training_run.run(config, forward_step="vlm"))
    carried, floats = results
    assert len(carried.losses) == 4
    assert carried.losses == floats.losses
    assert [step.grad_norm for step in carried.steps] == [step.grad_norm for step in floats.steps]
