"""Megatron-LM's command line with our arguments group, and what is refused before a run starts."""

import argparse
import ast
import codecs
import functools
import itertools
import json
import math
import os
import pickle
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from support import multimodal_arguments
from support.megatron_lm_ranks import COMMON

from energon_packing import megatron_lm
from energon_packing.cli.main import cli
from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.energon.loader import build_loader
from energon_packing.energon.states import read_state as state_in_file
from energon_packing.errors import ConfigError
from energon_packing.megatron_lm import dataloader, gpt
from energon_packing.megatron_lm.arguments import (
    _OWNED_BY_MEGATRON,
    UNREAD,
    add_energon_packing_args,
    row_length,
    run_config_of,
)
from energon_packing.megatron_lm.dataloader import packs_left, saved_state
from energon_packing.validate.run_source import ArgumentsRun, _arguments, enforce_rules

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "megatron_lm.md"
HARMLESS = ROOT / "tests" / "support" / "megatron_lm_arguments.txt"
REFUSED = [name for names in UNREAD.values() for name in names]
# What Megatron-LM's own parser makes of a plain command line, as far as we read it.
PLAIN = {
    "dataloader_type": "external",
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "seq_length": 4096,
    "num_workers": 2,
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
    "calculate_per_token_loss": True,
    "ddp_average_in_collective": False,
}


@pytest.fixture
def arguments(tmp_path):
    """``arguments(yaml, "--packing-set", ..., tensor_model_parallel_size=2)``: a parsed namespace."""

    def make(text="packing: {window: 99}", *words, **megatrons):
        file = tmp_path / "run.yaml"
        file.write_text(text)
        parser = add_energon_packing_args(argparse.ArgumentParser())
        args = parser.parse_args(["--packing-config", str(file), *words])
        vars(args).update(PLAIN | megatrons)
        return args

    return make


def test_the_layout_and_the_length_come_from_megatron_lm_and_the_rest_from_the_file(arguments):
    config = run_config_of(
        arguments(
            "data: {path: here, seed: 7}\npacking: {window: 99}",
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            context_parallel_size=4,
            num_workers=3,
        )
    )
    assert (config.data.path, config.data.seed, config.data.workers) == ("here", 7, 3)
    assert (config.packing.window, config.packing.seq_length) == (99, 4096)
    assert config.parallel.multiple == 8
    assert not config.packing.pad_to_max_length


def test_overrides_change_the_file_and_the_files_workers_count(arguments):
    words = ("--packing-set", "packing.window=5", "data.workers=0", "--packing-set", "encoder.train_on=all")
    config = run_config_of(arguments("packing: {window: 99}", *words))
    assert (config.packing.window, config.data.workers, config.encoder.train_on) == (5, 0, "all")
    with pytest.raises(ConfigError, match=r"packing\.seq_length is 8192, but --seq-length is 4096"):
        run_config_of(arguments("", "--packing-set", "packing={seq_length: 8192}"))


def test_every_argument_of_the_group_is_on_the_page(arguments):
    parser = argparse.ArgumentParser(add_help=False)
    add_energon_packing_args(parser)
    rows = set(re.findall(r"^\| `(--[\w-]+)", PAGE.read_text(), flags=re.MULTILINE))
    assert rows == set(re.findall(r"--[\w-]+", parser.format_usage()))


def test_a_script_that_has_dataloader_save_keeps_its_own():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataloader-save", default="its own")
    assert add_energon_packing_args(parser).parse_args([]).dataloader_save == "its own"


@pytest.mark.parametrize("sizes", [{"pipeline_model_parallel_size": 2}, {"expert_model_parallel_size": 2}])
def test_stages_and_experts_get_rows_of_one_width(arguments, sizes):
    assert run_config_of(arguments(**sizes)).packing.pad_to_max_length
    with pytest.raises(ConfigError, match="pad_to_max_length is false"):
        run_config_of(arguments("packing: {pad_to_max_length: false}", **sizes))


def test_no_packs_are_made_ahead_where_cuda_graphs_are_captured(arguments):
    depths = [
        run_config_of(arguments("data: {packs_ahead: 3}", **given)).data.depth
        for given in ({}, {"cuda_graph_impl": "none"}, {"cuda_graph_impl": "local"})
    ]
    assert depths == [3, 3, 0]


