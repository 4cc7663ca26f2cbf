"""An endless loader whose samples are all dropped ends with one sentence, and holds no more than it may until then."""

from __future__ import annotations

import pytest
from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset

from energon_packing.config import EncoderConfig, PackingConfig
from energon_packing.demo import processor_path
from energon_packing.energon.loader import build_loader
from energon_packing.energon.sample_task_encoder import MixedTaskEncoder
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import ConfigError, SampleRejected, UserError
from energon_packing.ledger import NothingToPack

ENDLESS = {"data": {"repeat": True}, "drop_budget": 1.0}
MOST = 200
"""More than twice the samples of the data set, so that they come again."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("buffer", [None, 16])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_of_which_every_sample_is_too_long_ends_with_the_reason_and_the_way_out(run_config, workers, buffer):
    config = run_config(
        seq_length=16, max_drops_without_pack=MOST, data={"repeat": True, "workers": workers}, drop_budget=1.0
    )
    with pytest.raises(UserError) as caught:
        next(iter(build_loader(config, packing_buffer_size=buffer)))
    message = str(caught.value)
    assert f"{MOST} samples were dropped without a single pack between them, {MOST} of them as oversize" in message
    assert f"or raise max_drops_without_pack={MOST}." in message
    assert "\n" not in message


@pytest.mark.timeout(300)
@pytest.mark.parametrize("buffer", [None, 16])
def test_a_stream_of_which_no_sample_can_be_rendered_ends_too(run_config, monkeypatch, buffer):
    config = run_config(**ENDLESS, max_drops_without_pack=MOST)
    task_encoder = PackingTaskEncoder(config.encoder, config.packing)

    def failing(*_):
        raise SampleRejected("corrupt_media", "all of them")

    monkeypatch.setattr(task_encoder.encoder, "render", failing)
    with pytest.raises(NothingToPack, match="as corrupt_media"):
        next(iter(build_loader(config, task_encoder=task_encoder, packing_buffer_size=buffer)))


@pytest.mark.timeout(300)
def test_single_samples_of_which_all_are_dropped_end_too(dataset):
    encoder = EncoderConfig(processor=str(processor_path("qwen2_5_vl")))
    task_encoder = MixedTaskEncoder(encoder, max_length=16, drop_budget=1.0, max_drops_without_pack=MOST)
    made = get_train_dataset(
        str(dataset / "dataset.yaml"),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=2,
        task_encoder=task_encoder,
        max_samples_per_sequence=None,
        shuffle_buffer_size=None,
    )
    with pytest.raises(Exception, match=f"{MOST} samples were dropped without"):
        next(iter(get_savable_loader(made)))


def test_a_number_below_one_is_refused():
    with pytest.raises(ConfigError, match="max_drops_without_pack is 0"):
        PackingConfig(max_drops_without_pack=0)
