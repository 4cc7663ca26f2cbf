"""Files in place of a loader's state: each is refused in one sentence with its name, whatever its bytes are."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from energon_packing.energon.loader import build_loader
from energon_packing.energon.states import read_state
from energon_packing.errors import ConfigError

MISSING = "begin again."


@pytest.fixture(scope="module")
def good(run_config_of, tmp_path_factory):
    """The file of a state as a checkpoint of Bridge or Megatron-LM holds it."""
    loader = build_loader(run_config_of(data={"repeat": True}, window=8, seq_length=2048))
    list(itertools.islice(loader, 2))
    path = tmp_path_factory.mktemp("states") / "train_dataloader_dprank000.pt"
    torch.save({"dataloader_state_dict": {"packs": 2, "source": loader.save_state()}}, path)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_state(path, missing=MISSING)
    (line,) = str(caught.value).splitlines()
    assert path.name in line
    return line


def test_a_missing_an_empty_and_a_foreign_file_are_refused_by_name(tmp_path, good):
    assert "There is no state" in refused(tmp_path / "missing.pt")
    for name, content in (("empty.pt", b""), ("text.pt", b"hello"), ("cut.pt", good.read_bytes()[:-200])):
        (tmp_path / name).write_bytes(content)
        assert "is not the state of a loader" in refused(tmp_path / name)
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps({"packs": 3}))
    refused(tmp_path / "pickle.pt")
    torch.save({"model": torch.zeros(3)}, tmp_path / "model.pt")
    assert "has no dataloader_state_dict" in refused(tmp_path / "model.pt")
    (tmp_path / "folder.pt").mkdir()
    refused(tmp_path / "folder.pt")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_refused_by_name_or_gives_the_same_state(tmp_path, good, data):
    content = bytearray(good.read_bytes())
    path = tmp_path / "damaged.pt"
    how = data.draw(st.sampled_from(["flip", "cut", "replace", "double"]))
    at = data.draw(st.integers(0, len(content) - 1))
    if how == "flip":
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del content[at:]
    elif how == "replace":
        content[at : at + 40] = data.draw(st.binary(max_size=60))
    else:
        content[at:at] = content[: data.draw(st.integers(1, 400))]
    path.write_bytes(content)
    try:
        found: Any = read_state(path, missing=MISSING)
    except ConfigError as error:
        message = str(error)
    else:
        message = path.name
        assert pickle.dumps(found) == pickle.dumps(read_state(good, missing=MISSING))
    assert path.name in message
    assert "\n" not in message


def test_one_flipped_bit_of_a_number_is_refused(tmp_path):
    """A pickle with another number is still a pickle: only its checksum tells."""
    path = tmp_path / "state.pt"
    torch.save({"dataloader_state_dict": {"packs": 1234567, "source": None}}, path)
    content = path.read_bytes()
    path.write_bytes(content.replace((1234567).to_bytes(4, "little"), (1234566).to_bytes(4, "little")))
    assert path.read_bytes() != content
    assert "checksum" in refused(path)
