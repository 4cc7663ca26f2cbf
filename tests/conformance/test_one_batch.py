"""``scripts/train.py --check`` gives the step of a run one row, of models of which no weight is made."""

import importlib
import json
from pathlib import Path

import bridge_here  # noqa: F401
import numpy as np
import pytest
from click.testing import CliRunner

from energon_packing.config import DataConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.wan.config import TextToVideoPackingConfig, TextToVideoRunConfig
from energon_packing.wan.task_encoder import build_text_to_video_loader

pytest.importorskip("diffusers", reason="Bridge's Wan model needs diffusers")
pytestmark = pytest.mark.usefixtures("stand_ins")

ROOT = Path(__file__).resolve().parents[2]
IDS = {"image_token_id": 4082, "video_token_id": 4083, "vision_start_token_id": 4079, "vision_end_token_id": 4080}


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Data of 40 stored clips of the published models' channels and width."""
    folder, draw, lines = tmp_path_factory.mktemp("clips"), np.random.default_rng(0), []
    for number in range(40):
        np.save(folder / f"{number}.npy", draw.normal(size=(16, 1 + number % 3, 4, 4)).astype("float32"))
        np.save(folder / f"{number}.text.npy", draw.normal(size=(3 + number, 4096)).astype("float32"))
        lines.append(json.dumps({"latents": f"{number}.npy", "context": f"{number}.text.npy"}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    split = {"train": 0.8, "val": 0.2}
    source = (folder / "rows.jsonl",)
    convert(ConvertConfig(sources=source, out=folder / "data", format="text-to-video", split=split, workers=0))
    return str(folder / "data")


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conversations")
    source = make_data(folder / "made", conversations=60, defects=False)
    convert(ConvertConfig(sources=(source,), out=folder / "data", split={"train": 0.8, "val": 0.2}, workers=0))
    return str(folder / "data")


@pytest.fixture
def check(monkeypatch, tmp_path):
    """Output and exit code of a check for 8 ranks, in a folder with the weights that recipes name."""
    for name in ("Wan2.1-T2V-14B", "Qwen2.5-VL-7B-Instruct", "Qwen3.5-27B"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setenv("WORLD_SIZE", "8")
    train = importlib.import_module("train")

    def run(recipe, data, *words):
        monkeypatch.setattr("sys.path", [*importlib.import_module("sys").path])
        done = CliRunner().invoke(
            train.main, [recipe if "." in recipe else f"bridge_configs.{recipe}", "--check", "--data", data, *words]
        )
        print(done.output)
        return done.exit_code, done.output

    return run


@pytest.mark.parametrize("recipe", ["wan:wan_14b_sft", "wan:wan_1_3b_text2video"])
def test_a_row_of_clips_is_read_by_the_step_that_its_recipe_takes(check, clips, recipe):
    code, said = check(recipe, clips)
    assert (code, "its step took a row of 128 samples with " in said, " of them trained" in said) == (0, True, True)


@pytest.mark.parametrize(
    ("data", "words", "sentence"),
    [
        (None, ["--step", "megatron.bridge.training.vlm_step:forward_step"], "does not take a row of this data set"),
        ("nowhere", [], "nowhere does not exist"),
    ],
)
def test_a_step_of_another_kind_and_missing_data_are_an_error(check, clips, data, words, sentence):
    code, said = check("wan:wan_14b_sft", data or clips, *words)
    assert (code, sentence in said, "its step took" in said) == (2, True, False)


def test_so_is_a_row_of_conversations_by_theirs(check, conversations):
    sets = [f"model.{name}={value}" for name, value in IDS.items()]
    sets.append(f"dataset.processor={processor_path('qwen2_5_vl')}")
    code, said = check("qwen25_vl:qwen25_vl_7b_sft", conversations, *sets)
    assert (code, "its step took a row of" in said, "with 8192 tokens" in said) == (0, True, True)
    wrong = "megatron.bridge.diffusion.models.wan.wan_step:wan_data_step"
    code, said = check("qwen25_vl:qwen25_vl_7b_sft", conversations, *sets, "--step", wrong)
    assert (code, f"{wrong} does not take a row" in said) == (2, True)


def test_a_check_leaves_what_the_run_wrote_as_it_was(check, clips, tmp_path):
    run = tmp_path / "run"
    config = TextToVideoRunConfig(
        data=DataConfig(path=clips, workers=0),
        packing=TextToVideoPackingConfig(seq_length=64, ledger=str(run / "ledger")),
    )
    next(iter(build_text_to_video_loader(config)))
    (run / "metrics").mkdir()
    (run / "metrics" / "rank0.jsonl").write_text("{}\n")

    def written():
        return {path: path.is_file() and path.read_bytes() for path in run.rglob("*")}

    before = written()
    assert len(before) > 3
    places = [f"dataset.packing.ledger={run}/ledger", f"dataset.metrics.directory={run}/metrics"]
    places.append(f"checkpoint.save={run}")
    code, said = check("wan:wan_14b_sft", clips, *places)
    assert (code, "its step took a row of 128 samples with " in said) == (0, True)
    assert written() == before


def test_a_model_of_uneven_pipeline_stages_is_built_in_one_piece(check, conversations, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    uneven = ["model.pipeline_model_parallel_size=2", "model.num_layers_in_first_pipeline_stage=1"]
    code, said = check("scripts.launch.tiny:text", conversations, *uneven)
    assert (code, "its step took a row of" in said) == (0, True)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("no such kernel"), "without Transformer Engine (ImportError: no such kernel)"),
        (ValueError("no such size"), "here (ValueError: no such size)"),
    ],
)
def test_a_model_that_cannot_be_built_here_is_told(check, clips, monkeypatch, error, reason):
    from megatron.bridge.diffusion.models.wan.wan_provider import WanModelProvider

    def provide(*_, **__):
        raise error

    monkeypatch.setattr(WanModelProvider, "provide", provide)
    code, said = check("wan:wan_14b_sft", clips)
    assert code == 0
    assert "read a row of 128 samples" in said
    assert f"was not given to its step, because the model cannot be built {reason}" in said
