"""Converted data sets in both layouts, with samples that are too long, too short or not measurable among them."""

import json

import pytest
import torch.utils.data._utils

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path

torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2  # closing a worker takes seconds otherwise


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """Conversations as files: text, images and videos, preference pairs, and ones that measuring refuses."""
    folder = tmp_path_factory.mktemp("offline-sources")
    source = make_data(folder / "demo", conversations=24, seed=5, defects=False)
    ask, say = {"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "It is what it is. " * 20}
    records = [
        {"id": f"pair-{number}", "conversations": [ask], "chosen": say, "rejected": {"from": "gpt", "value": "No."}}
        for number in range(5)
    ]
    records += [
        {"id": "reserved", "conversations": [{"from": "human", "value": "a <|image_pad|> b"}, say]},
        {"id": "long", "conversations": [ask, {"from": "gpt", "value": "word " * 3000}]},
    ]
    more = folder / "more.jsonl"
    more.write_text("".join(json.dumps(record) + "\n" for record in records))
    return source, more


def pytest_generate_tests(metafunc):
    """One layout, and where a test is marked ``both_layouts`` the other one too, in the full tier."""
    if "layout" in metafunc.fixturenames:
        both = metafunc.definition.get_closest_marker("both_layouts")
        others = [pytest.param("monolithic", marks=pytest.mark.full)] if both else []
        metafunc.parametrize("layout", ["polylithic", *others], indirect=True, scope="session")


@pytest.fixture(scope="session")
def layout(request):
    return request.param


@pytest.fixture(scope="session")
def dataset(layout, sources, tmp_path_factory):
    """Directory of the data set; six shards of six samples or fewer."""
    out = tmp_path_factory.mktemp("offline") / "a.b data"
    convert(
        ConvertConfig(sources=sources, out=out, layout=layout, split={"train": 1.0}, samples_per_shard=6, workers=0)
    )
    return out


@pytest.fixture(scope="session")
def run_of():
    """A run on a data set; keyword arguments replace packing fields, ``encoder`` and ``data`` those of the others."""

    # No child process for each of many loaders: tests/energon and tests/media decode in one.
    here = {"decode_in_child": False}

    usual = {"seq_length": 2048, "window": 32, "drop_budget": 1.0, "pairs": "both"}

    def make(path, *, encoder=None, data=None, family="qwen2_5_vl", **packing):
        return RunConfig(
            data=DataConfig(**({"path": str(path), "workers": 0, "repeat": False} | (data or {}))),
            encoder=EncoderConfig(processor=str(processor_path(family)), **(here | (encoder or {}))),
            packing=PackingConfig(**(usual | packing)),
        )

    return make
