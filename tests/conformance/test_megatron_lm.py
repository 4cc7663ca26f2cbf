"""GPT and LLaVA trained by Megatron-LM's own ``pretrain`` on packs, in one, two and four processes, on the CPU."""

from __future__ import annotations

import importlib.util
import pickle
import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
if importlib.util.find_spec("megatron.training") is None or importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("megatron.training or the CPU stand-ins' Megatron-Bridge is not installed", allow_module_level=True)

from megatron_lm_ranks import EXISTING_SCRIPT, Case, result_of, run_cases

from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.line_file import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # minutes on a machine that is busy otherwise

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "megatron_lm.md"
# Rows that every layout can slice, so that one process reads what two read.
ROWS = {"context_parallel": 2, "pad_to_max_length": True}
LAYOUTS = {
    "tp2": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "cp2": ("--context-parallel-size", "2"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
}
FOUR = {  # of GPT, four processes
    "pp4": ("--pipeline-model-parallel-size", "4"),
    "dp2-cp2": ("--context-parallel-size", "2"),  # with 4 processes: two replicas
}
SAVED_AT, KILLED_AFTER = 2, 3
full = pytest.mark.full


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    """Runs all cases, in the fast tier GPT's of one and two processes; holds what their ranks saw."""
    from support.offline_processors import llava

    root = tmp_path_factory.mktemp("megatron_lm")
    source = make_data(root / "raw", conversations=80, seed=3, defects=False)
    convert(ConvertConfig(sources=(source,), out=root / "data", split={"train": 1.0}, workers=1))
    llava(28).save_pretrained(root / "llava")
    for name, processor in (("gpt", processor_path("text")), ("llava", root / "llava")):
        (root / f"{name}.yaml").write_text(
            f"data: {{path: {root / 'data'}, workers: 0}}\n"
            f"encoder: {{processor: {processor}}}\npacking: {{window: 16, drop_budget: 1.0}}\n"
        )
    script = root / "pretrain_gpt.py"
    script.write_text(EXISTING_SCRIPT)
    (sed,) = re.findall(r"^sed .*$", PAGE.read_text(), flags=re.MULTILINE)
    subprocess.run(["bash", "-c", sed], cwd=root, check=True)
    scripts = {"gpt": str(script), "llava": str(Path(__file__).with_name("megatron_lm_llava.py"))}

    def case(model, name, layout, steps, *arguments, **settings):
        words = ["--num-layers", "4" if model == "gpt" else "2", "--lr-decay-iters", "10"]
        words += ["--packing-config", str(root / f"{model}.yaml"), "--train-iters", str(steps), *layout, *arguments]
        return Case(f"{model}-{name}", scripts[model], words, rows_of=ROWS, **settings)

    both = FOUR["dp2-cp2"]

    def kept(model):
        saved = ("--save", str(root / f"ck-{model}"), "--save-interval", str(SAVED_AT))
        return *saved, "--dataloader-save", str(root / f"loader-{model}")

    def again(model):
        # Megatron-LM restores CUDA's generators or none.
        return *kept(model), "--load", str(root / f"ck-{model}"), "--no-load-rng"

    metrics = ("--packing-set", f"metrics.directory={root / 'metrics'}", "metrics.interval=1")
    logged = (*metrics, "--tensorboard-dir", str(root / "events"))
    held_out = ("--eval-interval", "2", "--eval-iters", "3", "--packing-valid-split", "train")
    cases = [case("gpt", f"evaluated-{ranks}", (), 4, *held_out, world=ranks) for ranks in (1, 2)]
    cases += [case(model, "one", (), 4, *(logged if model == "gpt" else ())) for model in scripts]
    cases += [case(model, name, words, 2, world=2) for model in scripts for name, words in LAYOUTS.items()]
    cases += [case("gpt", name, words, 4, world=4) for name, words in FOUR.items()]
    cases += [
        case("gpt", "replayed", (), 4, replay="gpt-dp2-cp2"),
        case("gpt", "killed", both, 4, *kept("gpt"), world=4, kill_after=KILLED_AFTER),
        case("gpt", "continued", both, 4, *again("gpt"), world=4),
        case("llava", "killed", (), 4, *kept("llava"), kill_after=KILLED_AFTER),
        case("llava", "continued", (), 4, *again("llava")),
    ]
    if request.config.getoption("--fast"):
        cases = [
            case
            for case in cases
            if case.name in ("gpt-one", "gpt-evaluated-1", "gpt-evaluated-2", *(f"gpt-{name}" for name in LAYOUTS))
        ]
    run_cases(cases, root)
    return root


def pieces(boundaries, rank):
    """Positions of a rank of two by the definition: of four equal pieces of each segment the outer or the inner two."""
    found = []
    for start, stop in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True):
        quarter = (stop - start) // 4
        for piece in (rank, 3 - rank):
            found += range(start + piece * quarter, start + (piece + 1) * quarter)
    return torch.tensor(found)


