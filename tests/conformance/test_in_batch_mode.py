"""Modes ``in_batch`` and ``padded`` of our data set: Bridge's own rows of our samples, and the same loss as a pack.

What is compared: the batch that the mode hands to Bridge's step; what Bridge's in-batch packer, called here on a
right-padded batch as its collators call it, makes of the same samples; and our pack of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import bridge_here  # noqa: F401
import pytest
import torch
from click.testing import CliRunner
from support.bridge_cpu import attention as cpu_attention
from support.bridge_cpu import tiny_models, training_run

from energon_packing import thd
from energon_packing.cli.main import cli
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.errors import ConfigError

pytestmark = pytest.mark.usefixtures("stand_ins")

ROOT = Path(__file__).resolve().parents[2]

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "text")
SEQ_LENGTH = 1024


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Conversations with and without media as an Energon data set."""
    folder = tmp_path_factory.mktemp("in-batch")
    source = make_data(folder / "made", conversations=60, defects=False)
    convert(ConvertConfig(sources=(source,), out=folder / "dataset", split={"train": 0.8, "val": 0.2}, workers=0))
    return folder / "dataset"


@pytest.fixture
def dataset(data):
    """Makes a configuration on that data; keywords set fields."""
    from energon_packing.bridge import PackedEnergonDatasetConfig

    def make(family, **fields):
        made = PackedEnergonDatasetConfig(
            path=str(data),
            processor=str(processor_path(family)),
            seq_length=SEQ_LENGTH,
            num_workers=0,
            **fields,
        )
        made.encoder.min_pixels = made.encoder.video_min_pixels = 32 * 32
        made.encoder.max_pixels = made.encoder.video_max_pixels = 160 * 160
        made.packing.drop_budget = 0.5
        if family == "text":  # leaves out what has media
            made.encoder.modality, made.packing.drop_budget = "text", 1.0
        return made

    return make


