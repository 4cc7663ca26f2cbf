"""Training runs drawn at random, sound ones and sound ones with faults, and what Bridge and our rules say of them.

    python tests/conformance/drawn_runs.py 9000 [SEED]

judges by the Bridge that Python would import, in one process. For its main branch, put the checkout's ``src`` and the
Megatron-Core of its ``3rdparty/Megatron-LM`` first on ``PYTHONPATH``. The faults of a run are chosen independently, so
several may be done to one. The judges are Bridge's unmodified ``validate()``, and what is built next in `built_runs`.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from energon_packing.thd.alignment import alignment_multiple
from energon_packing.validate import verdict
from energon_packing.validate.rules.rule import all_rules, violations
from energon_packing.validate.run_facts import TokenFacts
from energon_packing.validate.run_view import RunView, installed_version, smallest_world_size
from energon_packing.validate.verdict import bridge_verdict


def without_attention(experts: int) -> tuple[str, ...]:
    """Modules under capture that see no boundaries; Megatron-Core captures ``mlp`` of dense layers only."""
    return ("mlp",) if experts == 1 else ("moe_router",)


def sound(rng: random.Random) -> RunView:
    """A run without fault, drawn over all axes: layout, batch sizes, packing mode, loss, graphs, width."""
    kind = rng.choice(["energon", "packed_energon", "gpt_sft"])
    mode = rng.choice(["offline", "offline", "in_batch", "none"])
    tp, cp, pp = rng.choice([1, 2, 4]), rng.choice([1, 2, 4]), rng.choice([1, 1, 2])
    eval_cp = rng.choice([None, None, 1, 2, 4])
    sequence_parallel = rng.random() < 0.5
    experts = rng.choice([1, 1, 2])
    expert_tensor = rng.choice([None, None, 1, tp])
    micro = 1 if mode == "offline" else rng.choice([2, 3]) if mode == "in_batch" else rng.choice([1, 2])
    multiple = math.lcm(alignment_multiple(tp, cp, sequence_parallel, eval_cp), 2 * cp)
    length = multiple * rng.choice([6, 10, 33])
    graph = rng.choice(["none"] * 4 + ["transformer_engine", "full_iteration"])
    captured = rng.choice([(), ("attn",), without_attention(experts)]) if graph == "transformer_engine" else ()
    offline = mode == "offline"
    fixed_boundaries = offline and graph != "none" and captured in ((), ("attn",))
    per_token = cp > 1 or rng.random() < 0.7
    world = rng.choice([1, 2, 3]) * math.lcm(
        smallest_world_size(tp, pp, cp, eval_cp), (expert_tensor or 1) * pp * experts if experts > 1 else 1
    )
    rows = micro * math.lcm(world // (tp * pp * cp), world // (tp * pp * (eval_cp or cp)))
    own_eval = rng.random() < 0.3
    return RunView(
        dataset_kind=kind,  # type: ignore[arg-type]
        tensor_parallel=tp,
        context_parallel=cp,
        pipeline_parallel=pp,
        expert_parallel=experts,
        expert_tensor_parallel=expert_tensor if experts > 1 else None,
        sequence_parallel=sequence_parallel,
        eval_context_parallel=eval_cp,
        world_size=world,
        cp_comm_type=rng.choice([None, "p2p", "a2a"]),
        micro_batch_size=micro,
        global_batch_size=rows * rng.choice([1, 2]),
        eval_micro_batch_size=micro if own_eval else None,
        eval_global_batch_size=rows if own_eval else None,
        dataset_micro_batch_size=None if kind == "gpt_sft" else micro,
        do_validation=rng.random() < 0.7,
        dataset_seq_length=length,
        model_seq_length=length,
        enable_offline_packing=offline,
        has_offline_packing_specs=offline,
        packed_sequence_size=length if offline else None,
        enable_in_batch_packing=mode == "in_batch",
        pad_cu_seqlens=fixed_boundaries,
        pad_to_max_length=(offline and graph != "none") or rng.random() < 0.3,
        calculate_per_token_loss=per_token,
        average_in_collective=not per_token and rng.random() < 0.5,
        overlap_grad_reduce=rng.random() < 0.5,
        cuda_graph_impl=graph,
        cuda_graph_modules=captured,
        num_layers=4,
        model="gpt",
        megatron_core_version="0.19.2",
        bridge_version=installed_version("megatron-bridge"),
        recompute_granularity=rng.choice([None, "selective", "full"]),
    )


def natively(view: RunView) -> dict[str, Any]:
    """A sound run on Bridge's own online packing, of 0.7, with the layout of a run."""
    return {
        "dataset_kind": "energon",
        "packing_buffer_size": 16,
        "task_encoder": "QwenVLEnergonTaskEncoderConfig",
        "pipeline_parallel": 1,
        "micro_batch_size": 1,
        "dataset_micro_batch_size": 1,
        "eval_micro_batch_size": None,
        "eval_global_batch_size": None,
        "global_batch_size": 2 * view.world_size,
        **dict.fromkeys(("enable_offline_packing", "has_offline_packing_specs", "enable_in_batch_packing"), False),
        "packed_sequence_size": None,
        "pad_cu_seqlens": False,
        "calculate_per_token_loss": True,
        "average_in_collective": False,
        "cuda_graph_impl": "none",
        "cuda_graph_modules": (),
    }


