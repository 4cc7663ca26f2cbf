"""`to_bridge()` gives each model of the installed Megatron-Bridge the visual inputs that its forward reads."""

from __future__ import annotations

import ast
import importlib.util
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from test_families_in_packs import SAMPLES, bridges_container, rows  # noqa: F401  (the second is a fixture)
from whole_sample import encoder

from energon_packing import thd
from energon_packing.encoders.joinable_rows import joinable
from energon_packing.report.offline_processors import gemma3, pixtral

FORWARDS = {
    "gemma3": ("gemma_vl/modeling_gemma3_vl.py", "Gemma3VLModel", {"pixel_values"}),
    "pixtral": ("ministral3/modeling_ministral3.py", "Ministral3Model", {"pixel_values", "image_sizes"}),
}
"""Family -> file under ``megatron/bridge/models``, class, and the visual inputs that a sample of images brings."""
PROCESSORS = {"gemma3": lambda: gemma3(56, 4), "pixtral": lambda: pixtral(112, 14, 2)}


def forward_arguments(file: str, model: str) -> set[str]:
    """Names of the arguments of a model's forward, read from the source: importing it wants a GPU's libraries."""
    found = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.bridge")
    if not found or not found.submodule_search_locations:
        pytest.skip("Megatron-Bridge is not installed")
    source = (Path(found.submodule_search_locations[0]) / "models" / file).read_text(encoding="utf-8")
    (kind,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == model]
    (forward,) = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    return {argument.arg for argument in (*forward.args.args, *forward.args.kwonlyargs)}


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.usefixtures("bridges_container")
def test_a_pack_brings_the_visual_inputs_that_the_models_forward_reads(name):
    file, model, expected = FORWARDS[name]
    ours = encoder(PROCESSORS[name](), family=name)
    batch = thd.assemble(joinable([row for _, row in rows(ours, SAMPLES)]))
    container = batch.to_bridge()["visual_inputs"]
    assert type(container).__module__ in sys.modules
    given = {spec.name for spec in fields(container) if getattr(container, spec.name) is not None}
    assert given == expected
    assert given <= forward_arguments(file, model)
