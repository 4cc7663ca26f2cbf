"""In-batch rows are the same with the packers of Bridge 0.6 and of main, which reserves the padding mask's name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import bridge_here  # noqa: F401
import pytest
import torch
from bridge_sources import BridgeSource, sources

from energon_packing import thd

pytestmark = pytest.mark.usefixtures("stand_ins")


def packer_of(source: BridgeSource):
    """The version's own function; its module needs torch and a name or two of the installed Bridge."""
    path = Path(source.folder) / "data" / "packing" / "in_batch.py"
    spec = importlib.util.spec_from_file_location("packer_under_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build_mcore_thd_sequence_batch_from_rows


@pytest.mark.parametrize("source", sources())
@pytest.mark.parametrize("multiple", [1, 8])
def test_a_micro_batch_is_packed_by_each_version_with_the_mask_of_our_own_rows(
    source, multiple, make_samples, monkeypatch
):
    from energon_packing.bridge import in_batch

    monkeypatch.setattr(in_batch, "build_mcore_thd_sequence_batch_from_rows", packer_of(source))
    samples = make_samples("text", 3)
    rows = [samples.draw("text", length) for length in (13, 8, 30)]
    form = in_batch.MicroBatchForm(packed=True, samples=3, seq_length=64, multiple=multiple)
    made = form(thd.assemble(rows))
    lengths = [len(row["input_ids"]) for row in rows]
    segments = [[False] * length + [True] * (-length % multiple) for length in lengths]
    assert made["padding_mask"].tolist() == [[padding for segment in segments for padding in segment]]
    real = made["tokens"][0][~made["padding_mask"][0]]
    assert torch.equal(real, torch.cat([row["input_ids"] for row in rows]))
