"""What surrounds the kernels of ``scripts/bench.py gpu``, on kernels that a CPU can run."""

import contextlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench import gpu as gpu_checks
from bench import gpu_kernels, train
from bench.loader import start
from forking_python import quick_python

from energon_packing import thd
from energon_packing.errors import PackingError
from energon_packing.validate.kernel_table import KERNELS, Attention, Machine, refused

pytestmark = pytest.mark.full  # benchmarks measure what other tests hold
needs_bridge = pytest.mark.skipif(not gpu_checks._installed("megatron.bridge"), reason="Bridge is not installed")


class OnCpu:
    """Attention of a case, sample by sample in float32, that can be made to err."""

    boundaries = "padded"
    leaves_padding = False

    def __init__(self, case, device):
        self.case = case
        self.sink = torch.linspace(-1, 2, case.heads).requires_grad_() if case.sinks else None

    def __call__(self, given, queries, keys):
        outside = torch.nan if self.leaves_padding else 0.0
        made = torch.full((queries.total, self.case.heads, given[2].shape[-1]), outside)
        sides = [getattr(side, self.boundaries).tolist() for side in (queries, keys)]
        lengths = [(side.real[1:] - side.real[:-1]).tolist() for side in (queries, keys)]
        for (one, two), (many, more) in zip(zip(*sides, strict=True), zip(*lengths, strict=True), strict=False):
            parts = (given[0][one : one + many], given[1][two : two + more], given[2][two : two + more])
            made[one : one + many] = attend(self.case, *(part.float() for part in parts), self.sink)
        return made.to(torch.bfloat16)


