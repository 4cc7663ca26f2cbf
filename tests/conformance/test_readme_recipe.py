"""The recipes in the README and in docs/index.md, run as they stand there, pass Bridge's own ``validate()``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from manual.blocks import read_page

pytest.importorskip("megatron.core", reason="Megatron-Bridge is not installed")
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)

from support.bridge_cpu import tiny_models

pytestmark = pytest.mark.usefixtures("stand_ins")

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": 4096, "docs/index.md": 8192}  # page -> seq_length


def recipe(page):
    (block,) = [block for block in read_page(ROOT / page).blocks if block.run_by.endswith(Path(__file__).name)]
    return block.text


@pytest.mark.parametrize("page", PAGES)
def test_the_recipe_has_at_most_fifteen_lines(page):
    assert len(recipe(page).strip().splitlines()) <= 15


@pytest.mark.parametrize("page", PAGES)
def test_the_recipe_passes_unmodified_validate_on_two_ranks(page, monkeypatch):
    """Only the hub is replaced: the recipe's model name gives a tiny configuration of the same family."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.config import runtime_config_update

    tokens = tiny_models.SpecialTokens(vision_start=4079, vision_end=4080, image=4082, video=4083)
    tiny = tiny_models.hugging_face_config("qwen3_vl", vocab_size=4096, tokens=tokens, seq_length=4096)
    monkeypatch.setattr(
        AutoBridge, "from_hf_pretrained", staticmethod(lambda *_, **__: AutoBridge.from_hf_config(tiny))
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    scope = {}
    exec(compile(recipe(page), page, "exec"), scope)
    cfg = scope["cfg"]
    runtime_config_update(cfg)  # what Bridge's pretrain() calls first; ends with validate()
    assert cfg.dataset.offline_packing_specs.packed_sequence_size == cfg.model.seq_length == PAGES[page]
    assert cfg.dataset.run_config(cfg.dataset.parallel_config(None)).packing.seq_length == PAGES[page]
