"""The loader benchmark: that both paths get the same data, and that its figures mean what they say."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch.utils.data._utils
from bench import loader as bench_loader
from bench import loader_data, loader_lengths, loader_run, window_memory
from bench.loader_run import LoaderJob
from forking_python import quick_python

from energon_packing.demo import processor_path
from energon_packing.errors import PackingError

torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2  # closing a worker takes seconds otherwise
pytestmark = pytest.mark.full  # benchmarks measure what other tests hold

PROCESSOR = str(processor_path("qwen2_5_vl"))
SEQ_LENGTH = 8192


@pytest.fixture
def quick(monkeypatch):
    """Measured processes have done the slow imports, which are no part of what they measure."""
    monkeypatch.setattr(sys, "executable", quick_python())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """40 conversations, four of them defective."""
    work = tmp_path_factory.mktemp("bench")
    return loader_data.prepare_data(work, conversations=40, seed=5, defects=4)


def job(data, **fields):
    return LoaderJob(
        **({"path": "ours", "data": str(data.root), "processor": PROCESSOR, "seq_length": SEQ_LENGTH} | fields)
    )


def run_of(tokens, keys, **fields):
    """What a measured process writes."""
    return {
        "seconds": 2.0,
        "cpu_seconds": 1.0,
        "first_row_seconds": 0.5,
        "memory": {"rss": 3 << 20, "pss": 2 << 20, "uss": 1 << 20},
        "keys": keys,
        "lengths": tokens,
        "tokens": tokens,
        "flush": 0,
        "dropped": {},
        **fields,
    }


def test_every_planted_defect_is_counted_and_is_all_that_our_loader_loses(made):
    rows = list(loader_run.open_rows(job(made)))
    emitted = [key for row in rows for key in row.keys]
    reasons = [reason for row in rows for reason in row.dropped]
    assert 3 <= len(made.defective) <= 4  # a cut file and an overlong turn may meet in one conversation
    assert len(emitted) == len(set(emitted))
    everything = {conversation.key for conversation in loader_data.read_conversations(made.root)}
    assert everything - set(emitted) == made.defective
    assert set(reasons) == {"corrupt_media", "oversize"}


@pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason="Megatron-Bridge is not installed")
@pytest.mark.skipif(importlib.util.find_spec("qwen_vl_utils") is None, reason="qwen-vl-utils is not installed")
def test_bridge_reads_the_same_conversations_at_the_same_lengths(made, tmp_path):
    from bench.bridge_in_batch import build_bridge_loader, rows, write_bridge_dataset

    config = loader_run.run_config(job(made), workers=0).encoder
    sound = [entry for entry in loader_data.read_conversations(made.root) if entry.key not in made.defective]
    write_bridge_dataset(sound, loader_data.read_media(made.root), tmp_path / "bridge", config)
    loader = build_bridge_loader(
        tmp_path / "bridge", processor=PROCESSOR, seq_length=SEQ_LENGTH, micro_batch_size=1, workers=0
    )
    theirs = {keys[0]: lengths[0] for keys, lengths in rows(loader)}
    expected = loader_lengths.expected_lengths(sound, config)
    assert theirs.keys() == expected.keys() == {entry.key for entry in sound}
    kinds = {entry.key: {media.kind for media in entry.media} for entry in sound}
    assert {frozenset(found) for found in kinds.values()} >= {frozenset(), frozenset({"image"}), frozenset({"video"})}
    loader_lengths.check_lengths("bridge", theirs, expected, exact=False)
    assert all(expected[key].slack == 0 for key, found in kinds.items() if not found)


def test_other_tokens_than_the_page_allows_are_no_result():
    expected = {"text": loader_lengths.Expected(10, 0.0), "image": loader_lengths.Expected(100, 5.0)}
    loader_lengths.check_lengths("bridge", {"text": 10, "image": 105, "overlong": 7}, expected, exact=False)
    for lengths, exact in (({"text": 11}, False), ({"image": 106}, False), ({"image": 99}, True)):
        with pytest.raises(PackingError, match="emitted"):
            loader_lengths.check_lengths("bridge", lengths, expected, exact=exact)


def test_a_row_longer_than_the_sequence_counts_as_full_and_as_over(made):
    found = bench_loader.figures(job(made), run_of([SEQ_LENGTH // 2, 2 * SEQ_LENGTH], ["a", "b"]), made)
    assert found["fill"] == 0.75
    assert (found["rows_over"], found["longest_row"]) == (1, 2 * SEQ_LENGTH)


def test_sound_samples_that_were_lost_are_told_from_defective_ones(made):
    good = sorted({entry.key for entry in loader_data.read_conversations(made.root)} - made.defective)
    found = bench_loader.figures(job(made), run_of([10], good[3:]), made)
    assert (found["lost_good"], found["lost_defective"], found["defective_emitted"]) == (3, len(made.defective), 0)


def test_a_sample_that_comes_twice_in_one_epoch_is_no_result(made):
    with pytest.raises(PackingError, match="twice"):
        bench_loader.figures(job(made), run_of([10], ["a", "a"]), made)


def test_the_verdict_knows_which_end_of_a_figure_is_better():
    ours = dict.fromkeys(bench_loader.FIGURES, 1.0)
    behind = bench_loader.verdict([ours, dict.fromkeys(bench_loader.FIGURES, 2.0)])["ahead"]
    assert {name for name, ahead in behind.items() if not ahead} == {"tokens_per_second", "fill"}
    ahead = bench_loader.verdict([ours, dict.fromkeys(bench_loader.FIGURES, 0.5)])["ahead"]
    assert {name for name, found in ahead.items() if found} == {"tokens_per_second", "fill"}


def burn(done, stop):
    """Uses half a second of CPU time, says so, and lives on."""
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
    done.set()
    stop.wait()


def test_cpu_seconds_count_a_child_once_whether_it_lives_or_has_ended():
    context = multiprocessing.get_context("fork")
    done, stop = context.Event(), context.Event()
    before, own = loader_run.cpu_seconds(), time.process_time()
    child = context.Process(target=burn, args=(done, stop))
    child.start()
    done.wait()
    living = loader_run.cpu_seconds() - before
    stop.set()
    child.join()
    ended = loader_run.cpu_seconds() - before
    own = time.process_time() - own
    assert living >= 0.4
    assert 0.4 <= ended <= living + own + 0.2


def test_a_run_reports_the_memory_of_its_worker(made):
    found = loader_run.measure(job(made))
    assert min(found["memory"].values()) > 10 << 20
    assert found["cpu_seconds"] > 0.3
    assert found["first_row_seconds"] <= found["seconds"]


def test_reachable_bytes_count_arrays_once_and_through_views():
    array = np.zeros(1000, dtype=np.int64)
    assert 8000 <= window_memory.reachable_bytes([array, array]) < 9000
    assert 8000 <= window_memory.reachable_bytes([array[:2]]) < 9000
    assert window_memory.reachable_bytes([[bytes(500)], np]) < 1000


def test_the_command_prints_one_json_line_a_result(quick, tmp_path, capfd):
    arguments = ["--conversations", "12", "--no-peer", "--seq-length", "4096", "--work", str(tmp_path)]
    assert bench_loader.main(arguments) == 0
    (line,) = capfd.readouterr().out.splitlines()
    result = json.loads(line)
    assert (result["samples"], result["lost_good"], result["rows_over"]) == (12, 0, 0)
    assert result["path"] == "ours-window256"


def test_memory_is_given_back_where_so_asked():
    jobs = [LoaderJob(path="ours", data="", processor="", seq_length=8, keep_memory=keep) for keep in (True, False)]
    assert [bench_loader.path_name(job) for job in jobs] == ["ours-window256", "ours-window256-give-back"]
    assert [loader_run.run_config(job, workers=1).data.keep_memory for job in jobs] == [True, False]


def test_a_larger_window_costs_little_more_for_each_image_sample(quick, tmp_path):
    bench = bench_loader.LoaderBench(conversations=40, seq_length=4096)
    (result,) = bench_loader.run_memory(bench, tmp_path, windows=(8, 128))
    assert result["held"][1] - result["held"][0] > 100
    assert result["media_per_sample"] >= 1
    assert 1000 < result["object_bytes_per_sample"] <= bench_loader.MEMORY_LIMIT


@pytest.mark.parametrize("arguments", [["--conversations", "0"], ["--window", "0"], ["--micro-batch", "0"]])
def test_unusable_input_is_one_sentence_and_exit_code_2(arguments, capsys):
    assert bench_loader.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Traceback" not in error


def test_the_script_knows_its_benchmarks(monkeypatch, capsys):
    path = Path(__file__).resolve().parents[2] / "scripts" / "bench.py"
    specification = importlib.util.spec_from_file_location("bench_script", path)
    script = importlib.util.module_from_spec(specification)
    monkeypatch.setattr(sys, "path", list(sys.path))
    specification.loader.exec_module(script)
    assert script.main(["nothing"]) == 2
    assert (
        script.main(["packing", "--list", "a", "--policy", "best_fit", "--samples", "500", "--no-peers", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["policy"] == "best_fit"
    script.print_tables([{"path": "ours", "fill": 0.5}, {"path": "bridge", "fill": 0.25}])
    shown = capsys.readouterr().err
    assert "fill" in shown
    assert "0.25" in shown
