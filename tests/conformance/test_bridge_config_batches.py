"""Every recipe in ``bridge_configs/`` builds a batch at its own alignment, from demo data.

The files are taken as they are, in a folder laid out as they say (``data/packed``, the blend); only the processor is
the small one of the same family that the demo ships, because no network is asked.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from energon_packing import thd
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.energon.loader import build_loader

pytest.importorskip("megatron.core", reason="Megatron-Bridge is not installed")
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)

from energon_packing.validate.run_source import run_source
from energon_packing.validate.verdict import container_verdict

pytestmark = pytest.mark.usefixtures("stand_ins")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bridge_configs"
FAMILIES = {"qwen25_vl": "qwen2_5_vl", "qwen3_vl": "qwen3_vl", "qwen3": "text"}


def gpus(module):
    """The table of a recipe file, read without importing it (that needs Bridge)."""
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "GPUS"]
    return ast.literal_eval(tables[0])


RECIPES = [(module, name, size) for module in FAMILIES for name, size in gpus(module).items()]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A working folder for vision models and one for text models, with the data that the files name."""
    folder = tmp_path_factory.mktemp("runs")
    draw = random.Random(1)
    words = ["pack", "row", "token", "image", "loader", "turn", "answer", "window", "batch", "sample"]
    lines = []
    for number in range(200):
        text = " ".join(draw.choices(words, k=draw.randint(5, 400)))
        turns = f'{{"role": "user", "content": "say {number}"}}, {{"role": "assistant", "content": "{text}"}}'
        lines.append(f'{{"id": "{number}", "messages": [{turns}]}}')
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    sources = {"vision": make_data(folder / "made", conversations=60, defects=False), "text": folder / "text.jsonl"}
    for kind, source in sources.items():
        shutil.copytree(FOLDER / "data", folder / kind / "bridge_configs" / "data")
        for name in ("packed", "packed_more"):
            out = folder / kind / "data" / name
            convert(ConvertConfig(sources=(source,), out=out, split={"train": 0.9, "val": 0.1}, workers=0))
    return folder


def first_pack(config):
    """Of a run configuration, read in this process."""
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, workers=0))
    return next(iter(build_loader(config)))


@pytest.mark.parametrize(("module", "name", "size"), RECIPES, ids=[name for _, name, _ in RECIPES])
def test_a_recipe_builds_a_sound_batch_at_its_own_alignment(module, name, size, places, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(places / ("text" if module == "qwen3" else "vision"))
    processor = str(processor_path(FAMILIES[module]))
    container = run_source((f"bridge_configs.{module}:{name}",), world_size=size).container
    if container.checkpoint.pretrained_checkpoint:
        Path(container.checkpoint.pretrained_checkpoint).mkdir(parents=True, exist_ok=True)
    verdict = container_verdict(container, world_size=size)  # what pretrain() calls first: it settles the layout
    assert verdict.accepted, verdict.message
    dataset, model = container.dataset, container.model
    sizes = {"tp": "tensor", "cp": "context", "pp": "pipeline"}
    groups = SimpleNamespace(
        **{
            short: SimpleNamespace(size=lambda long=long: getattr(model, f"{long}_model_parallel_size", None) or 1)
            for short, long in sizes.items()
            if short != "cp"
        },
        cp=SimpleNamespace(size=lambda: model.context_parallel_size),
    )
    parallel = dataset.parallel_config(groups)
    dataset.processor = processor
    config = dataset.run_config(parallel)
    batch = first_pack(config).batch

    assert parallel.multiple == thd.alignment_multiple(
        model.tensor_model_parallel_size, model.context_parallel_size, model.sequence_parallel
    )
    assert thd.check_thd(batch, multiple=parallel.multiple) == []
    fixed = model.pipeline_model_parallel_size > 1 or model.expert_model_parallel_size > 1
    assert batch.total_tokens == dataset.seq_length if fixed else batch.total_tokens <= dataset.seq_length
    assert batch.real_tokens > 0.9 * dataset.seq_length
    assert batch.num_samples > 1
    row = batch.to_bridge()
    assert (row["visual_inputs"] is None) == (module == "qwen3")
    if model.context_parallel_size > 1:  # and what each rank sees of it
        parts = [
            thd.slice_for_context_parallel(batch, model.context_parallel_size, rank)
            for rank in range(model.context_parallel_size)
        ]
        assert {part.tokens.shape[1] for part in parts} == {batch.total_tokens // model.context_parallel_size}
