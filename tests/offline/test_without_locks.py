"""File systems without locks (Lustre without flock, GCS FUSE, NFS without lockd): said once, before the work."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from energon_packing.convert import ConvertConfig, convert
from energon_packing.errors import UserError
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.pack import PackConfig, pack
from energon_packing.offline.packed import Packed
from energon_packing.offline.planner import make_plan

pytest.importorskip("pyarrow", reason="pyarrow is not installed")


@pytest.fixture(params=[errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK], ids=["ENOSYS", "EOPNOTSUPP", "ENOLCK"])
def without_locks(request, monkeypatch):
    def refused(*_):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(fcntl, "lockf", refused)


def test_convert_measure_plan_and_pack_go_on_without_locks_and_say_so_before_they_work(
    without_locks, sources, run_of, tmp_path
):
    told = "has no file locks .* do not run two commands"
    with pytest.warns(UserWarning, match=told):
        convert(ConvertConfig(sources=sources, out=tmp_path / "data", split={"train": 1.0}, workers=0))
    run = run_of(tmp_path / "data")
    steps: list[str] = []
    with pytest.warns(UserWarning, match=told) as warned:
        report = measure(
            MeasureConfig(paths=(tmp_path / "data",), out=tmp_path / "index", workers=0),
            run,
            lambda name, *_: steps.append(f"{name} after {len(warned)}"),
        )
    assert report.missing == 0
    assert steps[0] == "measure after 1"
    make_plan([tmp_path / "index"], run, tmp_path / "plan.parquet")
    with pytest.warns(UserWarning, match=told):
        pack(PackConfig(plan=tmp_path / "plan.parquet", out=tmp_path / "packed", workers=0))
    assert len(Packed.open(str(tmp_path / "packed")).plan) > 0


def test_a_lock_that_another_process_has_still_counts(sources, tmp_path, monkeypatch):
    partial = Path(f"{tmp_path / 'data'}.partial")

    def held(*_):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(fcntl, "flock", held)
    with pytest.raises(UserError, match="another conversion is writing"):
        convert(ConvertConfig(sources=sources, out=tmp_path / "data", split={"train": 1.0}, workers=0))
    assert partial.is_dir()
