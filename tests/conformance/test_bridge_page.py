"""The five steps of docs/bridge.md, executed as they stand there, in a folder with chats and images.

Two things are replaced: the hub (the processor lies in ``path/or/name``, the model of ``train.py`` is a tiny one of the
same family), and the eight GPUs of the last step (Bridge validates for eight ranks; one of them trains on the CPU).
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType

import bridge_here  # noqa: F401
import pytest
from click.testing import CliRunner
from manual.blocks import read_page
from PIL import Image
from support.bridge_cpu import stand_ins, tiny_models, training_run

from energon_packing.cli.main import cli
from energon_packing.demo import processor_path

ROOT = Path(__file__).resolve().parents[2]
STEPS, TRAIN, IN_BATCH = (block.text for block in read_page(ROOT / "docs" / "bridge.md").blocks if block.run_by)
STEPS = STEPS.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands are run: ``chats.jsonl``, ``images``, the processor, and this checkout's recipes."""
    here = tmp_path_factory.mktemp("page")
    (here / "images").mkdir()
    lines = []
    for number in range(120):
        name = f"{number}.png"
        Image.new("RGB", (64 + 8 * (number % 9), 96), (number, 90, 200)).save(here / "images" / name)
        question = {"role": "user", "content": [{"type": "image", "image": name}, {"type": "text", "text": "What?"}]}
        answer = {"role": "assistant", "content": "A field of one colour. " * (5 + number % 40)}
        lines.append(json.dumps({"id": str(number), "messages": [question, answer]}))
    (here / "chats.jsonl").write_text("\n".join(lines) + "\n")
    shutil.copytree(processor_path("qwen3_vl"), here / "path" / "or" / "name")
    (here / "bridge_configs").symlink_to(ROOT / "bridge_configs")
    (here / "checkpoints" / "Qwen3-VL-8B-Instruct").mkdir(parents=True)
    return here


@pytest.fixture(autouse=True)
def in_folder(folder, monkeypatch):
    stand_ins.install()
    monkeypatch.chdir(folder)
    yield
    stand_ins.uninstall()


@pytest.mark.parametrize("number", range(4))
def test_a_step_that_is_a_command_of_ours_ends_with_zero(number, folder):
    if number == 1 and not (folder / "data").exists():  # run alone, by number
        CliRunner().invoke(cli, shlex.split(STEPS[0])[1:])
    done = CliRunner().invoke(cli, shlex.split(STEPS[number])[1:])
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    expected = ("120", "2 packs,", "packs for the same tokens", "accepts")
    assert expected[number] in said, said


@pytest.fixture
def tiny_hub(monkeypatch):
    """The recipe's model name gives a tiny configuration of the same family, with the processor's token ids."""
    from megatron.bridge import AutoBridge

    ids = tiny_models.vocabulary_of(str(processor_path("qwen3_vl")))
    tokens = tiny_models.special_tokens(ids)
    config = tiny_models.hugging_face_config("qwen3_vl", vocab_size=len(ids), tokens=tokens, seq_length=8192)
    made = staticmethod(lambda *_, **__: AutoBridge.from_hf_config(config))
    monkeypatch.setattr(AutoBridge, "from_hf_pretrained", made)
    return lambda length: tiny_models.provider("qwen3_vl", vocab_size=len(ids), tokens=tokens, seq_length=length)


def test_the_last_step_validates_on_eight_ranks_and_trains(folder, tiny_hub, monkeypatch):
    from megatron.bridge.training.config import runtime_config_update

    from energon_packing.bridge.step import forward_step

    if not (folder / "data").exists():
        CliRunner().invoke(cli, shlex.split(STEPS[0])[1:])
    *launcher, program, first, second = shlex.split(STEPS[4])
    assert (launcher, program) == (["torchrun", "--nproc-per-node", "8"], "train.py")
    seen = {}

    def finetune(cfg, step):
        """In place of Bridge's, which cannot be imported without NVIDIA's resiliency extension."""
        monkeypatch.setenv("WORLD_SIZE", "8")
        runtime_config_update(cfg)  # its first call; ends with validate()
        monkeypatch.delenv("WORLD_SIZE")
        assert step is forward_step
        seen["iterations"], seen["cfg"] = cfg.scheduler.lr_decay_iters, cfg
        with training_run.process_groups():
            run = training_run.make_config(tiny_hub(cfg.model.seq_length), cfg.dataset, steps=1)
            seen["losses"] = training_run.run(run, forward_step=forward_step).losses

    module = ModuleType("megatron.bridge.training.finetune")
    module.finetune = finetune
    monkeypatch.setitem(sys.modules, module.__name__, module)
    offline = ["dataset.processor=path/or/name", "dataset.num_workers=0"]
    monkeypatch.setattr(sys, "argv", [program, first, second, *offline])
    exec(compile(TRAIN, program, "exec"), {"__name__": "__main__"})
    assert seen["iterations"] == seen["cfg"].train.train_iters == 2000
    assert seen["cfg"].checkpoint.pretrained_checkpoint == "checkpoints/Qwen3-VL-8B-Instruct"
    assert seen["cfg"].dataset.packing.window == 512
    assert seen["cfg"].train.global_batch_size == 16
    assert 0 < seen["losses"][0] < 20


def test_what_the_page_says_about_in_batch_packing_passes_validate(tiny_hub, monkeypatch):
    from megatron.bridge.recipes.qwen_vl import qwen3_vl_8b_sft_config
    from megatron.bridge.training.config import runtime_config_update

    from energon_packing.bridge.dataset import use_packed_data

    monkeypatch.setenv("WORLD_SIZE", "8")
    cfg = use_packed_data(qwen3_vl_8b_sft_config(), "data/packed", seq_length=8192, global_batch_size=16)
    exec(compile(IN_BATCH, "docs/bridge.md", "exec"), {"cfg": cfg})
    runtime_config_update(cfg)
    assert cfg.dataset.enable_in_batch_packing
    assert cfg.dataset.micro_batch_size == cfg.train.micro_batch_size == 4
