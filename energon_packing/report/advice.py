"""Advice before GPUs are paid for: how a Bridge recipe should share so many GPUs for the samples of an index, or the
packs of a plan, with what each layout would take.

A step is simulated: its packs cost what `energon_packing.packing.model_cost` counts, at the share of a GPU's peak that
published runs reach, and what ranks send each other comes on top; `energon_packing.packing.pipeline` says who waits.
Memory is that of ``validate``. Nothing here has measured the run itself; metrics of one that has scale all of it.
"""

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from energon_packing.config import ParallelConfig, RunConfig
from energon_packing.errors import UserError, refuse
from energon_packing.offline.data_paths import is_index, is_plan
from energon_packing.offline.index import Index
from energon_packing.offline.order import balanced_order
from energon_packing.offline.plan import Plan
from energon_packing.offline.samples import Sizes
from energon_packing.packing.balance import LINEAR, PATCH
from energon_packing.packing.model_cost import PARTS, SQUARES, ModelCost, model_cost
from energon_packing.packing.pipeline import Layout, Timeline, simulate, stage_costs
from energon_packing.report.stats import FEW, NEGLIGIBLE_FILL, NEGLIGIBLE_LOSS, SETTLED, WINDOWS, Dealt
from energon_packing.report.stats_samples import StatsSamples, samples_of_index
from energon_packing.report.steps import measured_steps
from energon_packing.thd.alignment import alignment_multiple
from energon_packing.validate.memory import GB, Memory, memory_of
from energon_packing.validate.recipes import embedding_rows, finalised
from energon_packing.validate.rules.kernels import machine_of
from energon_packing.validate.rules.rule import violations
from energon_packing.validate.run_source import ContainerRun, run_source

