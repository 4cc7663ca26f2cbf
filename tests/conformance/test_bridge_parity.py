"""A packed row through real Megatron-Bridge models against the same samples one a row.

The samples alone go through Bridge without any boundaries (its ordinary, unpacked path), so packing is compared with
the absence of packing. The numbers are printed: ``pytest -s tests/conformance/test_bridge_parity.py``.
"""

from __future__ import annotations

import functools
import itertools

import bridge_here  # noqa: F401
import pytest
import torch
from support.bridge_cpu import glm_and_ernie, row_parity, training_run
from support.offline_processors import ernie4_5_vl, glm4v

from energon_packing import thd
from energon_packing.config import EncoderConfig
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.joinable_rows import joinable
from energon_packing.energon.dummy_image import mask_fillers

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "text")


@pytest.fixture(scope="module")
def models(cpu_world, tiny_provider):
    """Family -> its tiny Bridge model, built once."""
    return functools.cache(lambda family: training_run.build_model(tiny_provider(family, seq_length=512)))


def rows_of(make_samples, family, seed=0):
    if family != "text":
        return make_samples(family, seed).variety()
    draw = make_samples("text", seed).draw
    return [draw("text", length) for length in (23, 40, 2, 17, 64, 9)]


@pytest.mark.parametrize(("multiple", "width"), [(1, None), (8, None), (1, 512), (8, 512)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_gives_the_logits_loss_and_gradient_of_its_samples_alone(family, multiple, width, models, make_samples):
    rows = rows_of(make_samples, family)
    batch = thd.assemble(rows, multiple=multiple, width=width)
    assert width is None or batch.total_tokens > batch.real_tokens + 8
    report = row_parity.compare(models(family), batch.to_bridge(), row_parity.row_batches(rows), control=width is None)
    print(
        f"\n{family}, multiple {multiple}: logits {report.logits:.1e}, loss {report.packed_loss:.6f} differs by "
        f"{report.loss:.1e}, gradient {report.gradient:.1e} (of {report.gradient_scale:.1e}), boundaries ignored "
        f"{report.control}"
    )
    assert report.failures() == []
    assert report.gradient_scale > 1e-3


@pytest.mark.parametrize(("multiple", "width"), [(8, None), (16, 512)])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_that_ends_a_sample_changes_neither_its_logits_nor_loss_nor_gradient(
    family, multiple, width, models, make_samples
):
    rows = rows_of(make_samples, family)
    batch = thd.real_padding(thd.assemble(rows, multiple=multiple, width=width))
    assert batch.cu_seqlens_padded is None
    assert batch.total_tokens > batch.real_tokens
    report = row_parity.compare(models(family), batch.to_bridge(), row_parity.row_batches(rows))
    assert report.failures() == []


def rounds_as_its_samples_do(model, batch, singles):
    """Compares a pack in bfloat16, and returns the mistakes that the comparison would have found."""
    found = row_parity.rounding(model, batch.to_bridge(), singles)
    print({name: [f"{distance:.2e}" for distance in distances] for name, distances in found.items()})
    limits = [row_parity.ROUNDING_LIMIT * distance for distance in found["alone"]]
    assert all(1e-3 < limit < 3e-2 for limit in limits), "as bfloat16 rounds, and not float32"
    assert all(distance <= limit for distance, limit in zip(found.pop("packed"), limits, strict=True))
    return {name for name, (logits, gradient) in found.items() if logits > limits[0] or gradient > limits[1]}


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_a_pack_is_no_farther_from_float32_than_its_samples_alone(family, models, make_samples):
    samples = make_samples(family, 3)
    # Positions from 256 on are not all numbers of bfloat16.
    rows = [samples.draw("text", 400), *rows_of(make_samples, family)[:3]]
    batch = thd.real_padding(thd.assemble(rows, multiple=8))
    found = rounds_as_its_samples_do(models(family), batch, row_parity.row_batches(rows))
    assert found == {"leaking"} | ({"positions"} if family == "qwen3_vl" else set())


@pytest.mark.parametrize("padding", ["real", "between"])
@pytest.mark.parametrize("kind", ["mamba", "gated_delta_net"])
def test_a_layer_with_a_state_gives_each_sample_its_own_results(kind, padding, models, make_samples):
    from megatron.bridge.training.utils.packed_seq_utils import get_packed_seq_params
    from support.bridge_cpu import state_space

    models("text")  # makes the groups
    rows = rows_of(make_samples, "text")
    batch = thd.assemble(rows, multiple=8, width=256)
    batch = thd.real_padding(batch) if padding == "real" else batch
    spans = list(zip(batch.boundaries.tolist(), batch.sample_lengths[: len(rows)], strict=False))
    hidden = torch.randn(batch.total_tokens, 1, state_space.HIDDEN, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))

    def gradient(*pairs):
        layer.zero_grad()
        sum((out * weight).sum() for out, weight in pairs).backward()
        return torch.cat([part.grad.flatten() for part in layer.parameters()])

    with state_space.layer(kind) as layer:

        def run(start, stop, packed=None):
            mask = {} if kind == "mamba" else {"attention_mask": None}
            return layer(hidden[start:stop], **mask, packed_seq_params=packed)[0]

        alone = [(run(start, start + length), weights[start : start + length]) for start, length in spans]
        expected = gradient(*alone)
        of_bridge = get_packed_seq_params(batch.to_bridge())
        for packed in (thd.packed_seq_params(batch), of_bridge, None):
            row = run(0, len(hidden), packed)
            together = [(row[start : start + length], weights[start : start + length]) for start, length in spans]
            apart = max(float((ours - own).abs().max()) for (ours, _), (own, _) in zip(together, alone, strict=True))
            changed = float((gradient(*together) - expected).norm() / expected.norm())
            assert (apart < 1e-7 and changed < 1e-5) if packed else (apart > 1e-4 and changed > 1e-2)


@pytest.mark.parametrize("family", ["text", "qwen3_5_vl", "qwen3_vl", "qwen2_5_vl"])
def test_several_predicted_tokens_train_as_in_samples_alone_where_the_rule_says_so(
    family, cpu_world, tiny_provider, make_samples, monkeypatch
):
    """Through what `vlm_step` calls. Megatron-Core shifts labels at ``cu_seqlens_q``, Qwen3.5-VL at the places of the
    samples; without a loss mask, as `gpt_step` calls, no layout is right."""
    from megatron.bridge.models.gpt_provider import mtp_block_spec
    from megatron.bridge.models.qwen_vl import qwen3_vl_provider

    kind = "qwen3_vl" if family == "qwen3_5_vl" else family
    provider = tiny_provider(kind, seq_length=512)
    provider.mtp_num_layers, provider.mtp_loss_scaling_factor = 1, 1.0
    if family != kind:  # the class of Qwen3-VL, see `FAMILY_TABLE`, with what the provider of Qwen3.5-VL gives it
        with_layers = functools.partial(qwen3_vl_provider.Qwen3VLModel, mtp_block_spec=mtp_block_spec(provider))
        monkeypatch.setattr(qwen3_vl_provider, "Qwen3VLModel", with_layers)
    model, rows = training_run.build_model(provider), rows_of(make_samples, kind)
    for row in rows:  # each begins with a prompt
        prompt = max(1, len(row["labels"]) // 3)
        row["labels"][:prompt], row["loss_mask"][:prompt] = -100, 0

    def gradient(*batches):
        model.zero_grad()
        for batch in batches:
            (row_parity.forward(model, batch, with_labels=True) * batch["loss_mask"]).sum().backward()
        return torch.cat([part.grad.flatten() for part in model.parameters() if part.grad is not None])

    if family in ("qwen3_vl", "qwen2_5_vl"):
        with pytest.raises((IndexError, TypeError)):
            gradient(*row_parity.row_batches(rows))
        return
    padded, alone = thd.assemble(rows, multiple=8, width=512), gradient(*row_parity.row_batches(rows))
    layouts = {"tight": thd.assemble(rows), "real": thd.real_padding(padded), "between": padded}
    apart = {}
    for name, batch in layouts.items():
        apart[name] = float((gradient(batch.to_bridge()) - alone).norm() / alone.norm())
    right = {name for name, by in apart.items() if by < 1e-5}
    assert right == set(layouts) - ({"between"} if family == "text" else set()), apart
    assert all(by > 1e-2 for name, by in apart.items() if name not in right), apart
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, *a, loss_mask=None, **k: forward(self, *a, **k))
    assert (gradient(layouts["tight"].to_bridge()) - alone).norm() > 1e-2 * alone.norm()


def test_second_predicted_tokens_weigh_alike_where_ranks_share_no_row(tmp_path):
    """On two ranks with rows of other samples, by Megatron-Core's own function; the rule is of its counts."""
    from support import mtp_ranks

    first, second = mtp_ranks.run(tmp_path)
    for own, lengths in ((first["own"], mtp_ranks.LENGTHS[0]), (second["own"], mtp_ranks.LENGTHS[1])):
        starts = [(sum(lengths[:number]), length) for number, length in enumerate(lengths)]
        expected = torch.zeros(sum(lengths))
        for start, length in starts:  # a target two tokens on, behind the prompt
            expected[start + length // 3 - 1 : start + length - 2] = 1
        assert torch.equal(own, expected)
    # Without prompts, a sample has one second token less than first ones: 29 : 26 in the one row, 31 : 30 in the other.
    assert torch.allclose(first["bare"].max(), torch.tensor(29 / 26))
    assert torch.allclose(second["bare"].max(), torch.tensor(31 / 30))
    whole = torch.zeros(len(first["own"]))
    for rank in (first, second):
        whole[rank["indices"]] = rank["part"]
    assert len(whole.unique()) > 2, "ranks that share a row weigh its tokens by their own counts: refused"


def test_a_vision_encoder_in_bfloat16_keeps_the_angles_of_hugging_face(cpu_world, tiny_provider):
    from megatron.core.transformer.module import Float16Module
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionRotaryEmbedding

    from energon_packing.thd.rotary import restore_frequencies

    model = training_run.build_model(tiny_provider("qwen2_5_vl", seq_length=512))
    model.config.bf16 = True
    inner = Float16Module(model.config, model).module
    rotary = next(module for module in inner.modules() if isinstance(module, Qwen2_5_VisionRotaryEmbedding))
    rows = torch.arange(92)  # of patches, 1,288 pixels
    expected = Qwen2_5_VisionRotaryEmbedding(rotary.dim, rotary.theta)(rows)
    assert (rotary(rows).float() - expected).abs().max() > 0.02, "the control: what Bridge leaves"
    assert restore_frequencies(inner) == 1
    assert torch.equal(rotary(rows), expected)
    assert restore_frequencies(inner) == 0


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("kind", ["text", "one_sample", "one_video", "media_first_and_last"])
def test_unusual_packs_give_the_same_as_their_samples_alone(family, multiple, kind, models, make_samples):
    samples = make_samples(family, seed=2)
    rows = {
        "text": lambda: [samples.draw("text", 9), samples.draw("text", 21)],
        "one_sample": lambda: [samples.draw("text", 13)],
        "one_video": lambda: [samples.draw("video", (3, 4, 4), text=6)],
        "media_first_and_last": lambda: [
            samples.draw("video", (2, 4, 2), (3, 2, 4), text=1),
            samples.draw("text", 6),
            samples.draw("video", (1, 4, 4), text=2),
        ],
    }[kind]()
    packed = thd.assemble(rows, multiple=multiple).to_bridge()
    report = row_parity.compare(models(family), packed, row_parity.row_batches(rows), control=False)
    assert report.failures() == []


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_bridge_gives_each_segment_the_positions_that_hugging_face_gives_the_sample_alone(
    family, multiple, models, make_samples
):
    rows = make_samples(family, seed=3).variety()
    batch = thd.assemble(rows, multiple=multiple)
    positions = row_parity.rotary_positions(models(family), batch.to_bridge())
    for index, (row, start) in enumerate(zip(rows, batch.boundaries.tolist(), strict=False)):
        expected = hugging_face_positions(family, models(family), row)
        found = positions[:, 0, start : start + len(row["input_ids"])]
        assert torch.equal(found, expected), f"segment {index}"


def hugging_face_positions(family, model, row):
    """`get_rope_index` of the Hugging Face model class, on one sample."""
    import types

    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    kind = {"qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}[family]
    config = model.config
    vision = config.vision_config
    host = types.SimpleNamespace(config=types.SimpleNamespace(vision_config=vision))
    host.get_vision_position_ids = types.MethodType(kind.get_vision_position_ids, host)
    tokens = row["input_ids"][None]
    modality = (tokens == config.image_token_id).int() + 2 * (tokens == config.video_token_id).int()
    visual = row.get("visual_inputs", {})
    options = {}
    if "second_per_grid_ts" in visual:
        options["second_per_grid_ts"] = visual["second_per_grid_ts"]
    positions, _ = kind.get_rope_index(
        host,
        tokens,
        modality,
        image_grid_thw=visual.get("image_grid_thw"),
        video_grid_thw=visual.get("video_grid_thw"),
        **options,
    )
    return positions[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_changing_one_segment_leaves_the_logits_of_all_others_unchanged(family, models, make_samples):
    rows = rows_of(make_samples, family, seed=4)
    model = models(family)
    changed = [dict(row) for row in rows]
    changed[3] = dict(rows[3], input_ids=(rows[3]["input_ids"] + 7) % 40)
    batches = [thd.assemble(version, multiple=8) for version in (rows, changed)]
    with torch.no_grad():
        before, after = (row_parity.forward(model, batch.to_bridge(), with_labels=False) for batch in batches)
    bounds = batches[0].boundaries.tolist()
    for index in range(len(rows)):
        start, stop = bounds[index], bounds[index] + len(rows[index]["input_ids"])
        same = torch.equal(before[:, start:stop], after[:, start:stop])
        assert same == (index != 3), f"segment {index}"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_swapping_the_images_of_two_samples_changes_those_two_alone(family, models, make_samples):
    samples = make_samples(family, seed=5)
    rows = [
        samples.draw("image", (1, 4, 4)),
        samples.draw("text", 8),
        samples.draw("image", (1, 4, 4)),
        samples.draw("video", (2, 4, 4)),
    ]
    swapped = [dict(row) for row in rows]
    swapped[0]["visual_inputs"], swapped[2]["visual_inputs"] = rows[2]["visual_inputs"], rows[0]["visual_inputs"]
    with torch.no_grad():
        before, after = (
            row_parity.forward(models(family), thd.assemble(version).to_bridge(), with_labels=False)
            for version in (rows, swapped)
        )
    bounds = thd.assemble(rows).boundaries.tolist()
    changed = [
        not torch.allclose(before[:, start:stop], after[:, start:stop], atol=1e-6)
        for start, stop in itertools.pairwise(bounds)
    ]
    assert changed == [True, False, True, False]


def test_a_pack_with_a_boundary_moved_by_one_token_is_found(models, make_samples):
    rows = rows_of(make_samples, "text")
    packed = thd.assemble(rows).to_bridge()
    wrong = packed["cu_seqlens_q"].clone()
    wrong[2] += 1
    packed |= {"cu_seqlens_q": wrong, "cu_seqlens_kv": wrong}
    singles = row_parity.row_batches(rows)
    with torch.no_grad():
        logits = row_parity.forward(models("text"), packed, with_labels=False)
        alone = row_parity.forward(models("text"), singles[2], with_labels=False)
    start = thd.assemble(rows).boundaries.tolist()[2]
    assert (logits[:, start : start + alone.shape[1]] - alone).abs().max() > 1e-3


def test_weights_between_zero_and_one_reach_loss_and_gradient_alike(models, make_samples):
    rows = rows_of(make_samples, "qwen3_vl", seed=6)
    for index, row in enumerate(rows):
        row["loss_mask"] = row["loss_mask"] * (0.25 + 0.1 * index)
    report = row_parity.compare(
        models("qwen3_vl"), thd.assemble(rows, multiple=8).to_bridge(), row_parity.row_batches(rows), control=False
    )
    assert report.failures() == []


def media_rows(encoder):
    """Two images, nothing, a clip, an image."""
    from whole_sample import image, video

    return [
        glm_and_ernie.row_of(encoder, 0, (image(90, 60, name="a"), image(31, 33, name="b")), "A cat."),
        glm_and_ernie.row_of(encoder, 1, (), "Nothing at all."),
        glm_and_ernie.row_of(encoder, 2, (video(8, 2.0, 64, 64, name="c"),), "A clip of rain."),
        glm_and_ernie.row_of(encoder, 3, (image(60, 200, name="d"),), "A tower."),
    ]


def is_sound(report):
    assert len(report.segments) == 4
    assert max(segment.logits for segment in report.segments) < 1e-4
    assert report.packed_loss == pytest.approx(report.single_loss, abs=1e-5)
    assert report.gradient < 1e-4
    assert report.control > 1e-2, "samples that see each other must show"


@pytest.mark.parametrize("multiple", [1, 16])
def test_a_pack_of_images_and_videos_gives_each_samples_own_results_in_bridges_glm(multiple, cpu_world):
    from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs

    encoder = ConversationEncoder(EncoderConfig(), processor=glm4v(glm_and_ernie.LIMITS, glm_and_ernie.LIMITS))
    rows, extra = media_rows(encoder), {"mm_token_type_ids": 0}
    batch = thd.real_padding(thd.assemble(joinable(rows), multiple=multiple, extra_fields=extra))
    assert set(batch.visual_inputs) == {"pixel_values", "image_grid_thw"}, "a pack hands videos over as images"
    alone = []
    for row in rows:  # as the processor made it: the video is a video
        (single,) = row_parity.row_batches(thd.unpack(thd.assemble([row], extra_fields=extra)))
        single["visual_inputs"] = single["visual_inputs"] or GenericVisualInputs()
        single["visual_inputs"].mm_token_type_ids = row["mm_token_type_ids"][None]
        alone.append(single)
    model = training_run.build_model(glm_and_ernie.glm_provider(encoder))
    report = row_parity.compare(model, batch.to_bridge(), alone)
    is_sound(report)
    assert max(segment.positions for segment in report.segments) == 0
    assert rounds_as_its_samples_do(model, batch, alone) == {"leaking"}


@pytest.mark.parametrize("multiple", [1, 16])
def test_a_pack_of_images_and_videos_gives_each_samples_own_results_in_bridges_ernie(multiple, cpu_world, monkeypatch):
    glm_and_ernie.known_layers(monkeypatch)
    limits = glm_and_ernie.LIMITS
    encoder = ConversationEncoder(EncoderConfig(), processor=ernie4_5_vl(limits, limits, max_frames=4))
    rows, extra = media_rows(encoder), dict.fromkeys(glm_and_ernie.TYPES, 0)
    batch = thd.real_padding(thd.assemble(rows, multiple=multiple, extra_fields=extra))
    alone = []
    for row in rows:  # without boundaries, with the types that the family says
        (single,) = row_parity.row_batches([{**row, "visual_inputs": {}}])
        single["visual_inputs"] = thd.assemble([row], extra_fields=extra).to_bridge()["visual_inputs"]
        alone.append(single)
    model = training_run.build_model(glm_and_ernie.ernie_provider(encoder))
    is_sound(row_parity.compare(model, batch.to_bridge(), alone))
    assert rounds_as_its_samples_do(model, batch, alone) == {"leaking"}
    without = batch.to_bridge()
    without["visual_inputs"].moe_mm_token_type_ids = None
    with torch.no_grad():
        there, gone = (row_parity.forward(model, each, with_labels=False) for each in (batch.to_bridge(), without))
    assert float((there - gone).abs().max()) > 1e-2, "the experts for vision must be used"


@pytest.mark.parametrize(("family", "multiple"), [("qwen2_5_vl", 1), ("qwen3_vl", 8)])
def test_a_dummy_image_runs_the_vision_tower_and_changes_neither_loss_nor_gradient(
    family, multiple, cpu_world, tiny_provider, make_samples
):
    model = training_run.build_model(tiny_provider(family, seq_length=512))
    samples = make_samples(family, 0)
    rows = [samples.draw("text", length) for length in (23, 40, 2, 17, 64, 9)]
    image = samples.draw("image", (1, 2, 2), text=20)
    dummy = image | {
        "labels": torch.full_like(torch.as_tensor(image["labels"]), thd.IGNORE_INDEX),
        "loss_mask": torch.zeros_like(torch.as_tensor(image["loss_mask"])),
    }
    plain = thd.assemble(rows, multiple=multiple)
    filled = mask_fillers(thd.assemble([*rows, dummy], multiple=multiple), 1)
    assert thd.check_thd(filled, multiple=multiple) == []
    calls = []
    tower = next(module for name, module in model.named_modules() if name.endswith(("visual", "vision_model")))
    hook = tower.register_forward_hook(lambda *_: calls.append(1))
    expected, gradient = row_parity.loss_and_gradient(model, [plain.to_bridge()])
    assert not calls
    loss, other = row_parity.loss_and_gradient(model, [filled.to_bridge()])
    hook.remove()
    assert calls
    assert loss == pytest.approx(expected, abs=1e-6)
    scale = max(float(part.abs().max()) for part in gradient.values())
    assert max(float((gradient[name] - other[name]).abs().max()) for name in gradient) < 1e-5 * scale
    # The same image with its targets is no dummy: the comparison would see it.
    seen, _ = row_parity.loss_and_gradient(model, [thd.assemble([*rows, image], multiple=multiple).to_bridge()])
    assert abs(seen - expected) > 1e-4
