"""Lines of a rank against its packs: every token is counted once, under what its row's tensors show it to be."""

import dataclasses
import itertools
import json
import os
import random
import re
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from made_data import chats, converted

from energon_packing import thd
from energon_packing.cli.main import cli
from energon_packing.config import DataConfig, EncoderConfig, MetricsConfig, PackingConfig, RunConfig
from energon_packing.demo import processor_path
from energon_packing.drops import DroppedSample
from energon_packing.energon import metrics as metrics_module
from energon_packing.energon import metrics as metrics_report
from energon_packing.energon.loader import build_loader
from energon_packing.energon.metrics import MetricsLog, PackMetrics, PackSums, watched
from energon_packing.energon.samples import Pack
from energon_packing.report.steps import fit_report

CAPACITY = 96


def made_pack(draw: random.Random, *, padding: bool = False) -> Pack[Any]:
    """A pack of a few samples: aligned or not, as wide as its samples or wider."""
    multiple = draw.choice((1, 4, 8))
    lengths = [draw.randint(2, 16) for _ in range(draw.randint(1, 4))]
    rows = []
    for length in lengths:
        ids = torch.arange(1, length + 1)
        nothing = torch.full((length,), -100)
        rows.append({"input_ids": ids, "labels": nothing, "loss_mask": torch.zeros(length), "position_ids": ids - 1})
    trains = slice(0, draw.randint(1, lengths[0] - 1))
    rows[0]["labels"][trains], rows[0]["loss_mask"][trains] = 7, draw.choice((0.25, 1.0))
    batch = thd.assemble(rows, multiple=multiple, width=draw.choice((None, CAPACITY)))
    keys = tuple(f"k{draw.random()}" for _ in lengths)
    dropped = tuple(
        DroppedSample(key="d", reason=draw.choice(("oversize", "corrupt_media")), detail="")
        for _ in range(draw.randint(0, 2))
    )
    return Pack(
        **{"__key__": "", "__restore_key__": (), "__subflavors__": {}, "__sources__": ()},
        batch=batch,
        keys=() if padding else keys,
        dropped=dropped,
        cost=sum(length**2 for length in lengths),
        vision_cost=lengths[0] ** 2 * draw.randint(0, 1),
        occupied=sum(-(-length // multiple) * multiple for length in lengths),
        delays=tuple(draw.randint(0, 300) for _ in lengths),
        read=Counter({("chats", "text"): draw.randint(0, 300), ("photos", "image"): draw.randint(0, 9)}),
        held=draw.randint(1, 256),
        padding=padding,
    )


def counted(packs: list[Pack[Any]]) -> dict[str, Any]:
    """The sums of packs, from the tensors of their rows."""
    real = alignment = tail = unused = 0
    for pack in packs:
        mask = pack.batch.padding_mask[0]
        starts = pack.batch.boundaries.tolist()
        samples = len(pack.batch.sample_lengths)
        in_samples = sum(int(mask[a:b].sum()) for a, b in itertools.pairwise(starts[: samples + 1]))
        real += int((~mask).sum())
        alignment += in_samples
        tail += int(mask.sum()) - in_samples
        unused += CAPACITY - mask.numel()
    delays = [delay for pack in packs for delay in pack.delays]
    return {
        "packs": len(packs),
        "samples": len(delays),
        "segments": sum(len(pack.batch.sample_lengths) for pack in packs),
        **{"real": real, "alignment": alignment, "tail": tail, "unused": unused},
        **{
            "delays": sum(delays),
            "delay_max": max(delays, default=0),
            "held": max((pack.held for pack in packs), default=0),
        },
    }


def trained(packs: list[Pack[Any]]) -> dict[str, int]:
    """What steps train on in packs, from the tensors of their rows; texts have no patches."""
    segments = [[int(n) for n in pack.batch.cu_seqlens.diff()][: len(pack.delays)] for pack in packs]
    return {
        "samples": sum(len(pack.keys) for pack in packs),
        "segments": sum(map(len, segments)),
        "tokens": sum(int((~pack.batch.padding_mask).sum()) for pack in packs),
        "targets": sum(int((pack.batch.loss_mask != 0).sum()) for pack in packs),
        "squares": sum(n * n for row in segments for n in row),
    }


def lines_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("interval", "per_step"), [(1, 1), (3, 1), (2, 4)])
def test_a_line_sums_up_the_packs_of_its_steps_and_the_last_line_the_rest(tmp_path, interval, per_step):
    draw = random.Random(interval)
    packs = [made_pack(draw, padding=number == 5) for number in range(23)]
    config = MetricsConfig(directory=str(tmp_path / "new" / "run"), interval=interval)
    used = list(watched(packs, config, capacity=CAPACITY, rank=2, world_size=4, packs_per_step=per_step))
    assert used == packs
    first, *lines = lines_of(tmp_path / "new" / "run", rank=2)
    assert (first["pack"], first["total"]["packs"]) == (0, 0)
    assert [line.get("ended") for line in lines] == [None] * (len(lines) - 1) + [True]
    assert {(line["run"], line["rank"], line["ranks"]) for line in lines} == {(first["run"], 2, 4)}
    at, every = 0, interval * per_step
    for line in lines:
        part = packs[at : at + every]
        at += len(part)
        assert line["pack"] == at
        for sums, own in ((line["last"], part), (line["total"], packs[:at])):
            full = [pack for pack in own if not pack.padding]
            expected = counted(full)
            assert {name: sums[name] for name in expected} == expected
            assert sums["read"] == sum(sum(pack.read.values()) for pack in own)
            assert sums["padding_packs"] == len(own) - len(full)
            reasons = Counter(entry.reason for pack in own for entry in pack.dropped)
            assert sums["dropped"] == reasons
            tokens = [sums[name] for name in ("real", "alignment", "tail", "unused")]
            assert sum(tokens) == CAPACITY * len(full)
            assert 0 <= sums["waited"] <= sums["seconds"]
        # The step of a pack ends where the next one is taken, so that of the last pack is in no line.
        assert Counter(line["total"]["done"]) == Counter(
            trained([pack for pack in packs[: at - 1] if not pack.padding])
        )
        steps = [part[start : start + per_step] for start in range(0, len(part), per_step)]
        whole = [step for step in steps if len(step) == per_step]
        assert [cost for _, cost in line["steps"]] == [sum(pack.cost for pack in step) for step in whole]
        assert [vision for vision, _ in line["took"]] == [sum(pack.vision_cost for pack in step) for step in whole]
    assert at == len(packs)


def test_a_fit_finds_what_vision_and_language_took_in_the_steps_of_a_run(tmp_path, monkeypatch):
    """Two ranks whose steps end when the slower one is done, with waits, noise of 2 % and a checkpoint now and then."""
    now, took = [0.0], (3e-6, 5e-7, 0.4)
    monkeypatch.setattr(metrics_module.time, "monotonic", lambda: now[0])
    draw, numbers = random.Random(1), np.random.default_rng(4)
    costs = numbers.integers(10_000, 900_000, (120, 2, 2, 2))  # steps, micro-batches, ranks, vision and language

    writers = [
        PackMetrics(
            MetricsConfig(directory=str(tmp_path), interval=7),
            capacity=CAPACITY,
            rank=rank,
            world_size=2,
            packs_per_step=lambda: 2,
        )
        for rank in range(2)
    ]
    for step in range(len(costs)):
        for part in range(2):
            now[0] += (waited := draw.random())
            for rank, writer in enumerate(writers):
                vision, language = costs[step, part, rank].tolist()
                writer.made(dataclasses.replace(made_pack(draw), cost=vision + language, vision_cost=vision))
                writer._used(waited, 2 * step + part + 1)
        lasts = (costs[step].sum(axis=0) @ took[:2]).max() + took[2]
        now[0] += lasts * (1 + 0.02 * numbers.standard_normal()) + 30.0 * (step % 40 == 39)
    for writer in writers:
        writer.close()
    found = fit_report(tmp_path)
    assert (found["vision"], found["language"], found["constant"]) == pytest.approx(took, rel=0.05)
    assert found["r_squared"] > 0.97
    assert found["median_error"] == pytest.approx(0.0135, abs=0.005)  # of noise, 0.67 standard deviations
    assert (found["ranks"], found["steps"] + found["left_out"]) == (2, 119)  # nobody knows when the last one ended
    assert found["left_out"] >= 2
    told = CliRunner().invoke(cli, ["stats", "--fit", str(tmp_path), "--json"])
    assert json.loads(told.stdout) == found
    shown = CliRunner().invoke(cli, ["stats", "--fit", str(tmp_path)]).output
    assert f"median error of a step {found['median_error']:.2%}" in shown.replace("\n", " ")


def test_a_fit_is_of_the_last_of_several_runs_whose_metrics_are_in_one_directory(tmp_path):
    def write(run, ranks, took, time, packs=range(30)):
        costs = np.random.default_rng(ranks).integers(10_000, 900_000, (30, ranks, 2))  # vision, language
        for rank in range(ranks):
            lines, before = [], 0.0
            for pack in packs:
                vision, language = costs[pack, rank].tolist()
                line = {"run": f"{run}{rank}", "rank": rank, "ranks": ranks, "time": time + pack, "pack": pack + 1}
                line |= {"steps": [[pack + 1, vision + language]]}
                lines.append(line | ({"took": [[vision, before]]} if took else {}))
                before = (costs[pack] @ took[:2]).max() + took[2] if took else 0.0
            with (tmp_path / f"rank{rank}.jsonl").open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)

    write("old", 5, None, time=0.0)  # a version that did not write what steps took
    write("large", 4, (9e-6, 9e-7, 9.0), time=100.0)
    write("now", 2, (3e-6, 5e-7, 0.4), time=200.0, packs=range(20))
    found = fit_report(tmp_path)
    assert (found["vision"], found["language"], found["constant"]) == pytest.approx((3e-6, 5e-7, 0.4), rel=1e-3)
    assert (found["ranks"], found["steps"]) == (2, 19)
    write("later", 4, (9e-6, 9e-7, 9.0), time=300.0)
    found = fit_report(tmp_path)
    assert (found["ranks"], found["steps"]) == (4, 29)
    assert found["constant"] == pytest.approx(9.0, rel=1e-3)
    write("last", 4, (9e-6, 9e-7, 4.0), time=400.0, packs=range(15))
    found = fit_report(tmp_path)
    assert (found["ranks"], found["steps"]) == (4, 14)
    assert found["constant"] == pytest.approx(4.0, rel=1e-3)
    write("between", 2, (9e-6, 9e-7, 3.0), time=500.0, packs=range(3))
    write("again", 4, (9e-6, 9e-7, 2.0), time=600.0, packs=range(12))
    found = fit_report(tmp_path)
    assert (found["ranks"], found["steps"]) == (4, 11)
    assert found["constant"] == pytest.approx(2.0, rel=1e-3)


