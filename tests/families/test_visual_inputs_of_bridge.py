"""`to_bridge()` gives each model of the installed Megatron-Bridge the visual inputs that its forward reads."""

import ast
import importlib.util
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from support.offline_processors import ernie4_5_vl, gemma3, glm4v, minimax_m3_vl, pixtral, qwen3_5_vl
from test_families_in_packs import SAMPLES, bridges_container, rows  # noqa: F401  (the second is a fixture)
from whole_sample import encoder

from energon_packing import PackingConfig, PackingTaskEncoder
from energon_packing.errors import PackingError

FORWARDS = {
    "gemma3": ("gemma_vl/modeling_gemma3_vl.py", "Gemma3VLModel", {"pixel_values"}),
    "glm4v": ("glm_vl/modeling_glm_45v.py", "GLM45VModel", {"pixel_values", "image_grid_thw", "mm_token_type_ids"}),
    "qwen3_5_vl": ("qwen_vl/modelling_qwen3_vl/model.py", "Qwen3VLModel", {"pixel_values", "image_grid_thw"}),
    "pixtral": ("ministral3/modeling_ministral3.py", "Ministral3Model", {"pixel_values", "image_sizes"}),
    "huggingface": (
        "minimax_m3/modeling_minimax_m3_vl.py",
        "MiniMaxM3VLModel",
        {"pixel_values", "image_grid_thw"},
    ),
    "ernie4_5_vl": (
        "ernie_vl/modeling_ernie45_vl/model.py",
        "Ernie45VLModel",
        {"pixel_values", "image_grid_thw", "mm_token_type_ids", "moe_mm_token_type_ids"},
    ),
}
"""Family -> file under ``megatron/bridge/models``, class, and the visual inputs that a sample of images brings."""
PROCESSORS = {
    "gemma3": lambda: gemma3(56, 4),
    "glm4v": glm4v,
    "qwen3_5_vl": qwen3_5_vl,
    "pixtral": lambda: pixtral(112, 14, 2),
    "huggingface": minimax_m3_vl,
    "ernie4_5_vl": ernie4_5_vl,
}


def forward_arguments(file: str, model: str) -> set[str]:
    """Names of the arguments of a model's forward, read from the source: importing it wants a GPU's libraries."""
    found = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.bridge")
    if not found or not found.submodule_search_locations:
        pytest.skip("Megatron-Bridge is not installed")
    source = (Path(found.submodule_search_locations[0]) / "models" / file).read_text(encoding="utf-8")
    (kind,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == model]
    (forward,) = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    return {argument.arg for argument in (*forward.args.args, *forward.args.kwonlyargs)}


def assembled(ours, made):
    """A pack as the packing encoder assembles it."""
    return PackingTaskEncoder(ours, PackingConfig(seq_length=2048))._assemble(made)


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.usefixtures("bridges_container")
def test_a_pack_brings_the_visual_inputs_that_the_models_forward_reads(name):
    file, model, expected = FORWARDS[name]
    ours = encoder(PROCESSORS[name](), family=name)
    batch = assembled(ours, [row for _, row in rows(ours, SAMPLES)])
    container = batch.to_bridge()["visual_inputs"]
    assert type(container).__module__ in sys.modules
    given = {spec.name for spec in fields(container) if getattr(container, spec.name) is not None}
    assert given == expected
    assert given <= forward_arguments(file, model)


@pytest.mark.usefixtures("bridges_container")
def test_bridges_ernie_gets_the_types_of_text_alone_and_no_pixels_that_are_normalised_already():
    ours = encoder(ernie4_5_vl())
    container = assembled(ours, [row for _, row in rows(ours, [[], []])]).to_bridge()["visual_inputs"]
    assert not container.mm_token_type_ids.any()
    assert not container.moe_mm_token_type_ids.any()
    assert set(container.normalized_for_model()) == {"mm_token_type_ids", "moe_mm_token_type_ids"}
    floats = encoder(ernie4_5_vl(), pixels="float32")
    with pytest.raises(PackingError, match=r"set encoder\.pixels to bytes"):
        assembled(floats, [row for _, row in rows(floats, SAMPLES)]).to_bridge()
