"""GPT, LLaVA and mixtures of experts trained by Megatron-LM's own ``pretrain`` on packs, on the CPU."""

import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import bridge_here  # noqa: F401
import pytest
import torch
from forking_python import quick_python
from manual.blocks import read_page
from support.megatron_lm_ranks import COMMON, EXISTING_SCRIPT, Case, result_of, run_cases
from support.offline_processors import glm4v

from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.line_file import read_lines

if importlib.util.find_spec("megatron.training") is None:
    pytest.skip("megatron.training is not installed", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
PAGE = ROOT / "docs" / "megatron_lm.md"
# Rows that every layout can slice, so that one process reads what two read.
ROWS = {"context_parallel": 2, "pad_to_max_length": True}
LAYOUTS = {
    "tp2": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "cp2": ("--context-parallel-size", "2"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
}
LAYOUTS["tp2-cp2"] = (*LAYOUTS["tp2"], *LAYOUTS["cp2"])
BOTH = ("--context-parallel-size", "2")  # with 4 processes: two replicas
SAVED_AT, KILLED_AFTER = 2, 3
full = pytest.mark.full


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    """Runs all cases, in the fast tier some of GPT; holds what their ranks saw."""
    from support.offline_processors import llava

    root = tmp_path_factory.mktemp("megatron_lm")
    source = make_data(root / "raw", conversations=80, seed=3, defects=False)
    convert(ConvertConfig(sources=(source,), out=root / "data", split={"train": 1.0}, workers=1))
    llava(28).save_pretrained(root / "llava")
    limits = {"shortest_edge": 4 * 28 * 28, "longest_edge": 32 * 28 * 28}
    glm4v(limits, limits).save_pretrained(root / "glm4v")
    small = "min_pixels: 1024, max_pixels: 16384, video_min_pixels: 1024, video_max_pixels: 16384"
    encoders = {name: f"processor: {root / name}" for name in ("llava", "glm4v")}
    encoders |= {"gpt": f"processor: {processor_path('text')}"}
    encoders |= {"qwen3_vl": f"processor: {processor_path('qwen3_vl')}, {small}"}
    for name, encoder in encoders.items():
        (root / f"{name}.yaml").write_text(
            f"data: {{path: {root / 'data'}, workers: 0}}\n"
            f"encoder: {{{encoder}}}\npacking: {{window: 16, drop_budget: 1.0}}\n"
        )
    script = root / "pretrain_gpt.py"
    script.write_text(EXISTING_SCRIPT)
    (sed,) = re.findall(r"^sed .*$", PAGE.read_text(), flags=re.MULTILINE)
    subprocess.run(["bash", "-c", sed], cwd=root, check=True)
    scripts = {"gpt": str(script), "llava": str(SUPPORT / "megatron_lm_llava.py")}

    def case(model, name, layout, steps, *arguments, **settings):
        words = ["--num-layers", "3" if model == "gpt" else "2", "--lr-decay-iters", "10"]
        words += ["--packing-config", str(root / f"{model}.yaml"), "--train-iters", str(steps), *layout, *arguments]
        rows = ROWS if model == "gpt" else {"context_parallel": 2, "pad_to_max_length": False}
        return Case(f"{model}-{name}", scripts[model], words, rows_of=rows, **settings)

    kept = ("--save", str(root / "checkpoints"), "--save-interval", str(SAVED_AT))
    # Megatron-LM restores CUDA's generators or none.
    again = (*kept, "--load", str(root / "checkpoints"), "--no-load-rng")

    busy = ("--packing-set", "data.workers=2")
    ended = (*busy, "--save", str(root / "ended"), "--save-interval", "100")

    metrics = ("--packing-set", f"metrics.directory={root / 'metrics'}", "metrics.interval=1")
    logged = (*metrics, "--tensorboard-dir", str(root / "events"))
    held_out = ("--eval-interval", "2", "--eval-iters", "3", "--packing-valid-split", "train")
    cases = [case("gpt", f"evaluated-{ranks}", (), 4, *held_out, world=ranks) for ranks in (1, 2)]
    cases += [case(model, "one", (), 4, *(logged if model == "gpt" else ())) for model in scripts]
    two = [("gpt", "tp2"), ("gpt", "cp2"), *(("llava", name) for name in LAYOUTS)]
    cases += [case(model, name, LAYOUTS[name], 2, world=2 * len(name.split("-"))) for model, name in two]
    overlapping = ("--overlap-grad-reduce", "--packing-set", "packing.dummy_image=true")
    cases += [case("llava", f"overlap-{ranks}", (), 2, *overlapping, world=ranks) for ranks in (1, 2)]
    cases += [
        case("gpt", "pp3", ("--pipeline-model-parallel-size", "3"), 4, world=3),
        case("gpt", "dp2-cp2", BOTH, 4, world=4),
        case("gpt", "replayed", (), 4, replay="gpt-dp2-cp2"),
        case("gpt", "killed", BOTH, 4, *kept, world=4, kill_after=KILLED_AFTER),
        case("gpt", "continued", BOTH, 4, *again, world=4),
        case("gpt", "busy", (), 4, *busy, world=2),
        case("gpt", "ended", (), 4, *ended, "--exit-signal-handler", world=2, end_after=SAVED_AT),
        case("gpt", "after", (), 4, *ended, "--load", str(root / "ended"), "--no-load-rng", world=2),
    ]
    models = tuple(OF_MODEL)
    if request.config.getoption("--fast"):
        quick, models = ("gpt-one", "gpt-evaluated-1", "gpt-evaluated-2", "gpt-tp2", "gpt-cp2"), ("gpt",)
        cases = [case for case in cases if case.name in quick]
    run_cases([*cases, *(case for model in models for case in cases_of(root, model))], root)
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
    assert any(batch["tokens"].size(1) % 8 == 4 for batch in result_of(folder, "llava-one")["batches"][:4])


@pytest.mark.parametrize(
    ("model", "layout"),
    [("gpt", "tp2"), ("gpt", "cp2"), *(pytest.param("llava", name, marks=full) for name in LAYOUTS)],
)
def test_losses_and_gradient_norms_of_several_processes_are_those_of_one(folder, model, layout):
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
            mine = pieces(expected["physical"], rank)
            for name in ("tokens", "labels", "loss_mask", "position_ids", "padding_mask"):
                assert torch.equal(own[name], expected[name][..., mine]), name
            for name in ("cu_seqlens", "physical"):
                assert torch.equal(own[name], expected[name])
            assert own["max_seqlen"] == expected["max_seqlen"]
            # Told, not guessed by the kernel, on every rank.
            padded = not torch.equal(own["cu_seqlens"], own["physical"])
            assert own["pad_between_seqs"] is expected["pad_between_seqs"] is padded


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
        for rank in range(2 * len(layout.split("-"))):
            batches = result_of(folder, f"llava-{layout}", rank)["batches"]
            for own, expected in zip(batches, whole[: len(batches)], strict=True):
                width = own["tokens"].size(1)
                length = expected["tokens"].size(1)
                assert width == 512 + 4 if layout == "pp2" else width % 8 == 0 or "-" not in layout
                for name in ("tokens", "labels", "loss_mask", "position_ids"):
                    assert torch.equal(own[name][:, :length], expected[name])
                assert own["physical"].tolist() == [*expected["physical"].tolist(), *[width] * (width > length)]
                assert not own["loss_mask"][:, length:].any()
                pixels = dict(own["visual_inputs"] or {}).get("pixel_values")
                if expected["visual_inputs"] and not (layout == "pp2" and rank == 1):
                    assert torch.equal(pixels, expected["visual_inputs"]["pixel_values"])
                else:
                    assert pixels is None


@full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dummy_image_gives_an_overlapped_reduction_every_gradient_that_it_waits_for(folder, ranks):
    found = [result_of(folder, f"llava-overlap-{ranks}", rank) for rank in range(ranks)]
    assert all(batch["visual_inputs"]["pixel_values"].numel() for each in found for batch in each["batches"])
    one, *others = (each["losses"] for each in found)
    assert len(one) == 2
    assert one[1] < one[0]
    assert all(losses == one for losses in others)


@full
def test_each_pipeline_stage_gets_what_it_needs_and_the_boundaries(folder):
    whole = result_of(folder, "gpt-one")
    stages = [result_of(folder, "gpt-pp3", rank) for rank in range(3)]
    needed = [("tokens", "position_ids"), (), ("labels", "loss_mask")]
    for stage, names in zip(stages, needed, strict=True):
        for own, expected in zip(stage["batches"], whole["batches"], strict=True):
            for name in ("cu_seqlens", "physical", "padding_mask", *names):
                assert torch.equal(own[name], expected[name]), name
            others = {"tokens", "position_ids", "labels", "loss_mask", "visual_inputs"} - set(names)
            assert all(own[name] is None for name in others)
    torch.testing.assert_close(stages[2]["losses"], whole["losses"], rtol=0, atol=1e-5)
    torch.testing.assert_close(stages[2]["norms"], whole["norms"], rtol=0, atol=1e-4)


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
def test_a_run_that_was_killed_continues_with_the_next_packs_and_exactly_the_same_losses(folder):
    for rank in range(4):
        whole, killed, rest = (result_of(folder, f"gpt-{name}", rank) for name in ("dp2-cp2", "killed", "continued"))
        assert len(whole["losses"]) == 4
        assert killed["losses"] == whole["losses"][:KILLED_AFTER]
        assert rest["losses"] == whole["losses"][SAVED_AT:]
        assert rest["norms"] == whole["norms"][SAVED_AT:]
        left = len(whole["batches"]) * (4 - SAVED_AT) // 4
        for own, expected in zip(rest["batches"], whole["batches"][-left:], strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=0)
    beside = folder / "checkpoints" / "energon"  # no --dataloader-save
    states = sorted(str(path.relative_to(beside)) for path in beside.rglob("*.pt"))
    assert states == [
        f"iter_000000{step}/mp_rank_00/train_dataloader_dprank{replica:03d}.pt" for step in (2, 4) for replica in (0, 1)
    ]


EXPERT_ROWS = {"context_parallel": 4, "tensor_parallel": 2, "sequence_parallel": True, "pad_to_max_length": True}


@full
def test_a_run_whose_processes_all_get_sigterm_saves_and_continues_exactly(folder):
    for rank in range(2):
        whole, ended, rest = (result_of(folder, f"gpt-{name}", rank) for name in ("busy", "ended", "after"))
        done = len(ended["losses"])
        assert SAVED_AT <= done < 4
        assert ended["losses"] + rest["losses"] == whole["losses"]
        assert ended["norms"] + rest["norms"] == whole["norms"]
        for own, expected in zip(ended["batches"] + rest["batches"], whole["batches"], strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=0)


TENSOR, CONTEXT = "--tensor-model-parallel-size", "--context-parallel-size"
EXPERT_LAYOUTS = {  # arguments, processes
    "ep2": (("--expert-model-parallel-size", "2"), 2),
    "one": ((), 1),
    "cp4": ((CONTEXT, "4"), 4),
    "tp2-cp2": ((TENSOR, "2", "--sequence-parallel", CONTEXT, "2"), 4),
}
# GLM-4.5V of Bridge has no context-parallel code.
OF_MODEL = {"gpt": ("ep2", "one", "tp2-cp2"), "glm4v": ("ep2", "one"), "qwen3_vl": ("ep2", "one", "cp4")}
PLAIN = ("ep2", "one")
EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0.5", "--moe-z-loss-coeff", "0.01")
BIAS = ("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid", "--moe-router-dtype", "fp32")


def cases_of(root, model):
    """Of a model: a run for each layout, on the rows of the first one, with masks and without."""
    script = str(root / "pretrain_gpt.py" if model == "gpt" else SUPPORT / "megatron_lm_experts.py")
    words = ["--num-layers", "2", "--lr-decay-iters", "10", "--train-iters", "1", "--clip-grad", "0.0", *EXPERTS]
    words += ["--packing-config", str(root / f"{model}.yaml"), "--moe-token-dispatcher-type", "alltoall"]
    words += BIAS if model == "gpt" else ()
    for how, layouts in (("mask", OF_MODEL[model]), ("plain", PLAIN if model == "gpt" else ())):
        for layout in layouts:
            arguments, world = EXPERT_LAYOUTS[layout]
            replay = None if layout == "ep2" else f"{model}-ep2-{how}"
            settings = {"rows_of": EXPERT_ROWS, "replay": replay, "gradients": True, "mask": how == "mask"}
            yield Case(f"{model}-{layout}-{how}", script, [*words, *arguments], world=world, **settings)


def difference(ours, theirs):
    """Norm of the difference, as a share of the norm of ``theirs``."""
    assert set(ours) == set(theirs)
    squares = [(float((ours[name] - theirs[name]).double().square().sum())) for name in theirs]
    whole = [float(each.double().square().sum()) for each in theirs.values()]
    return (sum(squares) / sum(whole)) ** 0.5


@pytest.mark.parametrize(
    ("model", "mask"),
    [
        ("gpt", "mask"),
        ("gpt", "plain"),
        pytest.param("glm4v", "mask", marks=full),
        pytest.param("qwen3_vl", "mask", marks=full),
    ],
)
def test_the_gradient_of_experts_is_that_of_one_process_in_every_layout(folder, model, mask):
    found = {case.name.split(f"{model}-")[1]: case for case in cases_of(folder, model) if case.name.endswith(mask)}
    one = result_of(folder, found[f"one-{mask}"].name)["gradients"]
    routers = [name for name in one if "router.weight" in name]
    assert routers
    for name, case in found.items():
        own = result_of(folder, case.name)["gradients"]
        whole = difference(own, one)
        router = difference({each: own[each] for each in routers}, {each: one[each] for each in routers})
        print(f"{model} {name}: all {whole:.1e}, routers {router:.1e}")
        assert whole < 1e-4, name
        assert router < 1e-4, name


def test_padding_counts_for_the_experts_where_the_mask_is_kept_from_them(folder):
    with_mask, plain = (
        result_of(folder, case.name)["gradients"] for case in cases_of(folder, "gpt") if case.name.startswith("gpt-one")
    )
    assert difference(with_mask, plain) > 1e-3
    assert any(bool(batch["padding_mask"].any()) for batch in result_of(folder, "gpt-one-mask")["batches"])


PAGE_STEPS = [block.text for block in read_page(ROOT / "docs" / "megatron_lm.md").blocks]

# A machine without a GPU needs the first line.
PAGE_SCRIPT = f"from support.megatron_lm_ranks import prepare; prepare()\n{EXISTING_SCRIPT}"
OWN = """--num-layers 2 --max-position-embeddings 4096 --train-iters 2 --lr-decay-iters 10 --ckpt-format torch
  --save checkpoints --save-interval 2"""


@pytest.fixture(scope="module")
def page_folder(tmp_path_factory):
    """What the page's user begins with."""
    page_folder = tmp_path_factory.mktemp("page")
    turns = [("human", "Tell me about the number {}."), ("gpt", "The number {} comes after the one before it. " * 9)]
    with (page_folder / "chats.jsonl").open("w") as chats:
        for number in range(400):
            said = [{"from": who, "value": what.replace("{}", str(number))} for who, what in turns * (1 + number % 5)]
            chats.write(json.dumps({"id": f"chat-{number}", "conversations": said}) + "\n")
    (page_folder / "pretrain_gpt.py").write_text(PAGE_SCRIPT)
    (page_folder / "arguments.txt").write_text(" ".join([*COMMON, OWN]) + "\n")
    (page_folder / "path" / "or").mkdir(parents=True)
    (page_folder / "path" / "or" / "name").symlink_to(processor_path("text"))
    (page_folder / "scripts").symlink_to(ROOT / "scripts")
    return page_folder


def bash(command, page_folder):
    """The finished command, in an environment as after ``source .venv/bin/activate``."""
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHON": quick_python(),
        "PYTHON_EXEC": quick_python(),
        "PYTHONPATH": ":".join(filter(None, (str(ROOT), str(SUPPORT.parent), os.environ.get("PYTHONPATH")))),
    }
    words = ["bash", "-c", f"set -euo pipefail\n{command}"]
    environment = os.environ | own
    return subprocess.run(
        words, cwd=page_folder, env=environment, capture_output=True, text=True, timeout=500, check=False
    )


@pytest.mark.full
def test_the_five_steps_train_an_existing_script_on_packs_of_its_conversations(page_folder):
    (index,) = [block for block in read_page(ROOT / "docs" / "index.md").blocks if block.language == "bash"]
    assert index.text == PAGE_STEPS[2], "docs/index.md shows the third step"
    for number, command in enumerate(PAGE_STEPS, start=1):
        done = bash(command, page_folder)
        assert done.returncode == 0, f"step {number}: {done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        if number == 4:
            assert "4 tokens" in done.stdout  # what TP 2 with sequence parallelism and CP 2 align a sample to
            with (page_folder / "arguments.txt").open("a") as arguments:
                arguments.write("--global-batch-size 2\n")
    losses = [float(loss) for loss in re.findall(r"lm loss: ([0-9.E+-]+)", done.stdout)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    states = [path.name for path in (page_folder / "checkpoints" / "loader" / "iter_0000002").rglob("*.pt")]
    assert states == ["train_dataloader_dprank000.pt"]
