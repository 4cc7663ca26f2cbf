"""Megatron-LM's own training scripts on our packs, changed by the page's ``sed`` alone, in several layouts.

They are those of the checkout that ``ENERGON_PACKING_MEGATRON_LM`` names; without it these tests are skipped. What has
no kernel on a CPU is replaced before the script runs (`PREPARE`), in the models that it builds, not in the script.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from support.megatron_lm_ranks import Case, result_of, run_cases
from support.multimodal_arguments import CHECKOUT

from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "megatron_lm.md"
TP, CP, PP = (f"--{kind}-parallel-size" for kind in ("tensor-model", "context", "pipeline-model"))
TP_CP = (TP, "2", "--sequence-parallel", CP, "2")
PREPARE = {
    "vlm": """
import sys
from types import ModuleType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.multimodal import llava_spec
from megatron.core.models.vision import vit_layer_specs
llava_spec.decoder_model_with_transformer_engine_default_spec = lambda *_: get_gpt_layer_with_transformer_engine_spec()
vit_layer_specs.get_vit_layer_with_transformer_engine_spec = vit_layer_specs.get_vit_layer_with_local_spec
sys.modules["pretrain_gpt"] = ModuleType("pretrain_gpt")  # whose loss the packs' replaces
sys.modules["pretrain_gpt"].loss_func = None
""",
    "hybrid": f"""
import sys
from unittest import mock
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.ssm import mamba_context_parallel
from megatron.core.tensor_parallel.layers import RowParallelLinear
from support.bridge_cpu import state_space
from support.bridge_cpu.attention import PartitionedIndices, SegmentAttention
from support.bridge_cpu.modules import NormColumnParallelLinear, TorchNorm
sys.path.append({os.environ.get(CHECKOUT, "")!r})  # its modules beside the script
for module, kernels in state_space.KERNELS.items():
    mock.patch.multiple(module, **kernels).start()
mamba_context_parallel.tex, mamba_context_parallel.is_te_min_version = PartitionedIndices, lambda *_: True
parts = hybrid_stack_spec.submodules
mixer, attention = parts.mamba_layer.submodules.mixer, parts.attention_layer.submodules.self_attention.submodules
mixer.params["rmsnorm"] = False  # a kernel of mamba_ssm
mixer.submodules.in_proj, mixer.submodules.out_proj = NormColumnParallelLinear, RowParallelLinear
attention.linear_qkv, attention.linear_proj = NormColumnParallelLinear, RowParallelLinear
attention.core_attention = SegmentAttention
parts.moe_layer.submodules.mlp = get_moe_module_spec(use_te=False, num_experts=4)
parts.moe_layer.submodules.pre_mlp_layernorm = hybrid_block.TENorm = TorchNorm
""",
}
WORDS = {
    "vlm": "--num-layers 2 --img-h 28 --img-w 28 --patch-dim 14 --disable-vision-class-token "
    "--dataloader-seq-length 512 --ckpt-format torch",
    "hybrid": "--mamba-state-dim 8 --mamba-head-dim 8 --mamba-num-groups 2 --num-experts 4 --moe-router-topk 2 "
    "--moe-aux-loss-coeff 0.5 --moe-token-dispatcher-type alltoall "
    "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec",
}
PATTERN = "--hybrid-layer-pattern"
LAYOUTS = {
    "vlm": {"one": (), "tp2-cp2": TP_CP, "pp2": (PP, "2"), "tp2-pp2": (TP, "2", PP, "2")},
    "hybrid": {
        "one": (PATTERN, "ME*E"),
        "tp2": (PATTERN, "ME*E", TP, "2", "--sequence-parallel"),
        "pp2": (PATTERN, "ME|*E", PP, "2"),  # with experts on each, or Megatron-Core's log waits
        "cp2": (PATTERN, "ME*E", CP, "2"),
        "tp2-cp2": (PATTERN, "ME*E", *TP_CP),
    },
}
ROWS = {
    "vlm": {"context_parallel": 2, "pad_to_max_length": False},
    "hybrid": {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True, "pad_to_max_length": True},
}
RUNS = [(script, layout) for script, layouts in LAYOUTS.items() for layout in layouts if layout != "one"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from support.offline_processors import llava

    if not os.environ.get(CHECKOUT):
        pytest.skip(f"{CHECKOUT} names no checkout of Megatron-LM")
    pytest.importorskip("megatron.training")
    root = tmp_path_factory.mktemp("scripts")
    source = make_data(root / "raw", conversations=80, seed=3, defects=False)
    convert(ConvertConfig(sources=(source,), out=root / "data", split={"train": 1.0}, workers=1))
    llava(28).save_pretrained(root / "llava")
    processors = {"vlm": root / "llava", "hybrid": processor_path("text")}
    (sed,) = re.findall(r"^sed .*$", PAGE.read_text(), flags=re.MULTILINE)
    cases = []
    for script, layouts in LAYOUTS.items():
        file, module = root / f"pretrain_{script}.py", "vlm" if script == "vlm" else "gpt"
        file.write_text(Path(os.environ[CHECKOUT], file.name).read_text())
        line = sed.replace("pretrain_gpt.py", file.name).replace("megatron_lm.gpt", f"megatron_lm.{module}")
        subprocess.run(["bash", "-c", line], cwd=root, check=True)
        file.write_text(PREPARE[script] + file.read_text())
        (root / f"{script}.yaml").write_text(
            f"data: {{path: {root / 'data'}, workers: 0}}\nencoder: {{processor: {processors[script]}}}\n"
            "packing: {window: 16, drop_budget: 1.0}\n"
        )
        words = [*WORDS[script].split(), "--packing-config", str(root / f"{script}.yaml"), "--train-iters", "2"]
        for layout, given in layouts.items():
            world = 2 ** sum(given.count(kind) for kind in (TP, CP, PP))
            name = f"{script}-{layout}"
            cases.append(Case(name, str(file), [*words, "--lr-decay-iters", "10", *given], world, rows_of=ROWS[script]))
    run_cases(cases, root)
    return root


@pytest.mark.parametrize(("script", "layout"), RUNS)
def test_a_script_of_megatron_lm_has_the_losses_and_norms_of_one_process_in_every_layout(folder, script, layout):
    world = 2 ** len(layout.split("-"))
    one, last = result_of(folder, f"{script}-one"), result_of(folder, f"{script}-{layout}", rank=world - 1)
    print(f"\n{script} {layout}: {one['losses']} {last['losses']} {one['norms']} {last['norms']}")
    assert len(last["losses"]) == 2
    torch.testing.assert_close(last["losses"], one["losses"], rtol=0, atol=1e-5)
    torch.testing.assert_close(last["norms"], one["norms"], rtol=0, atol=1e-4)
