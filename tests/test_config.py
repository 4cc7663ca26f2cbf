"""Configuration files: strict keys and types, overrides, one clear sentence for each mistake."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.config import (
    DataConfig,
    EncoderConfig,
    PackingConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
    from_mapping,
    load_config,
    to_mapping,
)
from energon_packing.config.setting import COUNTERPARTS
from energon_packing.errors import ConfigError

MIGRATION = (Path(__file__).parents[1] / "docs" / "migration.md").read_text()


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "run.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusal(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message.strip(), "a user's mistake is told in one line"
    return message


@pytest.mark.parametrize(("whose", "name"), [(whose, name) for whose, names in COUNTERPARTS.items() for name in names])
def test_a_setting_of_another_trainer_is_answered_with_what_its_table_says(whose: str, name: str) -> None:
    told = refusal(None, f"packing.{name}=1")
    section = MIGRATION.split(f"\n## {whose}", 1)[1].split("\n## ", 1)[0]
    (row,) = (line for line in section.splitlines() if re.match(rf"\|[^|]*`([\w.]+\.)?{name}\b", line))
    settings = re.findall(r"\b(packing|encoder|data|metrics)\.(\w+)", told)
    assert f"the one of {whose} " in told
    assert settings or "has no counterpart" in told
    for part, setting in settings:
        assert hasattr(getattr(RunConfig(), part), setting)
        assert f"{part}.{setting}" in row


def test_a_file_sets_what_it_names_and_leaves_the_rest_at_the_defaults(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "packing: {seq_length: 8192}\nparallel: {context_parallel: 2}\n"))
    assert config.packing == PackingConfig(seq_length=8192)
    assert config.parallel.multiple == 4
    assert config.encoder == EncoderConfig()


@pytest.mark.parametrize("content", ["", "# nothing but a remark\n", "packing:\n", "null\n"])
def test_an_empty_file_or_section_means_the_defaults(tmp_path: Path, content: str) -> None:
    assert load_config(written(tmp_path, content)) == RunConfig() == load_config(None)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, b"\xef\xbb\xbfpacking: {window: 7}\n")).packing.window == 7


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("packing: {seq_lenght: 8}", ["seq_lenght", "'seq_length'", "packing"]),
        ("pakcing: {window: 8}", ["pakcing", "'packing'"]),
        ("encoder: {max_pixel: 8}", ["'max_pixels'"]),
        ("packing: {zzzzzzzz: 8}", ["zzzzzzzz", "seq_length", "window"]),
        ("7: 8", ["unknown key 7"]),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(tmp_path: Path, content: str, names: list[str]) -> None:
    path = written(tmp_path, content)
    message = refusal(path)
    assert all(name in message for name in [*names, str(path)]), message


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("packing: {seq_length: '8192'}", ["seq_length", "'8192'", "int"]),
        ("packing: {seq_length: 8192.0}", ["seq_length", "int"]),
        ("packing: {seq_length: true}", ["seq_length", "True", "int"]),
        ("packing: {pad_to_max_length: 1}", ["pad_to_max_length", "bool"]),
        ("packing: {drop_budget: no}", ["drop_budget", "float"]),
        ("packing: {seq_length: null}", ["seq_length", "None"]),
        ("packing: {oversize: drp}", ["oversize", "'drop'"]),
        ("encoder: {train_on: asistant}", ["train_on", "Did you mean 'assistant'"]),
        ("encoder: {train_on: [all]}", ["train_on"]),
        ("encoder: {processor: 7}", ["processor", "str"]),
        ("parallel: {hierarchical_context_parallel_sizes: 4}", ["hierarchical_context_parallel_sizes", "list"]),
        ("parallel: {hierarchical_context_parallel_sizes: [2, a]}", ["hierarchical_context_parallel_sizes", "'a'"]),
        ("packing: [1, 2]", ["packing", "mapping"]),
        ("packing: 4096", ["packing", "mapping"]),
        ("- packing", ["list"]),
        ("[]", ["list"]),
        ("false", ["bool"]),
        ("just words", ["str"]),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_key(tmp_path: Path, content: str, names: list[str]) -> None:
    message = refusal(written(tmp_path, content))
    assert all(name in message for name in names), message


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("packing", "seq_length", 0),
        ("packing", "window", 0),
        ("packing", "balance_window", -1),
        ("packing", "drop_budget", 1.5),
        ("packing", "drop_budget", float("nan")),
        ("data", "workers", -1),
        ("data", "shuffle_buffer", 0),
        ("encoder", "min_pixels", 0),
        ("encoder", "max_source_pixels", 0),
        ("encoder", "video_fps", 0.0),
        ("encoder", "video_fps", float("nan")),
        ("encoder", "video_fps", float("inf")),
        ("encoder", "decode_seconds", -1.0),
        ("encoder", "decode_seconds", float("nan")),
        ("parallel", "tensor_parallel", 0),
        ("parallel", "context_parallel", -2),
        ("parallel", "eval_context_parallel", 0),
        ("parallel", "pipeline_parallel", 0),
        ("training", "micro_batch_size", 0),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(tmp_path: Path, section: str, name: str, value: Any) -> None:
    assert name in refusal(written(tmp_path, yaml.safe_dump({section: {name: value}})))


@pytest.mark.parametrize("what", ["{}_pixels", "video_{}_pixels", "video_{}_frames"])
def test_a_lower_bound_above_the_upper_one_is_refused(what: str) -> None:
    low, high = what.format("min"), what.format("max")
    with pytest.raises(ConfigError, match=rf"{low} \(9\) is above encoder.{high} \(4\)"):
        EncoderConfig(**{low: 9, high: 4})
    EncoderConfig(**{low: 4, high: 4})


def test_overrides_are_applied_in_order_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "packing: {window: 7, seq_length: 512}\n")
    config = load_config(
        path,
        [
            "packing.window=8",
            "packing.window=9",
            "encoder.processor=a/b=c",
            "data.repeat=false",
            "encoder.video_fps=1",
            "encoder.max_pixels=null",
            "parallel.hierarchical_context_parallel_sizes=[2, 4]",
        ],
    )
    assert config.packing == PackingConfig(window=9, seq_length=512)
    assert config.encoder.processor == "a/b=c"
    assert config.data.repeat is False
    assert config.encoder.video_fps == 1.0
    assert isinstance(config.encoder.video_fps, float)
    assert config.parallel.hierarchical_context_parallel_sizes == (2, 4)


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("packing.window", "section.key=value"),
        ("=3", "section.key=value"),
        ("packing.window=[1", "not valid YAML"),
        ("packing.window=2020-13-45", "not valid YAML"),
        ("packing.window=" + "9" * 5000, "not valid YAML"),
        ("packing.window=" + "[" * 5000, "not valid YAML"),
        ("packing.windoww=3", "'window'"),
        ("packing.window.deep=3", "'window' is not a section"),
        ("window=3", "unknown key 'window'"),
        ("packing=3", "mapping"),
        ("packing..window=3", "unknown key ''"),
    ],
)
def test_an_override_that_cannot_be_applied_is_told(tmp_path: Path, override: str, name: str) -> None:
    assert name in refusal(written(tmp_path, "packing: {window: 7}"), override)


# Every line names the one before nine times: 200 bytes that stand for more values than there is memory for.
BOMB = "a0: &a0 [lol, lol]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 25))


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("packing:\n  window: 7\n  seq_length: [1, 2\n", ["line 4", "not valid YAML"]),
        ("packing:\n\twindow: 7\n", ["line 2", "not valid YAML"]),
        ("a: b: c", ["line 1", "not valid YAML"]),
        (b"packing: \xff\xfe", ["is not UTF-8 (byte 9)"]),
        (b"packing: \x00", ["not valid YAML"]),
        ("!!python/object/apply:os.system ['true']", ["line 1", "not valid YAML"]),
        ("data: {seed: 2020-13-45}", ["not valid YAML"]),
        ("data: {seed: " + "9" * 5000 + "}", ["not valid YAML"]),
        ("[" * 5000, ["not valid YAML"]),
        ("data:\n  seed: " + "9" * 400, ["line 2", "a number of 400 characters"]),
        ("packing: {drop_budget: 0." + "1" * 400 + "}", ["line 1", "a number of 402 characters"]),
        ("data: {seed: 1}\npacking: {}\ndata: {seed: 2}", ["line 3", "the key 'data' occurs twice"]),
        ("packing:\n  window: 7\n  policy: window\n  window: 8", ["line 4", "the key 'window' occurs twice"]),
        (BOMB, ["values, each alias counted as what it names"]),
        ("data: &a {path: *a}", ["line 1", "contains itself"]),
        ("a: &a [*a, *a]", ["line 1", "contains itself"]),
    ],
)
def test_a_file_that_is_no_yaml_names_the_file_and_where_known_the_line(
    tmp_path: Path, content: str | bytes, names: list[str]
) -> None:
    path = written(tmp_path, content)
    message = refusal(path)
    assert all(name in message for name in [*names, str(path)]), message


def test_a_missing_file_and_a_directory_are_told(tmp_path: Path) -> None:
    assert "no configuration file" in refusal(tmp_path / "none.yaml")
    assert "no configuration file" in refusal(tmp_path)


counts = st.integers(1, 10**6)
shares = st.floats(0, 1)
positive = st.floats(1e-3, 1e6)


def sections(**drawn: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=drawn)


configs = st.builds(
    RunConfig,
    data=sections(path=st.text(), workers=st.integers(0, 9), repeat=st.booleans(), seed=st.integers()).map(
        lambda values: DataConfig(**values)
    ),
    encoder=sections(
        processor=st.text(),
        chat_template=st.none() | st.text(),
        train_on=st.sampled_from(["assistant", "last_assistant", "all"]),
        position_ids=st.sampled_from(["auto", "1d", "mrope"]),
        max_pixels=st.none() | counts,
        video_fps=st.none() | positive,
        decode_seconds=st.none() | positive,
    ).map(lambda values: EncoderConfig(**values)),
    packing=sections(
        seq_length=counts, window=counts, drop_budget=shares, oversize=st.sampled_from(["drop", "raise"])
    ).map(lambda values: PackingConfig(**values)),
    parallel=sections(
        tensor_parallel=counts,
        sequence_parallel=st.booleans(),
        eval_context_parallel=st.none() | counts,
        hierarchical_context_parallel_sizes=st.none() | st.lists(counts, max_size=3).map(tuple),
    ).map(lambda values: ParallelConfig(**values)),
    training=sections(micro_batch_size=counts, model=st.none() | st.text()).map(
        lambda values: TrainingConfig(**values)
    ),
)


@settings(max_examples=30)
@given(config=configs)
def test_a_configuration_survives_being_written_as_yaml_and_read_back(config: RunConfig) -> None:
    text = yaml.safe_dump(to_mapping(config))  # with allow_unicode PyYAML writes U+0085 as a line break
    assert from_mapping(RunConfig, yaml.safe_load(text), where="the text") == config


@pytest.mark.parametrize("written", ["1e-1", "1.0e-1", ".1e0", "1E-1"])
def test_numbers_may_have_an_exponent_with_or_without_a_point(written, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"packing: {{drop_budget: {written}}}\n")
    assert load_config(file, []).packing.drop_budget == 0.1