def test_what_cannot_be_fitted_is_said_in_a_sentence(tmp_path):
    def told(*more):
        result = CliRunner().invoke(cli, ["stats", "--fit", *more])
        assert (result.exit_code, "Traceback" in result.output) == (2, False)
        return " ".join(result.output.split())

    assert "has 0 steps whose time all ranks know, and a fit needs 10" in told(str(tmp_path))
    assert "No such file" in told(str(tmp_path / "rank7.jsonl"))
    (tmp_path / "rank0.jsonl").write_text('{"run": "a", "steps": [[2, 5.0]]}\n')
    assert "has no costs and times of steps; write metrics with this version" in told(str(tmp_path))
    assert "`stats --fit` does not take --samples; leave it out" in told(str(tmp_path), "--samples", "9")


def test_waiting_is_the_time_in_the_reader_but_for_the_first_pack(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics_module.time, "monotonic", lambda: now[0])

    class Reader:
        packs = 7  # restored

        def __next__(self) -> str:
            now[0] += 100.0 if self.packs == 7 else 0.5
            metrics.made(made_pack(random.Random(1)))
            self.packs += 1
            return "batch"

    metrics = PackMetrics(MetricsConfig(directory=str(tmp_path), interval=4), capacity=CAPACITY)
    reader = Reader()
    for _ in range(8):
        assert metrics.take(reader) == "batch"
        now[0] += 2.0  # the step
    first, second = lines_of(tmp_path)[1:]
    assert (first["pack"], second["pack"]) == (11, 15)
    each = trained([made_pack(random.Random(1))])
    for line, steps, seconds in ((first, 3, 7.5), (second, 4, 10.0)):  # of a clock that the test moves
        rank = metrics_report.RankLine.of(line)
        assert rank is not None
        found = metrics_report.figures([rank, rank])  # two ranks
        for name in ("samples", "tokens", "targets"):
            assert found[f"{name}_per_second"] == pytest.approx(2 * steps * each[name] / seconds)
    assert (first["last"]["waited"], first["last"]["seconds"]) == (1.5, 7.5)
    assert (second["last"]["waited"], second["last"]["seconds"]) == (2.0, 10.0)


