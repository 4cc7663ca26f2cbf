"""Benchmark of advice: what `stats --advise` foretells of published runs, beside what they took.

Each run is published with its model, GPUs, layout and row length, not with its samples; packed rows are taken to hold
samples of ``--mean`` tokens, where nothing else is known. ``error`` is foretold by published seconds of a step, less 1.
"""

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.dynamic import drawn, schedulers
from bench.offline_index import Mix, write_index
from energon_packing.errors import UserError
from energon_packing.packing.model_cost import model_cost
from energon_packing.report.advice import Choice, Gpus, Packs, StepTime, foretell
from energon_packing.validate.memory import Memory
from energon_packing.validate.recipes import finalised
from energon_packing.validate.verdict import prepare_bridge, without_output

QWEN2 = {"model_type": "qwen2", "vocab_size": 152064, "tie_word_embeddings": False}
QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "tie_word_embeddings": False, "head_dim": 128}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": QWEN2 | {"hidden_size": 3584, "num_hidden_layers": 28, "intermediate_size": 18944,
                           "num_attention_heads": 28, "num_key_value_heads": 4},
    "Qwen2.5-14B": QWEN2 | {"hidden_size": 5120, "num_hidden_layers": 48, "intermediate_size": 13824,
                            "num_attention_heads": 40, "num_key_value_heads": 8},
    "Qwen3-14B": QWEN3 | {"hidden_size": 5120, "num_hidden_layers": 40, "intermediate_size": 17408,
                          "num_attention_heads": 40, "num_key_value_heads": 8},
    "Qwen3-30B-A3B": QWEN3 | {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
                              "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
                              "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4,
                              "decoder_sparse_step": 1, "norm_topk_prob": True},
    "Llama-3-8B": {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
                   "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
                   "tie_word_embeddings": False},
    "gpt-oss-120b": {"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 36,
                     "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
                     "num_local_experts": 128, "num_experts_per_tok": 4, "tie_word_embeddings": False},
}  # fmt: skip
"""Configurations of published models, as Hugging Face has them."""
SWIFT, AUTOMODEL, BRIDGE = "ms-swift 3602360a", "NeMo AutoModel 36044ad3", "Megatron-Bridge 067f987d"
FLEX = {"model.moe_token_dispatcher_type": "flex"}
SOME = FLEX | {"model.recompute_granularity": "selective", "model.recompute_modules": ["layernorm", "moe_act"]}
A800, H20 = "link=200", "memory=96,tflops=148,bandwidth=4,reached=0.85"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run. ``row``: tokens of a rank's micro-batch; ``rows`` of them in a global batch; ``mean`` tokens of
    a sample, None where unknown; ``patches`` a row; ``seconds`` of a step, ``memory`` of a GPU in GiB, if published."""

    model: str
    gpus: str
    rows: int
    row: int
    source: str
    seconds: float
    changes: str = ""
    memory: float | None = None
    mean: int | None = None
    patches: int = 0
    lora: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)


def _layout(tensor: int = 1, stages: int = 1, experts: int = 0, *, full: bool = False) -> dict[str, Any]:
    found = {
        "model.tensor_model_parallel_size": tensor,
        "model.sequence_parallel": tensor > 1,
        "model.pipeline_model_parallel_size": stages,
        "model.context_parallel_size": 1,
        "model.recompute_granularity": "full" if full else None,
        "model.recompute_method": "uniform" if full else None,
        "model.recompute_num_layers": 1 if full else None,
    }
    return found | ({"model.expert_model_parallel_size": experts} if experts else {})


RUNS = (
    Run(model="Qwen2.5-14B", gpus="8xa100", changes=A800, rows=16, row=8192, seconds=9.04, memory=64, source=SWIFT,
        settings=_layout(4)),
    Run(model="Qwen3-30B-A3B", gpus="16xa100", changes=A800, rows=16, row=8192, seconds=9.6, memory=60, source=SWIFT,
        settings=_layout(1, 2, 8, full=True)),
    Run(model="Qwen2.5-7B", gpus="4xa100", rows=8, row=32768, seconds=23, memory=50, mean=8000, source=SWIFT,
        settings=_layout(4, full=True)),
    Run(model="Qwen3-14B", gpus="8xh100", changes=H20, rows=16, row=8192, seconds=13, memory=52, source=SWIFT,
        settings=_layout(4)),
    Run(model="Qwen2.5-VL-7B", gpus="2xa100", rows=4, row=2048, seconds=4.1, memory=72, mean=400, patches=5500,
        source=SWIFT, settings=_layout(2, full=True)),
    Run(model="Qwen3-30B-A3B", gpus="8xh100", rows=128, row=16384, seconds=21.773, mean=4096, source=AUTOMODEL,
        settings=_layout(experts=8, full=True) | FLEX),
    Run(model="gpt-oss-120b", gpus="64xh100", rows=1280, row=4096, seconds=1280 * 4096 / 64 / 5984, mean=4096,
        source=BRIDGE, settings=_layout(1, 4, 8) | SOME),
    Run(model="gpt-oss-120b", gpus="64xb200", rows=320, row=16384, seconds=1280 * 4096 / 64 / 13722, mean=4096,
        source=BRIDGE, settings=_layout(1, 1, 8) | SOME),
    Run(model="gpt-oss-120b", gpus="64xgb200", rows=320, row=16384, seconds=1280 * 4096 / 64 / 15754, mean=4096,
        source=BRIDGE, settings=_layout(1, 1, 64) | SOME),
    Run(model="Qwen3-30B-A3B", gpus="8xa100", rows=4, row=8192, seconds=3, memory=76, source=SWIFT,
        settings=_layout(4, 2, 4, full=True)),
    Run(model="Qwen2.5-7B", gpus="1xh100", rows=16, row=8192, seconds=9.29, mean=4096, lora=8, source=AUTOMODEL,
        settings=_layout()),
    Run(model="Llama-3-8B", gpus="1xh100", rows=16, row=8192, seconds=10.51, mean=4096, lora=8, source=AUTOMODEL,
        settings=_layout()),
)  # fmt: skip


def container_of(run: Run) -> Any:
    """A recipe with the model of a published run."""
    from energon_packing.validate.recipes import container_of_recipe

    if run.model == "Qwen2.5-VL-7B":
        found = container_of_recipe("bridge_configs.qwen25_vl:qwen25_vl_7b_sft", None)
        found.model.freeze_vision_model = found.model.freeze_vision_projection = True
        return found
    found = container_of_recipe("bridge_configs.qwen3:qwen3_8b_sft", None)
    from megatron.bridge import AutoBridge
    from transformers import AutoConfig

    values = dict(MODELS[run.model])
    name = values.pop("model_type")
    architecture = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "llama": "Llama", "gpt_oss": "GptOss"}[
        name
    ]
    config = AutoConfig.for_model(name, **values, architectures=[f"{architecture}ForCausalLM"])
    found.model = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    found.model.moe_router_dtype = None
    return found


def run(mean: int = 2000) -> Iterator[dict[str, Any]]:
    """Yields the runs with ``published`` and ``foretold`` seconds of a step, and GiB of a GPU."""
    for each in RUNS:
        container = container_of(each)
        from energon_packing.bridge.dataset import cost_of_run

        if each.lora:
            from megatron.bridge.peft.lora import LoRA

            container.peft = LoRA(dim=each.lora)
        gpus, cost = Gpus.of(each.gpus, each.changes), cost_of_run(container)
        assert cost is not None
        settings = {"model.seq_length": each.row, "train.global_batch_size": each.rows, **each.settings}
        choice = Choice.of(container, gpus, settings)
        segment = min(each.mean or mean, each.row)
        language = (cost.language["tokens"] + cost.language["logits"] + cost.language["squares"] * segment) * each.row
        vision = cost.vision.get("patches", 0.0) * each.patches
        sizes = np.full(each.rows, each.row)
        operations = np.tile(np.array([vision, language], np.float64), (each.rows, 1))
        packs = Packs(operations=operations, tokens=sizes, aligned=sizes, epoch=0.0, span=1)
        time = StepTime(model=choice.model, gpus=gpus, cost=cost, world=gpus.count)
        found = foretell(choice, packs, time)
        row: dict[str, Any] = {
            "model": each.model,
            "gpus": f"{each.gpus} {each.changes}".strip(),
            "layout": choice.layout,
        }
        row |= {"row": each.row, "rows": each.rows, "source": each.source, "published": each.seconds}
        row |= {"foretold": round(found["step"], 2), "error": round(found["step"] / each.seconds - 1, 3)}
        if choice.memory is not None:
            row |= {"published_gib": each.memory, "foretold_gib": round(choice.memory.total / 2**30, 1)}
        yield row


CORE = {4: (195.269, 151.906, 0.108), 8: (220.119, 155.850, 0.022), 16: (226.775, 187.125, 0.010),
        32: (286.206, 208.088, 0.101), 64: (271.988, 181.912, 0.202)}  # fmt: skip
"""GPUs -> milliseconds of a step with Megatron-Core's `dp_balanced` and with its dynamic context parallelism
(``examples/dynamic_context_parallel/README.md`` of its branch dev, d48bd6be; trimmed means of one run each), and the
noise of their ratio: how far it is from that of the plain means of the same runs."""


def core(checkout: Path) -> Iterator[dict[str, Any]]:
    """Yields the published runs of dynamic context parallelism with ``published`` and ``foretold`` ratios. The samples
    are those that Core's mock data set draws, its schedulers deal them; the GPUs are taken to be GB200, as nodes had
    four. The first run, with `dp_balanced` on four GPUs, scales all others, as metrics do in `stats --advise --fit`.
    Raises UserError: no checkout of that branch."""
    width, layers, vocabulary, held, size = 2048, 12, 131072, 2048, 4
    drawn = np.random.RandomState(0).lognormal(np.log(1024) - 1.5**2 / 2, 1.5, 1_000_000)
    lengths = np.clip(drawn, 128, 8192).astype(int) - 1  # the last token is only a label
    with without_output():
        prepare_bridge()
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    def model(by: int) -> Any:
        sizes = {"hidden_size": width, "num_layers": layers, "num_attention_heads": 16, "ffn_hidden_size": 4 * width}
        return finalised(GPTModelProvider(**sizes, vocab_size=vocabulary, kv_channels=128, context_parallel_size=by))

    with without_output():
        made = [model(by) for by in range(1, 65)]
    module = schedulers(checkout)
    if (cost := model_cost(made[0])) is None:
        raise UserError("Megatron-Bridge's GPTModelProvider has other fields than this benchmark knows.")
    count = 12 * width**2 * layers + (vocabulary + 8192) * width
    memory = Memory(weights=2 * count, gradients=4 * count, optimizer=12 * count, language=0, vision=0, loss=0)

    def row_of(padded: np.ndarray, time: StepTime) -> float:
        sums = cost.segment_sums(padded.astype(np.float64))
        operations = np.array([sum(cost.of({name: each.sum() for name, each in sums.items()}))])
        return float(time.packs(0 * operations, operations, padded.sum(keepdims=True)).sum())

    def steps(name: str, ranks: int, **changes: Any) -> tuple[float, float, float]:
        """Seconds of a step, rows of a rank in it, and seconds after them."""
        gpus, replicas = Gpus.of(f"{ranks}xgb200"), ranks // size
        times = {
            by: StepTime(model=each, gpus=gpus, cost=cost, world=ranks, **changes) for by, each in enumerate(made, 1)
        }
        after = times[1].after(memory, 0.0, spread=False, overlaps=False)
        rows, multiple, took, groups = 8 * replicas, 2 * ranks, 0.0, 0
        for step in range(10, 30):
            own = lengths[step * rows : (step + 1) * rows]
            padded = -(-own // multiple) * multiple
            scheduler = module.scheduler_map[name](held, size, replicas, None)
            for group in scheduler.get_groups_and_subsamples([*enumerate(padded.tolist())]):
                sharing = Counter(map(tuple, group))
                fixed = name == "dp_balanced"
                took += max(row_of(padded[list(own)], times[size if fixed else by]) for own, by in sharing.items())
                groups += 1
        return took / 20 + after, groups / 20, after

    foretold, rows, after = steps("dp_balanced", size)
    first = StepTime(model=made[0], gpus=Gpus.of("4xgb200"), cost=cost, world=size)
    fitted = first.measured(CORE[size][0] / 1000 - after, foretold - after, (CORE[size][0] / 1000 - after) / rows)
    for ranks, (balanced, dynamic, noise) in CORE.items():
        more = {"host": fitted.host, "scale": fitted.scale}
        found = [1000 * steps(name, ranks, **more)[0] for name in ("dp_balanced", "default_dynamic_cp")]
        told = found[0] / found[1]
        yield {"gpus": ranks, "published": round(balanced / dynamic, 3), "noise": noise, "foretold": round(told, 3),
               "error": round(told * dynamic / balanced - 1, 3), "published_ms": [balanced, dynamic],
               "foretold_ms": [round(each, 1) for each in found]}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON line per run, then the errors of all."""
    parser = argparse.ArgumentParser(prog="bench.py advice", description=__doc__)
    parser.add_argument("--mean", type=int, default=2000, help="tokens of a sample where nobody published them")
    parser.add_argument("--megatron-lm", type=Path, help="checkout of Megatron-LM's dev: its dynamic runs instead")
    parser.add_argument("--index", type=Path, help="write an index of 100,000 drawn samples there instead")
    parser.add_argument("--text", action="store_true", help="--index: with the lengths of Core's published workload")
    given = parser.parse_args(argv)
    if given.index:
        mix = None
        if given.text:
            lengths, nothing = drawn("published", 100_000, 0)
            mix = Mix(length=lengths, images=nothing, patches=nothing, files=nothing)
        write_index(given.index, 100_000, mix=mix)
        return 0
    if given.megatron_lm:
        for row in core(given.megatron_lm):
            print(json.dumps(row), flush=True)
        return 0
    errors = []
    for row in run(given.mean):
        print(json.dumps(row), flush=True)
        errors.append(abs(row["error"]))
    print(json.dumps({"runs": len(errors), "median": statistics.median(errors), "largest": max(errors)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