@pytest.fixture
def run(dataset):
    """A run on a data set in a mode, for one step of each kind; nothing is built yet."""
    from transformers import AutoTokenizer

    def make(family, *, steps=3, samples=3, **fields):
        vocabulary = AutoTokenizer.from_pretrained(processor_path(family)).get_vocab()
        names = {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
        names |= {"image": "<|image_pad|>", "video": "<|video_pad|>"}
        tokens = None
        if family != "text":
            tokens = tiny_models.SpecialTokens(**{field: vocabulary[name] for field, name in names.items()})
        model = tiny_models.provider(family, vocab_size=len(vocabulary), tokens=tokens, seq_length=SEQ_LENGTH)
        made = dataset(family, micro_batch_size=samples, **fields)
        config = training_run.make_config(model, made, steps=steps, global_batch_size=samples)
        config.train.micro_batch_size = samples
        return config

    return make


def context():
    from megatron.bridge.data.base import DatasetBuildContext

    return DatasetBuildContext(train_samples=100, valid_samples=10, test_samples=0, pg_collection=None)


def iterator_of(made):
    train, _, _ = made.build_datasets(context())
    return train


def samples_of(made, count):
    """The rows of the first micro-batches, from the loader under the mode."""
    from energon_packing.config import ParallelConfig
    from energon_packing.energon.loader import build_loader

    config = made.run_config(ParallelConfig())
    loader = build_loader(config, task_encoder=made._task_encoder(config))
    return [thd.unpack(pack.batch) for pack, _ in zip(loader, range(count), strict=False)]


def padded_by_hand(rows):
    """What a collator holds before it calls Bridge's packer: one sample a row, padded at the right."""
    width = max(len(row["input_ids"]) for row in rows)
    fills = {"input_ids": 0, "labels": -100, "loss_mask": 0.0, **EXTRA}
    batch = {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=fill)
        for name, fill in fills.items()
    }
    batch["position_ids"] = torch.arange(width).repeat(len(rows), 1)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    batch["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()
    return batch


def equal(name, left, right):
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, name
        assert torch.equal(left, right), name
    else:
        assert left == right, name


EXTRA = {"advantages": 0.0}
"""A field of a data set's own, and what it is padded with."""


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_batch_equals_what_bridges_packer_makes_of_our_samples_and_our_pack_of_them(family, multiple, dataset):
    from megatron.bridge.data.collators.sequence import prepare_sequence_batch

    from energon_packing.bridge.in_batch import form_of

    made = dataset(family, mode="in_batch", micro_batch_size=4)
    made._run_layout = (False, None)
    form, media = form_of(made, multiple), 0
    for rows in samples_of(made, 5):
        assert len(rows) == 4
        for number, row in enumerate(rows, 1):
            row["advantages"] = torch.arange(len(row["input_ids"])) / number
        batch = form(thd.assemble(rows, extra_fields=EXTRA))
        theirs = padded_by_hand(rows)
        prepare_sequence_batch(
            theirs,
            sequence_length=SEQ_LENGTH,
            enable_in_batch_packing=True,
            in_batch_packing_pad_to_multiple_of=multiple,
            sequence_tensor_pad_values=EXTRA,
        )
        pack = thd.assemble(rows, multiple=multiple, pad_token_id=0, extra_fields=EXTRA).to_bridge()
        for name, value in theirs.items():
            equal(name, batch[name], value)
            equal(name, pack[name], value)
        assert set(batch) == set(pack)
        equal("padding_mask", batch["padding_mask"], pack["padding_mask"])
        if pack["visual_inputs"] is None:
            assert batch["visual_inputs"] is None
            continue
        media += 1
        for name, value in vars(pack["visual_inputs"]).items():
            equal(name, vars(batch["visual_inputs"])[name], value)
    assert (media > 0) == (family != "text")


def test_the_iterator_hands_out_the_samples_of_the_loader_in_order_in_every_mode(dataset):
    packed = dataset("qwen3_vl", mode="in_batch", micro_batch_size=3)
    expected = samples_of(packed, 4)
    rows_of = {
        "in_batch": iterator_of(packed),
        "padded": iterator_of(dataset("qwen3_vl", mode="padded", micro_batch_size=3)),
        "deferred": iterator_of(
            dataset("qwen3_vl", mode="in_batch", defer_in_batch_packing_to_step=True, micro_batch_size=3)
        ),
    }
    for rows in expected:
        batch = next(rows_of["in_batch"])
        assert batch["cu_seqlens_q"].diff().tolist() == [len(row["input_ids"]) for row in rows]
        for name in ("padded", "deferred"):
            batch = next(rows_of[name])
            assert "cu_seqlens_q" not in batch
            assert batch["input_ids"].shape[0] == 3
            assert batch["input_ids"].shape[1] % 128 == 0
            for at, row in enumerate(rows):
                length = len(row["input_ids"])
                for field in ("input_ids", "labels", "loss_mask", "position_ids"):
                    assert torch.equal(batch[field][at, :length], row[field]), field
                assert batch["loss_mask"][at, length:].sum() == 0
                assert batch["attention_mask"][at].sum() == length


def test_a_later_pipeline_stage_gets_the_same_rows_without_pixels(dataset):
    """One rank of a replica reads; what it sends on has no pixels, and Bridge needs the grids all the same."""
    from energon_packing.bridge.in_batch import form_of
    from energon_packing.energon.pack_bytes import pack_from_bytes, pack_to_bytes

    made = dataset("qwen3_vl", mode="in_batch", micro_batch_size=4)
    (rows, *_) = [rows for rows in samples_of(made, 5) if any("visual_inputs" in row for row in rows)]
    sent, form = thd.assemble(rows), form_of(made, 8)
    first, later = form(sent), form(pack_from_bytes(pack_to_bytes(sent, pixels=False)))
    for name in ("input_ids", "labels", "cu_seqlens_q", "cu_seqlens_q_padded"):
        assert torch.equal(first[name], later[name]), name
    for name, value in vars(first["visual_inputs"]).items():
        if name.startswith("pixel"):
            assert vars(later["visual_inputs"])[name] is None
        else:
            equal(name, vars(later["visual_inputs"])[name], value)


def losses(config, step):
    with training_run.process_groups():
        return training_run.run(config, forward_step=step)


def difference(result, expected):
    """Largest difference of a loss or a gradient norm."""
    pairs = zip(result.steps, expected.steps, strict=True)
    return max(max(abs(a.loss - b.loss), abs(a.grad_norm - b.grad_norm)) for a, b in pairs)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_on_bridges_rows_has_the_loss_and_gradient_of_a_step_on_our_pack(family, run, ready_batches):
    """Three optimiser steps: ``in_batch``, ``padded``, and packs of the same samples through Bridge's own step."""
    step = "gpt" if family == "text" else "vlm"
    in_batch = run(family, mode="in_batch")
    packs = [thd.assemble(rows).to_bridge() for rows in samples_of(in_batch.dataset, 3)]
    results = [losses(in_batch, step), losses(run(family, mode="padded"), step)]
    packed = run(family)
    packed.dataset, packed.train.micro_batch_size, packed.train.global_batch_size = ready_batches(train=packs), 1, 1
    expected = losses(packed, step)
    for result in results:
        found = difference(result, expected)
        print(f"\n{family}: losses and gradient norms differ by at most {found:.1e}")
        assert found < 1e-5
    assert max(expected.losses) - min(expected.losses) > 0.01  # equal numbers would prove nothing
    with cpu_attention.ignore_boundaries():
        leaking = difference(losses(run(family, mode="in_batch"), step), expected)
    print(f"{family}: by {leaking:.1e} where samples see each other")
    assert leaking > 1e-4


def test_bridges_qwen3_vl_step_packs_what_is_left_to_it(run, monkeypatch):
    """Each sample alone in its row, as long as the longest: only the padding differs from a pack."""
    from megatron.bridge.models.qwen_vl import qwen3_vl_step
    from megatron.bridge.training import vlm_step

    expected = losses(run("qwen3_vl", mode="in_batch"), "vlm")
    monkeypatch.setattr(vlm_step, "forward_step", qwen3_vl_step.forward_step)
    result = losses(run("qwen3_vl", mode="in_batch", defer_in_batch_packing_to_step=True), "vlm")
    found = max(abs(a - b) for a, b in zip(result.losses, expected.losses, strict=True))
    print(f"\nlosses differ by at most {found:.1e}")
    assert found < 1e-5


def test_our_step_trains_rows_packed_in_the_batch_as_bridges_does(run):
    from energon_packing.bridge.step import forward_step

    ours, theirs = (
        losses(run("qwen3_vl", mode="in_batch"), forward_step),
        losses(run("qwen3_vl", mode="in_batch"), "vlm"),
    )
    assert ours == theirs


def test_a_state_continues_with_the_next_micro_batch(dataset):
    whole = iterator_of(dataset("qwen2_5_vl", mode="in_batch", micro_batch_size=2))
    for _ in range(3):
        next(whole)
    state = whole.save_state()
    expected = [next(whole) for _ in range(3)]
    again = iterator_of(dataset("qwen2_5_vl", mode="in_batch", micro_batch_size=2))
    again.restore_state(state)
    for batch in expected:
        assert torch.equal(next(again)["input_ids"], batch["input_ids"])
    other = iterator_of(dataset("qwen2_5_vl", mode="in_batch", micro_batch_size=4))
    with pytest.raises(ConfigError, match="micro_batch_size=2, but this run has 4"):
        other.restore_state(state)


def test_a_sample_that_cannot_be_rendered_leaves_a_masked_row(dataset):
    """A pipeline needs as many rows as it was told of."""
    from energon_packing.bridge.in_batch import form_of

    made = dataset("text", mode="padded", micro_batch_size=3)
    (rows,) = samples_of(made, 1)
    batch = form_of(made, 1)(thd.assemble(rows[:2]))
    assert batch["input_ids"].shape[0] == 3
    assert batch["loss_mask"][2].sum() == 0
    assert (batch["labels"][2] == -100).all()


def test_bridge_validates_the_modes_as_its_own_in_batch_packing(run):
    config = run("text", mode="in_batch")
    config.validate()
    assert config.model._enable_in_batch_packing
    assert (config.dataset.enable_in_batch_packing, config.dataset.enable_offline_packing) == (True, False)
    assert config.dataset.offline_packing_specs is None
    run("text", mode="padded").validate()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "in_batch", "micro_batch_size": 1}, "2 or more"),
        ({"mode": "packs", "micro_batch_size": 2}, "raise seq_length to 2048"),
        ({"mode": "padded", "micro_batch_size": 0}, "must be at least 1"),
        ({"mode": "in_batch", "micro_batch_size": 2, "packing.window": 64}, "packing.window is 64"),
        ({"mode": "in_batch", "micro_batch_size": 2, "packing.max_images_per_pack": 4}, "max_images_per_pack"),
        ({"mode": "padded", "packing.dummy_image": True}, "dummy_image"),
        ({"mode": "in_batch", "micro_batch_size": 2, "encoder.position_ids": "mrope"}, "needs 1d positions"),
        ({"defer_in_batch_packing_to_step": True}, "set dataset.mode to 'in_batch'"),
        ({"pad_to_multiple_of": 64}, "only for rows of one sample"),
        ({"mode": "in-batch"}, "Did you mean 'in_batch'"),
    ],
)
def test_a_setting_that_does_not_go_with_the_mode_is_refused(fields, message, dataset):
    made = dataset("text")
    for name, value in fields.items():
        *parents, last = name.split(".")
        place = made
        for parent in parents:
            place = getattr(place, parent)
        setattr(place, last, value)
    with pytest.raises(ConfigError, match=message):
        made.finalize()


