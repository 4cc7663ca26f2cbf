"""Modes ``in_batch`` and ``padded`` of our data set: Bridge's own rows of our samples, and the same loss as a pack.

What is compared: the batch that the mode hands to Bridge's step; what Bridge's in-batch packer, called here on a
right-padded batch as its collators call it, makes of the same samples; and our pack of them.
"""

import dataclasses
import importlib.util
import json
import math
import re
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bridge_here  # noqa: F401
import pytest
import torch
from bridge_sources import BridgeSource, sources
from click.testing import CliRunner
from support.bridge_cpu import attention as cpu_attention
from support.bridge_cpu import tiny_models, training_run

from energon_packing import thd
from energon_packing.cli.main import cli
from energon_packing.config import ParallelConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.errors import ConfigError
from energon_packing.validate.recipes import view_of
from energon_packing.validate.rules.rule import judge
from energon_packing.validate.run_view import COLLATED, PACKING_STEPS, RunView
from energon_packing.validate.verdict import believed_world_size, equivalent_container

pytestmark = pytest.mark.usefixtures("stand_ins")


ROOT = Path(__file__).resolve().parents[2]

SEQ_LENGTH = 1024


def form_of(dataset: Any, multiple: int) -> Any:
    """The form of the data set's mode where the layout needs this multiple."""
    return dataset.make_form(SimpleNamespace(parallel=SimpleNamespace(multiple=multiple)))


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

    def make(family, *, steps=2, samples=3, **fields):
        model = tiny_models.shipped_provider(family, seq_length=SEQ_LENGTH)
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


def loader_of(made):
    """The loader under the mode."""
    from energon_packing.config import ParallelConfig
    from energon_packing.energon.loader import build_loader

    config = made.run_config(ParallelConfig())
    return build_loader(config, task_encoder=made._task_encoder(config))


def samples_of(made, count):
    """The rows of its first micro-batches."""
    return [thd.unpack(pack.batch) for pack, _ in zip(loader_of(made), range(count), strict=False)]


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


@pytest.mark.parametrize(("family", "multiple"), [("qwen3_vl", 8), ("text", 1)])
def test_the_batch_equals_what_bridges_packer_makes_of_our_samples_and_our_pack_of_them(family, multiple, dataset):
    from megatron.bridge.data.collators.sequence import prepare_sequence_batch

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
@pytest.mark.parametrize("family", ["qwen3_vl", "text"])
def test_a_step_on_bridges_rows_has_the_loss_and_gradient_of_a_step_on_our_pack(family, run, ready_batches):
    """Two optimiser steps: ``in_batch``, ``padded``, and packs of the same samples through Bridge's own step."""
    step = "gpt" if family == "text" else "vlm"
    in_batch = run(family, mode="in_batch")
    packs = [thd.assemble(rows).to_bridge() for rows in samples_of(in_batch.dataset, 2)]
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
    for size in (2, 1):  # another micro-batch of the trainer
        config = run("text", mode="in_batch")
        config.train.micro_batch_size = config.train.global_batch_size = size
        with pytest.raises(ConfigError, match="rule bridge/micro-batch-size"):
            config.validate()


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
RECIPE += ("--set", "checkpoint.pretrained_checkpoint=null", "--set", "dataset.packing.max_patches_per_pack=null")


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


@pytest.mark.parametrize("packed", [False, True])
def test_types_of_tokens_stay_whole_numbers_beside_a_filler_row_as_the_processor_makes_them(packed):
    from support.bridge_cpu.glm_and_ernie import LIMITS, row_of
    from support.offline_processors import glm4v
    from whole_sample import image

    from energon_packing.bridge.dataset import MicroBatchForm
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