def test_a_vision_script_that_overwrites_the_length_keeps_the_rows(arguments):
    assert run_config_of(arguments(seq_length=577, dataloader_seq_length=2048)).packing.seq_length == 2048
    assert run_config_of(arguments(seq_length=577, packing_row_length=1024)).packing.seq_length == 1024


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ("--seq-length 576 --decoder-seq-length 2048", 2048),  # sft_mistral_clip.sh
        ("--seq-length 1024 --decoder-seq-length 16384 --packing-seq-length 8192 --dataloader-seq-length 16384", 8192),
        ("--seq-length 577 --dataloader-seq-length 4096", 4096),  # pretrain_vlm.py
        ("--seq-length 4096", 4096),
    ],
)
def test_rows_of_megatron_lms_own_scripts_are_as_long_as_their_language_model_reads(arguments, lengths, rows):
    words = lengths.split()
    given = {name[2:].replace("-", "_"): int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    assert run_config_of(arguments(**given)).packing.seq_length == rows
    told = CliRunner().invoke(cli, ["validate", "--no-data", "--no-bridge", "--json", "--", *words])
    assert json.loads(told.stdout)["resolved"]["seq_length"] == rows
    named = "--" + next(name for name, value in given.items() if value == rows).replace("_", "-")
    with pytest.raises(ConfigError, match=f"packing.seq_length is 64, but {named} is {rows}"):
        run_config_of(arguments("packing: {seq_length: 64}", **given))


# As its branch dev parses them.
DYNAMIC = {"dynamic_context_parallel": True, "sequence_packing_scheduler": "default_dynamic_cp"}
DYNAMIC |= {"max_seqlen_per_dp_cp_rank": 512, "min_dynamic_context_parallel_size": 1}


def test_rows_of_their_own_size_follow_from_the_arguments_and_the_file(arguments):
    stages = {"pipeline_model_parallel_size": 2, "eval_global_batch_size": 6}
    config = run_config_of(arguments("parallel: {max_dynamic_context_parallel_size: 4}", **DYNAMIC, **stages))
    assert (config.parallel.context_parallel, config.parallel.max_seqlen_per_dp_cp_rank) == ("dynamic", 512)
    assert config.training.eval_global_batch_size == 6
    assert not config.packing.pad_to_max_length, "Core takes rows of any size from a scheduler, between stages too"
    file = "parallel: {max_seqlen_per_dp_cp_rank: 256}"
    given = DYNAMIC | {"max_seqlen_per_dp_cp_rank": None}  # as `parse_and_validate_args` leaves it
    assert run_config_of(arguments(file, **given)).parallel.tokens_of_a_rank(4096) == 256
    assert run_config_of(arguments("", **given)).parallel.tokens_of_a_rank(4096) == 512


def test_validate_reads_the_arguments_of_rows_of_their_own_size(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("data: {path: plan.parquet}")
    words = [
        "--seq-length",
        "4096",
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "8",
        "--packing-config",
        str(file),
    ]
    words += ["--dynamic-context-parallel", "--max-seqlen-per-dp-cp-rank=512", "--calculate-per-token-loss"]
    told = CliRunner().invoke(cli, ["validate", "--no-data", "--no-bridge", "--world-size", "8", "--", *words])
    assert told.exit_code == 0, told.output
    told = CliRunner().invoke(cli, ["validate", "--no-data", "--no-bridge", "--world-size", "8", "--", *words[:-1]])
    assert told.exit_code == 1
    assert "ours/dynamic-context-parallel" in told.output


def test_a_scheduler_needs_a_plan_of_text(started, monkeypatch):
    scheduler = {"iteration": 0, "sequence_packing_scheduler": "dp_balanced"}
    with pytest.raises(ConfigError, match=r"--sequence-packing-scheduler packs rows again, and here is no plan"):
        started((9, 0, 0), **scheduler)
    monkeypatch.setattr(dataloader, "has_global_packs", lambda path: True)
    facts = SimpleNamespace(summary={"datasets": [{"name": "charts", "rows_with_media": 3}]})
    monkeypatch.setattr(dataloader, "plan_behind", lambda path: SimpleNamespace(facts=facts))
    with pytest.raises(ConfigError, match="takes rows of text with positions of one axis, and charts has media"):
        started((9, 0, 0), **scheduler)


def test_a_forward_step_of_whole_rows_refuses_a_scheduler_that_cuts_them(arguments, monkeypatch):
    from megatron import training

    args = arguments("", **DYNAMIC)
    monkeypatch.setattr(training, "get_args", lambda: args)
    monkeypatch.setattr(training, "get_timers", lambda: lambda *_, **__: SimpleNamespace(start=int, stop=int))
    with pytest.raises(ConfigError, match="needs whole rows"):
        gpt.read(iter(()), False, whole_row=True)


@pytest.mark.parametrize(
    ("text", "megatrons", "named"),
    [
        ("packing: {seq_length: 8192}", {}, "packing.seq_length is 8192, but --seq-length is 4096"),
        ("parallel: {tensor_parallel: 2}", {}, "parallel.tensor_parallel is 2, but --tensor-model-parallel-size is 1"),
        ("training: {global_batch_size: 8}", {}, "training.global_batch_size is 8"),
        ("parallel: {eval_context_parallel: 2}", {}, "eval_context_parallel"),
        (
            "parallel: {pipeline_parallel: 2, virtual_pipeline: 2}",
            {"pipeline_model_parallel_size": 2},
            "virtual_pipeline",
        ),
        ("packing: {windo: 9}", {}, "did you mean 'window'"),
        ("encoder: {loss_weighting: square}", {"calculate_per_token_loss": False}, "ours/weights-need-token-loss"),
        ("", {"dataloader_type": "cyclic"}, "--dataloader-type is cyclic"),
        ("", {"micro_batch_size": 2}, "--micro-batch-size is 2"),
        ("", {"virtual_pipeline_model_parallel_size": 2}, "Virtual pipeline"),
        ("", {"mtp_num_layers": 1}, "--mtp-num-layers"),
        ("", {"full_validation": True}, "--full-validation"),
        ("", {"use_varlen_dataset": True}, "--use-varlen-dataset packs rows again"),
        ("", {"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
        ("", {"context_parallel_size": 2, "calculate_per_token_loss": False}, "add --calculate-per-token-loss"),
        ("", {"ddp_average_in_collective": True}, "--ddp-average-in-collective"),
        ("parallel: {context_parallel: dynamic}", {}, "--dynamic-context-parallel is not given"),
        ("parallel: {context_parallel: 2}", DYNAMIC, "is 2, but --dynamic-context-parallel is given"),
        ("parallel: {max_seqlen_per_dp_cp_rank: 128}", DYNAMIC, "but --max-seqlen-per-dp-cp-rank is 512"),
        ("packing: {pad_to_max_length: true}", DYNAMIC, "packing.pad_to_max_length is about packs"),
        ("", DYNAMIC | {"tp_comm_overlap": True}, "--tp-comm-overlap has buffers"),
        ("", DYNAMIC | {"rampup_batch_size": [1, 2, 3]}, "needs a global batch of one size"),
        ("", {"seq_length": 4098, "context_parallel_size": 2, "pipeline_model_parallel_size": 2}, "use 4096"),
    ],
)
def test_what_cannot_work_is_refused_with_its_name(arguments, text, megatrons, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        run_config_of(arguments(text, **megatrons))


@pytest.fixture(scope="module")
def megatrons_parser():
    """The parser of the installed Megatron-LM, with our group."""
    theirs = pytest.importorskip("megatron.training.arguments")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    theirs.add_megatron_arguments(parser)
    return add_energon_packing_args(parser)


def named_in_our_code():
    """Arguments that the package reads: ``args.NAME``, and names in its texts."""
    names = set(_OWNED_BY_MEGATRON.values())
    for file in Path(megatron_lm.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("args", "get_args()"):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = re.findall(r"--([a-z][\w-]+)", node.value)
                words += re.findall(r"\A[a-z]+[-_][a-z_-]+\Z", node.value)
                names |= {word.replace("-", "_") for word in words}
    return names


def test_every_argument_of_megatron_lm_is_read_or_refused_or_known_to_change_neither_loss_nor_data(megatrons_parser):
    lines = HARMLESS.read_text().splitlines()
    harmless = {name for line in lines if not line.startswith("#") for name in line.split()}
    ours = named_in_our_code()
    assert not harmless & (ours | set(REFUSED)), "the list says less than the code"
    drawn = {action.dest for action in megatrons_parser._actions if not action.dest.startswith("packing_")}
    assert len(drawn) > 500
    unknown = drawn - harmless - ours - set(REFUSED) - {"help"}
    assert not unknown, f"does {sorted(unknown)} change the loss or the stream of data? If so, refuse it (UNREAD)"


def test_the_defaults_of_megatron_lms_parser_are_taken(megatrons_parser, arguments):
    given = vars(megatrons_parser.parse_args([]))
    kept = {name: value for name, value in given.items() if name not in PLAIN and not name.startswith("packing_")}
    assert run_config_of(arguments(**kept)).packing.window == 99


def test_every_argument_that_rules_read_is_one_of_megatron_lm(megatrons_parser):
    named = {name for _, name in _arguments()}
    assert {"--attention-backend", "--tp-comm-overlap", "--cuda-graph-modules"} < named
    of_dev = {"--dynamic-context-parallel", "--sequence-packing-scheduler"}  # of its branch dev, see dynamic_ranks
    assert named - of_dev < set(megatrons_parser._option_string_actions)


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_the_loss_or_the_data_is_refused_by_the_run_and_by_validate(
    megatrons_parser, arguments, tmp_path, name
):
    flag = f"--{name.replace('_', '-')}"
    action = megatrons_parser._option_string_actions.get(flag)  # or it is a script's own
    words = [flag] if action is None or action.nargs == 0 else [flag, "3"]
    given = {name: True} if action is None else vars(megatrons_parser.parse_args(words))
    assert given[name], "the list names what the parser calls otherwise"
    with pytest.raises(ConfigError, match=re.escape(flag) + " .*remove it"):
        run_config_of(arguments(**{name: given[name]}))
    words += ["--seq-length", "4096", "--calculate-per-token-loss", "--packing-config", str(tmp_path / "run.yaml")]
    assert flag in ArgumentsRun(name="arguments", words=words).reads().problem


def test_an_unexpectedly_large_loss_is_found_and_a_row_of_many_targets_is_none(monkeypatch):
    machines = pytest.importorskip("megatron.core.rerun_state_machine")
    from megatron import training

    from energon_packing.megatron_lm.gpt import loss_func

    rejected = []

    class Machine:
        large_value_counts, max_values = {}, {}
        is_unexpectedly_large = machines.RerunStateMachine.is_unexpectedly_large

        def validate_result(self, result, rejection_func, message, tolerance, fatal):
            if rejection_func(result):
                rejected.append((message, fatal))

    args = SimpleNamespace(check_for_nan_in_loss_and_grad=True, check_for_spiky_loss=True)
    monkeypatch.setattr(training, "get_args", lambda: args)
    machine = Machine()
    monkeypatch.setattr(machines, "get_rerun_state_machine", lambda: machine)
    for _ in range(100):  # from which Megatron-Core learns what is usual
        loss_func(torch.ones(1, 4), torch.full((1, 4), 2.0))
    loss_func(torch.ones(1, 64), torch.full((1, 64), 2.0))
    assert rejected == []
    loss_func(torch.ones(1, 4), torch.full((1, 4), 30.0))
    assert rejected == [("the loss of a packed row is unexpectedly large", False)]


def test_a_configuration_is_asked_for(arguments):
    args = arguments()
    args.packing_config = None
    with pytest.raises(ConfigError, match="--packing-config is missing"):
        run_config_of(args)


def test_the_pages_arguments_are_understood_by_validate_and_a_broken_one_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("packing: {window: 256}")
    (text,) = re.findall(r"<<'ARGUMENTS'\n(.*?)ARGUMENTS", PAGE.read_text(), flags=re.DOTALL)
    file = tmp_path / "arguments.txt"
    file.write_text(text)
    good = CliRunner().invoke(cli, ["validate", str(file), "--world-size", "4", "--no-data"])
    assert good.exit_code == 0, good.output
    assert "4 tokens" in good.output  # TP 2 with sequence parallelism and CP 2
    file.write_text(text.replace("--calculate-per-token-loss", ""))
    assert CliRunner().invoke(cli, ["validate", str(file), "--world-size", "4", "--no-data"]).exit_code == 1


PARSED = "--num-layers 4 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --train-iters 4 --lr 1e-2"


EXPERTS = "--num-experts 4 --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type"
ONE_STAGE = "--pipeline-model-parallel-size 1"


def own_arguments(parser):
    """As `add_vlm_extra_args` of a script for vision."""
    parser.add_argument("--dataloader-seq-length", type=int)
    return parser


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """``judged(yaml, words, world)``: why the run refuses the arguments, and its length of rows. `validate` says the
    same without a look at data, sentence by sentence; the run has them from Megatron-LM's `parse_and_validate_args`."""
    arguments = pytest.importorskip("megatron.training.arguments")
    from energon_packing.megatron_lm.gpt import parse_and_validate_args

    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 10)
    monkeypatch.setattr(arguments, "set_global_variables", lambda _: None)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")

    def judge(text, words, world=4, extra=own_arguments):
        (tmp_path / "run.yaml").write_text(text)
        given = [*words, "--packing-config", str(tmp_path / "run.yaml")]
        monkeypatch.setattr("sys.argv", ["pretrain.py", *given])
        monkeypatch.setenv("WORLD_SIZE", str(world))
        said = []
        try:
            args = parse_and_validate_args(extra)
        except ConfigError as error:
            said.append(str(error))
        told = CliRunner().invoke(
            cli, ["validate", "--no-data", "--no-bridge", "--json", "--world-size", str(world), "--", *given]
        )
        answer = json.loads(told.stdout)
        assert answer["valid"] is not bool(said)
        looks = [f"{look['why']}." for look in answer["reads"] or () if look["outcome"] == "error"]
        rules = [
            f"{each['why']}; {each['fix']} (rule {each['rule']})."
            for each in answer["rules"]
            if each["verdict"] == "error"
        ]
        assert said == (looks or rules)[:1]
        taken = ("seq_length", row_length), ("global_batch_size", lambda args: args.global_batch_size)
        assert said or all(answer["resolved"][name] == of(args) for name, of in taken)
        return said, answer["resolved"]["seq_length"]

    return judge


@pytest.mark.parametrize(
    ("text", "more", "refused"),
    [
        ("{}", "", False),
        ("{}", "--num-layers-per-virtual-pipeline-stage 1", True),
        ("{}", "--full-validation", True),
        ("{}", "--dataloader-type single", True),
        ("packing: {seq_length: 256}", "", True),
        ("parallel: {tensor_parallel: 2}", "", True),
        ("parallel: {eval_context_parallel: 2}", "", True),
        ("{}", "--dataloader-seq-length 1024", False),
        # Rules that only `validate` knew.
        ("{}", f"{EXPERTS} seq_aux_loss", True),
        ("{}", f"{EXPERTS} aux_loss", False),
        ("{}", f"{EXPERTS} seq_aux_loss aux_loss --moe-aux-loss-coeff 0 0.1", False),
        ("{}", f"{EXPERTS} aux_loss --expert-model-parallel-size 2 --moe-expert-capacity-factor 1", False),
        ("{}", f"{ONE_STAGE} --context-parallel-size 2 --cp-comm-type p2p p2p p2p p2p", False),
        ("{}", f"{ONE_STAGE} --context-parallel-size 2 --cp-comm-type p2p p2p", True),
        ("{}", f"{ONE_STAGE} --cuda-graph-impl local", False),
        ("{}", f"{ONE_STAGE} --cuda-graph-impl local {EXPERTS} aux_loss", True),
        ("{}", "--cuda-graph-impl transformer_engine --cuda-graph-modules attn", True),
        ("{}", "--cuda-graph-impl transformer_engine --cuda-graph-modules mlp", False),
        ("{}", "--attention-backend unfused", False),
        ("{}", "--attention-backend fused", False),
        ("{}", f"{ONE_STAGE} --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", False),
        ("{}", f"{ONE_STAGE} --tensor-model-parallel-size 2 --sequence-parallel", False),
        ("{}", f"{ONE_STAGE} --tensor-model-parallel-size 2 --sequence-parallel --dataloader-seq-length 1023", False),
        ("{}", f"{ONE_STAGE} --context-parallel-size 2 --dataloader-seq-length 1021", False),
        ("{}", "--global-batch-size 5 --decrease-batch-size-if-needed --eval-global-batch-size 2", False),
        ("{}", "--eval-global-batch-size 2", False),
    ],
)
def test_validate_refuses_the_arguments_that_the_run_refuses_with_megatron_lms_own_parser(judged, text, more, refused):
    errors, _ = judged(text, [*COMMON, "--global-batch-size", "4", *PARSED.split(), *more.split()])
    assert bool(errors) is refused


@pytest.mark.parametrize("more", ["", "--step-batch-size-schedule 0:2"])
def test_without_a_global_batch_the_run_and_validate_take_a_micro_batch_of_each_replica(judged, more):
    at = COMMON.index("--global-batch-size")
    assert judged("{}", [*COMMON[:at], *COMMON[at + 2 :], *PARSED.split(), *more.split()])[0] == []


@pytest.mark.parametrize(
    ("more", "said", "rule"),
    [
        ("--eval-global-batch-size 3", "eval_global_batch_size", "bridge/eval-global-batch-size"),
        ("--global-batch-size 5 --decrease-batch-size-if-needed", "eval_glob", "bridge/eval-global-batch-size"),
        (f"{ONE_STAGE} --context-parallel-size 2 --seq-length 510", "seq-length", "bridge/model-seq-length"),
    ],
)
def test_what_megatron_lms_own_parser_asserts_of_batches_and_lengths_is_an_error_of_validate(judged, more, said, rule):
    words = [*COMMON, "--global-batch-size", "4", *PARSED.split(), *more.split()]
    with pytest.raises(AssertionError, match=said):
        judged("{}", words)
    told = CliRunner().invoke(cli, ["validate", "--no-data", "--no-bridge", "--json", "--world-size=4", "--", *words])
    errors = [each["rule"] for each in json.loads(told.stdout)["rules"] if each["verdict"] == "error"]
    assert errors == [rule]


def test_the_older_name_of_what_graphs_capture_is_read_too(arguments):
    def judge(module):
        graphs = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": [SimpleNamespace(name=module)]}
        args = arguments("packing: {pad_to_max_length: true}", **graphs)
        enforce_rules(args, run_config_of(args))

    judge("mlp")
    with pytest.raises(ConfigError, match="bridge/graphs-need-fixed-boundaries"):
        judge("attn")


ROWS = {
    "pretrain_mistral_clip.sh": 1024,
    "sft_mistral_clip.sh": 2048,
    "nvlm/pretrain_yi_34b_internvit_6b.sh": 512,
    "nvlm/sft_34b_internvit.sh": 3200,
    "nvlm/pretrain_qwen20_72b_internvit_6b.sh": 512,
    "nvlm/sft_qwen20_72b_internvit_6b.sh": 3200,
    "nvlm/sft_qwen2p5_7b_internvit_6b_video.sh": 16384,
    "llama_3p1_nemotron_nano_vl_8b_v1/pretraining_llama_3p1_nemotron_nano_vl_8b_v1.sh": 4096,
    "llama_3p1_nemotron_nano_vl_8b_v1/sft_llama_3p1_nemotron_nano_vl_8b_v1.sh": 16384,
}
"""Scripts of examples/multimodal, and what their language model reads (DECODER_SEQ_LEN)."""


def test_the_listed_scripts_are_those_of_the_checkout():
    assert set(multimodal_arguments.listed()) == set(ROWS)
    checkout = os.environ.get(multimodal_arguments.CHECKOUT)
    if not checkout:
        pytest.skip(f"{multimodal_arguments.CHECKOUT} names no checkout of Megatron-LM")
    folder = Path(checkout) / "examples" / "multimodal"
    found = {str(path.relative_to(folder)): path for path in multimodal_arguments.scripts_of(Path(checkout))}
    words = {name: multimodal_arguments.words_of(path) for name, path in found.items()}
    assert words == multimodal_arguments.listed()


@pytest.mark.parametrize("script", ROWS)
def test_the_arguments_of_examples_multimodal_are_taken_but_for_those_of_its_data(judged, script):
    """As they are, the first of these is refused, which names what the packs replace."""
    words = multimodal_arguments.listed()[script]
    extra = functools.partial(multimodal_arguments.add_arguments_of, words)
    values = dict(itertools.pairwise(words))
    sizes = (int(values.get(f"--{kind}-model-parallel-size", 1)) for kind in ("tensor", "pipeline"))
    world = math.prod(sizes)
    (refused,), _ = judged("{}", words, world, extra)
    assert refused.startswith("--data-path is read by Megatron-LM's own data sets")
    kept, names = [], {f"--{name.replace('_', '-')}" for name in REFUSED}
    for word in words:
        if word.startswith("--"):
            keeps = word not in names
        kept += [word] * keeps
    removed = {word for word in words if word.startswith("--")} - set(kept)
    assert removed - {"--use-loss-scaling"} == {"--data-path", "--split", "--eod-mask-loss"}
    assert judged("{}", kept, world, extra) == ([], ROWS[script])


def read_state(path: Path) -> object:
    return state_in_file(path, missing="begin again.")


def state_of(path: Path, value: object) -> Path:
    torch.save(value, path)
    return path


class Harmful:
    def __reduce__(self):
        return subprocess.run, (["touch", "harm"],)


def test_a_state_is_read_and_code_in_its_place_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {"packs": 3, "source": {"numbers": torch.arange(3), "names": ["a"]}}
    read = read_state(state_of(tmp_path / "good.pt", {"dataloader_state_dict": state}))
    assert read["packs"] == 3
    assert torch.equal(read["source"]["numbers"], torch.arange(3))
    for name, value in (("harm.pt", {"dataloader_state_dict": Harmful()}), ("other.pt", [1, 2])):
        with pytest.raises(ConfigError, match="is not the state of a loader"):
            read_state(state_of(tmp_path / name, value))
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ConfigError, match="is not the state of a loader"):
        read_state(tmp_path / "plain.pt")
    assert not (tmp_path / "harm").exists()


class OtherCodec:
    def __reduce__(self):
        return codecs.encode, ("a" * 9, "rot13")


def test_bytes_of_a_state_are_read_and_no_other_codec_is_run(tmp_path):
    good = state_of(tmp_path / "good.pt", {"dataloader_state_dict": {"rng": bytes(range(256))}})
    assert read_state(good) == {"rng": bytes(range(256))}
    with pytest.raises(ConfigError, match="codec 'rot13'"):
        read_state(state_of(tmp_path / "other.pt", {"dataloader_state_dict": OtherCodec()}))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    source = make_data(folder / "raw", conversations=60, seed=3, defects=False)
    convert(ConvertConfig(sources=(source,), out=folder / "data", split={"train": 1.0}, workers=0))
    (folder / "blend.yaml").write_text(
        "{__module__: megatron.energon, __class__: MetadatasetV2, splits: {train: {blend: "
        "[{weight: 3, path: data/dataset.yaml}, {weight: 1, path: data/dataset.yaml}]}}}"
    )
    return folder


@pytest.mark.parametrize(("path", "packing"), [("data", {}), ("data", {"balance_window": 2}), ("blend.yaml", {})])
def test_the_states_of_all_kinds_of_loaders_are_read_from_a_checkpoint(dataset, tmp_path, path, packing):
    config = RunConfig(
        data=DataConfig(path=str(dataset / path), workers=0),
        encoder=EncoderConfig(processor=str(processor_path("text"))),
        packing=PackingConfig(seq_length=512, window=8, drop_budget=1.0, **packing),
    )
    loader = build_loader(config)
    packs = iter(loader)
    for _ in range(3):
        next(packs)
    file = state_of(tmp_path / "state.pt", {"dataloader_state_dict": {"packs": 3, "source": loader.save_state()}})
    expected = [next(packs).batch.tokens for _ in range(4)]
    again = build_loader(config)
    again.restore_state(read_state(file)["source"])
    for tokens, pack in zip(expected, again, strict=False):
        assert torch.equal(tokens, pack.batch.tokens)


def test_data_never_begin_anew_in_silence(tmp_path, monkeypatch):
    checkpointing = pytest.importorskip("megatron.training.checkpointing")
    monkeypatch.setattr(checkpointing.mpu, "get_pipeline_model_parallel_world_size", lambda: 1)
    args = SimpleNamespace(iteration=4, packing_restart_data=False, dataloader_save=None, load=str(tmp_path), save=None)
    with pytest.raises(ConfigError, match=rf"no state of the loader at {tmp_path}/energon/iter_0000004"):
        saved_state(args, data_parallel_rank=0)
    with pytest.raises(ConfigError, match="no state of the loader"):
        read_state(tmp_path / "missing.pt")
    args.packing_restart_data = True
    assert saved_state(args, data_parallel_rank=0) is None
    assert saved_state(SimpleNamespace(iteration=0, packing_restart_data=False), data_parallel_rank=0) is None


class OneRank:
    """A `PackDataloader` of a process without groups, whose state is the number of packs that were read."""

    def __init__(self, config, replica, *, split, data_parallel_group, **what):
        self.split, self.packs = split, 0

    def restore_together(self, read):
        self.packs = read() or 0

    def save_state(self):
        return self.packs


@pytest.fixture
def started(arguments, monkeypatch):
    """``started(samples, load=..., save=...)``: the iterators of a process, and the arguments after that."""
    checkpointing = pytest.importorskip("megatron.training.checkpointing")
    from megatron import training

    for name in ("data", "tensor_model", "context", "pipeline_model"):
        monkeypatch.setattr(
            checkpointing.mpu, f"get_{name}_parallel_group", lambda **_: SimpleNamespace(size=lambda: 1)
        )
        for what, value in (("rank", 0), ("world_size", 1)):
            monkeypatch.setattr(checkpointing.mpu, f"get_{name}_parallel_{what}", lambda value=value: value)
    monkeypatch.setattr(checkpointing.mpu, "is_pipeline_first_stage", lambda **_: True)
    monkeypatch.setattr(torch.distributed, "barrier", lambda **_: None)
    monkeypatch.setattr(dataloader, "PackDataloader", OneRank)
    monkeypatch.setattr(dataloader, "has_global_packs", lambda path: False)
    monkeypatch.setattr(dataloader.Replica, "of", lambda groups: SimpleNamespace(is_reader=True))
    settings = {"eval_iters": 1, "eval_global_batch_size": 16, "skip_train": False, "load": None, "save": None}

    def start(samples, **given):
        args = arguments("data: {path: here}", **(settings | given))
        monkeypatch.setattr(training, "get_args", lambda: args)
        return dataloader.train_valid_test_datasets_provider(samples), args

    return start


def test_a_run_that_saves_its_model_saves_its_data_beside_it_and_continues_from_there(started, tmp_path):
    from megatron.training.checkpointing import maybe_save_dataloader_state

    (train, _, _), args = started((9, 0, 0), iteration=0, save=str(tmp_path / "model"))
    train.packs = 7
    maybe_save_dataloader_state(SimpleNamespace(iterable=train), 4, args.dataloader_save)  # as `save_checkpoint` does
    assert [path.name for path in (tmp_path / "model" / "energon").iterdir()] == ["iter_0000004"]
    (again, _, _), args = started((9, 0, 0), iteration=4, load=str(tmp_path / "model"), save=str(tmp_path / "next"))
    assert (again.packs, args.dataloader_save) == (7, str(tmp_path / "next" / "energon"))
    _, args = started((9, 0, 0), iteration=0, save=str(tmp_path), dataloader_save="elsewhere")
    assert args.dataloader_save == "elsewhere"


def test_the_run_itself_refuses_what_only_rules_of_validate_know(started):
    experts = {"num_experts": 4, "moe_router_load_balancing_type": ["seq_aux_loss"], "moe_aux_loss_coeff": [0.1]}
    with pytest.raises(ConfigError, match=r"seq_aux_loss.*\(rule ours/balance-per-sequence\)"):
        started((9, 0, 0), iteration=0, **experts)
    started((9, 0, 0), iteration=0, **experts | {"moe_aux_loss_coeff": 0.0})


def test_a_run_that_only_evaluates_needs_no_state_and_reads_no_training_data(started, tmp_path):
    (train, valid, _), _ = started((9, 9, 9), iteration=4, load=str(tmp_path), skip_train=True)
    assert train is None
    assert valid.split == "val"


@pytest.mark.parametrize(("saving", "reading"), [(1, 2), (2, 1), (1, 1), (2, 2)])
def test_a_run_on_a_plan_goes_on_with_another_number_of_pipeline_stages(tmp_path, monkeypatch, saving, reading):
    checkpointing = pytest.importorskip("megatron.training.checkpointing")
    args = SimpleNamespace(iteration=4, packing_restart_data=False, dataloader_save=str(tmp_path))

    def stages(number):
        monkeypatch.setattr(checkpointing.mpu, "get_pipeline_model_parallel_world_size", lambda: number)

    stages(saving)
    none = {"tensor_rank": 0, "pipeline_rank": 0, "expert_parallel": False, "expert_rank": 0}
    name = checkpointing.get_checkpoint_name(str(tmp_path), 4, **none, basename="train_dataloader_dprank000.pt")
    Path(name).parent.mkdir(parents=True)
    state = {"packs": 3, "source": {"position": 6}}
    state_of(Path(name), {"dataloader_state_dict": state})
    stages(reading)
    assert saved_state(args, data_parallel_rank=None) == state
    if saving != reading:
        with pytest.raises(ConfigError, match="no state of the loader"):
            saved_state(args, data_parallel_rank=0)


@pytest.mark.parametrize(
    ("iteration", "batch", "growing", "left"), [(0, 8, None, 80), (7, 8, None, 24), (7, 9, None, 24), (0, 8, [4], None)]
)
def test_what_a_run_has_still_to_read_is_its_steps_times_its_batch(iteration, batch, growing, left):
    args = SimpleNamespace(train_iters=10, iteration=iteration, global_batch_size=batch, rampup_batch_size=growing)
    assert packs_left(args, 4) == left
    args.step_batch_size_schedule = "0:8 100:16"
    assert packs_left(args, 4) is None
