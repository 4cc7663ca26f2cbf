"""Bytes become the processor's floats: the forms, their way through a pack, and what is refused."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_packing import thd
from energon_packing.energon.pack_bytes import field_digests, pack_from_bytes, pack_to_bytes
from energon_packing.errors import PackingError
from energon_packing.thd.pixels import PixelForm, finish, repeated

MEAN, DEVIATION = (122.77, 116.75, 104.09), (68.5, 66.63, 70.32)
PATCHES = PixelForm(layout="patches", mean=MEAN, deviation=DEVIATION, repeat=2)
IMAGES = PixelForm(layout="images", mean=MEAN, deviation=DEVIATION)


def random_bytes(*shape, seed=0):
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def by_torchvision(images):
    """The last step of a processor of transformers, on ``[n, 3, H, W]``."""
    from torchvision.transforms.v2 import functional

    return functional.normalize(images.to(torch.float32), torch.tensor(MEAN), torch.tensor(DEVIATION))


@given(count=st.integers(0, 5), height=st.integers(1, 40), width=st.integers(1, 40), seed=st.integers(0, 99))
def test_images_are_normalised_as_a_processor_does(count, height, width, seed):
    given_bytes = random_bytes(count, 3, height, width, seed=seed)
    made = finish({"pixel_values": given_bytes}, {"pixel_values": IMAGES})["pixel_values"]
    assert torch.equal(made, by_torchvision(given_bytes))


def test_a_device_gets_the_constants_of_a_form_once(monkeypatch):
    form = dataclasses.replace(IMAGES, mean=(1.0, 2.0, 3.0))
    images = {"pixel_values": random_bytes(2, 3, 8, 6)}
    with torch.inference_mode():  # of an evaluation
        first = finish(images, {"pixel_values": form})["pixel_values"]
    monkeypatch.setattr(torch, "tensor", None)  # which copies, and on a GPU waits
    again = finish(images, {"pixel_values": form})["pixel_values"]
    assert torch.equal(first, again)
    assert not again.is_inference()


def test_videos_keep_their_axes():
    clips = random_bytes(2, 5, 3, 8, 6)
    made = finish({"pixel_values_videos": clips}, {"pixel_values_videos": IMAGES})["pixel_values_videos"]
    assert made.shape == clips.shape
    assert torch.equal(made, by_torchvision(clips.flatten(0, 1)).view(clips.shape))


@given(count=st.integers(0, 3000), values=st.integers(1, 260), repeat=st.integers(1, 3), seed=st.integers(0, 9))
def test_patches_are_normalised_by_channel_and_repeated(count, values, repeat, seed):
    form = dataclasses.replace(PATCHES, repeat=repeat)
    given_bytes = random_bytes(count, 3 * values, seed=seed)
    made = finish({"pixel_values": given_bytes}, {"pixel_values": form})["pixel_values"]
    expected = by_torchvision(given_bytes.view(count, 3, 1, values)).expand(-1, -1, repeat, -1)
    expected = expected.reshape(count, 3 * repeat * values)
    assert torch.equal(made, expected)
    whole, rest = repeated(given_bytes, form)
    assert rest.repeat == 1
    assert torch.equal(finish({"p": whole}, {"p": rest})["p"], expected)


def test_padding_below_and_to_the_right_is_zero_whatever_its_bytes_are():
    form = dataclasses.replace(IMAGES, sizes="image_sizes")
    visual = {"pixel_values": random_bytes(3, 3, 9, 7), "image_sizes": torch.tensor([[9, 7], [4, 7], [9, 2]])}
    made = finish(visual, {"pixel_values": form})["pixel_values"]
    for image, given_bytes, (height, width) in zip(
        made, visual["pixel_values"], visual["image_sizes"].tolist(), strict=True
    ):
        assert torch.equal(image[:, :height, :width], by_torchvision(given_bytes[None])[0, :, :height, :width])
        assert not image[:, height:].any()
        assert not image[:, :, width:].any()


def test_what_is_no_byte_or_lacks_its_sizes_is_refused():
    with pytest.raises(PackingError, match="float32"):
        finish({"pixel_values": torch.zeros(1, 3, 2, 2)}, {"pixel_values": IMAGES})
    form = dataclasses.replace(IMAGES, sizes="image_sizes")
    with pytest.raises(PackingError, match="image_sizes"):
        finish({"pixel_values": random_bytes(1, 3, 2, 2)}, {"pixel_values": form})


def sample(key, patches, seed, form=PATCHES):
    row = {
        "key": key,
        "input_ids": torch.arange(7),
        "labels": torch.cat([torch.arange(1, 7), torch.tensor([-100])]),
        "loss_mask": torch.cat([torch.ones(6), torch.zeros(1)]),
        "position_ids": torch.arange(7),
    }
    if patches:
        row["visual_inputs"] = {
            "pixel_values": random_bytes(patches, 12, seed=seed),
            "image_grid_thw": torch.tensor([[1, 1, patches]]),
        }
        row["pixel_forms"] = {"pixel_values": form}
    return row


ROWS = [sample("a", 3, 0), sample("b", 0, 1), sample("c", 5, 2)]


def test_a_pack_finishes_the_pixels_of_its_samples():
    batch = thd.assemble(ROWS, multiple=4)
    assert batch.visual_inputs["pixel_values"].dtype == torch.uint8
    done = batch.finished()
    expected = torch.cat(
        [thd.finished_row(row)["visual_inputs"]["pixel_values"] for row in ROWS if "pixel_forms" in row]
    )
    assert torch.equal(done.visual_inputs["pixel_values"], expected)
    assert done.pixel_forms == {}
    assert done.finished() is done
    assert done.visual_counts == batch.visual_counts


def test_rows_of_a_pack_are_the_rows_that_made_it():
    for row, again in zip(ROWS, thd.unpack(thd.assemble(ROWS, multiple=4)), strict=True):
        assert again.get("pixel_forms") == row.get("pixel_forms")
        for name, tensor in row.get("visual_inputs", {}).items():
            assert torch.equal(again["visual_inputs"][name], tensor)


@pytest.mark.parametrize("pixels", [True, False])
def test_forms_travel_with_the_bytes_and_only_with_them(pixels):
    batch = thd.assemble(ROWS, multiple=4)
    again = pack_from_bytes(pack_to_bytes(batch, pixels=pixels))
    assert ("pixel_values" in again.visual_inputs) == pixels
    assert again.pixel_forms == (batch.pixel_forms if pixels else {})
    again.finished()
    if pixels:
        assert field_digests(again) == field_digests(batch)


def test_bytes_of_pixels_move_to_the_device_and_their_sizes_stay_where_the_host_reads_them():
    form = dataclasses.replace(IMAGES, sizes="image_sizes")
    row = sample("a", 1, 0) | {
        "visual_inputs": {"pixel_values": random_bytes(1, 3, 4, 4), "image_sizes": torch.tensor([[4, 4]])},
        "pixel_forms": {"pixel_values": form},
    }
    row["visual_inputs"]["other"] = torch.zeros(1, 2)
    moved = thd.assemble([row]).with_pixels_on("meta")
    assert {name: tensor.device.type for name, tensor in moved.visual_inputs.items()} == {
        "pixel_values": "meta",
        "image_sizes": "cpu",
        "other": "cpu",
    }


def test_samples_of_two_image_processors_share_no_pack_of_bytes():
    other = dataclasses.replace(PATCHES, mean=(0.0, 0.0, 0.0))
    with pytest.raises(PackingError, match=r"sample c: .* encoder.pixels to float32"):
        thd.assemble([ROWS[0], sample("c", 5, 2, other)])