def packer_of(source: BridgeSource):
    """The version's own function; its module needs torch and a name or two of the installed Bridge."""
    path = Path(source.folder) / "data" / "packing" / "in_batch.py"
    spec = importlib.util.spec_from_file_location("packer_under_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build_mcore_thd_sequence_batch_from_rows


@pytest.mark.parametrize("source", sources())
@pytest.mark.parametrize("multiple", [1, 8])
def test_a_micro_batch_is_packed_by_each_version_with_the_mask_of_our_own_rows(
    source, multiple, make_samples, monkeypatch
):
    from energon_packing.bridge import dataset as in_batch

    monkeypatch.setattr(in_batch, "build_mcore_thd_sequence_batch_from_rows", packer_of(source))
    samples = make_samples("text", 3)
    rows = [samples.draw("text", length) for length in (13, 8, 30)]
    form = in_batch.MicroBatchForm(packed=True, samples=3, seq_length=64, multiple=multiple)
    made = form(thd.assemble(rows))
    lengths = [len(row["input_ids"]) for row in rows]
    segments = [[False] * length + [True] * (-length % multiple) for length in lengths]
    assert made["padding_mask"].tolist() == [[padding for segment in segments for padding in segment]]
    real = made["tokens"][0][~made["padding_mask"][0]]
    assert torch.equal(real, torch.cat([row["input_ids"] for row in rows]))


LENGTHS = (5, 9, 4)
ONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
GROUPS = SimpleNamespace(tp=ONE, cp=ONE, pp=ONE)


def batch_of(mode: Any, *, deferred: bool = False) -> tuple[dict[str, Any], Any]:
    """What our data set hands to a step in the mode, and the configuration that the step reads."""
    from energon_packing.bridge.dataset import PackedEnergonDatasetConfig

    dataset = PackedEnergonDatasetConfig(
        seq_length=64, mode=mode, micro_batch_size=len(LENGTHS), defer_in_batch_packing_to_step=deferred
    )
    rows = []
    for length in LENGTHS:
        ids = torch.arange(1, length + 1)
        labels = torch.cat([ids[1:], torch.tensor([-100])])
        rows.append({"input_ids": ids, "labels": labels, "loss_mask": (labels >= 0).float()})
        rows[-1]["position_ids"] = torch.arange(length)
    samples = thd.assemble(rows)
    batch = samples.to_bridge() if mode == "packs" else form_of(dataset, 1)(samples)
    model = SimpleNamespace(pipeline_model_parallel_size=1, seq_length=64, sequence_parallel=False)
    return batch, SimpleNamespace(dataset=dataset, model=model)


def boundaries_of_audio_lm_step(batch: dict[str, Any], config: Any) -> list[int] | None:
    from megatron.bridge.training.audio_lm_step import get_batch

    (*_, boundaries, _, _) = get_batch(iter([batch]), config, pg_collection=GROUPS)
    return None if boundaries is None else boundaries.tolist()


def rule_on_step(*, deferred: bool, step: str, in_batch: bool) -> str:
    view = RunView(
        enable_offline_packing=not in_batch,
        has_offline_packing_specs=not in_batch,
        enable_in_batch_packing=in_batch,
        defer_in_batch_packing_to_step=deferred,
        step=step,
    )
    return next(found.outcome for found in judge(view) if found.rule.id == "ours/step-reads-packs")


@pytest.mark.parametrize("mode", ["packs", "in_batch"])
def test_the_audio_step_sees_no_boundary_inside_our_rows(mode: Any) -> None:
    found = boundaries_of_audio_lm_step(*batch_of(mode))
    assert found in (None, [0, sum(LENGTHS)])
    assert rule_on_step(deferred=False, step="audio_lm_step", in_batch=mode == "in_batch") == "error"


def test_the_audio_step_joins_the_samples_that_are_left_to_it() -> None:
    found = boundaries_of_audio_lm_step(*batch_of("in_batch", deferred=True))
    assert found == [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    assert rule_on_step(deferred=True, step="audio_lm_step", in_batch=True) == "not applicable"


@pytest.mark.parametrize("mode", ["packs", "in_batch"])
def test_the_qwen3_vl_step_refuses_our_rows(mode: Any) -> None:
    from megatron.bridge.models.qwen_vl.qwen3_vl_step import get_batch_from_iterator

    batch, _ = batch_of(mode)
    with pytest.raises(ValueError, match="does not support collate-time in-batch packing"):
        get_batch_from_iterator(iter([batch]), is_first_pp_stage=True, is_last_pp_stage=True)
    assert rule_on_step(deferred=False, step="qwen3_vl_step", in_batch=mode == "in_batch") == "error"


def test_every_step_that_packs_is_a_module_of_bridge() -> None:
    homes = ("megatron.bridge.models.qwen_vl", "megatron.bridge.training")
    assert all(any(importlib.util.find_spec(f"{home}.{step}") for home in homes) for step in PACKING_STEPS)


def test_a_batch_without_a_form_says_what_is_wrong_with_it() -> None:
    from energon_packing.bridge.dataset import MicroBatchForm
    from energon_packing.errors import PackingError

    form = MicroBatchForm(packed=True, samples=2, seq_length=64)
    row = torch.zeros((1, 7), dtype=torch.int64)
    batch = SimpleNamespace(position_ids=torch.zeros((3, 1, 7)), sample_lengths=(3, 4), input_ids=row)
    with pytest.raises(PackingError, match=r"set encoder.position_ids to 1d"):
        form(batch)  # type: ignore[arg-type]


FIXED = 768
THREE = (5, 300, 41)


def three_samples() -> Any:
    """Three samples as a loader of single samples gives them, with a field of their own."""
    rows = []
    for length in THREE:
        ids = torch.arange(1, length + 1)
        labels, loss_mask = torch.cat([ids[1:], torch.tensor([-100])]), (ids < length).float()
        values = {"input_ids": ids, "labels": labels, "loss_mask": loss_mask, "position_ids": torch.arange(length)}
        rows.append(values | {"advantages": ids / 7})
    return thd.assemble(rows, extra_fields={"advantages": 0.0})


def dataset_of(**fields: Any) -> Any:
    from energon_packing.bridge.dataset import PackedEnergonDatasetConfig

    return PackedEnergonDatasetConfig(
        path="data", processor="processor", seq_length=FIXED, micro_batch_size=len(THREE), **fields
    )


def rows_as_bridge_gets_them(made: Any, multiple: int = 1) -> dict[str, Any]:
    return form_of(made, multiple)(three_samples())


def collated() -> dict[str, Any]:
    """The samples as Bridge's collators hold them, padded to the longest."""
    width = max(THREE)
    real = torch.arange(width) < torch.tensor(THREE)[:, None]
    positions = torch.arange(width).repeat(len(THREE), 1)
    names = {"input_ids": real.long(), "labels": real.long(), "loss_mask": real.float(), "attention_mask": real.long()}
    return names | {"position_ids": positions}


def width_by_bridge(*, packed: bool, pad_to_max_length: bool, pad_to_multiple_of: int = 128, multiple: int = 1) -> int:
    """What Bridge's collators call makes of a batch of the same samples."""
    from megatron.bridge.data.collators.sequence import prepare_sequence_batch

    batch = collated()
    prepare_sequence_batch(
        batch,
        sequence_length=FIXED,
        pad_to_max_length=pad_to_max_length,
        # As validate() changes it for rows that are not packed.
        pad_to_multiple_of=math.lcm(pad_to_multiple_of, multiple),
        enable_in_batch_packing=packed,
        in_batch_packing_pad_to_multiple_of=multiple,
    )
    width: int = batch["input_ids"].shape[1]
    return width


@pytest.mark.parametrize(("mode", "deferred"), [("in_batch", False), ("in_batch", True), ("padded", False)])
@pytest.mark.parametrize("fixed", [False, True])
def test_our_rows_are_as_wide_as_bridges_and_as_the_rules_say(fixed: bool, mode: Any, deferred: bool) -> None:
    """`pad_to_max_length` widens rows of one sample, also where a step packs them, and no row packed before it."""
    made = dataset_of(mode=mode, pad_to_max_length=fixed, defer_in_batch_packing_to_step=deferred)
    packed = mode == "in_batch" and not deferred
    width = rows_as_bridge_gets_them(made)["input_ids"].shape[1]
    assert width == width_by_bridge(packed=packed, pad_to_max_length=fixed)
    assert width == (sum(THREE) if packed else FIXED if fixed else 384)
    view = RunView(
        enable_in_batch_packing=made.enable_in_batch_packing,
        defer_in_batch_packing_to_step=deferred,
        pad_to_max_length=fixed,
    )
    assert view.rows_of_one_width == (width == FIXED)


@pytest.mark.parametrize(("pad_to_multiple_of", "multiple"), [(128, 1), (1, 8), (1, 1), (128, 48), (96, 80)])
def test_the_width_of_padded_rows_is_a_multiple_of_both_alignments_up_to_seq_length(
    pad_to_multiple_of: int, multiple: int
) -> None:
    made = dataset_of(mode="padded", pad_to_multiple_of=pad_to_multiple_of)
    rows = rows_as_bridge_gets_them(made, multiple)
    assert rows["input_ids"].shape == (len(THREE), rows["attention_mask"].shape[1])
    width = rows["input_ids"].shape[1]
    assert width == width_by_bridge(
        packed=False, pad_to_max_length=False, pad_to_multiple_of=pad_to_multiple_of, multiple=multiple
    )
    both = math.lcm(pad_to_multiple_of, multiple)
    assert width == min(FIXED, math.ceil(max(THREE) / both) * both)


@pytest.mark.parametrize("fixed", [False, True])
def test_nemotron_omnis_own_packer_gives_its_rows_the_width_that_the_rules_say(fixed: bool) -> None:
    from megatron.bridge.models.nemotron_omni.data.collate_fn import _pack_omni_rows_to_mcore_thd

    batch = collated()
    _pack_omni_rows_to_mcore_thd(
        batch,
        torch.tensor(THREE),
        sequence_length=FIXED,
        pad_to_max_length=fixed,
        pad_to_multiple_of=1,
        pad_token_id=0,
    )
    view = RunView(dataset_kind="hf_sft", model="NemotronOmni", enable_in_batch_packing=True, pad_to_max_length=fixed)
    assert view.rows_of_one_width == (batch["input_ids"].shape[1] == FIXED) == fixed
    assert not view.as_wide_as_its_samples
    assert view.changed(dataset_kind="packed_energon").as_wide_as_its_samples  # our rows for it


@pytest.mark.parametrize(("pipeline", "experts"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["energon", "gpt_sft"])
def test_bridge_fixes_the_width_for_pipelines_and_experts_where_the_rule_says_so(
    kind: Any, pipeline: int, experts: int
) -> None:
    view = RunView(
        dataset_kind=kind,
        pipeline_parallel=pipeline,
        expert_parallel=experts,
        world_size=pipeline * experts,
        num_moe_experts=experts if experts > 1 else None,
        global_batch_size=2,
        dataset_micro_batch_size=None if kind == "gpt_sft" else 1,
    )
    container = equivalent_container(view)
    with believed_world_size(view.world_size):
        container.validate()
    assert view_of(container, world_size=view.world_size).pad_to_max_length == view.width_fixed_by_bridge


def test_the_data_sets_with_a_width_that_bridge_fixes_are_those_that_have_the_setting() -> None:
    from megatron.bridge.training import config as bridge

    from energon_packing.bridge.dataset import PAD_TO_MULTIPLE_OF, PackedEnergonDatasetConfig

    classes: dict[str, Any] = {
        "packed_energon": PackedEnergonDatasetConfig,
        "energon": bridge.EnergonDatasetConfig,
        "hf_sft": bridge.DirectHFSFTDatasetConfig,
        "mock_vlm": bridge.MockVLMSFTDatasetConfig,
        "gpt_sft": bridge.GPTSFTDatasetConfig,
        "gpt_pretraining": bridge.GPTDatasetConfig,
    }
    assert {kind for kind, found in classes.items() if hasattr(found, "pad_to_max_length")} == set(COLLATED)
    assert {classes[kind].pad_to_multiple_of for kind in COLLATED} == {PAD_TO_MULTIPLE_OF}


@pytest.mark.parametrize("mode", ["packs", "padded"])
def test_an_encoder_of_the_users_own_makes_the_rows_of_a_data_set_that_names_it(data, mode, tmp_path, monkeypatch):
    """The encoder over bytes of docs/encoders.md, by its name in the current directory."""
    from energon_packing.bridge import PackedEnergonDatasetConfig

    page = (ROOT / "docs/encoders.md").read_text(encoding="utf-8")
    other = "\n\nclass Other(Bytes): ...\n"
    (tmp_path / "my_bytes.py").write_text(re.search(r"```python\n([^`]*class Bytes[^`]*)```", page)[1] + other)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_bytes", raising=False)
    arguments = {"path": str(data), "processor": str(processor_path("text")), "seq_length": SEQ_LENGTH}
    made = PackedEnergonDatasetConfig(**arguments, num_workers=0, encoder="my_bytes:Bytes", mode=mode)
    made.packing.drop_budget = 1.0
    made.finalize()
    assert "my_bytes" not in sys.modules  # a look at a configuration runs no code that it names
    with tarfile.open(data / "text/train-000000.tar") as tar:
        records = [json.loads(tar.extractfile(member).read()) for member in tar]
    parts = [[[each for each in turn["parts"] if isinstance(each, str)] for turn in each["turns"]] for each in records]
    texts = {"\n".join("".join(part) for part in turns) for turns in parts}
    found = [bytes(row["input_ids"].tolist()).decode() for rows in samples_of(made, 4) for row in rows]
    assert len(found) >= 4
    assert set(found) <= texts
    if mode == "packs":  # rules know what the task encoder chooses
        for encoder, seen in ((made.encoder, True), (PackedEnergonDatasetConfig(**arguments).encoder, False)):
            run = equivalent_container(RunView(dataset_kind="packed_energon", context_parallel=2, world_size=2))
            run.dataset = dataclasses.replace(made, encoder=encoder)
            config = run.dataset.run_config(ParallelConfig(context_parallel=2))
            assert (run.dataset._task_encoder(config)._padding == "between") is seen
            assert view_of(run, world_size=2).pads_between is seen
    loaders = []
    for name, accepted in (("my_bytes:Bytes", ()), ("my_bytes:Other", ()), ("my_bytes:Other", ("encoder",))):
        made.encoder, made.data.accept_changed = name, accepted
        loaders.append(loader_of(made))
    next(iter(loaders[0]))
    with pytest.raises(ConfigError, match="made with encoder=my_bytes:Bytes, but this run has my_bytes:Other"):
        loaders[1].restore_state(loaders[0].save_state())
    with pytest.warns(UserWarning, match=r"encoder=my_bytes:Bytes.*accept_changed"):
        loaders[2].restore_state(loaders[0].save_state())
    next(iter(loaders[2]))
    for name, words in (("my_bytes:torch", "is no subclass of"), ("my_bytes:Lost", "cannot be imported")):
        made.encoder = name
        with pytest.raises(ConfigError, match=rf"dataset.encoder {name} {words}"):
            samples_of(made, 1)
