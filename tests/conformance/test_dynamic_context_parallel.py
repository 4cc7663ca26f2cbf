"""Megatron-Core's ``dev`` branch with a context-parallel size per micro-batch: one gradient, that of a static size.

Four processes and Core's own code, see `dynamic_ranks`. ``MEGATRON_LM_DEV`` names a checkout of that branch, and
``MEGATRON_LM_MAIN`` one of ``main``, where our scheduler takes the place of ``dp_balanced``. ``pytest -s`` prints the
largest differences.
"""

import functools
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import bridge_here  # noqa: F401
import pytest
import torch
from support import dynamic_ranks

from energon_packing import thd
from energon_packing.errors import ConfigError, PackingError
from energon_packing.megatron_lm.dataloader import BOUNDARIES, PlannedScheduler, core_row, install
from energon_packing.thd.batch import Shared, real_padding

pytestmark = pytest.mark.timeout(600)
COMMITS = {
    "MEGATRON_LM_DEV": "d48bd6be0a85cc0d6d3cc71e8750cf357cc6bdb1",
    "MEGATRON_LM_MAIN": "d98e8a64ddf34856e74b24714e3bedb2f5a39553",
}
TOLERANCE = 1e-5  # of gradients whose largest entry is 0.1


def case(name, **how):
    return {"name": name, "cp": 1, "domain": 4, "dynamic": False, "positions": "rope"} | how


STATIC = [case(f"static {cp}", cp=cp) for cp in (1, 2, 4)]
DYNAMIC = [
    case("dynamic", dynamic=True),
    case("dynamic over groups of 2", dynamic=True, cp=2),
    case("dynamic with 2 tensor ranks", dynamic=True, domain=2),
]
LEARNED = [case("learned static", cp=4, positions="learned_absolute")]
LEARNED += [case("learned dynamic", dynamic=True, positions="learned_absolute")]
WRONG = [case(f"wrong {fault}", dynamic=True, fault=fault) for fault in ("slice", "size")]
ALONE = [case("alone", alone=True)]
LOOPS = [
    case("loop", arguments=[]),
    case("loop dynamic", dynamic=True, arguments=[]),
    case("loop run again", dynamic=True, arguments=[], again=True),
    case("loop over tensor ranks", dynamic=True, domain=2, arguments=["--tensor-model-parallel-size", "2"]),
    case("loop over stages", dynamic=True, domain=2, arguments=["--pipeline-model-parallel-size", "2"]),
    case(
        "loop over virtual stages",
        dynamic=True,
        domain=2,
        arguments=["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"],
    ),
]


def checkout(variable):
    folder = os.environ.get(variable)
    if not folder or not (Path(folder) / "megatron/core/datasets/data_schedule.py").is_file():
        pytest.skip(
            f"{variable} names no checkout of Megatron-LM: a clone of github:NVIDIA/Megatron-LM && "
            f"git -C Megatron-LM checkout {COMMITS[variable]}"
        )
    return Path(folder)


@functools.cache
def run_once(variable):
    """Results of the cases, or what the ranks printed: a second try would take as long."""
    cases = [*ALONE, *STATIC] + ([*DYNAMIC, *LEARNED, *WRONG, *LOOPS] if variable == "MEGATRON_LM_DEV" else [])
    try:
        return dynamic_ranks.run_cases(checkout(variable), cases)
    except RuntimeError as error:
        return {each["name"]: {"error": str(error)} for each in cases}


def result_of(name, variable="MEGATRON_LM_DEV"):
    checkout(variable)
    result = run_once(variable)[name]
    assert "error" not in result, result["error"]
    return result


def differences(one, other):
    """Of the loss, and the largest one of any gradient."""
    assert one["gradients"].keys() == other["gradients"].keys()
    gaps = [float((part - other["gradients"][name]).abs().max()) for name, part in one["gradients"].items()]
    return abs(one["loss"] - other["loss"]), max(gaps)


def assert_equal(name, other, **where):
    loss, gradient = differences(result_of(name, **where), result_of(other, **where))
    print(f"{name} / {other}: loss {loss:.1e}, gradient {gradient:.1e}")
    assert loss < TOLERANCE
    assert gradient < TOLERANCE