def attend(case, query, key, value, sink):
    """Torch's own attention; a sink is a key of its own whose value is zero."""
    times = case.heads // case.groups
    parts = [query, key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)]
    query, key, value = (part.transpose(0, 1)[None] for part in parts)
    row, column = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None]
    mask = torch.zeros(1, case.heads, query.shape[2], key.shape[2])
    if case.causal:
        mask = mask.masked_fill(column > row, -torch.inf)
    if case.window:
        mask = mask.masked_fill(column < row - case.window[0], -torch.inf)
    if sink is not None:
        mask = torch.cat([mask, sink.reshape(1, -1, 1, 1).expand(-1, -1, query.shape[2], 1)], -1)
        key, value = (torch.nn.functional.pad(part, (0, 0, 0, 1)) for part in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)[0].transpose(0, 1)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "Layer", OnCpu)
    monkeypatch.setattr(gpu_kernels, "only", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(gpu_kernels, "chosen_kernel", lambda: "stand-in")
    return monkeypatch


def test_a_kernel_that_keeps_segments_apart_is_found_equal_in_all_cases(on_cpu):
    def short(lengths):
        return lengths and tuple(-(-length // 8) for length in lengths)

    cases = [case for case in gpu_kernels.cases() if len(case.lengths) < 200]
    kinds = {(case.name, case.padding, case.sinks, case.window): case for case in cases}
    found = [
        gpu_kernels.check(
            replace(case, lengths=short(case.lengths), keys=short(case.keys), tail=case.tail // 8), "any", "cpu"
        )
        for case in kinds.values()
    ]
    assert len(found) >= 20
    assert [row for row in found if not row.get("equal")] == []


def test_the_table_of_kernels_has_what_an_h200_chose():
    """Of Transformer Engine 2.20.2 with cuDNN 9.19.0: which kernels ran on which case."""
    machine = Machine(sm=90, te=(2, 20, 2), cudnn=(9, 19, 0), flash=())
    for case in gpu_kernels.cases():
        padded = case.padding == "between" and case.multiple > 1
        attention = Attention(
            width=case.width, value_width=case.value_width or case.width, heads=case.heads, groups=case.groups,
            padded=padded, causal=case.causal, window=case.window is not None, sinks=case.sinks,
            deterministic=case.deterministic,
        )  # fmt: skip
        ran = {"cuDNN"} - {"cuDNN" if case.sinks else ""} | ({"unfused"} - {"unfused" if padded else ""})
        assert set(KERNELS) - set(refused(attention, machine)) == ran, case


@pytest.mark.parametrize("wrong", [{"boundaries": "real"}, {"leaves_padding": True}])
def test_a_kernel_that_reads_shifted_places_or_leaves_padding_unwritten_is_found(on_cpu, wrong):
    for name, value in wrong.items():
        on_cpu.setattr(OnCpu, name, value)
    found = gpu_kernels.check(gpu_kernels.Case(), "any", "cpu")
    assert not found["equal"], found
    assert gpu_kernels.check(gpu_kernels.Case(padding="real"), "any", "cpu")["equal"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "error"),
        (getattr(torch, "AcceleratorError", torch.OutOfMemoryError)("a"), "error"),
        (torch.OutOfMemoryError("CUDA out of memory."), "error"),
        (RuntimeError("t.cu:9 in f: CUDA Error: invalid argument"), "error"),
        (ValueError("No dot product attention backend is available for the provided inputs."), "refused"),
    ],
)
def test_a_gpu_that_failed_has_not_refused(on_cpu, error, kind):
    def layer(*_):
        raise error

    on_cpu.setattr(gpu_kernels, "Layer", layer)
    for found in (
        gpu_kernels.check(gpu_kernels.Case(), "any", "cpu"),
        gpu_kernels.speed(gpu_kernels.Case(), "any", [[16]], "cpu"),
    ):
        assert {"error", "refused"} & found.keys() == {kind}
        assert found.get("equal", True) is (kind == "refused")


def test_functions_that_need_no_gpu_are_equal_and_fused_ones_say_why_not():
    pytest.importorskip("megatron.core")
    rows = [*gpu_kernels.routers("cpu"), *gpu_kernels.rotary("cpu"), *gpu_kernels.losses("cpu")]
    assert {row["check"] for row in rows if row["equal"]} == {"router", "rotary", "losses"}
    assert all(row["equal"] or "not available" in row["refused"] or "NoneType" in row["refused"] for row in rows), rows


def test_indices_that_are_ours_are_equal_and_shifted_ones_are_named():
    def ours(boundaries, total, cp_size, rank):
        return thd.context_parallel_indices(boundaries, cp_size, rank)

    found = gpu_checks.partition_check(ours, device="cpu")
    assert (found["equal"], found["compared"]) == (True, gpu_checks.ROWS * 15)
    found = gpu_checks.partition_check(lambda b, t, c, r: ours(b, t, c, (r + 1) % c), device="cpu")
    assert not found["equal"]
    assert found["different"]["cp"] == 2


def test_whole_jobs_count_what_packing_before_them_costs(monkeypatch, tmp_path):
    seconds = {"padded-mb4": (1.0, 60.0), "packs": (1.0, 20.0), "packs-made-before": (10.0, 20.0)}

    def told(job, log, *, module, name):
        assert (job.whole, job.offline is not None) == (True, name == "packs-made-before")
        prepare, trained = seconds[name]
        return {"tokens": 600, "rows": [600], "device": "cpu", "prepare": [prepare] * 2, "train": [trained] * 2}

    monkeypatch.setattr(train, "prepare_data", lambda *_, **__: SimpleNamespace(root=tmp_path))
    monkeypatch.setattr(train, "start", told)
    *rows, verdict = train.run_whole(train.TrainBench(micro_batches=(4,)), tmp_path)
    assert [row["total_seconds"] for row in rows] == [60, 20, 30]
    assert verdict["total_cpu_seconds"] == {"packs": 0.33, "packs made before": 0.5}
    assert verdict["tokens_per_cpu_second"] == {"packs": 3, "packs made before": 3}


@needs_bridge
def test_every_pass_copies_the_pixels_and_keeps_none_of_them(monkeypatch, tmp_path):
    from support.bridge_cpu import stand_ins, tiny_models, training_run

    stand_ins.install()
    from bench import train_run
    from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
    from megatron.bridge.training.vlm_step import get_batch_from_iterator

    copied, pixels = [], torch.zeros(3)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, **_: copied.append(self) or self.clone())
    batch = {"visual_inputs": GenericVisualInputs(pixel_values=pixels)}

    def steps(batches, *_):
        for _ in range(2):
            get_batch_from_iterator(iter(batches), is_first_pp_stage=True, is_last_pp_stage=True)
        return SimpleNamespace(optimizer=SimpleNamespace())

    steps(train_run._Passes([batch]))
    pack = SimpleNamespace(batch=SimpleNamespace(to_bridge=lambda: batch), vision_cost=1)
    for owner, name, stand_in in (
        (train_run, "open_packs", lambda _: ([pack], None)),
        (train_run, "watched", lambda packs, *_, **__: iter(packs)),
        (train_run, "_model", lambda _: {}),
        (train_run, "_data_set", lambda batches, *_: batches),
        (train_run, "_training", lambda _job, batches, *_, **__: steps(batches)),
        (tiny_models, "hugging_face_config", lambda *_, **__: SimpleNamespace(save_pretrained=lambda _: None)),
        (training_run, "process_groups", contextlib.nullcontext),
        (training_run, "run", lambda *_, **__: None),
    ):
        monkeypatch.setattr(owner, name, stand_in)
    job = train.TrainJob(
        rows="packs", data="", processor="", family="x", seq_length=1, window=1, micro_batch_size=1, passes=1,
        pixels=(1, 1), metrics=str(tmp_path), mixes=[("", 1)],
    )  # fmt: skip
    train_run.costs(job)
    assert len(copied) == 4
    assert all(each is pixels for each in copied), "and none is there already"


def test_the_verdict_of_steps_takes_packs_by_name_whatever_came_first(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "measure_kind", lambda *_: None)
    run = gpu_checks.Run(device="cpu", metrics=tmp_path)
    *_, (name, verdict) = gpu_checks.step(run)
    assert name == "verdict"
    with pytest.raises(gpu_checks.NotYet):
        verdict()
    for kind, speed in (("in_batch-mb2", 2), ("padded-mb2", 1), ("packs", 4)):  # packs failed at first
        run.stored.append({
            "row": kind, "rows": kind, "tokens_per_cpu_second": speed, "peak_mb": speed, "samples": 1, "tokens": 1,
            "loss": 1.0, "small": False, "tf32": False,
        })  # fmt: skip
    assert verdict()["times_faster"] == {"in_batch-mb2": 2, "padded-mb2": 4}


@pytest.fixture
def example_gpu(monkeypatch):
    """A device by name, and what stands for its parts: ``parts(name=[units])``."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Example GPU/80")
    properties = SimpleNamespace(total_memory=80 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)

    def parts(**units):
        for name, own in units.items():
            part = replace(gpu_checks.PARTS[name], units=lambda _, own=own: iter(own), needs=())
            monkeypatch.setitem(gpu_checks.PARTS, name, part)

    return parts


def test_results_are_stored_under_the_name_of_the_device_and_a_failed_row_stops_no_other(example_gpu, tmp_path, capsys):
    rows = [("good", lambda: {"equal": True}), ("bad", lambda: 1 / 0), ("after", lambda: [{"equal": True}] * 2)]
    example_gpu(indices=rows, parity=rows[:1])
    chosen = ["--check", "indices", "--check", "parity", "--out", str(tmp_path)]
    assert gpu_checks.main(chosen) == 1
    stored = json.loads((tmp_path / "gpu-Example-GPU-80.json").read_text())
    assert stored["device"] == "Example GPU/80"
    assert [row["row"] for row in stored["results"]] == ["good", "bad", "after", "after", "good"]
    report = (tmp_path / "gpu-Example-GPU-80.md").read_text()
    assert "device Example GPU/80, memory 80 GiB, compute capability 9.0, " in report
    assert ", cudnn 91900, " in report
    assert "| indices | failed in part; 3 equal; 1 **failed** |" in report
    assert "ZeroDivisionError: division by zero | **no** |" in report
    capsys.readouterr()
    example_gpu(indices=[("good", lambda: 1 / 0), ("bad", lambda: {"equal": True}), ("after", lambda: 1 / 0)])
    assert gpu_checks.main(chosen) == 0, "only what failed runs again"
    assert "parity: stored in" in capsys.readouterr().err
    assert "| indices | 4 equal |" in (tmp_path / "gpu-Example-GPU-80.md").read_text()
    assert gpu_checks.main([*chosen, "--again"]) == 1, "all run again"


def test_a_part_that_has_had_its_time_stops_before_its_next_row_and_the_same_command_goes_on(
    example_gpu, monkeypatch, tmp_path, capsys
):
    now, ran = [0.0], []

    def row(name, seconds):
        now[0] += seconds
        ran.append(name)
        return {"equal": True}

    monkeypatch.setattr(gpu_checks, "clock", lambda: now[0])
    example_gpu(
        speed=[(name, lambda name=name: row(name, 200)) for name in "abcd"], pixels=[("e", lambda: row("e", 10))]
    )
    chosen, report = (
        ["--out", str(tmp_path), "--check", "speed", "--check", "pixels"],
        tmp_path / "gpu-Example-GPU-80.md",
    )
    assert gpu_checks.main(chosen) == 0
    assert ran == ["a", "b", "c", "e"], "the third begins before 480 s"
    assert "| speed | stopped after 600 s; 3 equal; 1 left | 600 |" in report.read_text()
    assert "not done yet: speed" in capsys.readouterr().err
    assert gpu_checks.main(chosen) == 0
    assert ran == ["a", "b", "c", "e", "d"]
    assert "| speed | 4 equal | 800 |" in report.read_text()
    ran.clear()
    assert gpu_checks.main([*chosen, "--again", "--limit", "100", "--minutes", "3"]) == 0
    assert ran == ["a"], "and pixels would begin after the 3 minutes"
    assert "| pixels | 1 equal | 10 |" in report.read_text(), "what is stored stays until it can run"
    example = replace(gpu_checks.PARTS["speed"], units=lambda _: pytest.fail("a part without time is set up"))
    monkeypatch.setitem(gpu_checks.PARTS, "losses", example)
    assert gpu_checks.main(["--out", str(tmp_path), "--check", "losses", "--minutes", "0"]) == 0
    assert "| losses | stopped after 0 s; all left | 0 |" in report.read_text()
    assert "not done yet: losses" in capsys.readouterr().err


def test_no_two_rows_of_a_part_have_one_name():
    for units in (gpu_kernels.attention("cpu"), gpu_kernels.speeds("cpu")):
        names = [name for name, _ in units]
        assert len(names) == len(set(names)) > 20


def test_a_part_that_was_killed_goes_on_with_the_row_that_it_was_in(example_gpu, tmp_path):
    def killed():
        raise KeyboardInterrupt

    chosen, ran = ["--out", str(tmp_path), "--check", "losses"], []
    example_gpu(losses=[("a", lambda: {"equal": True}), ("b", killed)])
    with pytest.raises(KeyboardInterrupt):
        gpu_checks.main(chosen)
    assert "| losses | interrupted; 1 equal |" in (tmp_path / "gpu-Example-GPU-80.md").read_text()
    example_gpu(losses=[(name, lambda name=name: ran.append(name) or {"equal": True}) for name in "ab"])
    assert gpu_checks.main(chosen) == 0
    assert ran == ["b"]


def test_a_row_or_part_whose_package_is_missing_says_so_and_the_others_run(example_gpu, monkeypatch, tmp_path):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def units(_):
        missing("no_such.part")
        yield

    good = ("b", lambda: {"equal": True})
    example_gpu(indices=[("a", lambda: missing("no_such.part")), good], losses=[good])
    for name, part in {"speed": {"needs": ("no_other.part",)}, "rotary": {"needs": (), "units": units}}.items():
        monkeypatch.setitem(gpu_checks.PARTS, name, replace(gpu_checks.PARTS[name], **part))
    chosen = [word for name in ("indices", "speed", "rotary", "losses") for word in ("--check", name)]
    assert gpu_checks.main([*chosen, "--out", str(tmp_path)]) == 0
    report = (tmp_path / "gpu-Example-GPU-80.md").read_text()
    assert "| indices | 1 equal; 1 not run (not installed: no_such) |" in report
    assert "| speed | not run: needs a package that is not installed: no_other.part |" in report
    assert "| rotary | not run: needs a package that is not installed: no_such |" in report
    assert "| losses | 1 equal |" in report
    assert "| step | not run yet |" in report
    example_gpu(indices=[("a", lambda: missing("json.no_such")), ("b", None)])
    assert gpu_checks.main([*chosen, "--out", str(tmp_path)]) == 1, "a module that a package lacks is a failure"
    example_gpu(indices=[("a", lambda: {"equal": True}), ("b", None)])
    assert gpu_checks.main([*chosen, "--out", str(tmp_path)]) == 0
    assert "| indices | 2 equal |" in (tmp_path / "gpu-Example-GPU-80.md").read_text()


def test_a_device_that_failed_ends_the_command_and_what_failed_comes_last(example_gpu, monkeypatch, tmp_path, capsys):
    ran, refuses = [], [True]

    def fails():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def dies():
        ran.append("dies")
        monkeypatch.setattr(torch.cuda, "synchronize", fails)
        return {"refused": "by what a kernel left"} if refuses[0] else {"equal": True}

    def row(name):
        return name, lambda: ran.append(name) or {"equal": True}

    def command():
        ran.clear()
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        return gpu_checks.main(["--out", str(tmp_path), "--check", "attention", "--check", "losses"])

    example_gpu(attention=[row("a"), ("dies", dies), row("b")], losses=[row("c")])
    assert (command(), ran) == (1, ["a", "dies"])
    assert "the device failed; start again" in capsys.readouterr().err
    report = tmp_path / "gpu-Example-GPU-80.md"
    assert "| attention | the device failed; 1 equal; 1 **failed**; 1 left |" in report.read_text()
    assert "illegal memory access" in report.read_text()
    assert (command(), ran) == (1, ["b", "c", "dies"])
    assert "| attention | the device failed; 2 equal; 1 **failed** |" in report.read_text()
    refuses[0] = False
    for _ in range(2):
        assert (command(), ran) == (1, ["dies"]), "a row that is equal, after which nothing runs"
        assert "| attention | the device failed; 2 equal; 1 **failed** |" in report.read_text()


def test_rows_of_other_variables_are_not_kept_and_rows_of_another_revision_say_so(example_gpu, monkeypatch, tmp_path):
    def command():
        example_gpu(losses=[(name, lambda name=name: ran.append(name) or next(results)) for name in "ab"])
        return gpu_checks.main(["--out", str(tmp_path), "--check", "losses"])

    good = {"equal": True}
    ran, results = [], iter([good, [good, {"error": "e"}], good, good, good])
    monkeypatch.setattr(gpu_checks, "_output", lambda *_: "old")
    assert command() == 1
    monkeypatch.setattr(gpu_checks, "_output", lambda *_: "new")
    assert (command(), ran) == (0, ["a", "b", "b"])
    report = tmp_path / "gpu-Example-GPU-80.md"
    assert "torch's (revision new, old)" in report.read_text()
    assert "| row | equal | revision |" in report.read_text()
    assert "| a | yes | old |" in report.read_text()
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert (command(), ran) == (0, ["a", "b", "b", "a", "b"])
    assert "torch's (revision new)\n" in report.read_text()


def test_a_part_that_cannot_run_now_keeps_its_rows_even_with_again(example_gpu, monkeypatch, tmp_path):
    example_gpu(losses=[("a", lambda: {"equal": False}), ("b", lambda: {"equal": True})])
    chosen = ["--out", str(tmp_path), "--check", "losses"]
    assert gpu_checks.main(chosen) == 1
    monkeypatch.setitem(gpu_checks.PARTS, "losses", replace(gpu_checks.PARTS["losses"], needs=("no_such",)))
    assert gpu_checks.main([*chosen, "--again"]) == 1
    report = (tmp_path / "gpu-Example-GPU-80.md").read_text()
    assert "| losses | not run: needs a package that is not installed: no_such; 1 equal; 1 **differ** | 0 |" in report


def test_wrong_values_and_kernels_that_take_nothing_are_bold_in_the_report(example_gpu, tmp_path):
    refused = {"refused": "no | kernel\nhere"}
    example_gpu(attention=[("a", lambda: refused)], losses=[("a", lambda: {"equal": False}), ("b", lambda: refused)])
    assert gpu_checks.main(["--out", str(tmp_path), "--check", "attention"]) == 1
    assert gpu_checks.main(["--out", str(tmp_path), "--check", "losses"]) == 1
    report = (tmp_path / "gpu-Example-GPU-80.md").read_text()
    assert "| attention | **refused** by every kernel |" in report
    assert "| losses | 1 refused; 1 **differ** |" in report
    assert "no \\| kernel here" in report


def test_without_a_gpu_the_report_says_of_every_part_what_it_needs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_checks.main(["--out", str(tmp_path)]) == 0
    report = (tmp_path / "gpu-no-device.md").read_text()
    for name in gpu_checks.PARTS:
        assert f"| {name} | not run: needs a CUDA device" in report
    assert gpu_checks.main(["--out", str(tmp_path / "none")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    older, wrong = {"results": [{"asked_for": "indices", "releases": {}}]}, {"results": [], "parts": []}
    for stored, said in (({}, "older version"), (older, "older version"), (wrong, "be read"), ([], "be read")):
        (tmp_path / "gpu-no-device.json").write_text(json.dumps(stored))
        assert gpu_checks.main(["--out", str(tmp_path)]) == 2
        assert said in capsys.readouterr().err


@needs_bridge
def test_on_a_cpu_every_part_runs_or_says_what_it_needs_and_what_ran_is_equal(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which the command sets
    monkeypatch.setattr(sys, "executable", quick_python())
    assert gpu_checks.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "gpu-cpu.json").read_text())
    report = (tmp_path / "gpu-cpu.md").read_text()
    rows = {name: [row for row in stored["results"] if row["part"] == name] for name in gpu_checks.PARTS}
    for name, own in rows.items():
        if name in ("indices", "attention", "speed"):
            assert f"| {name} | not run: needs a CUDA device with Transformer Engine |" in report
            assert not own
        else:
            assert [row for row in own if row.get("equal", True) is not True] == []
            assert f"\n**{name}**: " in report
    for name in ("router", "rotary", "losses", "handover", "pixels", "parity", "step"):
        assert any(row.get("equal") for row in rows[name]), name
    whole, ours, in_bridge, bridge = rows["handover"]
    assert whole["different"] == []
    assert ours["megabytes"] == in_bridge["megabytes"] < bridge["megabytes"] / 3, "bytes; frames are not repeated"
    *kinds, verdict = rows["step"]
    assert [row["rows"] for row in kinds] == ["packs", "in_batch-mb2", "padded-mb2"]
    assert len({row["tokens"] for row in kinds}) == 1
    assert all(row["peak_mb"] > 0 for row in kinds)
    assert verdict["same_loss"]
    (cost,) = rows["cost"]
    assert 0 < cost["text"] < cost["packs"]
    assert cost["steps"] + cost["left_out"] == cost["packs"] - 1
    assert {"config.json", "rank0.jsonl"} == {file.name for file in (tmp_path / cost["metrics"]).iterdir()}


def test_a_transformer_engine_without_its_library_is_no_error_of_the_command(example_gpu, monkeypatch, tmp_path):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise FileNotFoundError('libtransformer_engine.so')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    assert gpu_checks.environment("cuda")["releases"]["cudnn"] == "91900"


def test_groups_of_a_run_on_a_gpu_are_of_its_own_backend(monkeypatch):
    pytest.importorskip("megatron.core")
    from support.bridge_cpu import stand_ins, training_run

    stand_ins.install()
    monkeypatch.setenv("LOCAL_RANK", "3")
    seen = []
    monkeypatch.setattr(stand_ins, "needed", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)

    def made(backend, **_options):
        seen.append(backend)
        raise InterruptedError

    monkeypatch.setattr(torch.distributed, "init_process_group", made)
    with pytest.raises(InterruptedError), training_run.process_groups():
        pass
    assert seen == [3, "cpu:gloo,cuda:nccl"]


def test_losses_that_differ_by_tf32_are_the_same_where_it_is_on_and_ignored_boundaries_are_not():
    figures = {"tokens_per_cpu_second": 1, "peak_mb": 1, "samples": 1, "tokens": 1, "small": False}
    for difference, tf32, same in ((3e-5, False, False), (3e-5, True, True), (4e-4, True, False)):
        losses = {"packs": 8.3, "padded-mb4": 8.3 + difference}
        rows = [{**figures, "rows": name, "loss": loss, "tf32": tf32} for name, loss in losses.items()]
        assert train.verdict(rows)["same_loss"] is same


def test_the_log_of_a_measured_process_outlives_its_folder(tmp_path):
    job = train.TrainJob(
        rows="packs", data="none", processor="", family="x", seq_length=1, window=1, micro_batch_size=1, passes=1,
        pixels=(1, 1),
    )  # fmt: skip
    with pytest.raises(PackingError) as failed:
        start(job, tmp_path / "train.log", module="no_module", name="packs")
    (tmp_path / "train.log").unlink()
    log = Path(str(failed.value).partition("(see ")[2].rstrip(")"))
    assert "no_module" in log.read_text()
    shutil.rmtree(log.parent)
