"""A packed row through real Megatron-Bridge models against the same samples one a row.

The samples alone go through Bridge without any boundaries (its ordinary, unpacked path), so packing is compared with
the absence of packing. The numbers are printed: ``pytest -s tests/conformance/test_bridge_parity.py``.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from energon_packing import thd

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "text")


@pytest.fixture(scope="module")
def models(cpu_world, tiny_provider):
    """Family -> its tiny Bridge model, built once."""
    from support.bridge_cpu import training_run

    built = {}

    def get(family):
        if family not in built:
            built[family] = training_run.build_model(tiny_provider(family, seq_length=512))
        return built[family]

    return get


@pytest.fixture(scope="module")
def parity(cpu_world):
    from support.bridge_cpu import row_parity as parity

    return parity


def rows_of(make_samples, family, seed=0):
    if family != "text":
        return make_samples(family, seed).variety()
    draw = make_samples("text", seed).draw
    return [draw("text", length) for length in (23, 40, 2, 17, 64, 9)]


def show(title, report):
    print(
        f"\n{title}: logits {report.logits:.1e}, loss {report.packed_loss:.6f} differs by {report.loss:.1e}, gradient "
        f"{report.gradient:.1e} (of {report.gradient_scale:.1e}), boundaries ignored {report.control:.1e}"
    )


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_gives_the_logits_loss_and_gradient_of_its_samples_alone(family, multiple, models, parity, make_samples):
    rows = rows_of(make_samples, family)
    packed = thd.assemble(rows, multiple=multiple).to_bridge()
    report = parity.compare(models(family), packed, parity.row_batches(rows))
    show(f"{family}, multiple {multiple}", report)
    assert report.failures() == []
    assert report.gradient_scale > 1e-3
    assert report.control > parity.CONTROL_LIMIT


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_fixed_width_gives_the_same_as_its_samples_alone(family, multiple, models, parity, make_samples):
    rows = rows_of(make_samples, family, seed=1)
    batch = thd.assemble(rows, multiple=multiple, width=512)
    assert batch.total_tokens > batch.real_tokens + 8
    report = parity.compare(models(family), batch.to_bridge(), parity.row_batches(rows))
    show(f"{family}, multiple {multiple}, width 512", report)
    assert report.failures() == []


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("kind", ["text", "one_sample", "one_video", "media_first_and_last"])
def test_unusual_packs_give_the_same_as_their_samples_alone(family, multiple, kind, models, parity, make_samples):
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
    report = parity.compare(models(family), packed, parity.row_batches(rows), control=False)
    assert report.failures() == []


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_bridge_gives_each_segment_the_positions_that_hugging_face_gives_the_sample_alone(
    family, multiple, models, parity, make_samples
):
    rows = make_samples(family, seed=3).variety()
    batch = thd.assemble(rows, multiple=multiple)
    positions = parity.rotary_positions(models(family), batch.to_bridge())
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
def test_changing_one_segment_leaves_the_logits_of_all_others_unchanged(family, models, parity, make_samples):
    rows = rows_of(make_samples, family, seed=4)
    model = models(family)
    changed = [dict(row) for row in rows]
    changed[3] = dict(rows[3], input_ids=(rows[3]["input_ids"] + 7) % 40)
    batches = [thd.assemble(version, multiple=8) for version in (rows, changed)]
    with torch.no_grad():
        before, after = (parity.forward(model, batch.to_bridge(), with_labels=False) for batch in batches)
    bounds = batches[0].boundaries.tolist()
    for index in range(len(rows)):
        start, stop = bounds[index], bounds[index] + len(rows[index]["input_ids"])
        same = torch.equal(before[:, start:stop], after[:, start:stop])
        assert same == (index != 3), f"segment {index}"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_swapping_the_images_of_two_samples_changes_those_two_alone(family, models, parity, make_samples):
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
            parity.forward(models(family), thd.assemble(version).to_bridge(), with_labels=False)
            for version in (rows, swapped)
        )
    bounds = thd.assemble(rows).boundaries.tolist()
    changed = [
        not torch.allclose(before[:, start:stop], after[:, start:stop], atol=1e-6)
        for start, stop in itertools.pairwise(bounds)
    ]
    assert changed == [True, False, True, False]


def test_a_pack_with_a_boundary_moved_by_one_token_is_found(models, parity, make_samples):
    rows = rows_of(make_samples, "text")
    packed = thd.assemble(rows).to_bridge()
    wrong = packed["cu_seqlens_q"].clone()
    wrong[2] += 1
    packed |= {"cu_seqlens_q": wrong, "cu_seqlens_kv": wrong}
    singles = parity.row_batches(rows)
    with torch.no_grad():
        logits = parity.forward(models("text"), packed, with_labels=False)
        alone = parity.forward(models("text"), singles[2], with_labels=False)
    start = thd.assemble(rows).boundaries.tolist()[2]
    assert (logits[:, start : start + alone.shape[1]] - alone).abs().max() > 1e-3


def test_weights_between_zero_and_one_reach_loss_and_gradient_alike(models, parity, make_samples):
    rows = rows_of(make_samples, "qwen3_vl", seed=6)
    for index, row in enumerate(rows):
        row["loss_mask"] = row["loss_mask"] * (0.25 + 0.1 * index)
    report = parity.compare(
        models("qwen3_vl"), thd.assemble(rows, multiple=8).to_bridge(), parity.row_batches(rows), control=False
    )
    assert report.failures() == []
