"""Bridge's sequence-packing page, pasted as written: of 0.4, whose names are gone, and of 0.7; and Bridge's recipes.

The models of recipes come from the defaults of transformers, or are the provider's class where it has none: what is
judged here are the names of settings, and no size.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import bridge_here  # noqa: F401
import pytest
from click.testing import CliRunner

from energon_packing.cli.main import cli
from energon_packing.validate.recipes import _unknown_settings, view_of
from energon_packing.validate.rules.rule import judge

pytestmark = pytest.mark.usefixtures("stand_ins")

MODEL_CONFIGS = Path(__file__).resolve().parents[2] / "bridge_configs" / "hf"
BASE = """
from megatron.bridge.data.packing import PackedSequenceSpecs
from megatron.bridge.recipes.qwen import qwen3_8b_sft_config


def recipe():
    cfg = qwen3_8b_sft_config()
    cfg.dataset.enable_offline_packing, cfg.dataset.offline_packing_specs = False, None
    cfg.train.micro_batch_size = 4
    cfg.train.global_batch_size = 64
"""
SPECS = "PackedSequenceSpecs(packed_sequence_size=cfg.model.seq_length, pad_seq_to_mult=1)"
RENAMED, UNREAD = "ours/settings-by-their-names", "ours/settings-are-read"
NEW = (
    *("cfg.train.micro_batch_size = 1", "cfg.dataset.enable_offline_packing = True"),
    f"cfg.dataset.offline_packing_specs = {SPECS}",
)
LINES = {
    "the specs of 0.4": (
        [f"cfg.dataset.packed_sequence_specs = {SPECS}"],
        RENAMED,
        "dataset.offline_packing_specs, with",
    ),
    "in-batch packing of 0.4": (
        ["cfg.dataset.pack_sequences_in_batch = True"],
        RENAMED,
        "use dataset.enable_in_batch_packing",
    ),
    "the import of 0.4, which the page of 0.7 still has": (
        ["from megatron.bridge.data.datasets.packed_sequence import PackedSequenceSpecs"],
        None,
        "0.6.2 and 0.7: megatron.bridge.data.packing)",
    ),
    "fixed boundaries of 0.4": (
        ["cfg.dataset.packed_sequence_specs.pad_cu_seqlens = True"],
        None,
        "0.6.2 and 0.7: offline_packing_specs, with enable_offline_packing=True)",
    ),
    "a slip, a local name in Bridge's sources": (["cfg.train.train_iter = 1"], UNREAD, "use train.train_iters if"),
    "an attribute of one's own": (["cfg.model.of_my_step = 1"], UNREAD, "model.of_my_step"),
    "a private attribute": (["cfg.model._of_my_step = 1"], "", ""),
    "a nested section": (
        [*NEW, "cfg.dataset.offline_packing_specs.pad_seq_to_multiple = 4"],
        UNREAD,
        "dataset.offline_packing_specs.pad_seq_to_mult",
    ),
    "the specs of 0.7": (
        NEW,
        "",
        "",
    ),
    "ours, with an old name": (
        [
            "from energon_packing.bridge.dataset import use_packed_data",
            "use_packed_data(cfg, 'data', processor='p').dataset.packed_sequence_specs = 1",
        ],
        RENAMED,
        "use dataset.mode",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_of_the_page_is_valid_or_its_new_name_is_told(name, tmp_path, monkeypatch):
    lines, rule, said = LINES[name]
    module = f"line_{list(LINES).index(name)}_of_the_page"
    (tmp_path / f"{module}.py").write_text(BASE + "".join(f"    {line}\n" for line in lines) + "    return cfg\n")
    monkeypatch.chdir(tmp_path)
    words = ["validate", f"{module}:recipe", "--world-size", "8", "--no-data", "--no-bridge", "--json"]
    done = CliRunner().invoke(cli, [*words, "--model-configs", str(MODEL_CONFIGS)])
    if rule is None:
        assert done.exit_code == 2
        assert said in json.loads(done.stdout)["error"]
        return
    told = {each["rule"]: each for each in json.loads(done.stdout)["rules"] if each["why"] is not None}
    assert {each for each in told if each in (RENAMED, UNREAD)} == {rule} - {""}, done.output
    assert done.exit_code == (rule == RENAMED)
    if rule:
        assert said in f"{told[rule]['why']} {told[rule]['fix']}"


def test_sections_that_hold_each_other_are_looked_at_once():
    from megatron.bridge.training.config import ConfigContainer

    made = (object.__new__(ConfigContainer) for _ in range(2))
    container, other = made
    container.model, container.of_mine, other.model = other, 1, container
    assert _unknown_settings(container) == (("of_mine", ""),)


MODELS = {
    r"Llama": "llama",
    r"Qwen2\.5-VL": "qwen2_5_vl",
    r"Qwen2-Audio": "qwen2_audio",
    r"Qwen2": "qwen2",
    r"Qwen3-Next": "qwen3_next",
    r"Qwen3-VL-.*A": "qwen3_vl_moe",
    r"Qwen3-VL": "qwen3_vl",
    r"Qwen3-Omni": "qwen3_omni_moe",
    r"Qwen3\.5-.*A": "qwen3_5_moe",
    r"Qwen3\.5": "qwen3_5",
    r"Qwen3-.*A\d": "qwen3_moe",
    r"Qwen3": "qwen3",
    r"GLM-4\.5V": "glm4v_moe",
    r"GLM-4\.5": "glm4_moe",
    r"GLM-5": "glm_moe_dsa",
    r"gpt-oss": "gpt_oss",
    r"gemma-2": "gemma2",
    r"gemma-3-1b": "gemma3_text",
    r"gemma-3": "gemma3",
    r"gemma-4": "gemma4",
    r"DeepSeek-V2": "deepseek_v2",
    r"DeepSeek-V3": "deepseek_v3",
    r"OLMoE": "olmoe",
    r"Ministral-3": "mistral3",
    r"MiniMax-M2": "minimax_m2",
    r"EXAONE": "exaone4",
}
"""Pattern of a published name -> type of transformers."""


def published(name):
    """A configuration of the type of a published model, with the architecture that Bridge knows it by."""
    import transformers

    (kind, *_) = [kind for pattern, kind in MODELS.items() if re.search(pattern, str(name))]
    config = transformers.AutoConfig.for_model(kind)
    mapping = transformers.models.auto.modeling_auto
    classes = mapping.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, mapping.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config.architectures = [next(table[kind] for table in classes if kind in table)]
    config.name_or_path = str(name)
    return config


@contextlib.contextmanager
def published_models():
    import transformers
    from megatron.bridge import AutoBridge

    made = {"from_hf_pretrained": lambda name, **_: AutoBridge.from_hf_config(published(name))}
    with (
        mock.patch.multiple(AutoBridge, **made),
        mock.patch.object(transformers.AutoConfig, "from_pretrained", lambda name, **_: published(name)),
        mock.patch(
            "torch.cuda.get_device_properties", return_value=SimpleNamespace(name="NVIDIA H100", major=9, minor=0)
        ),
    ):
        yield


OPTED_OUT = {
    "qwen3_next_80b_a3b_sft_config": ("qwen", "Qwen3-Next-80B-A3B-Instruct"),
    "glm45_355b_sft_config": ("glm", "GLM-4.5"),
    "glm45_air_106b_peft_config": ("glm", "GLM-4.5-Air"),
    "qwen3_8b_sft_config": ("qwen", ""),
}


@pytest.mark.parametrize("name", OPTED_OUT)
def test_a_recipe_that_opts_out_of_packing_is_refused_if_it_packs(name):
    module, model = OPTED_OUT[name]
    from megatron.bridge.data.packing import PackedSequenceSpecs

    with published_models():
        container = getattr(importlib.import_module(f"megatron.bridge.recipes.{module}"), name)()
    if not model:
        container.tokenizer.tokenizer_model = "zai-org/GLM-4.5"  # the tokenizer of another model refuses nothing
    before = view_of(container, world_size=8)
    container.dataset.enable_offline_packing = True
    container.dataset.offline_packing_specs = PackedSequenceSpecs(packed_sequence_size=4096)
    view = view_of(container, world_size=8)
    (found,) = [each.outcome for each in judge(view) if each.rule.id == "ours/family-takes-packs"]
    assert found == ("error" if model else "ok")
    assert (view.model == model) == bool(model)
    assert before.packed == (not model)  # its own data are not packed


def recipes_of_bridge():
    """Every recipe function of the installed Bridge, once, that needs no argument."""
    import megatron.bridge.recipes as folder

    found = {}
    for module in pkgutil.walk_packages(folder.__path__, folder.__name__ + "."):
        with contextlib.suppress(ImportError):
            names = vars(importlib.import_module(module.name))
            found |= {value: None for name, value in names.items() if name.endswith("_config") and callable(value)}
    return [
        recipe for recipe in found if inspect.isfunction(recipe) and not recipe.__name__.startswith(("_", "default"))
    ]


@pytest.mark.full
def test_no_attribute_of_a_recipe_of_bridge_is_called_unknown():
    built, failed = 0, {}
    with published_models():
        for recipe in recipes_of_bridge():
            try:
                container = recipe()
            except Exception as error:
                failed[recipe.__name__] = repr(error)
                continue
            if not hasattr(container, "dataset"):
                continue
            assert _unknown_settings(container) == (), recipe.__name__
            built += 1
    # The others need files of the hub, or models that this release of transformers does not have.
    assert built > 200, failed