def dispatched(view: RunView) -> dict[str, Any]:
    """In-batch rows over HybridEP."""
    return {
        "dataset_kind": "energon",
        **dict.fromkeys(("enable_offline_packing", "has_offline_packing_specs", "pad_cu_seqlens"), False),
        "packed_sequence_size": None,
        "enable_in_batch_packing": True,
        "micro_batch_size": 2,
        "dataset_micro_batch_size": 2,
        "eval_micro_batch_size": None,
        "eval_global_batch_size": None,
        "global_batch_size": 8 * view.world_size,
        "world_size": 2 * view.world_size,
        "expert_parallel": 2,
        "expert_tensor_parallel": None,
        "expert_dispatcher": "hybridep",
        "cuda_graph_modules": ("attn",),
    }


Fault = Callable[[RunView, random.Random], dict[str, Any]]


def specs(view: RunView) -> dict[str, Any]:
    return {"enable_offline_packing": True, "has_offline_packing_specs": True} | (
        {"packed_sequence_size": view.dataset_seq_length}
    )


def lengths(view: RunView, tokens: int) -> dict[str, Any]:
    packs = {"packed_sequence_size": tokens} if view.has_offline_packing_specs else {}
    return {"dataset_seq_length": tokens, "model_seq_length": tokens, **packs}


def data_set_rows(view: RunView, rng: random.Random) -> dict[str, Any]:
    other = view.micro_batch_size + 1
    evaluated: dict[str, Any] = rng.choice(
        [
            {},  # the rule about the evaluation speaks too
            {"do_validation": False},
            {"eval_micro_batch_size": other, "eval_global_batch_size": other * view.eval_data_parallel},
        ]
    )
    return {"dataset_kind": "energon", "dataset_micro_batch_size": other, **evaluated}


def evaluation_rows(view: RunView, rng: random.Random) -> dict[str, Any]:
    other, whole = view.micro_batch_size + 1, (view.micro_batch_size + 1) * view.eval_data_parallel
    return {
        "dataset_kind": rng.choice(["energon", "packed_energon"]),
        "dataset_micro_batch_size": view.micro_batch_size,
        "do_validation": True,
        "eval_micro_batch_size": other,
        "eval_global_batch_size": whole,
    }


def two_or_more(size: int) -> int:
    return max(2, size)


