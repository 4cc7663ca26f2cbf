"""Recipes with two layers, to try launchers and data on a machine without GPUs: `text`, `vision` and `clips`.

torchrun --nproc-per-node 2 scripts/train.py --cpu scripts.launch.tiny:text --data DATA
"""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from support.bridge_cpu.training_run import make_config

VOCABULARY = 4224
LENGTH = 1024


def text() -> Any:
    """Returns a tiny language model's recipe with the demo's text processor; name the data with ``--data``."""
    from support.bridge_cpu import tiny_models

    from energon_packing.bridge import PackedEnergonDatasetConfig
    from energon_packing.demo import processor_path

    model = tiny_models.provider("text", vocab_size=VOCABULARY, seq_length=LENGTH)
    dataset = PackedEnergonDatasetConfig(processor=str(processor_path("text")), seq_length=LENGTH, num_workers=0)
    # Text only: samples with images and videos of a mixed data set are dropped.
    dataset.packing.window, dataset.packing.drop_budget = 16, 1.0
    dataset.encoder.modality = "text"  # of mixed data, images and videos are left out by choice
    dataset.do_validation = False
    return make_config(model, dataset, steps=4, global_batch_size=2)


def vision() -> Any:
    """Returns the recipe of a tiny Qwen2.5-VL with the demo's processor: 20 steps on text, images and videos."""
    from support.bridge_cpu import tiny_models

    from energon_packing.bridge import PackedEnergonDatasetConfig
    from energon_packing.demo import processor_path

    tokens = tiny_models.SpecialTokens(vision_start=4079, vision_end=4080, image=4082, video=4083)
    model = tiny_models.provider("qwen2_5_vl", vocab_size=4096, tokens=tokens, seq_length=4096)
    processor = str(processor_path("qwen2_5_vl"))
    dataset = PackedEnergonDatasetConfig(processor=processor, seq_length=4096, num_workers=1)
    dataset.packing.window, dataset.packing.drop_budget = 64, 1.0
    dataset.do_validation = False
    return make_config(model, dataset, steps=20, learning_rate=2e-3)


def clips() -> Any:
    """Returns a tiny Wan's recipe for stored latents of 4 channels and embeddings of width 32 (docs/wan.md)."""
    from support import wan_on_cpu

    from energon_packing.bridge.dataset import use_packed_data

    recipe = make_config(wan_on_cpu.tiny_provider(seq_length=LENGTH), None, steps=4, global_batch_size=2)
    use_packed_data(recipe, "unnamed", num_workers=0)
    recipe.dataset.packing.window, recipe.dataset.do_validation = 16, False
    return recipe
