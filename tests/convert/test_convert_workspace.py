"""A data set is whole or absent; a finished conversion is recognised, an interrupted one goes on."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from source_files import count_checks, run, sharegpt, write_image, write_json

from energon_packing.convert import ConvertConfig, convert, pipeline
from energon_packing.errors import UserError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for seed in range(6):
        write_image(tmp_path / f"src/{seed}.png", seed=seed)
    records = [sharegpt(f"k{seed}", "<image>", image=f"{seed}.png") for seed in range(6)]
    return write_json(tmp_path / "src/a.json", records)


def stamps(out: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(out.rglob("*"))}


def test_resume_skips_a_finished_conversion_of_the_same_sources_and_options(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(source, tmp_path / "out")
    before = stamps(tmp_path / "out")
    checked = count_checks(monkeypatch)
    again = run(source, tmp_path / "out", resume=True, workers=3, max_rejects=0.1)
    assert (again.skipped, again.written, again.fingerprint) == (True, first.written, first.fingerprint)
    assert checked == []
    assert stamps(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": "monolithic"}, "layout was 'polylithic' and is 'monolithic'"),
        ({"split": {"train": 1.0}}, "split was"),
        ({"check_media": "header"}, "check_media"),
        ({}, "a.json has changed"),
    ],
)
def test_resume_under_other_conditions_is_refused_by_name(
    source: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    run(source, tmp_path / "out")
    if not change:
        write_json(source, [sharegpt("other")])
    with pytest.raises(UserError, match=words):
        run(source, tmp_path / "out", resume=True, **change)
    assert not run(source, tmp_path / "out", resume=True, overwrite=True, **change).skipped


def test_a_filled_directory_is_refused_without_overwrite_and_replaced_with_it(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out")
    (tmp_path / "out/old-file").touch()
    with pytest.raises(UserError, match="--overwrite"):
        run(source, tmp_path / "out")
    run(source, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out/old-file").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


def test_overwrite_never_removes_what_convert_did_not_make(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("years of work")
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(UserError, match="convert did not write what it contains"):
            run(source, tmp_path / "out", **options)
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial/thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="is in the way"):
        run(source, tmp_path / "new")
    assert (tmp_path / "out/thesis.tex").exists()
    assert (tmp_path / "new.partial/thesis.tex").exists()


def test_overwrite_never_removes_its_own_sources(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out")
    inside = write_json(tmp_path / "out/more.json", [sharegpt("a")])
    with pytest.raises(UserError, match="lie in each other"):
        run(inside, tmp_path / "out", overwrite=True)
    assert inside.exists()


@pytest.mark.parametrize(("stage", "overwrite"), [("read", False), ("write", True), ("index", False)])
def test_an_interruption_at_any_stage_leaves_no_data_set_or_the_old_one(
    source: Path, tmp_path: Path, stage: str, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    if overwrite:
        run(source, out)
    before = stamps(out)

    def interrupt(now: str, done: int, total: int) -> None:
        if now == stage and done:
            raise KeyboardInterrupt

    config = ConvertConfig(sources=(source,), out=out, workers=2, overwrite=overwrite, resume=True)
    if overwrite:
        write_json(source, [sharegpt(f"k{n}", "<image>", image=f"{n}.png") for n in (5, 4, 3, 2, 1, 0)])
    with pytest.raises(KeyboardInterrupt):
        convert(config, interrupt)
    assert stamps(out) == before
    # The second run goes on: what was checked is not checked again.
    checked = count_checks(monkeypatch)
    report = convert(dataclasses.replace(config, workers=1))  # in this process, where the checks are counted
    assert (report.written, report.skipped) == (6, False)
    if stage != "read":
        assert checked == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


def interrupted(config: ConvertConfig) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "write":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(config, interrupt)


def test_a_file_that_changed_since_the_interruption_is_checked_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(ConvertConfig(sources=(source,), out=tmp_path / "out", workers=1))
    write_image(source.parent / "3.png", 55, 44)
    checked = count_checks(monkeypatch)
    report = run(source, tmp_path / "out", resume=True)
    assert checked == ["3.png"]
    assert report.written == 6


@pytest.mark.parametrize("options", [{"resume": False}, {"resume": True, "max_pixels": 5000}])
def test_old_checks_are_forgotten_without_resume_or_under_other_options(
    source: Path, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(ConvertConfig(sources=(source,), out=tmp_path / "out", workers=1))
    checked = count_checks(monkeypatch)
    run(source, tmp_path / "out", **options)
    assert len(checked) == 6


def test_two_conversions_to_one_place_do_not_mix(source: Path, tmp_path: Path) -> None:
    interrupted(ConvertConfig(sources=(source,), out=tmp_path / "out", workers=1))
    with (tmp_path / "out.partial/in-progress.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another conversion"):
            run(source, tmp_path / "out", resume=True)
    assert run(source, tmp_path / "out").written == 6


def test_a_kill_between_the_two_renames_of_an_overwrite_loses_no_data_set(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(source, out)
    before = stamps(out)
    interrupted(ConvertConfig(sources=(source,), out=out, workers=1, overwrite=True))
    out.rename(tmp_path / "out.partial/replaced")
    with pytest.raises(UserError, match="already contains a converted data set"):
        run(source, out)
    assert stamps(out) == before
    assert run(source, out, overwrite=True).written == 6


def test_a_conversion_that_finishes_while_another_begins_is_not_replaced_by_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    sources = pipeline.find_sources

    def meanwhile(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(pipeline, "find_sources", sources)
        run(source, out)
        return sources(*given, **named)

    monkeypatch.setattr(pipeline, "find_sources", meanwhile)
    with pytest.raises(UserError, match="already contains a converted data set"):
        run(source, out)


def test_a_workspace_that_is_removed_while_its_lock_is_opened_is_that_of_another(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def late(*given: Any) -> None:
        shutil.rmtree(tmp_path / "out.partial")
        lock(*given)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(UserError, match="another conversion"):
        run(source, tmp_path / "out")
    monkeypatch.undo()
    assert run(source, tmp_path / "out").written == 6


def test_a_kill_before_anything_was_noted_is_in_nobodys_way(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/in-progress.lock").touch()
    assert run(source, tmp_path / "out").written == 6


def test_a_disk_that_is_full_from_the_start_is_one_sentence_and_costs_no_check(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *ignored: Any, **more: Any) -> None:
        path.open("w").close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(UserError, match=f"--out {out} cannot be written: No space left on device"):
            run(source, out)
    interrupted(ConvertConfig(sources=(source,), out=out, workers=1))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(UserError, match="No space left on device"):
            run(source, out, resume=True)
    checked = count_checks(monkeypatch)
    assert run(source, out, resume=True).written == 6
    assert checked == []


def test_a_mount_point_is_refused_before_anything_is_read(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "disk")
    with pytest.raises(UserError, match=r"disk is a mount point.*name a directory in it"):
        run(source, tmp_path / "disk")
    assert run(source, tmp_path / "disk/data").written == 6


def test_a_source_without_a_usable_record_does_not_cost_the_media_checks_of_others(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = write_json(tmp_path / "src/empty.json", [])
    with pytest.raises(UserError, match=r"empty\.json holds no usable record.*leave it out, and add --resume"):
        run((source, empty), tmp_path / "out")
    checked = count_checks(monkeypatch)
    assert run(source, tmp_path / "out", resume=True).written == 6
    assert checked == []