RECIPE = ("bridge_configs.qwen3_vl:qwen3_vl_8b_sft", "--world-size", "8", "--no-data", "--json")


def judged(monkeypatch, *arguments):
    monkeypatch.syspath_prepend(str(ROOT))
    result = CliRunner().invoke(cli, ["validate", *RECIPE, *arguments])
    answer = json.loads(result.stdout)
    broken = [rule["rule"] for rule in answer["rules"] if rule["verdict"] == "error"]
    return result.exit_code, broken, answer


def test_validate_judges_a_recipe_in_the_mode(monkeypatch):
    sizes = [f"{place}.micro_batch_size=2" for place in ("dataset", "train")]
    sets = [word for change in ("dataset.mode=in_batch", *sizes) for word in ("--set", change)]
    code, broken, answer = judged(monkeypatch, *sets, "--step", "vlm_step")
    assert (code, broken, answer["bridge"]["verdict"]) == (0, [], "accepts")
    assert answer["resolved"]["packing"] == "in_batch"
    assert judged(monkeypatch, *sets, "--step", "qwen3_vl_step", "--no-bridge")[1] == ["ours/step-reads-packs"]
    deferred = (*sets, "--set", "dataset.defer_in_batch_packing_to_step=true", "--no-bridge")
    assert judged(monkeypatch, *deferred, "--step", "qwen3_vl_step")[1] == []
    assert judged(monkeypatch, *deferred, "--step", "vlm_step")[1] == ["ours/step-packs-in-batch"]


