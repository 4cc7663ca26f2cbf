"""`energon-packing validate` looks at what a run reads, names what is missing, and says what it could not look at."""

import json
import shutil
import socket
import subprocess
import sys

import pytest
import yaml
from click.testing import CliRunner

from energon_packing.cli.main import cli
from energon_packing.demo import processor_path
from energon_packing.validate.looks.data import LOOKS


@pytest.fixture(scope="module")
def data(demo_data):
    """40 conversations with images, in two splits."""
    return demo_data(40, seed=4, val=0.3)


@pytest.fixture
def run(tmp_path, data):
    """A sound run."""
    file = tmp_path / "run.yaml"
    file.write_text(
        f"data: {{path: {data}}}\n"
        f"encoder: {{processor: {processor_path('qwen2_5_vl')}}}\n"
        "packing: {seq_length: 8192}\n"
        "parallel: {tensor_parallel: 2, sequence_parallel: true}\n"
    )
    return file


def validate(run, *overrides, options=("--no-bridge",)):
    """Exit code, looks by id (several are joined in a list), and the whole answer."""
    sets = [word for override in overrides for word in ("--set", override)]
    result = CliRunner().invoke(cli, ["validate", str(run), *options, "--json", *sets])
    answer = json.loads(result.stdout)
    looks = {}
    for look in answer["reads"] or ():
        looks.setdefault(look["look"], []).append(look)
    return result.exit_code, looks, answer


def outcomes(looks):
    return {name: [look["outcome"] for look in found] for name, found in looks.items()}


def errors(looks):
    return [look for found in looks.values() for look in found if look["outcome"] == "error"]


def test_a_sound_run_is_valid_and_its_conversations_were_measured_without_decoding(run, monkeypatch):
    def decodes(*_arguments, **_settings):
        raise AssertionError("a look decodes no media")

    monkeypatch.setattr("energon_packing.encoders.decoding.decode_media", decodes)
    monkeypatch.setattr("PIL.Image.Image.load", decodes)
    code, looks, answer = validate(run)
    assert outcomes(looks) == {name: ["ok"] for name in LOOKS}
    assert list(looks) == list(LOOKS)
    assert (code, answer["valid"]) == (0, True)
    assert (looks["samples"][0]["samples"], looks["samples"][0]["refused"]) == (IN_TRAINING, [])


