"""`scripts/parity.py` on real packs: equal where they are right, and every mistake made on purpose is found."""

import contextlib
import io
import json
import sys

import parity as script
import pytest
import torch
from support.parity import families

from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Directory of a small converted data set, and of configuration files beside it."""
    root = tmp_path_factory.mktemp("parity")
    source = make_data(root / "raw", conversations=24, seed=3, defects=False)
    convert(ConvertConfig(sources=(source,), out=root / "data", split={"train": 1.0}, workers=1))
    return root


@pytest.fixture(scope="module")
def run(data):
    """``run(family, *options)``: exit code and the JSON that the command prints."""

    def call(family, *options, length=1024):
        file = data / f"{family}.yaml"
        settings, processor = families.SETTINGS.get(family, {}), data / f"{family}-processor"
        if family not in families.MADE:
            processor = processor_path(family)
        elif not processor.exists():
            families.MADE[family]().save_pretrained(processor)
        file.write_text(
            f"data: {{path: {data / 'data'}, shuffle_buffer: 1}}\n"
            f"encoder: {json.dumps({'processor': str(processor), **settings})}\n"
            f"packing: {{seq_length: {length}, window: 16, drop_budget: 1.0}}\n"
        )
        words = ["parity.py", "--config", str(file), "--packs", "1", "--json", *options]
        printed = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
            patch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as end:
                script.main()
        return end.value.code, json.loads(printed.getvalue())

    return call


REAL = ("--set", "packing.padding=real", "--set", "parallel.sequence_parallel=true", "--set")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2_5_vl", ()),
        ("qwen3_vl", ("--cp", "2", *REAL, "parallel.tensor_parallel=1")),
        ("internvl", (*REAL, "parallel.tensor_parallel=16")),
        ("llava_onevision", ("--cp", "2")),
        ("gemma3", ("--attention", "positions")),
        ("ministral3", (*REAL, "parallel.tensor_parallel=8")),
        ("glm4v", ()),
        ("ernie4_5_vl", ("--attention", "positions", *REAL, "parallel.tensor_parallel=8")),
        ("qwen3_5_vl", (*REAL, "parallel.tensor_parallel=16")),
        ("text", ("--cp", "4")),
    ],
)
def test_packs_of_real_data_equal_their_samples_alone(run, family, options):
    code, outcome = run(family, *options, "--bfloat16")
    assert outcome["failures"] == []
    assert code == 0
    rounded = outcome["bfloat16"]
    logits, gradient = rounded["alone"]
    assert 1e-3 < logits < 2e-2, "as bfloat16 rounds, and not float32"
    # Without AVX-512, torch sums the gradient of a convolution in bfloat16: Qwen3-VL's patches make it 0.11 then.
    assert 1e-3 < gradient < (0.2 if family == "qwen3_vl" else 2e-2), "as bfloat16 rounds, and not float32"
    assert rounded.keys() == {"alone", "packed"} | (set() if "positions" in options else {"leaking"})
    leaks = zip(rounded.get("leaking", ()), rounded["alone"], strict=False)
    assert all(leaking > max(0.1, 3 * alone) for leaking, alone in leaks)
    assert len(outcome["segments"]) > 1
    for segment in outcome["segments"]:
        assert segment["logits"] < 1e-5
        assert segment["gradient"] < 1e-5
        assert segment["gradient_norm_alone"] > 0.1
        assert segment["loss"] == pytest.approx(segment["loss_alone"], abs=1e-4)
    (perturbation,) = outcome["perturbations"]
    assert perturbation["others"] == 0
    assert perturbation["own"] > 0.01
    (ignored,) = outcome["boundaries_ignored"]
    assert (ignored is None) if "positions" in options else ignored > 0.01


@pytest.mark.parametrize(
    ("family", "mistake", "sentence"),
    [
        ("qwen2_5_vl", "boundaries", "logits of segment"),
        ("internvl", "positions", "logits differ"),
        ("llava_onevision", "labels", "the gradient differs"),
        ("qwen3_5_vl", "boundaries", "logits of segment"),
    ],
)
def test_a_mistake_made_on_purpose_is_found_and_exits_with_one(run, family, mistake, sentence):
    code, outcome = run(family, "--break", mistake)
    assert code == 1
    assert any(sentence in failure for failure in outcome["failures"])


def test_a_comparison_that_could_not_have_found_a_leak_does_not_count(run, monkeypatch):
    from support.parity import hugging_face_parity as parity

    whole = parity._packed_logits
    monkeypatch.setattr(
        parity,
        "_packed_logits",
        lambda subject, batch, *, cp_size, isolate: whole(subject, batch, cp_size=cp_size, isolate=True),
    )
    code, outcome = run("text")
    assert code == 1
    assert "could not have found a leak" in outcome["failures"][0]


def test_a_saved_model_is_loaded_and_one_that_does_not_fit_is_refused(run, data):
    import transformers
    from support.bridge_cpu.tiny_models import hugging_face_config

    def save(name, vocab_size):
        torch.manual_seed(0)
        model = transformers.Qwen2ForCausalLM(hugging_face_config("text", vocab_size=vocab_size))
        model.save_pretrained(data / name)
        return str(data / name)

    code, outcome = run("text", "--model", save("fits", 4200))
    assert (code, outcome["failures"]) == (0, [])
    assert "fits" in outcome["model"]
    code, outcome = run("text", "--model", save("small", 100))
    assert code == 2
    assert "has 100 tokens" in outcome["error"]
    code, outcome = run("text", "--model", str(data / "nothing"))
    assert code == 2
    assert "No model can be loaded" in outcome["error"]


def test_linear_attention_is_not_shown_by_a_mask_over_ranks(run):
    code, outcome = run("qwen3_5_vl", "--cp", "2")
    assert code == 2
    assert "linear attention" in outcome["error"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--attention", "positions", "--cp", "2"), "use --attention mask"),
        (("--attention", "positions", "--break", "boundaries"), "use --attention mask"),
        (("--device", "toaster"), "device 'toaster' is not available"),
    ],
)
def test_impossible_requests_are_one_sentence(run, options, sentence):
    code, outcome = run("text", *options)
    assert code == 2
    assert sentence in outcome["error"]


def test_a_row_too_long_for_a_mask_is_refused_before_memory_is_gone(run, monkeypatch):
    from support.parity import hugging_face_parity as parity

    monkeypatch.setattr(parity, "LONGEST_MASK", 100)
    code, outcome = run("text")
    assert code == 2
    assert "needs too much memory" in outcome["error"]