@pytest.mark.parametrize("size", [2, 1])
def test_another_micro_batch_of_the_trainer_is_refused(size, run):
    config = run("text", mode="in_batch")
    config.train.micro_batch_size = config.train.global_batch_size = size
    with pytest.raises(ConfigError, match="rule bridge/micro-batch-size"):
        config.validate()


@pytest.mark.parametrize("packed", [False, True])
def test_types_of_tokens_stay_whole_numbers_beside_a_filler_row_as_the_processor_makes_them(packed):
    from support.offline_processors import glm4v
    from test_glm_in_bridge import LIMITS, image, row_of

    from energon_packing.bridge.in_batch import MicroBatchForm
    from energon_packing.config import EncoderConfig
    from energon_packing.encoders.encoder import ConversationEncoder

    encoder = ConversationEncoder(EncoderConfig(), processor=glm4v(LIMITS, LIMITS))
    row = row_of(encoder, 0, (image(90, 60, name="a"),), "A cat.")
    row["position_ids"] = torch.arange(len(row["input_ids"]))
    batch = thd.assemble([row], extra_fields={"mm_token_type_ids": 0})
    form = MicroBatchForm(packed=packed, samples=3, seq_length=SEQ_LENGTH, multiple=8)
    made, count = form(batch), len(row["input_ids"])
    theirs = encoder.processor.create_mm_token_type_ids([row["input_ids"].tolist()])
    for types in (made["mm_token_type_ids"], made["visual_inputs"].mm_token_type_ids):
        assert types.dtype == torch.tensor(theirs).dtype == torch.int64
        assert types.shape == made["input_ids"].shape
        assert types[0, :count].tolist() == theirs[0]
        assert not types[0, count:].any()
        assert not types[1:].any()