IN_TRAINING = 28
"""Conversations of the training part."""
MISSING = {
    "path": ("data.path=/nowhere/data", "data-path", "/nowhere/data does not exist"),
    "processor": ("encoder.processor=/nowhere/processor", "processor", "no directory /nowhere/processor"),
    "template": ("encoder.chat_template=chatmll", "chat-template", "'chatmll' cannot be read"),
    "split": ("data.split=trian", "data-split", "no split 'trian'; it has 'train', 'val'"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_thing_exits_with_1_and_is_the_one_that_is_named(run, name):
    override, look, words = MISSING[name]
    code, looks, answer = validate(run, override)
    assert (code, answer["valid"]) == (1, False)
    (wrong,) = errors(looks)
    assert wrong["look"] == look
    assert words in wrong["why"]
    assert override.replace("=", ": ") == wrong["at"]
    assert wrong["fix"]
    assert {rule["verdict"] for rule in answer["rules"]} <= {"ok", "not applicable"}


def test_all_four_at_once_are_named_in_one_run(run, data, tmp_path):
    """A blend, because a part of nothing cannot be missing."""
    blend = tmp_path / "blend.yaml"
    inner = [{"path": "nowhere", "weight": 1.0}, {"path": str(data / "text"), "split_part": "trian", "weight": 1.0}]
    content = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": {"blend": inner}}}
    blend.write_text(yaml.safe_dump(content))
    overrides = [f"data.path={blend}", MISSING["processor"][0], MISSING["template"][0]]
    code, looks, _ = validate(run, *overrides)
    assert code == 1
    found = {look["look"]: look["why"] for look in errors(looks)}
    assert list(found) == ["data-path", "data-split", "processor", "chat-template"]
    assert f"{tmp_path / 'nowhere'} does not exist (named in {blend})" in found["data-path"]
    assert "no split 'trian'; it has 'train', 'val'" in found["data-split"]
    assert looks["samples"][0]["outcome"] == "not looked at"


@pytest.fixture
def no_network(monkeypatch):
    """A network that does not answer; a list of what was asked of it."""
    tried = []

    def connects(*arguments, **_settings):
        tried.append(arguments)
        raise OSError("no route")

    monkeypatch.setattr(socket.socket, "connect", connects)
    monkeypatch.setattr(socket, "getaddrinfo", connects)
    return tried


def test_a_name_of_the_hub_that_is_not_here_is_said_and_the_network_is_left_alone(
    run, tmp_path, monkeypatch, no_network
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    code, looks, answer = validate(run, "encoder.processor=Qwen/Qwen3-VL-8B-Instruct")
    assert (code, answer["valid"]) == (0, True)
    (processor,) = looks["processor"]
    assert processor["outcome"] == "not looked at"
    assert "Qwen/Qwen3-VL-8B-Instruct is not on this machine" in processor["why"]
    assert outcomes(looks)["samples"] == ["not looked at"]
    assert constants.HF_HUB_OFFLINE is False
    assert no_network == []


def cached(cache, name, files):
    """A snapshot of a model of the hub as the hub's own client lays it out."""
    snapshot = cache / f"models--{name.replace('/', '--')}" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    reference = snapshot.parents[1] / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("0")
    for file in files:
        shutil.copy(file, snapshot)
    (snapshot / "config.json").write_text('{"model_type": "qwen2_5_vl"}')


@pytest.mark.full
def test_a_name_of_the_hub_is_loaded_from_its_cache_without_the_network(run, tmp_path, monkeypatch, no_network):
    from huggingface_hub import constants
    from transformers.utils import hub

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "TRANSFORMERS_CACHE", str(tmp_path / "hub"), raising=False)
    cached(tmp_path / "hub", "some/model", processor_path("qwen2_5_vl").iterdir())
    assert {look["outcome"] for look in validate(run, "encoder.processor=some/model")[2]["reads"]} == {"ok"}
    (tmp_path / "hub" / "models--some--model" / "snapshots" / "0" / "tokenizer.json").unlink()
    (look,) = validate(run, "encoder.processor=some/model")[1]["processor"]
    assert look["outcome"] == "not looked at"
    assert "the hub's cache has only a part of it" in look["why"]
    assert no_network == []


def test_a_directory_that_lacks_the_files_of_a_processor_is_an_error(run, tmp_path):
    folder = shutil.copytree(processor_path("text"), tmp_path / "processor")
    (folder / "tokenizer.json").write_text("{}")
    code, looks, _ = validate(run, f"encoder.processor={folder}")
    assert (code, looks["processor"][0]["outcome"]) == (1, "error")
    (folder / "tokenizer.json").unlink()
    code, looks, _ = validate(run, f"encoder.processor={folder}")
    assert (code, f"{folder} lacks tokenizer.json" in looks["processor"][0]["why"]) == (1, True)


def test_remote_code_runs_only_where_the_run_trusts_it(run, tmp_path):
    folder = tmp_path / "remote"
    shutil.copytree(processor_path("text"), folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    settings["tokenizer_class"] = "OwnTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n"
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    validate(run, f"encoder.processor={folder}")
    assert not (tmp_path / "ran").exists()
    _, looks, _ = validate(run, f"encoder.processor={folder}", "encoder.trust_remote_code=true")
    assert (tmp_path / "ran").exists()
    assert looks["processor"][0]["outcome"] == "ok"
    assert "OwnTokenizer" in looks["processor"][0]["why"]


@pytest.mark.parametrize("reason", ["template_omits", "unstable_prefix"])
def test_one_conversation_that_the_template_cannot_show_is_an_error_and_one_that_is_too_short_a_note(
    run, monkeypatch, reason
):
    from energon_packing.encoders.encoder import ConversationEncoder
    from energon_packing.errors import SampleRejected

    measure = ConversationEncoder.measure
    asked = []

    def refuses(self, conversation, **settings):
        asked.append(conversation.key)
        if len(asked) == 7:
            raise SampleRejected(chosen, "the call get_weather")
        return measure(self, conversation, **settings)

    monkeypatch.setattr(ConversationEncoder, "measure", refuses)
    chosen = reason
    code, looks, _ = validate(run)
    assert code == 1
    (samples,) = looks["samples"]
    assert samples["refused"] == [{"key": asked[6], "reason": reason, "detail": "the call get_weather"}]
    assert samples["samples"] == IN_TRAINING
    asked.clear()
    chosen = "too_few_targets"
    code, looks, answer = validate(run)
    assert (code, answer["valid"]) == (0, True)
    (samples,) = looks["samples"]
    assert samples["outcome"] == "note"
    assert f"1 of {IN_TRAINING}" in samples["why"]
    assert "1 too_few_targets" in samples["why"]


def test_the_looks_can_be_left_out(run):
    overrides = [override for override, _, _ in MISSING.values()]
    code, _, answer = validate(run, *overrides, options=("--no-bridge", "--no-data"))
    assert (code, answer["reads"], answer["valid"]) == (0, None, True)


def test_what_needs_no_tensors_imports_none(run):
    words = ["--set", "encoder.processor=''", "--set", "data.path=/nowhere"]
    script = (
        "import sys\nfrom energon_packing.cli.main import cli\n"
        f"try:\n    cli(['validate', {str(run)!r}, '--no-bridge', *{words!r}])\n"
        "except SystemExit:\n    pass\n"
        "print(*sorted({'torch', 'transformers', 'megatron', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # What the start-up files of site-packages import is in this list, too.
    started = [sys.executable, "-c", "import sys; print(*sorted({'numpy', 'megatron'} & set(sys.modules)))"]
    assert (
        done.stderr.partition(" ...\n")[2] == subprocess.run(started, capture_output=True, text=True, check=True).stdout
    )
    assert "valid" in done.stdout


def test_a_ledger_that_cannot_be_written_is_an_error(run, tmp_path):
    (tmp_path / "file").write_text("")
    code, looks, _ = validate(run, f"packing.ledger={tmp_path / 'file' / 'below'}")
    assert (code, looks["packing-ledger"][0]["outcome"]) == (1, "error")
    assert f"{tmp_path / 'file'} is a file" in looks["packing-ledger"][0]["why"]
    code, looks, _ = validate(run, f"packing.ledger={tmp_path / 'new' / 'deeper'}")
    assert (code, looks["packing-ledger"][0]["outcome"]) == (0, "ok")
    assert not (tmp_path / "new").exists()


def test_arguments_of_megatron_lm_are_looked_at_through_their_configuration(run, data):
    words = ["--seq-length", "8192", "--calculate-per-token-loss", "--micro-batch-size", "1"]
    words += ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--packing-config"]

    def looked(*more):
        result = CliRunner().invoke(cli, ["validate", "--json", "--", *words, *more])
        looks = json.loads(result.stdout)["reads"]
        return {(look["look"], look["at"]): look for look in looks}, result.exit_code

    looks, _ = looked(str(run))
    assert {look["outcome"] for look in looks.values()} == {"ok"}
    assert ("data-split", "--packing-valid-split: val") in looks
    dev = ("data-split", "--packing-valid-split: dev")
    looks, _ = looked(str(run), "--packing-valid-split", "dev")
    assert looks[dev]["outcome"] == "error"
    assert "evaluation off" in looks[dev]["fix"]
    looks, _ = looked(str(run), "--packing-valid-split", "dev", "--eval-iters", "0")
    assert dev not in looks
    looks, code = looked(str(run), "--packing-set", "data.path=/nowhere")
    assert (code, looks["data-path", "data.path: /nowhere"]["outcome"]) == (1, "error")
    looks, code = looked("/nowhere/run.yaml")
    assert (code, looks["data-path", "the run"]["outcome"]) == (1, "error")