# What is done to a sound run; several may be done to one.
FAULTS: dict[str, Fault] = {
    "both modes": lambda v, r: {**specs(v), "enable_in_batch_packing": True},
    "specs missing": lambda v, r: {"enable_offline_packing": True, "has_offline_packing_specs": False},
    "specs left": lambda v, r: {**specs(v), "enable_offline_packing": False},
    "fixed boundaries": lambda v, r: {
        "has_offline_packing_specs": True,
        "packed_sequence_size": v.dataset_seq_length,
        "pad_cu_seqlens": True,
        "pad_to_max_length": False,
    },
    "graph width": lambda v, r: {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": without_attention(v.expert_parallel),
        "pad_cu_seqlens": False,
        "pad_to_max_length": False,
    },
    "graph boundaries": lambda v, r: {
        "cuda_graph_impl": r.choice(["transformer_engine", "full_iteration"]),
        "cuda_graph_modules": (),
        "pad_to_max_length": True,
        "pad_cu_seqlens": False,
    },
    "local graph": lambda v, r: {"cuda_graph_impl": "local", "cuda_graph_modules": r.choice([(), ("mlp",)])},
    "NaN check": lambda v, r: {
        "cuda_graph_impl": "full_iteration",
        "cuda_graph_modules": (),
        "check_for_nan_in_loss": True,
    },
    "rows of the data set": data_set_rows,
    "rows of the evaluation": evaluation_rows,
    "unaligned width": lambda v, r: {
        "dataset_kind": "energon",
        "dataset_micro_batch_size": v.micro_batch_size,
        # By whole slices of CP where the alignment is wider than they are.
        **lengths(
            v,
            v.dataset_seq_length + (1 if v.context_parallel == 1 else r.choice([1, 2, 2]) * v.context_parallel),
        ),
    },
    "odd slices": lambda v, r: {"dataset_kind": "gpt_sft", **lengths(v, v.dataset_seq_length + 1)},
    "world": lambda v, r: {"world_size": v.world_size + 1},
    "half a world": lambda v, r: {"world_size": max(1, v.world_size // 2)},
    "evaluation world": lambda v, r: {"eval_context_parallel": r.choice([3, 8])},
    "evaluation batch": lambda v, r: {"eval_global_batch_size": v.eval_global * 2 + 1},
    "mean loss": lambda v, r: {"calculate_per_token_loss": False},
    "averaged": lambda v, r: {"average_in_collective": True},
    "averaged tokens": lambda v, r: {
        "calculate_per_token_loss": True,
        "average_in_collective": True,
    },
    "layers": lambda v, r: {"cp_comm_type": (r.choice(["p2p", "a2a+p2p"]),) * r.choice([2, 3])},
    "hierarchy missing": lambda v, r: {"cp_comm_type": "a2a+p2p"},
    "hierarchy product": lambda v, r: {"hierarchical_context_parallel_sizes": r.choice([(2, 1), (2, 2), (3, 3)])},
    "no pack size": lambda v, r: {**specs(v), "packed_sequence_size": r.choice([0, -5])},
    "several packs": lambda v, r: {
        **specs(v),
        "micro_batch_size": two_or_more(v.micro_batch_size),
        "dataset_micro_batch_size": None if v.dataset_kind == "gpt_sft" else two_or_more(v.micro_batch_size),
        "global_batch_size": v.global_batch_size * 2,
        "eval_micro_batch_size": None,
        "eval_global_batch_size": None,
    },
    "one sample": lambda v, r: {
        "enable_in_batch_packing": True,
        "micro_batch_size": 1,
        "dataset_micro_batch_size": None if v.dataset_kind == "gpt_sft" else 1,
        "eval_micro_batch_size": None,
    },
    "two lengths": lambda v, r: {r.choice(["model_seq_length", "dataset_seq_length"]): v.model_seq_length * 2},
    "batch": lambda v, r: {"global_batch_size": v.global_batch_size + 1, "eval_global_batch_size": v.eval_global},
    "expert groups": lambda v, r: {
        "expert_parallel": 8,
        "expert_tensor_parallel": r.choice([1, 2]),
        "cuda_graph_modules": (),
    },
    "predicted tokens": lambda v, r: {"mtp_num_layers": 1},
    "hybrid parallelism": lambda v, r: {"hybrid_context_parallel": True},
    "family": lambda v, r: {"model": r.choice(["Qwen3Next", "GLM45", "Qwen3Omni"])},
    "step": lambda v, r: {"step": "qwen3_vl_step"},
    "old core": lambda v, r: {"megatron_core_version": r.choice(["0.16.0", "0.18.0rc1"])},
    "Qwen2.5-VL": lambda v, r: {"model": "Qwen25VL"},
    "vision": lambda v, r: {
        "model": r.choice(["Qwen3VL", "Qwen25VL"]),
        "overlap_grad_reduce": True,
        "vision_frozen": r.random() < 0.5,
    },
    "image in each pack": lambda v, r: {
        "dataset_kind": "packed_energon",
        "dataset_micro_batch_size": v.micro_batch_size,
        "model": "Qwen25VL",
        "overlap_grad_reduce": True,
        "dummy_image": True,
    },
    "averaged under FSDP": lambda v, r: {
        "megatron_fsdp": True,
        "disable_symmetric_registration": r.random() < 0.5,
        "average_in_collective": True,
    },
    "Gemma 4": lambda v, r: {"model": r.choice(["gemma4_text", "Gemma4VL"])},
    "Qwen3.5-VL": lambda v, r: {"model": "Qwen35VL"},
    "no evaluation": lambda v, r: {
        "do_validation": False,
        "do_test": v.dataset_kind == "gpt_sft" and r.random() < 0.3,
        "eval_micro_batch_size": 2,
        "eval_global_batch_size": 2 * v.eval_data_parallel,
    },
    "deepstack": lambda v, r: {
        "model": "Qwen3VL",
        "vision_frozen": r.random() < 0.5,
        "overlap_grad_reduce": False,
        "recompute_granularity": "full",
    },
    "graphed experts": lambda v, r: (
        {}
        if not v.enable_offline_packing
        else {
            "dataset_kind": "packed_energon",
            "dataset_micro_batch_size": v.micro_batch_size,
            "num_moe_experts": 4,
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": ("attn", "moe_router"),
            "pad_cu_seqlens": True,
            "pad_to_max_length": True,
            "step": "energon_packing.bridge.step",
        }
    ),
    "deepstack over ranks": lambda v, r: {
        "model": "Qwen3VL",
        "overlap_grad_reduce": False,
        "recompute_granularity": None,
        "dataset_kind": "energon",
        "dataset_micro_batch_size": v.micro_batch_size,
        "sequence_parallel": True,
        **lengths(v, v.dataset_seq_length * v.tensor_parallel),
    },
    "evaluated packs": lambda v, r: {
        "dataset_kind": "gpt_sft",
        "dataset_micro_batch_size": None,
        "eval_micro_batch_size": 2,
        "eval_global_batch_size": 2 * v.eval_data_parallel,
    },
    "metadata": lambda v, r: {
        "dataset_kind": "gpt_sft",
        "dataset_micro_batch_size": None,
        "pad_cu_seqlens": True,
        "pad_to_max_length": True,
        "packed_metadata_missing": "packs.json",
    },
    "alignment": lambda v, r: {**specs(v), "pad_seq_to_multiple": 5},
    "fp8": lambda v, r: {"fp8_recipe": r.choice(["delayed", "mxfp8"]), "pad_to_max_length": v.pad_to_max_length},
    "wide heads": lambda v, r: {"head_dim": r.choice([100, 288])},
    "attention": lambda v, r: {"attention_backend": r.choice(["local", "local", "flash", "unfused"])},
    "vocabulary": lambda v, r: {
        "model_tokens": TokenFacts(size=100),
        "processor_tokens": TokenFacts(size=r.choice([101, 500])),
    },
    "placeholders": lambda v, r: {
        "model_tokens": TokenFacts(placeholders={"image": 7}),
        "processor_tokens": TokenFacts(placeholders={"image": 8}),
    },
    "native packing": lambda v, r: {
        "dataset_kind": "energon",
        "dataset_micro_batch_size": v.micro_batch_size,
        "packing_buffer_size": 16,
    },
    "weights": lambda v, r: {
        "dataset_kind": "packed_energon",
        "dataset_micro_batch_size": v.micro_batch_size,
        "loss_weighting": "square",
        "calculate_per_token_loss": False,
    },
    "overlapped experts": lambda v, r: {"overlap_moe_expert_parallel_comm": True, "step": "vlm_step"},
    "failures without limit": lambda v, r: {"failure_tolerance": 0},
    "no buffer": lambda v, r: {**natively(v), "packing_buffer_size": r.choice([0, -4])},
    "native": lambda v, r: natively(v),
    "native, two modes": lambda v, r: {**natively(v), "enable_in_batch_packing": True},
    "native, left to a step": lambda v, r: {**natively(v), "defer_in_batch_packing_to_step": True},
    "native, two packs": lambda v, r: {
        **natively(v),
        "micro_batch_size": 2,
        "dataset_micro_batch_size": 2,
        "global_batch_size": 4 * v.world_size,
    },
    "native, other encoder": lambda v, r: {
        **natively(v),
        "task_encoder": r.choice(["HFEnergonTaskEncoderConfig", "NemotronOmniEnergonTaskEncoderConfig"]),
    },
    "native, mean loss": lambda v, r: {**natively(v), "calculate_per_token_loss": False},
    "native, averaged": lambda v, r: {**natively(v), "average_in_collective": True},
    "native, predicted tokens": lambda v, r: {**natively(v), "mtp_num_layers": 1},
    "native, graphs": lambda v, r: {
        **natively(v),
        r.choice(["cuda_graph_impl", "vision_cuda_graph_impl"]): "transformer_engine",
        "cuda_graph_modules": ("attn",),
    },
    "native, apart": lambda v, r: {**natively(v), "dist_train": True},
    "native, pipeline": lambda v, r: {
        **natively(v),
        "pipeline_parallel": 2,
        "world_size": 2 * v.world_size,
        "global_batch_size": 4 * v.world_size,
    },
    "native, its own step": lambda v, r: {**natively(v), "step": "qwen3_vl_step"},
    "native, overlapped": lambda v, r: {**natively(v), "overlap_moe_expert_parallel_comm": True},
    "epochs": lambda v, r: {"num_epochs": r.choice([1, 3])},
    "epochs of samples": lambda v, r: {
        "dataset_kind": "gpt_sft",
        "dataset_micro_batch_size": None,
        "num_epochs": 2,
        "dataloader_type": r.choice(["single", "cyclic"]),
    },
    "epochs of batches": lambda v, r: {
        "dataset_kind": "gpt_sft",
        "dataset_micro_batch_size": None,
        "num_epochs": 2,
        "dataloader_type": "batch",
    },
    "uneven dispatch": lambda v, r: {
        **dispatched(v),
        "cuda_graph_impl": "transformer_engine",
        "pads_uneven_dispatch": r.random() < 0.2,
    },
    "even dispatch": lambda v, r: {**dispatched(v), "cuda_graph_impl": "none", "expert_capacity_factor": 1.5},
    "balance of sequences": lambda v, r: {
        **dispatched(v),
        "cuda_graph_impl": "none",
        "load_balancing": "seq_aux_loss",
        "balance_coefficients": (0.001,),
    },
    "left to a step": lambda v, r: {
        "enable_in_batch_packing": True,
        "defer_in_batch_packing_to_step": True,
        "step": r.choice(["vlm_step", "gpt_step", "energon_packing.bridge.step"]),
    },
}


def drawn(runs: int, seed: int) -> Iterator[RunView]:
    """Runs with none to three faults."""
    rng = random.Random(seed)
    for _ in range(runs):
        yield faulty(sound(rng), rng.sample(list(FAULTS), rng.choice([0, 1, 1, 1, 1, 2, 3])), rng)


def faulty(view: RunView, faults: list[str], rng: random.Random) -> RunView:
    """The run with the faults done to it, in their order."""
    for fault in faults:
        view = view.changed(**FAULTS[fault](view, rng))
    return view


def grid(runs: int) -> Iterator[RunView]:
    """First so many runs with none to three faults, then three for each pair of faults."""
    rng = random.Random(20260801)
    names = list(FAULTS)
    chosen = [rng.sample(names, rng.choice([0, 1, 1, 1, 1, 2, 3])) for _ in range(runs)]
    for pair in itertools.permutations(names, 2):
        chosen += [list(pair), list(pair), ["specs left", *pair]]  # specs bring rules to runs of any mode
    for faults in chosen:
        yield faulty(sound(rng), faults, rng)


SEED = 20261122
EARLY = "bridge/pack-size"
"""The rule whose place in Bridge's order depends on the data set: ``GPTSFTDatasetConfig`` tests it by itself."""


@dataclasses.dataclass
class Tally:
    """What came of the runs, judged by Bridge's unmodified ``ConfigContainer.validate()`` and by the rules.

    Attributes:
        accepted: by ``validate()``.
        built: by ``validate()`` and by what is built next.
        by_ours_alone: built, refused by rules of ours or of Megatron-Core.
        theirs_alone: not built, refused by none of our rules.
        sole: rule -> runs that are built, and that this rule alone refuses.
        unjustified: refused by one rule whose reason the built model does not have.
        named: rule -> runs that Bridge refuses for it.
        violated, alone: rule -> runs that violate it; and no other.
        pairs: two rules -> runs that violate both.
        disagreements: runs that Bridge and the rules that restate it judge differently, or name another rule for.
    """

    version: str = ""
    runs: int = 0
    accepted: int = 0
    built: int = 0
    by_ours_alone: int = 0
    theirs_alone: list[str] = dataclasses.field(default_factory=list)
    sole: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unjustified: list[str] = dataclasses.field(default_factory=list)
    named: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    violated: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    alone: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    pairs: collections.Counter[frozenset[str]] = dataclasses.field(default_factory=collections.Counter)
    disagreements: list[str] = dataclasses.field(default_factory=list)


def tallied(views: Iterable[RunView]) -> Tally:
    """Judges every run by Bridge and by the rules."""
    found = Tally(version=installed_version("megatron-bridge") or "")
    verdict.prepare_bridge()
    import built_runs  # which imports Bridge

    with verdict.without_output():  # once, not four times for every run
        for view in views:
            ours = [judgement.rule for judgement in violations(view)]
            bridges = [rule.id for rule in ours if rule.bridge_says]
            answer = bridge_verdict(view)
            found.runs += 1
            named = None if answer.rule is None else answer.rule.id
            expected = None if not bridges else named if EARLY in bridges and named == EARLY else bridges[0]
            if answer.accepted is None or answer.accepted == bool(bridges) or named != expected:
                found.disagreements.append(f"ours {bridges}, Bridge {named}: {answer.message[:120]!r}; {view}")
                continue
            found.accepted += bool(answer.accepted)
            refused = built_runs.refusal(view) if answer.accepted else ""
            found.theirs_alone += [f"{refused}; {view}"] if refused and not ours else []
            built = bool(answer.accepted and not refused)
            found.built += built
            found.by_ours_alone += bool(built and ours)
            if built and len(ours) == 1:
                found.sole.update([ours[0].id])
                found.unjustified += [] if built_runs.justified(ours[0], view) else [f"{ours[0].id}; {view}"]
            found.named.update([named] if named else [])
            found.violated.update(rule.id for rule in ours)
            found.alone.update([ours[0].id] if len(ours) == 1 else [])
            found.pairs.update(frozenset(pair) for pair in itertools.combinations([rule.id for rule in ours], 2))
    return found


def main(runs: int, seed: int = SEED) -> int:
    """Prints the figures, with the line of source behind each rule of ours that refuses a run alone; 1 where Bridge and
    the rules disagree, or a refusal has no reason."""
    found = tallied(drawn(runs, seed))
    both = found.built - found.by_ours_alone
    print(f"Megatron-Bridge {found.version}: {found.runs} runs of seed {seed}, {both} accepted by both,")
    refused = found.runs - found.built - len(found.theirs_alone) - len(found.disagreements)
    print(f"{refused} refused by both, {found.by_ours_alone} by us alone, {len(found.theirs_alone)} by Bridge alone,")
    print(f"{len(found.disagreements)} for other rules, {len(found.unjustified)} without a reason")
    for rule in all_rules():
        if found.sole[rule.id]:
            print(f"{rule.id:50}{found.sole[rule.id]:>7}  {rule.sources[0].file}: {rule.sources[0].says}")
    wrong = [*found.disagreements, *found.theirs_alone, *found.unjustified]
    print("\n".join(wrong[:5]), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # `support`
    sys.exit(main(*map(int, sys.argv[1:])))
