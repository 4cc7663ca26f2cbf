"""Schema and sketches of files say what the configuration classes say; tests/manual compare the reference page."""

import dataclasses
import json
import re

import pytest
import yaml
from click.testing import CliRunner
from manual.written import _effect

from energon_packing.cli.main import cli
from energon_packing.config import RunConfig, from_mapping, load_config, to_mapping
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import processor_path
from energon_packing.energon.states import settings_of
from energon_packing.errors import ConfigError
from energon_packing.report.settings import json_schema, settings, shown


def flat(values, prefix=""):
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def test_every_setting_is_there_with_its_default_a_text_and_a_unit():
    found = {each.name: each for each in settings()}
    expected = dict(flat(to_mapping(RunConfig())))
    assert {name: each.default for name, each in found.items() if not re.search(r"\.N(AME)?\.", name)} == expected
    for each in found.values():
        assert each.text, f"{each.name} needs a string below its field"
        if isinstance(each.default, int | float) and not isinstance(each.default, bool):
            assert each.unit, f"{each.name} needs a unit"
        assert yaml.safe_load(shown(each.default)) == each.default


@pytest.mark.parametrize("section", ["data", "encoder", "packing"])
def test_what_is_compared_is_what_the_fingerprint_holds(section):
    compared = set(settings_of(section, getattr(RunConfig(), section)))
    own = [each for each in settings() if each.name.startswith(f"{section}.")]
    documented = {".".join(each.name.split(".")[:2]) for each in own if _effect(each.name) == "compared"}
    assert documented == compared


def test_the_schema_accepts_what_the_classes_accept_and_refuses_what_they_refuse():
    validators = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    judge = validators.Draft202012Validator(json_schema())
    judge.check_schema(json_schema())
    good = [
        to_mapping(RunConfig()),
        {},
        {"data": None},
        {"encoder": {"limits": {"when_over": "drop", "max_images": 3}, "thinking": "strip"}},
        {"plan": {"datasets": {"a": {"weight": 0.5}}}, "packing": {"max_cost_per_pack": 5}},
    ]
    bad = [
        {"packing": {"seq_lenght": 5}},
        {"nothing": {}},
        {"packing": {"seq_length": "5"}},
        {"data": {"repeat": 1}},
        {"encoder": {"thinking": "sometimes"}},
        {"encoder": {"limits": {"when_over": ["never"]}}},
        {"plan": {"datasets": {"a": {"wait": 1}}}},
    ]
    for values in good:
        from_mapping(RunConfig, values, where="here")
        assert judge.is_valid(values), values
    for values in bad:
        with pytest.raises(ConfigError):
            from_mapping(RunConfig, values, where="here")
        assert not judge.is_valid(values), values


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("init")
    source = folder / "chats.jsonl"
    turns = [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "Three, as far as I can see."}]
    source.write_text("".join(json.dumps({"id": f"k{at}", "conversations": turns}) + "\n" for at in range(4)))
    convert(ConvertConfig(sources=(source,), out=folder / "my: data #1", split={"train": 1.0}, workers=0))
    return folder / "my: data #1"


def init(*arguments):
    return CliRunner().invoke(cli, ["init", *map(str, arguments)])


def test_validate_accepts_the_file_and_every_comment_is_a_setting(dataset, tmp_path):
    out, schema = tmp_path / "run.yaml", tmp_path / "run.schema.json"
    done = init(dataset, "--processor", processor_path("text"), "--out", out, "--schema", schema)
    assert done.exit_code == 0, done.output
    assert done.stderr == f"Writing {out} ...\n"
    run = load_config(out)
    assert (run.data.path, run.packing.seq_length) == (str(dataset), 8192)
    verdict = CliRunner().invoke(cli, ["validate", str(out), "--no-bridge"])
    assert verdict.exit_code == 0, verdict.output
    text = out.read_text()
    assert text.startswith("# yaml-language-server: $schema=run.schema.json\n")
    assert json.loads(schema.read_text()) == json_schema()
    # Uncommented, every line gives the default that it names.
    whole = re.sub(r"^(\s*)# ((?:\s*)[a-z_]+:)", r"\1\2", text, flags=re.MULTILINE)
    every = from_mapping(RunConfig, yaml.safe_load(whole), where="uncommented")
    assert every == run
    named = {name for name, _ in flat(yaml.safe_load(whole))}
    expected = {each.name for each in settings() if not each.name.startswith("plan.")}
    assert named == expected
    assert dataclasses.asdict(every) == dataclasses.asdict(run)


def test_mistakes_are_one_sentence_and_write_nothing(dataset, tmp_path):
    out = tmp_path / "run.yaml"
    for arguments, sentence in (
        ((tmp_path / "nothing", "--processor", "p"), "There is no data set"),
        ((__file__, "--processor", "p"), "is a file, but not .yaml"),
        ((dataset, "--processor", "p", "--seq-length", 1001, "--context-parallel", 2), "use 1000 or 1004"),
    ):
        found = init(*arguments, "--out", out)
        assert found.exit_code == 2
        assert sentence in found.output
        assert not out.exists()
    out.write_text("mine")
    assert "--force" in init(dataset, "--processor", "p", "--out", out).output
    assert out.read_text() == "mine"
    assert init(dataset, "--processor", "p", "--out", out, "--force").exit_code == 0
