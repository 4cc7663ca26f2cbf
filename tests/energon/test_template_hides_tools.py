"""A whole run on conversations with tools, under a published template that hides them and under one that shows them."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import processor_path
from energon_packing.energon.loader import build_loader

CALL = {"name": "weather", "arguments": {"town": "Rome", "days": 3}}
TOOLS = [{"name": "weather", "description": "Of a town.", "parameters": {"type": "object", "properties": {}}}]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty plain conversations and ten with a definition, a call and a result."""
    root = tmp_path_factory.mktemp("tools")
    records: list[dict[str, Any]] = []
    for number in range(40):
        turns = [{"from": "human", "value": f"Question {number}?"}]
        if number % 4 == 0:
            turns += [
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": '{"sky": "clear"}'},
            ]
        turns.append({"from": "gpt", "value": f"Answer {number}."})
        records.append({"id": f"talk{number}", "conversations": turns} | ({"tools": TOOLS} if number % 4 == 0 else {}))
    (root / "talks.json").write_text(json.dumps(records), encoding="utf-8")
    convert(ConvertConfig(sources=(root / "talks.json",), out=root / "data", split={"train": 1.0}, workers=0))
    return root / "data"


def published_template() -> Path:
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("trl, whose templates are read, is not installed")
    return Path(found.submodule_search_locations[0]) / "chat_templates" / "qwen2_5_vl.jinja"


def read(dataset: Path, template: str, *, workers: int = 0) -> tuple[list[Any], list[str]]:
    """The packs of one epoch, and what the run warned of."""
    config = RunConfig(
        data=DataConfig(path=str(dataset), workers=workers, repeat=False),
        encoder=EncoderConfig(processor=str(processor_path("qwen2_5_vl")), chat_template=template),
        packing=PackingConfig(seq_length=512, window=8, drop_budget=1.0),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        packs = list(build_loader(config))
    return packs, [str(entry.message) for entry in caught if "template_omits" in str(entry.message)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_template_that_hides_tools_refuses_those_conversations_and_warns_once(dataset: Path, workers: int) -> None:
    packs, told = read(dataset, str(published_template()), workers=workers)
    dropped = {entry.key: entry for pack in packs for entry in pack.dropped}
    hidden = {f"talk{number}" for number in range(0, 40, 4)}
    assert {key for pack in packs for key in pack.keys} == {f"talk{number}" for number in range(40)} - hidden
    assert set(dropped) <= hidden  # those after the last pack have none to travel with
    assert dropped
    assert {entry.reason for entry in dropped.values()} == {"template_omits"}
    assert len(told) == 1
    assert "it has no tool support; use a format that has, such as encoder.chat_template: qwen" in told[0]


def test_under_the_built_in_format_with_tools_every_call_is_trained(dataset: Path) -> None:
    packs, told = read(dataset, "qwen2_5_vl")
    assert not told
    tokenizer = AutoTokenizer.from_pretrained(processor_path("qwen2_5_vl"))
    trained = "".join(tokenizer.decode(pack.batch.labels[pack.batch.labels >= 0].tolist()) for pack in packs)
    assert trained.count(f"<tool_call>\n{json.dumps(CALL)}\n</tool_call><|im_end|>") == 10
    assert all(f"Answer {number}.<|im_end|>" in trained for number in range(40))