FIELDS = ("memory", "tflops", "bandwidth", "link", "network", "node", "reached", "price")
GPUS: dict[str, tuple[float, ...]] = {
    "a100": (80, 312, 2.0, 300, 25, 8, 0.58),
    "h100": (80, 989, 3.35, 450, 50, 8, 0.46),
    "h200": (141, 989, 4.8, 450, 50, 8, 0.46),
    "b200": (180, 2250, 7.7, 900, 50, 8, 0.46),
    "gb200": (186, 2500, 8.0, 900, 50, 72, 0.46),
    "l40s": (45, 362, 0.864, 32, 25, 8, 0.46),
}
"""GPU -> memory in GiB, dense bfloat16 TFLOP/s, TB/s of its memory, GB/s each way to a GPU of its node and to one of
another, and GPUs of a node: from NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM, HGX B200, GB200 NVL72 and
L40S (PCIe), halved where they count sparsity or both ways; between nodes, the network of the DGX that it is sold in.
Then the share of the peak that dense layers reach, norms and all included, in the runs of `ERRORS`."""
COMPARED = ("a100", "h100")  # of these, those with runs of dense models; the others are taken to be like an H100
EXPERT, VISION, BYTES = 0.5, 0.7, 2
"""What experts and vision encoders reach of the share of dense layers; bytes of a number that is sent."""
OWN_TOWERS = ("Qwen3VL", "Qwen35VL")  # beginnings of providers whose vision encoders are Bridge's
HOST = 3.5e-4  # seconds in which the host launches the kernels of a layer, both ways: no layer takes less
ERRORS = {"text": 0.11, "experts": 0.63, "images": 0.62}
"""How wrong the seconds of a step are at most for the published runs on which ``reached`` and `EXPERT` were chosen, of
dense text, with experts, with images: as ``scripts/bench.py advice`` prints them."""
UNLIKELY = 3.0  # no published run took so many times as long as foretold by its products
SPARE, FULL = 12 << 30, 0.8
"""Bytes of a GPU that an estimate leaves free: of the same runs four took 6 to 10 GiB more, one 16 and one less. Share
of a row below which it is said why rows may be so empty."""
MOST_SAMPLES, SPANS, FIRST, STEPS, REPLICAS, SHOWN = 20_000, 32, 3, 32, 8, 8
"""Samples (packs of a plan) that are looked at, in so many places; steps that are simulated of each layout and of the
fastest, replicas of them, and layouts that are shown."""
SIZES = {"TP": "tensor_model", "CP": "context", "PP": "pipeline_model", "EP": "expert_model"}
RECOMPUTED = ("granularity", "method", "num_layers")
AGAIN: dict[str, tuple[str | None, str | None, int | None]] = {
    "none": (None, None, None),
    "inside": ("selective", None, None),
    "all layers": ("full", "uniform", 1),
}
"""What is recomputed: nothing, feed-forward parts or experts, or all layers -> settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """GPUs of a run, in the units of `GPUS`; ``price`` of one for an hour, if known."""

    name: str
    count: int
    memory: float
    tflops: float
    bandwidth: float
    link: float
    network: float
    node: int
    reached: float
    price: float | None = None

    @classmethod
    def of(cls, text: str, changes: str = "") -> "Gpus":
        """Of ``8xh100``, and ``price=2.5,memory=94`` that changes it. Raises ConfigError: it is not of this form."""
        count, separator, name = text.lower().partition("x")
        form = f"give a number and one of {', '.join(GPUS)}, such as 8xh100, and what differs in --gpu."
        known = bool(separator) and count.isdecimal() and int(count) > 0 and name in GPUS
        refuse((not known, f"--gpus is {text!r}; {form}"))
        values: dict[str, Any] = dict(zip(FIELDS, GPUS[name], strict=False))
        for each in filter(None, changes.split(",")):
            key, _, value = (part.strip() for part in each.partition("="))
            number = float(value) if value.replace(".", "", 1).isdecimal() else 0.0
            most = {"reached": 1.0}.get(key, np.inf)
            wrong = key not in FIELDS or not 0 < number <= most or (key == "node" and number % 1 > 0)
            refuse((wrong, f"--gpu has {each!r}; give NAME=NUMBER above 0, with a name of {', '.join(FIELDS)}."))
            values[key] = int(number) if key == "node" else number
        return cls(name=name, count=int(count), **values)

    def between(self, ranks: int, stride: int = 1, *, single: bool = False) -> float:
        """Bytes per second that each of so many ranks, ``stride`` apart, sends to the next of a ring. Collectives leave
        a node by the network cards of all members there, a ``single`` ring by one."""
        inside, span = max(1, self.node // stride), ranks * stride
        away = self.network * (1 if single else inside)
        near = ranks == 1 or self.count <= self.node or (span <= self.node and self.node % span == 0)
        return 1e9 * (self.link if near else min(self.link, away))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a model's packs on GPUs, in the layout of its provider after ``finalize()``; ``world`` are all ranks,
    ``scale`` measured seconds by those foretold."""

    model: Any
    gpus: Gpus
    cost: ModelCost
    world: int
    scale: float = 1.0
    host: float = HOST

    def measured(self, seconds: float, foretold: float, row: float) -> "StepTime":
        """Scaled to a step of ``seconds`` by what was foretold of it; or, where no product can take so long, with a
        host that does, alike in all layers of a row, which then take ``row`` seconds."""
        if seconds <= UNLIKELY * foretold:
            return dataclasses.replace(self, scale=seconds / foretold)
        return dataclasses.replace(self, host=row / self.model.num_layers)

    def packs(self, vision: np.ndarray, language: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Seconds ``[M, 3]`` of vision, layers and head, in all pipeline stages, of packs of so many operations ``[M]``
        float64 and ``tokens`` ``[M]``, padding included: of products, repeated ones too, and of what tensor-, context-
        and expert-parallel ranks send for them, which is taken to hide behind nothing."""
        model, peak = self.model, self.gpus.tflops * 1e12 * self.gpus.reached
        tensor, context, layers = model.tensor_model_parallel_size, model.context_parallel_size, model.num_layers
        own, experts, forward = self.cost.language, bool(model.num_moe_experts), model_cost(model, frozen=PARTS)
        assert forward is not None  # as the cost of the model is known
        width = model.moe_ffn_hidden_size * model.moe_router_topk if experts else model.ffn_hidden_size
        inner = 2 * (2 + model.gated_linear_unit) * model.hidden_size * width * layers  # of feed-forward parts, forward
        # The share of layers that is computed again, whole, or inside of their feed-forward parts.
        full = float(model.recompute_granularity == "full")
        if full and model.recompute_method == "block":
            full = min(model.recompute_num_layers * model.pipeline_model_parallel_size / layers, 1.0)
        modules = {*(model.recompute_modules or ())} if model.recompute_granularity == "selective" else set()
        some = full or float(("moe" if experts else "mlp") in modules)
        head = own.get("logits", 0.0) * tokens
        again = full * forward.language["tokens"] / own["tokens"] * (language - head) if full else some * inner * tokens
        slower = 1 + inner / forward.language["tokens"] * (1 / EXPERT - 1) * experts
        seconds = (language - head + again) * slower / (tensor * context * peak)
        # Around attention and a dense feed-forward part, activations are all-reduced, or gathered and scattered, which
        # is the same; what sequence parallelism gathers once more for weights overlaps with their products.
        stream = BYTES * model.hidden_size * layers
        reduced = 4 + 2 * full + (0 if experts else 4 + 2 * some)
        sent = reduced * stream * (tensor - 1) / tensor / self.gpus.between(tensor)
        sent += self._to_experts((4 + 2 * some) * stream) if experts else 0.0
        # Keys and values pass all ranks of a ring, in the backward pass with their gradients.
        groups = max(model.num_query_groups or model.num_attention_heads, tensor) / tensor
        ring = (3 + full) * 2 * BYTES * groups * model.kv_channels * layers * (context - 1)
        sent += ring / self.gpus.between(context, tensor, single=True)
        seconds = np.maximum(self.scale * (seconds + sent * tokens / context), self.host * layers)
        head = self.scale * head / (tensor * context * peak)
        return np.stack([self.scale * self._towers(vision, peak), seconds, head], axis=1)

    def _towers(self, vision: np.ndarray, peak: float) -> np.ndarray:
        """Seconds of vision encoders. Bridge's own are spread over tensor ranks, Hugging Face's are whole on each."""
        model, tower = self.model, getattr(self.model, "vision_config", None)
        spread = type(model).__name__.startswith(OWN_TOWERS)
        trained = 0.0 if getattr(model, "freeze_vision_model", False) else 1.0
        tensor = model.tensor_model_parallel_size if spread else 1
        again = trained * (spread and model.recompute_granularity == "full")
        seconds = vision * (1 + again / 3) / (VISION * peak * tensor)
        if tensor > 1 and tower is not None:  # all-reduced twice in each layer and pass
            sent = (4 + 4 * trained + 4 * again) * BYTES * tower.hidden_size * tower.depth * (tensor - 1) / tensor
            seconds += vision / self.cost.vision["patches"] * sent / self.gpus.between(tensor)
        return seconds / (model.context_parallel_size if getattr(model, "vision_dp_when_cp", False) else 1)

    def _to_experts(self, stream: float) -> float:
        """Seconds per token of a rank for ``stream`` bytes to each of its experts and back; a flexible dispatcher sends
        them once to each rank, and once to each other node."""
        model, node, ranks = self.model, self.gpus.node, self.model.expert_model_parallel_size
        near, away = min(node, ranks) - 1, max(ranks - node, 0)
        copies, far = model.moe_router_topk, model.moe_router_topk
        if model.moe_token_dispatcher_type == "flex":
            copies, far = min(copies, ranks), min(far, max(ranks // node, 1))
        spread = model.tensor_model_parallel_size if model.sequence_parallel else 1
        links = copies * near / self.gpus.link + far * away / self.gpus.network
        return stream * links / ranks / 1e9 / spread

    def after(self, memory: Memory, backward: float, *, spread: bool, overlaps: bool) -> float:
        """Seconds of a step after its packs: gradients are summed over replicas, those of experts over their own ones,
        behind the last ``backward`` pass if that ``overlaps``; the optimizer reads and writes its state; and what it
        trains, 2 bytes for 4 of gradients, is gathered if it is ``spread``."""
        model, tensor = self.model, self.model.tensor_model_parallel_size
        stages, inside, share = model.pipeline_model_parallel_size, 1, 0.0
        if model.num_moe_experts:
            inside = model.expert_model_parallel_size * (model.expert_tensor_parallel_size or 1)
            held = 3 * model.hidden_size * model.moe_ffn_hidden_size * model.num_moe_experts * model.num_layers
            share = min(BYTES * held / (stages * inside) / memory.weights, 1.0)
        sent = memory.gradients * (1.5 if spread else 2)
        sending = 0.0
        for part, stride in ((1 - share, tensor), (share, inside)):
            ranks = self.world // (stages * stride)
            sending += part * sent * (ranks - 1) / ranks / self.gpus.between(ranks, stride)
        states = (2 * memory.optimizer + 2 * memory.gradients + memory.weights) / self.gpus.bandwidth / 1e12
        return max(sending - overlaps * backward, 0.0) + states


@dataclass(frozen=True, kw_only=True, slots=True)
class Packs:
    """Packs of a row length and an alignment."""

    operations: np.ndarray  # ``[P, 2]`` float64, of vision and language, padding included
    tokens: np.ndarray  # ``[P]`` int64 or float64, without padding
    aligned: np.ndarray  # ``[P]``, the same with it
    epoch: float  # tokens of a pass over all data
    lost: float = 0.0  # share of the tokens that no row has
    span: int = 0  # how many of them follow each other in a plan; 0 if they are of none


def packs_of_index(samples: StatsSamples, run: RunConfig, cost: ModelCost, *, seed: int) -> Packs:
    """Packs of the samples of an index, or of `MOST_SAMPLES` drawn from it, as a plan makes them. Raises ConfigError:
    no sample fits a row."""
    dealt, row = Dealt(dataclasses.replace(samples, remeasure=None), run), run.packing.seq_length
    refuse((not len(dealt.kept), f"No sample fits a row of {row} tokens; give another --seq-length."))
    chosen = _drawn(dealt, seed)
    packs = [*dealt.packs(chosen, None, steady=False, once=dealt.alike)]
    sizes, starts = dealt.kept.sizes.take(chosen[np.concatenate(packs)]), np.cumsum([0, *map(len, packs[:-1])])
    lost, multiple = dealt.lost_share(samples)[0], run.parallel.multiple
    return _packs(sizes, starts, cost, multiple, lost=lost, epoch=dealt.tokens)


def _packs(sizes: Sizes, starts: np.ndarray, cost: ModelCost, multiple: int, **more: Any) -> Packs:
    """Packs that begin at ``starts`` of these samples."""
    first, second = (-(-each // multiple) * multiple for each in (sizes.length, sizes.second))
    costs = cost.costs(dataclasses.replace(sizes, length=first, second=second))
    columns = np.broadcast_arrays(*costs, sizes.tokens, first + second)
    vision, language, tokens, aligned = (np.add.reduceat(each, starts, dtype=np.float64) for each in columns)
    return Packs(operations=np.stack([vision, language], axis=1) * cost.unit, tokens=tokens, aligned=aligned, **more)


def _drawn(dealt: Dealt, seed: int) -> np.ndarray:
    """Numbers of at most `MOST_SAMPLES` samples that fit a row, in random order; by weights, if there are any."""
    random, count, share = np.random.default_rng(seed), len(dealt.kept), dealt.share[dealt.kept.source]
    share = None if dealt.alike else share / share.sum()
    return random.choice(count, min(MOST_SAMPLES, count) if dealt.alike else MOST_SAMPLES, not dealt.alike, share)


def window_of(samples: StatsSamples, run: RunConfig, *, seed: int) -> tuple[int, float] | None:
    """The smallest window, of the run's and `WINDOWS`, that fills rows as those of the others do, and its fill; None if
    there are too few samples to say so."""
    dealt, fills = Dealt(dataclasses.replace(samples, remeasure=None), run), dict[int, float]()
    stream = _drawn(dealt, seed)
    for window in sorted({run.packing.window, *WINDOWS}):
        packs = [*dealt.packs(stream, window, steady=True, once=dealt.alike)]
        packs = packs[np.searchsorted(np.cumsum([0, *map(len, packs)]), SETTLED * window) :]
        if len(packs) >= FEW:
            tokens = dealt.tokens_of[stream[np.concatenate(packs)]].sum()
            fills[window] = float(tokens / (len(packs) * run.packing.seq_length))
    most = max(fills.values(), default=0.0) - NEGLIGIBLE_FILL
    known = run.packing.window in fills
    return next((each for each in fills.items() if known and each[1] >= most), None)


def packs_of_plan(plan: Plan, cost: ModelCost) -> Packs:
    """Packs of a plan, at equal distances if they are many."""
    facts, spans = plan.facts, 1 if len(plan) <= MOST_SAMPLES else SPANS
    group = int(facts.config.get("data", {}).get("max_data_parallel", 1))  # so many packs are even
    span = len(plan) if spans == 1 else max(MOST_SAMPLES // spans // group, 1) * group
    starts = (np.linspace(0, max(len(plan) - span, 0) // group, spans).astype(int) * group).tolist()
    tables = [pa.concat_tables(plan.tables(["pack", "length", "second"], at, at + span)) for at in starts]
    table = pa.concat_tables(
        each.filter((pc.field("pack") >= at) & (pc.field("pack") < at + span))
        for each, at in zip(tables, starts, strict=True)
    )
    pack, length, second = (column.to_numpy().astype(np.int64) for column in table.columns)
    nothing = dict.fromkeys(("images", "patches", *SQUARES), np.zeros_like(pack))
    sizes = Sizes(length=length, second=second, **nothing)
    known = bool(facts.config.get("packing", {}).get("cost_model"))
    epoch = float(facts.summary["fill"]) * int(facts.decided["seq_length"]) * len(plan) / facts.epochs
    begins, multiple = np.flatnonzero(np.diff(pack, prepend=-1)), int(facts.decided["multiple"])
    packs = _packs(sizes, begins, cost, multiple, epoch=epoch, span=span if spans > 1 else 1)
    vision = np.concatenate([plan.costs(at, at + span)[:, 0] for at in starts])
    packs.operations[:, 0] = vision * _operations(cost, known=known)[0]
    return packs


def _operations(cost: ModelCost, *, known: bool) -> np.ndarray:
    """Operations of a unit of vision and of language ``[2]``, counted by the model or, if it is not ``known``, by
    `pack_cost`: tokens have their mean share of attention there, and patches none."""
    patch, token = cost.vision.get("patches", 0.0) / PATCH, cost.token * cost.unit / LINEAR
    return np.full(2, float(cost.unit)) if known else np.array([patch, token])


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One layout of a recipe: what it sets, and what follows."""

    overrides: list[str]  # what it changes, as Hydra takes it
    container: Any
    model: Any  # its provider after ``finalize()``
    memory: Memory | None
    again: str  # of `AGAIN`
    sizes: Mapping[str, int]  # ``TP``, ``CP``, ``PP``, ``EP`` -> ranks
    replicas: int  # data-parallel ones
    multiple: int  # tokens to whose multiple samples are padded
    row: int  # tokens
    rows: int  # of a global batch

    @classmethod
    def of(cls, container: Any, gpus: Gpus, settings: Mapping[str, Any], again: str = "as it is") -> "Choice":
        """A recipe with these settings, which stays as it is."""
        settings = {path: value for path, value in settings.items() if attrgetter(path)(container) != value}
        changed = copy.copy(container)
        for section in ("model", "train", "dataset"):
            setattr(changed, section, copy.copy(getattr(container, section)))
        for path, value in settings.items():
            section, _, name = path.partition(".")
            setattr(getattr(changed, section), name, value)
        model, vocabulary = finalised(changed.model), embedding_rows(changed.model)
        sizes = {name: getattr(model, f"{kind}_parallel_size") for name, kind in SIZES.items()}
        tensor, context, stages, _ = sizes.values()
        evaluation = container.dist.eval_context_parallel_size
        return cls(
            overrides=[f"{path}={orjson.dumps(each).decode().replace('"', '')}" for path, each in settings.items()],
            container=changed,
            model=model,
            memory=memory_of(changed, model, vocabulary=vocabulary, world_size=gpus.count),
            again=again,
            sizes=sizes,
            replicas=max(1, gpus.count // (tensor * context * stages)),
            multiple=alignment_multiple(tensor, context, model.sequence_parallel, evaluation),
            row=model.seq_length,
            rows=changed.train.global_batch_size,
        )

    @property
    def layout(self) -> str:
        """For example ``TP 2 SP EP 8 DP 4``."""
        told = [f"{name} {size}" for name, size in self.sizes.items() if size > 1]
        return " ".join(told[:1] + ["SP"] * bool(self.model.sequence_parallel) + told[1:] + [f"DP {self.replicas}"])

    @property
    def stages(self) -> Layout:
        """The pipeline."""
        return Layout(self.sizes["PP"], self.model.virtual_pipeline_model_parallel_size or 1)

    def fits(self, largest: float, own: "Choice") -> bool:
        """Whether a step needs no more than so many bytes of a GPU; where they are not known, whether it divides the
        model as its `own` recipe does or more, and recomputes as much."""
        if self.memory is not None:
            return self.memory.total <= largest
        less = any(size < own.sizes[name] for name, size in self.sizes.items())
        less = less or self.model.sequence_parallel < own.model.sequence_parallel
        return not less and self.row <= own.row and not any("recompute" in each for each in self.overrides)

    def after(self, time: StepTime, seconds: np.ndarray) -> float:
        """`StepTime.after` packs that take `seconds` ``[..., 3]``; 0 where memory is not known."""
        ddp, optimizer = self.container.ddp, self.container.optimizer
        spread = bool(ddp.use_distributed_optimizer or optimizer.use_distributed_optimizer)
        backward = 2 / 3 * float(seconds.sum(axis=-1).mean()) / self.stages.ranks
        overlaps = bool(ddp.overlap_grad_reduce)
        return 0.0 if self.memory is None else time.after(self.memory, backward, spread=spread, overlaps=overlaps)


def choices(container: Any, gpus: Gpus, rows: Sequence[int]) -> Iterator[Choice]:
    """All layouts of a recipe on so many GPUs that its heads, layers and experts allow, in rows of these lengths, with
    about as many tokens in a global batch as the recipe has, and one row at a time."""
    model, experts = container.model, container.model.num_moe_experts
    tokens = container.train.global_batch_size * model.seq_length
    sizes = [each for each in range(1, gpus.count + 1) if gpus.count % each == 0]
    heads = int(np.gcd(model.num_attention_heads, model.num_query_groups or model.num_attention_heads))
    tensors = [(each, both) for each in sizes if each <= gpus.node and heads % each == 0 for both in {False, each > 1}]
    stages = [each for each in sizes if model.num_layers % each == 0]
    spreads = [each for each in sizes if experts % each == 0] if experts else [1]
    for (tensor, sequence), stage, context, spread, again, row in product(tensors, stages, sizes, spreads, AGAIN, rows):
        replicas, left = divmod(gpus.count, tensor * stage * context)
        count = max(1, round(tokens / row / max(replicas, 1))) * replicas
        inside = spread * (model.expert_tensor_parallel_size or 1)
        # Core's experts refuse tensor parallelism without sequence parallelism in their first forward pass.
        if (
            (experts and tensor > 1 and not sequence)
            or left
            or not replicas
            or gpus.count // stage % inside
            or not 2 / 3 <= count * row / tokens <= 1.5
        ):
            continue
        settings: dict[str, Any] = {
            "model.tensor_model_parallel_size": tensor,
            "model.context_parallel_size": context,
            "model.pipeline_model_parallel_size": stage,
            "model.virtual_pipeline_model_parallel_size": None,
            **({"model.expert_model_parallel_size": spread} if experts else {}),
            "model.sequence_parallel": sequence,
            **{f"model.recompute_{name}": value for name, value in zip(RECOMPUTED, AGAIN[again], strict=True)},
            **({"model.recompute_modules": ["moe" if experts else "mlp"]} if again == "inside" else {}),
            "model.seq_length": row,
            "dataset.seq_length": row,
            "train.global_batch_size": count,
            "train.micro_batch_size": 1,
        }
        choice = Choice.of(container, gpus, settings, again)
        if row % choice.multiple == 0:
            yield choice


def _staged(seconds: np.ndarray, stages: Layout) -> Timeline:
    """One replica's step of packs that take `seconds` ``[M, 3]``; the head is in the last stage."""
    forward, backward = stage_costs(seconds[:, :2], stages)
    forward[:, -1] += seconds[:, 2] / 3
    backward[:, -1] += seconds[:, 2] * 2 / 3
    return simulate(forward, backward, stages)


def foretell(choice: Choice, packs: Packs, time: StepTime, *, steps: int = STEPS, seed: int = 0) -> dict[str, float]:
    """Simulates steps of a layout, whose replicas take packs in turn: at equal distances in a plan, or in the order of
    a plan for them. Replicas are a part of all, at equal distances. Returns seconds of a ``step``, real ``tokens`` per
    second of all GPUs and their standard error ``chance``, as a share; ``bubble`` and ``imbalance``: the shares of a
    step in which pipeline stages of a replica wait for each other, and replicas for the slowest; and ``of_peak``:
    operations of packs per second, of the peak of all GPUs."""
    rows, replicas, stages = choice.rows, choice.replicas, choice.stages
    unit = packs.span if rows <= packs.span else rows  # a step lies in one place
    starts = np.linspace(0, max(len(packs.tokens) // unit - 1, 0), steps).astype(int) * unit
    chosen = (starts[:, None] + np.arange(rows)).ravel() % len(packs.tokens)
    if not packs.span:
        chosen = np.random.default_rng(seed).permutation(len(packs.tokens))[: max(steps * rows, 32 * replicas)]
    seconds = time.packs(packs.operations[chosen, 0], packs.operations[chosen, 1], packs.aligned[chosen])
    if not packs.span:  # each epoch has its order, as in a plan
        more: dict[str, Any] = {"group": replicas, "before": np.zeros((0, 2))}
        epochs = range(-(-steps * rows // len(chosen)))
        order = np.concatenate([balanced_order(seconds[:, :2], **more, seed=[seed, epoch]) for epoch in epochs])
        chosen, seconds = chosen[order], seconds[order]
    own = np.unique(np.linspace(0, replicas - 1, min(replicas, REPLICAS)).astype(int)).tolist()
    lasted, bubbles = np.zeros((steps, len(own))), np.zeros((steps, len(own)))
    for step, (at, rank) in product(range(steps), enumerate(own)):
        mine = seconds[step * rows + rank : (step + 1) * rows : replicas]
        if stages.ranks > 1:
            lasted[step, at], _, bubbles[step, at], _ = _staged(mine, stages)
        else:
            lasted[step, at] = mine.sum()
    took, first = lasted.max(axis=1) + choice.after(time, seconds), chosen[: steps * rows].reshape(steps, rows)
    tokens, operations = packs.tokens[first].sum(axis=1), packs.operations[first].sum()
    rates = tokens / took
    return {
        "step": float(took.mean()),
        "tokens": float(tokens.sum() / took.sum()),
        "chance": float(rates.std() / rates.mean() / math.sqrt(steps)),
        "bubble": max(float(bubbles.mean()), 0.0),
        "imbalance": max(1 - float(lasted.mean() / lasted.max(axis=1).mean()), 0.0),
        "of_peak": float(operations / took.sum() / (time.gpus.tflops * 1e12 * time.gpus.count)),
    }


def calibrated(time: StepTime, choice: Choice, path: Path) -> StepTime:
    """A time scaled to the metrics of a run with this layout (its median step), whose packs are taken to be alike.
    Raises UserError: as `measured_steps`; there is no step, or none so long as what comes after packs."""
    costs, seconds = measured_steps(path)
    refuse((not len(seconds), f"{path} has no step whose time all ranks know; give the metrics of a longer run."))
    count = max(1, choice.rows // choice.replicas)
    known = bool(getattr(getattr(choice.container.dataset, "packing", None), "cost_model", ""))
    vision, language = (costs * _operations(time.cost, known=known)).reshape(-1, 2).T / count
    each = time.packs(vision, language, language / (time.cost.token * time.cost.unit)).reshape(*costs.shape[:2], 3)
    slowest = each[np.arange(len(each)), each.sum(axis=2).argmax(axis=1)]
    same = np.tile(np.median(slowest, axis=0), (count, 1))
    measured = float(np.median(seconds)) - choice.after(time, each)
    foretold = _staged(same, choice.stages).makespan
    fast = f"Steps of {path} are faster than all products at the peak of --gpus"
    fast += ": they are of other GPUs, of another recipe or without its packing.cost_model."
    refuse((measured < foretold * time.gpus.reached, fast))
    ones, others = np.tile([0.0, 1.0, 0.0], (count, 1)), _staged(same * [1, 0, 1], choice.stages).makespan
    return time.measured(measured, foretold, (measured - others) / _staged(ones, choice.stages).makespan)


def advice_of(
    path: Path, recipe: str, gpus: Gpus, *, rows: Sequence[int] = (), fit: Path | None = None, seed: int = 0
) -> dict[str, Any]:
    """The layouts of a recipe that take least time for an epoch of an index or a plan, of those that fit the GPUs and
    break no rule of ``validate``; by default in rows of the recipe's length and twice that, or of the plan's. Returns
    ``choices``, fastest first, and ``own``, the recipe as it is or None if the GPUs cannot share it so, as plain
    values; ``layouts`` that were tried, ``too_large`` and, by rule, ``refused`` ones; ``scale`` and ``host`` of
    `StepTime`, whether they are ``measured``, and the largest ``error`` of such models; for an index the ``window``
    that an online run needs, and its ``fill``; ``how`` figures were made, and ``warnings``. Raises UserError: no layout
    is left; there is no index or plan, or it is of clips; metrics are of another recipe; ConfigError: the recipe cannot
    be read, or has another data set than ours."""
    source, known = run_source((recipe,), world_size=gpus.count), is_index(path) or is_plan(path)
    refuse((not known, f"{path} is no index and no plan; make an index with `energon-packing measure`."))
    if not isinstance(source, ContainerRun):
        raise UserError(f"{recipe} is no recipe of Bridge; give module:function, or a YAML that Bridge wrote.")
    from energon_packing.bridge.dataset import cost_of_run  # Bridge can be imported now

    container, other = source.container, type(source.container.dataset).__name__
    other = f"{recipe} has a {other}; advice is for conversations and our encoder (`use_packed_data`, docs/bridge.md)."
    ours = hasattr(container.dataset, "run_config") and not hasattr(container.dataset, "run_facts")
    refuse((not ours or isinstance(container.dataset.encoder, str), other))
    run = source.measured()[0]
    if (cost := cost_of_run(container)) is None:
        raise UserError(f"The layers of {type(container.model).__name__} are not known here: no advice for it.")
    multiple, warnings, samples = 0, list[str](), None
    if is_plan(path):
        packs, decided = packs_of_plan(plan := Plan.open(path), cost), plan.facts.decided
        row, multiple = int(decided["seq_length"]), int(decided["multiple"])
        refuse((bool(rows) and [*rows] != [row], f"{path} has rows of {row} tokens; leave out --seq-length."))
        rows = [row]
    else:
        index, rows = Index.open(path), rows or [run.packing.seq_length, 2 * run.packing.seq_length]
        try:
            samples = samples_of_index(index, str(path), needed=cost.needed)
        except UserError:  # most are measured without the columns
            samples = samples_of_index(index, str(path))
            warnings += [f"{path} was measured without packing.cost_model: attention inside images is not counted."]
            vision = {name: each for name, each in cost.vision.items() if name not in cost.needed}
            cost = dataclasses.replace(cost, vision=vision, language={**cost.language, "visual": 0.0})
        refuse(("text_tokens" in samples.columns, f"{path} is an index of clips; there is no advice for them."))

    def of(row: int, multiple: int) -> RunConfig:
        packing = dataclasses.replace(run.packing, seq_length=row, cost_model="", cost_frozen=())
        parallel = ParallelConfig(tensor_parallel=multiple, sequence_parallel=multiple > 1)
        return dataclasses.replace(run, packing=packing, parallel=parallel)

    @cache
    def packed(row: int, multiple: int) -> Packs:
        return packs if samples is None else packs_of_index(samples, of(row, multiple), cost, seed=seed)

    def foretold(choice: Choice, steps: int = STEPS) -> dict[str, Any]:
        packs, changed = packed(choice.row, choice.multiple), dataclasses.replace(time, model=choice.model)
        found = foretell(choice, packs, changed, steps=steps, seed=seed)
        return _told(found, choice, packs, gpus)

    own, largest = Choice.of(container, gpus, {}), gpus.memory * (1 << 30) - SPARE
    time = StepTime(model=own.model, gpus=gpus, cost=cost, world=gpus.count)
    tensor, context, stages, spread = own.sizes.values()
    experts = own.model.num_moe_experts
    inside = (own.model.expert_tensor_parallel_size or 1) * spread if experts else 1
    runs = gpus.count % (tensor * context * stages) == 0 == own.rows % own.replicas
    runs = runs and gpus.count // stages % inside == 0 and (not experts or tensor == 1 or own.model.sequence_parallel)
    cannot = f"The recipe does not run as it is: {own.layout}, {own.rows} rows of {own.row} tokens in a global batch"
    cannot += "." if runs else ", do not divide."
    if fit is not None:
        refuse((not runs, f"{fit} is not of {recipe} on {gpus.count} GPUs. {cannot}"))
        time = calibrated(time, own, fit)
    possible = [each for each in choices(container, gpus, rows) if not multiple or multiple % each.multiple == 0]
    fits = [each for each in possible if each.fits(largest, own)]
    different = {(each.layout, each.again, each.row): each for each in fits[::-1]}  # what `finalize()` leaves so
    quick = [(foretold(each, FIRST), each) for each in different.values()]
    refused, good = Counter[str](), list[Choice]()
    for _, choice in sorted(quick, key=_slowness):
        said = objections(source, choice.overrides, gpus, ask=not good)
        refused.update(said[:1])
        good += [choice] * (not said)
        if len(good) == 2 * SHOWN:
            break
    shown = sorted(((foretold(choice), choice) for choice in good), key=_slowness)
    while len(shown) > 1 and (said := objections(source, shown[0][1].overrides, gpus, ask=True)):
        refused.update(said[:1])
        shown.pop(0)
    large = f"{len(possible) - len(fits)} of {len(possible)} layouts need more than {largest / (1 << 30):.0f} GiB"
    large += ", or, as that is not known, divide the model less than the recipe" * (own.memory is None)
    if not shown:
        reasons = ", ".join([large, *(f"{name} refuses {count}" for name, count in refused.most_common(3))])
        fix = "take other GPUs or another number of them, shorter rows, or another train.global_batch_size."
        raise UserError(f"{recipe} fits {gpus.count} x {gpus.name} in no way ({reasons}): {fix}")
    as_it_is, best = None, shown[0][1]
    with suppress(UserError):  # of a pipeline that Core refuses, for example
        planned = not multiple or (own.row in rows and multiple % own.multiple == 0)
        as_it_is = foretold(own) if runs and planned else None
    kind = "experts" if experts else "images" if cost.vision else "text"
    report: dict[str, Any] = {
        "recipe": recipe,
        "gpus": dataclasses.asdict(gpus),
        "choices": [told for told, _ in shown[:SHOWN]],
        "own": as_it_is,
        **{"layouts": len(possible), "too_large": len(possible) - len(fits), "refused": dict(refused)},
        **{"measured": fit is not None, "scale": time.scale, "host": time.host, "error": ERRORS[kind]},
        "warnings": [*_uncompared(best, gpus, kind, measured=fit is not None), *warnings, *[cannot] * (not as_it_is)],
    }
    if samples is not None and (found := window_of(samples, of(best.row, best.multiple), seed=seed)):
        report["choices"][0]["overrides"] += [f"dataset.packing.window={found[0]}"] * (found[0] != run.packing.window)
        report |= {"window": found[0], "fill": found[1]}
    return report | {"how": [*_how(report)]}


def _slowness(told: tuple[Mapping[str, Any], Choice]) -> float:
    """What layouts are sorted by: tokens per second of all that was read, those without a row among them."""
    return -float(told[0]["tokens"]) * (1 - told[0]["lost"])


def _uncompared(best: Choice, gpus: Gpus, kind: str, *, measured: bool) -> list[str]:
    """Sentences about what no published run confirms, or no run at all."""
    worst, spread = f"{1 / (1 - ERRORS[kind]):.1f}", best.model.num_moe_experts and best.sizes["EP"] > gpus.node
    reached = f"No dense model was compared on {gpus.name}, which is taken to reach {gpus.reached:.0%} of its peak."
    said = {
        reached: gpus.name not in COMPARED and not measured,
        f"Published runs with {kind} took up to {worst} times as long as foretold.": kind != "text" and not measured,
        "No run with context parallelism, or with experts over several nodes, was compared.": (
            (best.sizes["CP"] > 1 or spread) and not measured
        ),
        "The memory of this model or precision is not known: it is divided as in the recipe, or more.": not best.memory,
        f"Runs of up to 64 GPUs were compared, not of {gpus.count}: the network may be slower.": gpus.count > 64,
        f"Rows of up to 32,768 tokens were compared, not of {best.row:,}.": best.row > 32768,
    }
    return [sentence for sentence, holds in said.items() if holds]


def objections(source: ContainerRun, changes: Sequence[str], gpus: Gpus, *, ask: bool) -> list[str]:
    """The rules that a recipe with these overrides breaks, and, if to ``ask``, what Bridge's ``validate()`` says
    against it; missing weights apart."""
    changes = (*changes, "checkpoint.pretrained_checkpoint=.")  # a place that is there
    changed = dataclasses.replace(source, container=copy.deepcopy(source.container), overrides=changes)
    view = changed.view().changed(gpu_memory=round(gpus.memory * (1 << 30)), machine=machine_of(gpus.name, ""))
    found = [each.rule.id for each in violations(view)]
    if found or not ask:
        return found
    verdict = changed.verdict()
    return [f"Megatron-Bridge: {verdict.message}"] if verdict.accepted is False else []


def _told(found: Mapping[str, float], choice: Choice, packs: Packs, gpus: Gpus) -> dict[str, Any]:
    """One layout as plain values: seconds, bytes of the fullest GPU, and GPU hours and price of an epoch."""
    seconds = packs.epoch / found["tokens"]
    hours = seconds * gpus.count / 3600
    return {
        **{"layout": choice.layout, "recompute": choice.again, "seq_length": choice.row, "multiple": choice.multiple},
        **{"global_batch_size": choice.rows, "micro_batches": choice.rows // choice.replicas},
        **{"lost": packs.lost, "fill": float(packs.tokens.mean()) / choice.row},
        **found,
        "memory": None if choice.memory is None else choice.memory.parts | {"total": choice.memory.total},
        **{"steps": seconds / found["step"], "gpu_hours": hours, "price": gpus.price and gpus.price * hours},
        "overrides": choice.overrides,
    }


def _how(report: Mapping[str, Any]) -> Iterator[str]:
    """How the figures of a report were made, and how wrong they may be."""
    gpus, best, own = report["gpus"], report["choices"][0], report["own"]
    large, broken = report["too_large"], sum(report["refused"].values())
    yield (
        f"{report['layouts']} layouts of {gpus['count']} x {gpus['name']}: {large} leave less than {SPARE >> 30} of "
        f"{gpus['memory']:.0f} GiB, and {broken} of the fastest break a rule. The first pads samples to a multiple of "
        f"{best['multiple']} and takes {best['step']:.3g} s a step, {best['of_peak']:.1%} of the peak, and "
        f"{best['steps']:,.0f} steps an epoch."
    )
    if own:
        needs = f" and needs {own['memory']['total'] / GB:.1f} GB" if own["memory"] else ""
        needs += ", too much" * bool(own["memory"] and own["memory"]["total"] > gpus["memory"] * (1 << 30) - SPARE)
        yield f"The recipe as it is has {own['tokens'] / best['tokens']:.0%} of its tokens a second{needs}."
    if best["lost"] > NEGLIGIBLE_LOSS:
        yield (
            f"{best['lost']:.1%} of the tokens are in samples that fit no such row as they are; hours and price are "
            "without them. A run drops, cuts or resizes them (packing.oversize, encoder.limits.when_over)."
        )
    if best["fill"] < FULL:
        ends = "samples are few, or a limit ends them, such as dataset.packing.max_patches_per_pack"
        yield f"Rows are {best['fill']:.0%} full: {ends}."
    how = f"products at {gpus['reached']:.0%} of {gpus['tflops']:.0f} TFLOP/s, links of {gpus['link']:.0f} and "
    how += f"{gpus['network']:.0f} GB/s; the seconds of published runs were up to {report['error']:.0%} off"
    if report["measured"]:
        how = f"{report['scale']:.3g} times what products and links take, at least {1000 * report['host']:.3g} ms a "
        how += "layer and row, as measured: right for the recipe as it is, the less for others the more they differ"
    chance = f"layouts within {3 * best['chance']:.1%} of each other are alike"
    yield f"Tokens, bubble and waiting for the slowest replica are of {STEPS} simulated steps, so that {chance}: {how}."
    yield (
        "GB are an estimate for rows as full of images as they may be; CUDA, NCCL and fragments come on top, 6 to 16 "
        "GiB in published runs. GPU hours and price are of an epoch without saving, evaluating and waiting for data."
    )
    if best["memory"]:
        yield "The first: " + ", ".join(f"{name} {size / GB:.1f}" for name, size in best["memory"].items()) + " GB."
    if "window" in report:
        yield f"Packs are those of a plan; online, a window of {report['window']} fills rows to {report['fill']:.2%}."