@full
def test_the_model_learns_from_packs_of_several_samples_and_of_several_images(folder):
    one = result_of(folder, "gpt-one")
    assert one["losses"][3] < one["losses"][0] - 0.05
    assert len(one["batches"]) == 4 * 2  # steps, rows of a step
    assert sum(batch["cu_seqlens"].numel() > 2 for batch in one["batches"]) > 2
    assert len({tuple(batch["tokens"][0].tolist()) for batch in one["batches"]}) > 5
    pixels = [batch["visual_inputs"] for batch in result_of(folder, "llava-one")["batches"]]
    assert any(found and found["pixel_values"].shape[0] > 1 for found in pixels)


@pytest.mark.parametrize("model", ["gpt", pytest.param("llava", marks=full)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradient_norms_of_two_processes_are_those_of_one(folder, model, layout):
    one, last = result_of(folder, f"{model}-one"), result_of(folder, f"{model}-{layout}", rank=1)
    print(f"\n{model} {layout}: {one['losses'][:2]} {last['losses']}")
    assert len(last["losses"]) == 2
    torch.testing.assert_close(last["losses"], one["losses"][:2], rtol=0, atol=1e-5)
    torch.testing.assert_close(last["norms"], one["norms"][:2], rtol=0, atol=1e-4)


def test_tensor_parallel_ranks_get_the_same_batch(folder):
    whole = result_of(folder, "gpt-one")["batches"]
    for rank in range(2):
        for own, expected in zip(result_of(folder, "gpt-tp2", rank)["batches"], whole, strict=False):
            torch.testing.assert_close(own, expected, rtol=0, atol=0)


def test_context_parallel_ranks_get_their_pieces_of_it_and_the_boundaries_of_the_whole(folder):
    whole = result_of(folder, "gpt-one")["batches"]
    for rank in range(2):
        for own, expected in zip(result_of(folder, "gpt-cp2", rank)["batches"], whole, strict=False):
            mine = pieces(expected["cu_seqlens_padded"], rank)
            for name in ("tokens", "labels", "loss_mask", "position_ids", "padding_mask"):
                assert torch.equal(own[name], expected[name][..., mine]), name
            for name in ("cu_seqlens", "cu_seqlens_padded"):
                assert torch.equal(own[name], expected[name])
            assert own["max_seqlen"] == expected["max_seqlen"]
            # Told, not guessed by the kernel, on every rank.
            padded = not torch.equal(own["cu_seqlens"], own["cu_seqlens_padded"])
            assert own["pad_between_seqs"] is expected["pad_between_seqs"] is padded


def test_each_pipeline_stage_gets_what_it_needs_and_the_boundaries(folder):
    whole = result_of(folder, "gpt-one")["batches"]
    first, last = (result_of(folder, "gpt-pp2", rank)["batches"] for rank in range(2))
    for begin, end, expected in zip(first, last, whole, strict=False):
        assert torch.equal(begin["tokens"], expected["tokens"])
        assert torch.equal(end["labels"], expected["labels"])
        assert torch.equal(end["loss_mask"], expected["loss_mask"])
        assert begin["labels"] is begin["loss_mask"] is end["tokens"] is end["position_ids"] is None
        for stage in (begin, end):
            assert torch.equal(stage["cu_seqlens"], expected["cu_seqlens"])
            assert torch.equal(stage["cu_seqlens_padded"], expected["cu_seqlens_padded"])
            assert torch.equal(stage["padding_mask"], expected["padding_mask"])


def test_metrics_count_the_tokens_of_the_batches_and_reach_the_writer_of_megatron_lm(folder):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    batches = result_of(folder, "gpt-one")["batches"]
    _, *lines, last = read_lines(folder / "metrics" / "rank0.jsonl")
    assert last["ended"]
    assert [line["pack"] for line in lines] == [2, 4, 6, 8]
    fills = []
    for line, step in zip(lines, (batches[at : at + 2] for at in range(0, 8, 2)), strict=True):
        sums = line["last"]
        padding = sum(int(batch["padding_mask"].sum()) for batch in step)
        assert sums["alignment"] + sums["tail"] == padding
        assert sums["real"] + padding == sum(batch["tokens"].numel() for batch in step)
        assert sums["real"] + padding + sums["unused"] == 2 * 512
        fills.append(sums["real"] / 1024)
    (events,) = (folder / "events").glob("events*")
    values = [value for event in loader.EventFileLoader(str(events)).Load() for value in event.summary.value]
    posted = [value.tensor.float_val[0] for value in values if value.tag == "packing/fill"]
    assert all(any(fill == pytest.approx(each, rel=1e-6) for each in fills) for fill in posted)
    assert posted[-1] == pytest.approx(fills[-1], rel=1e-6), "the last step too, which ends after the last pack"


@full
def test_vision_models_get_whole_rows_on_every_rank_and_pixels_on_the_first_stage_only(folder):
    whole = result_of(folder, "llava-one")["batches"]
    for layout in LAYOUTS:
        for rank in range(2):
            batches = result_of(folder, f"llava-{layout}", rank)["batches"]
            for own, expected in zip(batches, whole[: len(batches)], strict=True):
                for name in ("tokens", "labels", "loss_mask", "position_ids"):
                    assert torch.equal(own[name], expected[name])
                pixels = dict(own["visual_inputs"] or {}).get("pixel_values")
                if expected["visual_inputs"] and not (layout == "pp2" and rank == 1):
                    assert torch.equal(pixels, expected["visual_inputs"]["pixel_values"])
                else:
                    assert pixels is None


@full
def test_middle_pipeline_stages_get_the_boundaries_and_nothing_else_of_a_row(folder):
    whole = result_of(folder, "gpt-one")
    stages = [result_of(folder, "gpt-pp4", rank) for rank in range(4)]
    for stage in stages:
        for own, expected in zip(stage["batches"], whole["batches"], strict=True):
            assert torch.equal(own["cu_seqlens"], expected["cu_seqlens"])
            assert torch.equal(own["padding_mask"], expected["padding_mask"])
    fields = ("tokens", "position_ids", "labels", "loss_mask", "visual_inputs")
    assert all(batch[name] is None for stage in stages[1:3] for batch in stage["batches"] for name in fields)
    torch.testing.assert_close(stages[3]["losses"], whole["losses"], rtol=0, atol=1e-5)


@full
def test_two_replicas_train_on_different_packs_with_the_losses_of_one_process_on_all_of_them(folder):
    ranks = [result_of(folder, "gpt-dp2-cp2", rank) for rank in range(4)]
    packs = [[tuple(batch["tokens"].flatten().tolist()) for batch in rank["batches"]] for rank in ranks]
    assert all(len(own) == 4 for own in packs)
    assert not set(packs[0]) & set(packs[2])
    assert not set(packs[1]) & set(packs[3])
    for first, second in (ranks[:2], ranks[2:]):  # the two context-parallel ranks of a replica
        for one, other in zip(first["batches"], second["batches"], strict=True):
            assert torch.equal(one["cu_seqlens"], other["cu_seqlens"])
    alone = result_of(folder, "gpt-replayed")
    torch.testing.assert_close(ranks[3]["losses"], alone["losses"], rtol=0, atol=1e-5)
    torch.testing.assert_close(ranks[3]["norms"], alone["norms"], rtol=0, atol=1e-4)


def test_every_evaluation_has_the_same_packs_on_any_number_of_replicas(folder):
    """Two after every second step, and one at the end; the training's rows are those of the run without."""
    found, trained = {}, {}
    for ranks in (1, 2):
        each = [pickle.loads((folder / f"gpt-evaluated-{ranks}-rows-{rank}.pt").read_bytes()) for rank in range(ranks)]
        rows = [tuple(row.sample_keys) for step in zip(*each, strict=True) for row in step]
        assert len(rows) == 4 * 2 + 3 * 6
        found[ranks] = rows[4:10], rows[14:20], rows[20:]
        trained[ranks] = rows[:4] + rows[10:14]
    first = found[1][0]
    assert len(set(first)) == 6
    assert all(evaluation == first for evaluations in found.values() for evaluation in evaluations)
    plain = pickle.loads((folder / "gpt-one-rows-0.pt").read_bytes())
    assert trained[1] == [tuple(row.sample_keys) for row in plain]


@full
@pytest.mark.parametrize(("model", "uninterrupted", "ranks"), [("gpt", "dp2-cp2", 4), ("llava", "one", 1)])
def test_a_run_that_was_killed_continues_with_the_next_packs_and_exactly_the_same_losses(
    folder, model, uninterrupted, ranks
):
    for rank in range(ranks):
        names = (uninterrupted, "killed", "continued")
        whole, killed, rest = (result_of(folder, f"{model}-{name}", rank) for name in names)
        assert len(whole["losses"]) == 4
        assert killed["losses"] == whole["losses"][:KILLED_AFTER]
        assert rest["losses"] == whole["losses"][SAVED_AT:]
        assert rest["norms"] == whole["norms"][SAVED_AT:]
        left = len(whole["batches"]) * (4 - SAVED_AT) // 4
        for own, expected in zip(rest["batches"], whole["batches"][-left:], strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=0)


@full
def test_one_file_of_loader_state_is_written_for_a_replica(folder):
    states = sorted(str(path.relative_to(folder / "loader-gpt")) for path in (folder / "loader-gpt").rglob("*.pt"))
    assert states == [
        f"iter_000000{step}/mp_rank_00/train_dataloader_dprank{replica:03d}.pt" for step in (2, 4) for replica in (0, 1)
    ]