@pytest.mark.parametrize("static", [each["name"] for each in [*STATIC, *ALONE]])
@pytest.mark.parametrize("dynamic", [each["name"] for each in DYNAMIC])
def test_a_size_per_micro_batch_gives_the_loss_and_gradient_of_one_size(dynamic, static):
    assert_equal(dynamic, static)
    assert result_of(dynamic)["tokens"] == result_of(static)["tokens"]


def test_absolute_positions_follow_the_group_of_the_row():
    assert_equal("learned dynamic", "learned static")


def test_groups_of_three_sizes_take_part_in_one_step():
    ranks = result_of("dynamic")["ranks"]
    sizes = [[size for size, _ in micro_batches] for micro_batches, *_ in ranks]
    assert sizes == [[4, 2, 1, 2, 1], [4, 2, 1, 2, 1], [4, 1, 2, 2, 2], [4, 1, 2, 2, 2]]
    assert len({micro_batches[1][1] for micro_batches, *_ in ranks}) > 1  # slices of other lengths beside each other
    assert [count for _, count, *_ in ranks] == [5] * 4


@pytest.mark.parametrize("fault", [each["name"] for each in WRONG])
def test_rows_for_a_group_of_another_size_are_noticed(fault):
    """Pairs that cut rows as four ranks do and share those pieces; a row of four ranks that says two."""
    loss, gradient = differences(result_of(fault), result_of("static 1"))
    assert loss > 100 * TOLERANCE
    assert gradient > 1000 * TOLERANCE


@pytest.mark.parametrize("static", [each["name"] for each in STATIC])
@pytest.mark.parametrize("variable", COMMITS)
def test_the_scheduler_also_takes_the_place_of_dp_balanced(static, variable):
    assert_equal(static, "alone", variable=variable)


@pytest.mark.parametrize("loop", [each["name"] for each in LOOPS[1:]])
def test_the_training_loop_and_its_evaluation_take_a_size_per_micro_batch(loop):
    static, dynamic = result_of("loop"), result_of(loop)
    assert dynamic["counts"] == [8 if "over" in loop else 5] * 3
    assert static["counts"] == [3] * 3
    chunks = 2 if "virtual" in loop else 1
    forwards = (3 * (2 if "again" in loop else 1) + 2) * chunks  # steps and evaluations
    assert dynamic["forwards"] == forwards * dynamic["counts"][0]
    for name, length in (("losses", 3), ("norms", 3), ("evaluations", 1)):
        assert len(static[name]) == length
        assert dynamic[name] == pytest.approx(static[name], abs=TOLERANCE)
        print(loop, name, max(abs(a - b) for a, b in zip(static[name], dynamic[name], strict=True)))
    assert dynamic["losses"][-1] < dynamic["losses"][0] - 0.1


# --- The scheduler alone, with the installed Core --------------------------------------------------------------------


def group(rank=0, size=1):
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def rows(count=2, **more):
    samples = [dynamic_ranks.make_sample(length, length) for length in (5, 11)]
    return [dynamic_ranks.row_of(samples, 2) | more for _ in range(count)]


def run(iterator, *, stage=0, stages=1, chunks=None, every=None, mtp=None, tensor_rank=0):
    scheduler = PlannedScheduler(None, 1, 4, every, max_num_seqs=None, min_cp_size=1)
    config = SimpleNamespace(virtual_pipeline_model_parallel_size=chunks, mtp_num_layers=mtp)
    groups = group(size=4), group(tensor_rank), group(stage, stages), group(size=4)
    return scheduler.run(iterator, 7, *groups, torch.device("cpu"), config)


@pytest.mark.parametrize(
    ("lengths", "how"),
    [((5, 11), {"multiple": 8, "width": 64}), ((13,), {"multiple": 8}), ((8, 3, 16), {"multiple": 4})],
)
@pytest.mark.parametrize("real", [False, True])
def test_padding_and_masked_tails_are_between_segments_for_core(lengths, how, real):
    """By the rule of Core's ``_build_thd_padding_mask``: a slot behind the real end of its segment holds no token."""
    batch = thd.assemble([dynamic_ranks.make_sample(length, length) for length in lengths], **how)
    expected = batch.padding_mask[0].tolist()
    row = core_row(real_padding(batch) if real else batch)
    starts, ends = row["cu_seqlens_padded"][:-1].tolist(), row["cu_seqlens_padded"][1:].tolist()
    tokens = row["cu_seqlens"].diff().tolist()
    assert sum(tokens) == sum(lengths)
    slots = [at >= start + n for start, end, n in zip(starts, ends, tokens, strict=True) for at in range(start, end)]
    assert slots == expected
    assert int(row["max_seqlen"]) == batch.max_seqlen


