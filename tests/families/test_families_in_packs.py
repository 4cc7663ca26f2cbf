"""The documented example of a new family, and the visual inputs of all families once samples share a pack."""

import importlib.util
import io
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from manual.blocks import read_page
from PIL import Image
from support.offline_processors import gemma3, glm46v, internvl
from test_llava_against_processor import small
from whole_sample import both_ways, conversations, encoder, image

from energon_packing import thd
from energon_packing.conversation import Conversation, MediaPart, Turn
from energon_packing.errors import PackingError, SampleRejected
from energon_packing.families import registry
from energon_packing.families.internvl import InternVL

PAGE = Path(__file__).parents[2] / "docs" / "families.md"


@pytest.fixture
def documented_family():
    """The family of the page, registered by its own code, and forgotten afterwards."""
    code = next(block.text for block in read_page(PAGE).blocks if "register_family" in block.text)
    before = dict(registry.FAMILIES._entries)
    scope: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), scope)
    yield scope["Glm46V"]
    registry.FAMILIES._entries = before


def test_the_documented_family_equals_its_processor(documented_family):
    ours = encoder(glm46v())
    assert type(ours.family) is documented_family
    compared = 0

    @settings(max_examples=30, database=None)
    @given(conversation=conversations(kinds=("image",)))
    def check(conversation):
        nonlocal compared
        try:
            ids, visual, whole, _ = both_ways(ours, conversation)
        except SampleRejected:
            return
        assert ids.tolist() == whole["input_ids"][0].tolist()
        for name in visual:
            assert torch.equal(visual[name], whole[name])
        compared += bool(visual)

    check()
    assert compared > 5
    ((measured, row),) = rows(ours, [[(90, 60), (40, 200)]])
    assert len(thd.finished_row(row)["visual_inputs"]["pixel_values"]) == measured.patches


def test_the_page_names_every_family_and_its_processor_classes():
    table = PAGE.read_text(encoding="utf-8").split("\n## ")[0]
    rows = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    for name in registry.families():
        assert name in rows
        assert all(f"`{kind}`" in rows[name] for kind in registry.FAMILIES.find(name).processor_classes)


def png(width: int, height: int, seed: int) -> bytes:
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(buffer, "PNG")
    return buffer.getvalue()


def rows(ours, samples):
    """Rendered samples, each with images of the given sizes."""
    made = []
    for number, sizes in enumerate(samples):
        media = tuple(image(*size, name=f"{number}-{at}") for at, size in enumerate(sizes))
        parts = (*(MediaPart(index=at) for at in range(len(sizes))), "Hello")
        turns = (Turn(role="user", parts=parts), Turn(role="assistant", parts=("Fine.",)))
        files = {medium.name: png(medium.width, medium.height, number + 7) for medium in media}
        measured = ours.measure(Conversation(key=f"k{number}", turns=turns, media=media))
        made.append((measured, ours.render(measured, files.__getitem__)))
    return made


SAMPLES = [[(90, 30)], [], [(31, 33), (120, 40), (50, 50)], [(200, 300)]]


@pytest.mark.parametrize("name", ["internvl", "llava", "llava_next", "llava_onevision", "gemma3"])
def test_a_pack_holds_the_tiles_of_its_samples_in_order_and_counts_them(name):
    others = {"internvl": lambda: internvl(28, 4), "gemma3": lambda: gemma3(56, 4)}
    ours = encoder(others[name]()) if name in others else small(name)
    made = rows(ours, SAMPLES)
    batch = thd.assemble([row for _, row in made])
    assert batch.visual_counts["pixel_values"] == tuple(measured.images for measured, _ in made)
    assert batch.visual_counts["pixel_values"][1] == 0
    for part, (_, row) in zip(thd.unpack(batch), made, strict=True):
        assert part.get("visual_inputs", {}).keys() == row["visual_inputs"].keys()
        for key, tensor in row["visual_inputs"].items():
            assert torch.equal(part["visual_inputs"][key], tensor)
    image_id = ours.family.placeholder_ids["image"]
    assert int((batch.tokens == image_id).sum()) == sum(p.tokens for measured, _ in made for p in measured.plans)


@pytest.fixture
def bridges_container(monkeypatch):
    """The installed `GenericVisualInputs`, without the rest of Bridge, which asks for a GPU's libraries."""
    name = "megatron.bridge.training.utils.visual_inputs"
    found = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.bridge")
    if not found:
        pytest.skip("Megatron-Bridge is not installed")
    path = Path(found.submodule_search_locations[0]) / "training" / "utils" / "visual_inputs.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)


@pytest.mark.usefixtures("bridges_container")
def test_bridge_takes_what_its_container_has_a_field_for_and_names_what_it_has_not():
    tiles = thd.assemble([row for _, row in rows(encoder(internvl(28, 4)), SAMPLES)])
    pixels = tiles.finished().visual_inputs["pixel_values"]
    assert torch.equal(tiles.to_bridge()["visual_inputs"].pixel_values, pixels)
    anyres = thd.assemble([row for _, row in rows(small("llava_next"), SAMPLES)])
    assert anyres.to_bridge()["visual_inputs"].image_sizes.shape == (5, 2)
    with pytest.raises(PackingError, match="batch_num_images"):
        thd.assemble([row for _, row in rows(small("llava_onevision"), SAMPLES)]).to_bridge()


def test_a_setting_that_only_one_family_reads_is_part_of_its_fingerprint(monkeypatch):
    def limits(cut):
        return encoder(internvl(28, 4, crop_to_patches=cut)).fingerprint()["vision_limits"]

    assert limits(True) == limits(False)  # InternVL always cuts
    monkeypatch.setattr(InternVL, "processor_settings", ("crop_to_patches",))
    assert limits(True) != limits(False)