@pytest.mark.filterwarnings("ignore:.*samples read so far")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_share_of_drops_is_that_of_the_data_from_the_first_pack_on(tmp_path, workers):
    """Every fifth conversation is too long for a row. A pack of 20 is the first when 64 samples wait beside it."""
    data = converted(tmp_path, chats([300 if number % 5 == 3 else 10 for number in range(400)]))
    run = RunConfig(
        data=DataConfig(path=str(data), workers=workers, shuffle_buffer=1),
        encoder=EncoderConfig(processor=str(processor_path("text"))),
        packing=PackingConfig(seq_length=256, window=64, drop_budget=1.0),
        metrics=MetricsConfig(directory=str(tmp_path / "run"), interval=1),
    )
    packs = list(itertools.islice(watched(build_loader(run), run.metrics, capacity=256), 30))
    totals = [PackSums.from_json(line["total"]) for line in lines_of(tmp_path / "run")[1:]]
    shares = [total.figures()["dropped_share"] for total in totals]
    assert len(shares) >= 30
    assert shares == pytest.approx([0.2] * len(shares), abs=0.02)
    held = totals[29].read - totals[29].samples - totals[29].dropped.total()
    assert totals[29].samples == sum(len(pack.keys) for pack in packs)
    assert held == sum({pack.worker: pack.held - len(pack.keys) for pack in packs}.values()), "in the windows"