def test_a_row_without_samples_is_masked_and_media_are_refused():
    batch = thd.assemble([dynamic_ranks.make_sample(3, 3)], multiple=4)
    masked = core_row(replace(batch, sample_lengths=(), shared=Shared(2, 5, 70, 900)))
    assert not masked["cu_seqlens"].any()
    assert int(masked["cu_seqlens_padded"][-1]) == batch.total_tokens
    assert int(masked["local_cp_size"]) == 2
    assert masked["step_lengths"].tolist() == [70.0, 900.0]
    for more in ({"visual_inputs": {"pixel_values": torch.ones(1, 2)}}, {"extra": {"weight": torch.ones(1, 4)}}):
        with pytest.raises(PackingError, match="takes rows of text"):
            core_row(replace(batch, **more))


def test_rows_come_as_they_are_and_their_number_is_that_of_the_iterator():
    given = rows(3)
    iterator, count, tokens, squares = run(iter([given]))
    assert (count, tokens, squares) == (3, 3 * 16 * 2, 3 * (25 + 121) * 2)  # 4 ranks, 2 of which share a row
    got = [next(iterator) for _ in range(count)]
    for mine, theirs in zip(got, given, strict=True):
        assert mine is not theirs  # Core writes into it
        assert {name: mine[name] is theirs[name] for name in theirs} == dict.fromkeys(theirs, True)


def test_lengths_of_the_step_are_those_that_the_plan_knows():
    known = torch.tensor([2.0**40 + 1, 2.0**50 + 1], dtype=torch.float64)
    iterator, _, *lengths = run(iter([rows(step_lengths=known)]))
    assert lengths == known.tolist()
    assert "step_lengths" not in next(iterator)


@pytest.mark.parametrize(("stage", "whole"), [(0, [True, False]), (1, [False, False]), (2, [False, True])])
def test_virtual_stages_get_what_they_read(stage, whole):
    iterators, count, *_ = run([None, iter([rows(4)])], stage=stage, stages=3, chunks=2, every=2)
    assert count == 4
    seen = [[next(iterator) for _ in range(count)] for iterator in iterators]
    for chunk, has_tokens in enumerate(whole):
        assert all(("tokens" in row) == has_tokens and set(BOUNDARIES) <= set(row) for row in seen[chunk])
    assert len({id(row) for chunk in seen for row in chunk}) == 8


def test_stages_with_mtp_and_none_in_the_middle_get_tokens():
    assert "tokens" in next(run(iter([rows()]), stage=1, stages=3, mtp=1)[0])
    assert set(next(run(iter([rows()]), stage=1, stages=3)[0])) == set(BOUNDARIES)


def test_a_step_that_virtual_stages_cannot_share_is_refused():
    with pytest.raises(PackingError, match="a step of 3 rows: virtual stages need a multiple of 2"):
        run([iter([rows(3)])], chunks=2, every=2)


def test_the_end_of_the_data_is_that_of_an_iterator():
    with pytest.raises(StopIteration):
        run(iter([]))


def test_a_first_tensor_rank_without_iterator_is_refused():
    with pytest.raises(PackingError, match="needs an iterator"):
        run(None)


def test_cores_iterator_gives_the_step_again_for_a_second_run():
    from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, get_rerun_state_machine

    machine = get_rerun_state_machine()
    before = machine.get_mode()
    machine.set_mode(RerunMode.VALIDATE_RESULTS)
    try:
        wrapped = RerunDataIterator(iter([rows(2), rows(3)]))
        first = next(run(wrapped)[0])
        first["tokens"] = None  # as Core cuts it
        wrapped.rewind()
        again, count, *_ = run(wrapped)
        assert count == 2
        assert next(again)["tokens"] is not None
    finally:
        machine.set_mode(before)


def test_a_core_without_schedulers_is_refused():
    with pytest.raises(ConfigError, match="no scheduler of packed rows called default_dynamic_cp"):
        install("default_dynamic_cp")