def test_packs_count_when_they_are_taken_and_not_when_they_are_made(tmp_path):
    draw = random.Random(0)
    packs = [made_pack(draw) for _ in range(5)]
    metrics = PackMetrics(MetricsConfig(directory=str(tmp_path), interval=1), capacity=CAPACITY)
    for pack in packs[:4]:
        metrics.made(pack)
    reader = type("Reader", (), {"packs": 1, "__next__": lambda self: None})()
    metrics.take(reader)
    assert [line["total"]["packs"] for line in lines_of(tmp_path)] == [0, 1]
    metrics.forget()  # as after a restored state
    metrics.made(packs[4])
    metrics.take(reader)
    assert lines_of(tmp_path)[-1]["last"]["real"] == packs[4].batch.real_tokens


def test_without_a_path_nothing_is_written_and_packs_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert list(watched(iter([1, 2]), MetricsConfig(), capacity=CAPACITY)) == [1, 2]  # type: ignore[list-item]
    assert PackMetrics.of(MetricsConfig(), SimpleNamespace(capacity=9), rank=0, world_size=1) is None  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_is_one_warning_however_many_lines_are_lost(tmp_path):
    file = tmp_path / "rank0.jsonl"
    file.symlink_to("/dev/full")
    packs = [made_pack(random.Random(seed)) for seed in range(4)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        used = watched(packs, MetricsConfig(directory=str(tmp_path), interval=1), capacity=CAPACITY)
        assert [next(used), next(used)] == packs[:2]
    assert [re.sub(r".*/", "", str(each.message)).split(";")[0] for each in told] == [
        "rank0.jsonl cannot be written (No space left on device)"
    ]


def test_a_process_that_can_start_no_thread_writes_its_lines(tmp_path, monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(metrics_module.threading.Thread, "start", fail)
    packs = [made_pack(random.Random(seed)) for seed in range(4)]
    assert list(watched(packs, MetricsConfig(directory=str(tmp_path), interval=1), capacity=CAPACITY)) == packs
    assert [line["total"]["packs"] for line in lines_of(tmp_path)] == [0, 1, 2, 3, 4, 4]


def test_a_forked_process_that_ends_does_not_end_the_run(tmp_path):
    metrics = PackMetrics(MetricsConfig(directory=str(tmp_path)), capacity=CAPACITY)
    child = os.fork()
    if not child:
        metrics.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert [line.get("ended") for line in lines_of(tmp_path)] == [None]
    metrics.close()
    metrics.close()
    assert [line.get("ended") for line in lines_of(tmp_path)] == [None, True]


class Writers:
    """A TensorBoard writer and wandb, as far as they are used."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.logged: list[tuple[dict[str, float], int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((dict(values), step))


def settle(log: MetricsLog) -> None:
    """Waits for a reading that has begun."""
    if log._thread is not None:
        log._thread.join()


def test_a_writer_gets_the_figures_of_all_ranks_and_nothing_from_before(tmp_path):
    config = MetricsConfig(directory=str(tmp_path), interval=2)
    draw = random.Random(4)
    list(watched([made_pack(draw) for _ in range(6)], config, capacity=CAPACITY, rank=0, world_size=2))
    writers, packs = Writers(), [[made_pack(draw) for _ in range(4)] for _ in range(2)]
    log = MetricsLog(config)
    ranks = [watched(own, config, capacity=CAPACITY, rank=rank, world_size=2) for rank, own in enumerate(packs)]
    for step in range(1, 4):
        for rank in ranks:
            next(rank)
        log.post(step, writers, writers)
        settle(log)
    assert [(name, step) for name, _, step in writers.scalars if name == "packing/fill"] == []
    log.finish(4, writers, writers)
    ((found, step),) = writers.logged
    assert step == 4
    assert {name: value for name, value, _ in writers.scalars} == found
    first = [pack for own in packs for pack in own[:2]]
    assert found["packing/fill"] == pytest.approx(counted(first)["real"] / (4 * CAPACITY))
    costs = [[pack.cost for pack in own[:2]] for own in packs]
    ratios = [2 * max(pair) / sum(pair) for pair in zip(*costs, strict=True)]
    assert found["packing/cost_max_over_mean"] == pytest.approx(sum(ratios) / 2)
    assert found["packing/ranks"] == 2
    reasons = Counter(entry.reason for pack in first for entry in pack.dropped)
    assert {name: value for name, value in found.items() if "dropped/" in name} == {
        f"packing/dropped/{reason}": count for reason, count in reasons.items()
    }


def test_what_a_rank_dropped_before_it_only_padded_stays_counted(tmp_path):
    config, draw, writers = MetricsConfig(directory=str(tmp_path), interval=1), random.Random(9), Writers()
    packs = [[made_pack(draw), made_pack(draw)], [made_pack(draw), made_pack(draw, padding=True)]]
    lost = (DroppedSample(key="d", reason="oversize", detail=""),) * 3
    # Energon's own loaders do not count what they read.
    packs = [[dataclasses.replace(pack, read=Counter(), dropped=lost) for pack in own] for own in packs]
    log = MetricsLog(config)
    for rank, own in enumerate(packs):
        list(watched(own, config, capacity=CAPACITY, rank=rank, world_size=2))
    log.finish(2, writers, writers)
    ((found, _),) = writers.logged
    assert (found["packing/dropped"], found["packing/ranks"]) == (12, 1)
    assert "packing/dropped_share_total" not in found, "nobody knows of how many"
    (line,) = lines_of(tmp_path, 0)[-1:]
    assert line["figures"]["fill"] == pytest.approx(counted(packs[0])["real"] / CAPACITY / 2, abs=1e-4)


def test_formulas_that_do_not_know_a_model_cost_one_warning_and_no_other_figure(tmp_path):
    config = MetricsConfig(directory=str(tmp_path), interval=1)
    log = MetricsLog(config, lambda rates: {"tflops_per_device": rates["nothing"]})
    used, writers = watched([made_pack(random.Random(seed)) for seed in range(4)], config, capacity=CAPACITY), Writers()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(1, 4):
            next(used)
            log.post(step, writers, None)
            settle(log)
        log.finish(4, writers, None)
    assert ["lack TFLOP/s: KeyError: 'nothing'" in str(each.message) for each in told] == [True]
    assert {"packing/fill", "packing/tokens_per_second"} <= {name for name, _, _ in writers.scalars}


def test_a_writer_that_raises_is_one_warning(tmp_path, monkeypatch):
    config = MetricsConfig(directory=str(tmp_path), interval=1)
    log = MetricsLog(config)
    used = watched([made_pack(random.Random(seed)) for seed in range(3)], config, capacity=CAPACITY)
    next(used)
    monkeypatch.setattr(Writers, "add_scalar", lambda *_: (_ for _ in ()).throw(RuntimeError("queue is closed")))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(1, 5):
            log.post(step, Writers(), None)
            settle(log)
        log.finish(5, Writers(), None)
    assert ["RuntimeError: queue is closed" in str(each.message) for each in told] == [True]

    def fails(self: Any) -> None:
        raise OSError(5, "I/O error", "x")

    monkeypatch.setattr(metrics_report.LineFollower, "read", fails)
    with pytest.warns(UserWarning, match=r"The metrics x cannot be read \(I/O error\)\. Training goes on"):
        MetricsLog(config)
