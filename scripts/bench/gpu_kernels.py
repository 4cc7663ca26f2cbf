"""Attention kernels on packed rows: each case, kernel by kernel, forward and backward against each sample alone."""

import contextlib
import dataclasses
import logging
import os
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
FORWARD, BACKWARD = 3e-2, 4e-2
"""Largest difference in bfloat16 from float32: of an output; of a gradient, relative to the largest of its sample."""
SWITCHES = {
    "fused": ("0", "1", "0"),
    "flash": ("1", "0", "0"),
    "unfused": ("0", "0", "1"),
    "any": ("1", "1", "1"),
}
"""What `NVTE_FLASH_ATTN`, `NVTE_FUSED_ATTN` and `NVTE_UNFUSED_ATTN` are set to for a kernel alone."""
MIXED = (3, 17, 400, 64, 129, 5, 256, 33, 1, 90, 311, 200)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row and one layer.

    Attributes:
        name: of the row.
        lengths: tokens of the samples; of the queries, for cross attention.
        keys: tokens of the samples' keys and values, for cross attention; None for self attention.
        multiple: of the alignment.
        tail: masked tokens behind the last sample.
        padding: ``between``: padding stands between samples; ``real``: it is part of the sample before it.
        width, value_width: of a head; of its values, if another.
        heads, groups: of queries, and of keys and values.
        causal, window, sinks, deterministic: as Megatron-Core has them.
    """

    name: str = "mixed"
    lengths: Sequence[int] = MIXED
    keys: Sequence[int] | None = None
    multiple: int = 16
    tail: int = 0
    padding: str = "between"
    width: int = 128
    value_width: int | None = None
    heads: int = 8
    groups: int = 2
    causal: bool = True
    window: tuple[int, int] | None = None
    sinks: bool = False
    deterministic: bool = False

    @property
    def differences(self) -> dict[str, Any]:
        """The fields that are not those of the base, without its lengths."""
        fields = {spec.name: spec.default for spec in dataclasses.fields(self) if spec.name not in ("lengths", "keys")}
        return {name: getattr(self, name) for name, usual in fields.items() if getattr(self, name) != usual}


def cases() -> Iterator[Case]:
    """Yields a base, and what differs from it in one thing."""
    many = tuple(1 + (7 * index) % 61 for index in range(300))
    for padding in ("between", "real"):
        base = Case(padding=padding)
        yield base
        for width in (64, 72, 80, 96, 256):
            yield dataclasses.replace(base, width=width)
        yield dataclasses.replace(base, width=192, value_width=128, groups=8)
        yield dataclasses.replace(base, groups=8)
        yield dataclasses.replace(base, groups=1)
        yield dataclasses.replace(base, multiple=8)
        yield dataclasses.replace(base, name="tail", tail=512)
        yield dataclasses.replace(base, name="one segment", lengths=(1999,))
        yield dataclasses.replace(base, name="300 segments", lengths=many)
        yield dataclasses.replace(base, name="segments of one token", lengths=(1,) * 40 + (5,))
        yield dataclasses.replace(base, name="shorter than the multiple", lengths=(3, 7, 2, 9, 4))
        yield dataclasses.replace(base, window=(63, 0))
        yield dataclasses.replace(base, sinks=True)
        yield dataclasses.replace(base, sinks=True, window=(63, 0), width=64)
        yield dataclasses.replace(base, deterministic=True)
    unaligned = Case(multiple=1)
    yield unaligned
    yield dataclasses.replace(unaligned, name="tail", tail=512)
    for images in (1, 20, 200):  # a tower: patches of images, which see all of their own
        yield Case(name=f"{images} images", lengths=(64, 256, 100, 1024)[:images] * max(1, images // 4), multiple=1,
                   width=80, heads=16, groups=16, causal=False)  # fmt: skip
    yield Case(name="clips", lengths=(520, 1040, 260), causal=False, heads=12, groups=12)
    yield Case(name="clips and their text", lengths=(520, 1040, 260), keys=(77, 512, 30), causal=False, heads=12,
               groups=12)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Where the samples of one side lie, in tokens, and the kernel's int32 boundaries on the device."""

    starts: list[int]
    lengths: list[int]
    total: int
    longest: int
    between: bool
    real: torch.Tensor
    padded: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], case: Case, device: str) -> "Row":
        """Returns the row of samples of these lengths."""
        aligned = [-(-length // case.multiple) * case.multiple for length in lengths]
        ends = [*aligned, case.tail] if case.tail else aligned
        real = [*lengths, case.tail] if case.tail else list(lengths)
        padded = torch.tensor([0, *np.cumsum(ends)], dtype=torch.int32, device=device)
        inner = torch.tensor([0, *np.cumsum(real)], dtype=torch.int32, device=device)
        return cls(
            starts=[0, *np.cumsum(aligned)[:-1].tolist()],
            lengths=list(lengths),
            total=int(sum(ends)),
            longest=max(ends),
            between=case.padding == "between" and ends != real,
            real=padded if case.padding == "real" else inner,
            padded=padded,
        )


def tensors(case: Case, queries: Row, keys: Row, device: str, seed: int = 0) -> Tensors:
    """Returns query, key and value, ``[tokens, heads, width]`` in bfloat16, which take gradients."""
    made = torch.Generator(device).manual_seed(seed)
    shapes = (
        (queries.total, case.heads, case.width),
        (keys.total, case.groups, case.width),
        (keys.total, case.groups, case.value_width or case.width),
    )
    one, two, three = (
        torch.randn(shape, generator=made, device=device, dtype=torch.bfloat16).requires_grad_() for shape in shapes
    )
    return one, two, three


def alone(
    case: Case, given: Tensors, gradient: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Returns the output of one sample and the gradients of its query, key, value and sinks, in float32."""
    query, key, value = (tensor.detach().float().requires_grad_() for tensor in given)
    times = case.heads // case.groups
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(times, 1)) * case.width**-0.5
    row = torch.arange(query.shape[0], device=query.device)[:, None]
    column = torch.arange(key.shape[0], device=query.device)[None]
    seen = torch.ones_like(scores[0], dtype=torch.bool)
    if case.causal:
        seen &= column <= row
    if case.window:
        seen &= column >= row - case.window[0]
    scores = scores.masked_fill(~seen, -torch.inf)
    sinks = () if sink is None else (sink.detach().float().requires_grad_(),)
    for sink in sinks:
        scores = torch.cat([scores, sink.reshape(-1, 1, 1).expand(-1, query.shape[0], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[0]]
    output = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(times, 1))
    return output.detach(), torch.autograd.grad(output, (query, key, value, *sinks), gradient.float())


def poison(device: str) -> None:
    """Fills memory that the next tensors get with NaN, so that a kernel that leaves rows unwritten is seen."""
    if device == "cpu":
        return
    held = [torch.full((size,), torch.nan, device=device) for size in (1 << 28, *[1 << 22] * 8, *[1 << 17] * 8)]
    del held


class Layer:
    """Megatron-Core's `TEDotProductAttention` for a case."""

    def __init__(self, case: Case, device: str) -> None:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(
            num_layers=1,
            hidden_size=case.heads * case.width,
            num_attention_heads=case.heads,
            num_query_groups=case.groups,
            kv_channels=case.width,
            attention_dropout=0.0,
            window_size=case.window,
            softmax_type="learnable" if case.sinks else "vanilla",
            deterministic_mode=case.deterministic,
            bf16=True,
            params_dtype=torch.bfloat16,
        )
        mask = AttnMaskType.causal if case.causal else AttnMaskType.no_mask
        widths = {"k_channels": case.width, "v_channels": case.value_width} if case.value_width else {}
        self.module = TEDotProductAttention(
            config,
            1,
            mask,
            "self" if case.keys is None else "cross",
            pg_collection=SimpleNamespace(tp=None, cp=None),
            **widths,
        ).to(device)
        self.mask = mask
        self.sink = None
        if case.sinks:
            self.sink = next(parameter for name, parameter in self.module.named_parameters() if "softmax" in name)
            with torch.no_grad():
                self.sink.copy_(torch.linspace(-1, 2, self.sink.numel()).reshape(self.sink.shape))

    def __call__(self, given: Tensors, queries: Row, keys: Row) -> torch.Tensor:
        """Returns the output, ``[tokens, heads, width]``."""
        from megatron.core.packed_seq_params import PackedSeqParams

        values: dict[str, Any] = {
            "qkv_format": "thd",
            "cu_seqlens_q": queries.real,
            "cu_seqlens_kv": keys.real,
            "cu_seqlens_q_padded": queries.padded,
            "cu_seqlens_kv_padded": keys.padded,
            "max_seqlen_q": queries.longest,
            "max_seqlen_kv": keys.longest,
            "pad_between_seqs": queries.between or keys.between,
        }
        known = {spec.name for spec in dataclasses.fields(PackedSeqParams)}
        params = PackedSeqParams(**{name: value for name, value in values.items() if name in known})
        made = self.module(*given, None, self.mask, packed_seq_params=params)
        return made.reshape(given[0].shape[0], given[0].shape[1], given[2].shape[-1])


@contextlib.contextmanager
def only(kernel: str, *, deterministic: bool = False) -> Iterator[None]:
    """Leaves Transformer Engine one kernel."""
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention as chosen

    names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(zip(names, (*SWITCHES[kernel], "0" if deterministic else "1"), strict=True))
    chosen._attention_backends["backend_selection_requires_update"] = True
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def chosen_kernel() -> str:
    """Returns the kernel that Transformer Engine took last."""
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention as chosen

    state = chosen._attention_backends
    if state["use_flash_attention"]:
        return f"FlashAttention {state['flash_attention_backend']}"
    if state["use_fused_attention"]:
        return f"cuDNN {str(state['fused_attention_backend']).rsplit('.', 1)[-1]}"
    return "unfused" if state["use_unfused_attention"] else "none"


def relative(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, relative to the largest of their values; infinite where there is a NaN."""
    return float((mine.float() - theirs).abs().nan_to_num(torch.inf).max()) / (float(theirs.abs().max()) or 1.0)


def check(case: Case, kernel: str, device: str = "cuda") -> dict[str, Any]:
    """Compares one kernel on one case with its samples alone.

    Returns:
        ``output`` and ``gradient``: largest differences, the second of queries, keys, values and sinks; ``unwritten``:
        shares of NaN in the padding of the output and of the gradients; ``kernel``: the one that ran; ``equal``.
        ``refused``: why no kernel ran, or ``error``; see `_stopped`.
    """
    told = {"check": "attention", "asked": kernel, **case.differences}
    queries = Row.of(case.lengths, case, device)
    keys = queries if case.keys is None else Row.of(case.keys, case, device)
    with only(kernel, deterministic=case.deterministic):
        try:
            layer = Layer(case, device)
            given = tensors(case, queries, keys, device)
            gradient = torch.zeros(
                queries.total, case.heads, case.value_width or case.width, device=device, dtype=torch.bfloat16
            )
            for start, length in zip(queries.starts, queries.lengths, strict=True):
                gradient[start : start + length].normal_()
            poison(device)
            output = layer(given, queries, keys)
            poison(device)
            sinks = [] if layer.sink is None else [layer.sink]
            found = torch.autograd.grad(output, [*given, *sinks], gradient)
            if device != "cpu":
                torch.cuda.synchronize()
        except Exception as error:
            return told | _stopped(error)
        told["kernel"] = chosen_kernel()
    forward = backward = 0.0
    of_sinks: list[torch.Tensor] = []  # into which every sample's gradient goes
    inside = [torch.zeros(side.total, dtype=torch.bool, device=device) for side in (queries, keys)]
    for index, (start, length) in enumerate(zip(queries.starts, queries.lengths, strict=True)):
        there, many = keys.starts[index], keys.lengths[index]
        one, two = slice(start, start + length), slice(there, there + many)
        inside[0][one], inside[1][two] = True, True
        parts = (given[0][one], given[1][two], given[2][two])
        expected, gradients = alone(case, parts, gradient[one], layer.sink)
        of_sinks += gradients[3:]
        forward = max(forward, float((output[one].detach().float() - expected).abs().nan_to_num(torch.inf).max()))
        mine = (found[0][one], found[1][two], found[2][two])
        backward = max(backward, *map(relative, mine, gradients[:3]))
    if of_sinks:
        backward = max(backward, relative(found[3], torch.stack(of_sinks).sum(0)))
    outside = [~inside[0], ~inside[0], ~inside[1], ~inside[1]]
    unwritten = [
        round(float(tensor[rows].isnan().any(-1).float().mean()), 3) if bool(rows.any()) else 0.0
        for tensor, rows in zip((output, *found[:3]), outside, strict=True)
    ]
    return {
        **told,
        "output": round(forward, 5),
        "gradient": round(backward, 5),
        "unwritten": unwritten,
        "equal": forward <= FORWARD and backward <= BACKWARD and not any(unwritten),
    }


def attention(device: str = "cuda") -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
    """Yields a name and `check` of every case and kernel."""
    logging.getLogger("DotProductAttention").setLevel(logging.ERROR)
    for case in cases():
        differs = ", ".join(f"{name} {value}" for name, value in case.differences.items()) or case.name
        for kernel in ("fused", "flash", "unfused"):
            yield f"{kernel}: {differs}", partial(check, case, kernel, device)


def rows_of(total: int, mean: int, seed: int) -> list[int]:
    """Returns lengths of samples, log-normal around ``mean``, that fill a row of ``total`` tokens aligned to 16."""
    random = np.random.default_rng(seed)
    lengths: list[int] = []
    room = total
    while room >= 16:
        length = int(np.clip(random.lognormal(np.log(mean), 0.8), 16, room - 7))
        lengths.append(length)
        room -= -(-length // 16) * 16
    return lengths


LAYERS = 8
"""Calls of a layer behind each other that are timed together, so that the GPU and not its queue is measured."""


def speed(case: Case, kernel: str, rows: Sequence[Sequence[int]], device: str = "cuda") -> dict[str, Any]:
    """Times a layer on rows, one after the other.

    Returns:
        Medians of milliseconds per layer: ``forward_ms``, ``backward_ms`` of rows that were seen before, and
        ``first_ms``, forward and backward of the first layer on a row that was not.
    """
    told = {
        "check": "speed",
        "kernel": kernel,
        "tokens": max(map(sum, rows)),
        "samples": round(statistics.mean(map(len, rows))),
        "padding": case.padding if case.multiple > 1 else "none",
    }
    first: list[float] = []
    again: list[tuple[float, float]] = []
    with only(kernel):
        try:
            layer = Layer(case, device)
            for visit in range(3):
                for seed, lengths in enumerate(rows):
                    row = Row.of(lengths, case, device)
                    given = tensors(case, row, row, device, seed)
                    gradient = torch.randn_like(given[0])
                    layers = LAYERS if visit else 1
                    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    torch.cuda._sleep(20_000_000 * bool(visit))  # the queue fills while the GPU waits
                    marks[0].record()
                    outputs = [layer(given, row, row) for _ in range(layers)]
                    marks[1].record()
                    for output in outputs:
                        torch.autograd.grad(output, given, gradient)
                    marks[2].record()
                    torch.cuda.synchronize()
                    if visit:
                        again.append(
                            (marks[0].elapsed_time(marks[1]) / layers, marks[1].elapsed_time(marks[2]) / layers)
                        )
                    else:
                        first.append((time.perf_counter() - began) * 1e3)
        except Exception as error:
            return told | _stopped(error)
        return {
            **told,
            "kernel": chosen_kernel(),
            "forward_ms": round(statistics.median(one for one, _ in again), 3),
            "backward_ms": round(statistics.median(two for _, two in again), 3),
            "first_ms": round(statistics.median(first), 1),
        }


def speeds(device: str = "cuda") -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
    """Yields a name and `speed` of short and long samples, by kernel: padding between, real padding, and none."""
    for total, mean in ((8192, 300), (8192, 2000), (32768, 300), (32768, 4000)):
        rows = [rows_of(total, mean, seed) for seed in range(12)]
        for kernel in ("fused", "flash"):
            for padding, multiple in (("between", 16), ("real", 16), ("real", 1)):
                case = Case(padding=padding, multiple=multiple, heads=32, groups=8)
                name = f"{kernel}: {total} tokens, samples of {mean}, padding {padding if multiple > 1 else 'none'}"
                yield name, partial(speed, case, kernel, rows, device)


def waits(function: Callable[[], Any]) -> int:
    """Returns how often a call makes the host wait for the GPU; 0 without one."""
    if not torch.cuda.is_available():
        function()
        return 0
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in said)


def routers(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Compares Core's router, fused and not, under a padding mask and without one, as Core has it and as we repair it.

    Yields ``gradient``: largest difference of the weights' gradient from float32 without padding, relative.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig
    from support.bridge_cpu import training_run

    from energon_packing.thd.routers import count_real_tokens

    with training_run.process_groups():
        parallel_state.initialize_model_parallel()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        expected = None
        for fusion, masked, repaired in (
            (False, None, False), (False, True, True), (True, None, False), (True, True, False), (True, True, True),
        ):  # fmt: skip
            told = {"check": "router", "fusion": fusion, "mask": bool(masked), "repaired": repaired}
            config = TransformerConfig(
                num_layers=1, hidden_size=64, num_attention_heads=4, num_moe_experts=8, moe_router_topk=2,
                moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1, moe_router_fusion=fusion,
                moe_router_dtype="fp32", calculate_per_token_loss=False,
            )  # fmt: skip
            try:
                torch.manual_seed(0)
                router = TopKRouter(config=config, pg_collection=groups).to(device)
                with torch.no_grad():
                    router.weight.normal_(std=0.2)
                if repaired:
                    count_real_tokens(router)
                hidden = torch.randn(256, 1, 64, device=device)
                padding = torch.zeros(256, 1, dtype=torch.bool, device=device)
                if masked:
                    hidden = torch.cat([hidden, torch.randn(64, 1, 64, device=device) + 2])
                    padding = torch.cat([padding, torch.ones(64, 1, dtype=torch.bool, device=device)])

                def step(
                    router: Any = router, hidden: Any = hidden, padding: Any = padding, masked: Any = masked
                ) -> Any:
                    probabilities, _ = router(hidden, padding_mask=padding if masked else None)
                    return torch.autograd.grad(
                        (probabilities.float() * (~padding).float().reshape(-1, 1)).square().sum(), router.weight
                    )[0]

                gradient = step()
                expected = gradient if expected is None else expected
                difference = float((gradient - expected).abs().max() / expected.abs().max())
                yield {**told, "gradient": round(difference, 6), "waits": waits(step), "equal": difference < 1e-2}
            except Exception as error:
                yield told | {"equal": not (repaired or not masked)} | _stopped(error)


def rotary(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Compares Core's rotary embedding, fused and not, on aligned rows with each sample alone in float32."""
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.transformer.transformer_config import TransformerConfig

    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    for fused in (False, True):
        case = Case()
        row = Row.of(case.lengths, case, device)
        query = torch.randn(row.total, 4, 64, device=device, dtype=torch.bfloat16)
        inverse = 1e6 ** (-torch.arange(0, 64, 2, device=device) / 64)
        angles = torch.outer(torch.arange(case.multiple + row.longest, device=device).float(), inverse)
        frequencies = torch.cat([angles, angles], -1)[:, None, None]
        try:
            config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, apply_rope_fusion=fused)
            found = apply_rotary_pos_emb(query, frequencies, config, cu_seqlens=row.padded, cp_group=group)
            counted = waits(
                lambda: apply_rotary_pos_emb(query, frequencies, config, cu_seqlens=row.padded, cp_group=group)  # noqa: B023
            )
        except Exception as error:
            yield {"check": "rotary", "fused": fused, "equal": False} | _stopped(error)
            continue
        worst = 0.0
        for start, length in zip(row.starts, row.lengths, strict=True):
            one = query[start : start + length].float()
            turned = torch.cat([-one[..., 32:], one[..., :32]], -1)
            angle = frequencies[:length, 0]
            expected = one * angle.cos() + turned * angle.sin()
            worst = max(worst, float((found[start : start + length].float() - expected).abs().max()))
        yield {"check": "rotary", "fused": fused, "largest": round(worst, 5), "waits": counted, "equal": worst < 5e-2}


def losses(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Compares Core's cross entropies on labels of which some are -100 with torch's, loss and gradient."""
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import te_parallel_cross_entropy
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from support.bridge_cpu import training_run

    with training_run.process_groups():
        parallel_state.initialize_model_parallel()
        group = parallel_state.get_tensor_model_parallel_group()
        functions: dict[str, Callable[..., torch.Tensor]] = {
            "Core": lambda logits, labels: vocab_parallel_cross_entropy(logits, labels),
            "Core fused": lambda logits, labels: fused_vocab_parallel_cross_entropy(logits, labels, group),
            "Transformer Engine": lambda logits, labels: te_parallel_cross_entropy(logits, labels, group),
        }
        for name, function in functions.items():
            for masked in (-100, 0):
                torch.manual_seed(0)
                logits = torch.randn(1024, 1, 4096, device=device, dtype=torch.bfloat16, requires_grad=True)
                labels = torch.randint(4096, (1024, 1), device=device)
                mask = torch.rand(1024, 1, device=device) < 0.5
                asked = labels.masked_fill(~mask, masked)
                given = logits.detach().float().requires_grad_()
                alone = torch.nn.functional.cross_entropy(given[:, 0], labels[:, 0], reduction="none")[:, None]
                expected = torch.autograd.grad((alone * mask).sum(), given)[0]
                told = {"check": "losses", "function": name, "masked_label": masked}
                try:
                    poison(device)
                    made = function(logits.clone(), asked)
                    gradient = torch.autograd.grad((made * mask).sum(), logits)[0].float()
                except Exception as error:
                    yield told | {"equal": False} | _stopped(error)
                    continue
                loss = float((made.float() - alone)[mask].abs().max())
                slope = float((gradient - expected).abs().nan_to_num(torch.inf).max())
                yield {
                    **told, "loss": round(loss, 5), "gradient": round(slope, 5),
                    "masked_loss_is_finite": bool(made[~mask].isfinite().all()), "equal": loss < 2e-2 and slope < 1e-2,
                }  # fmt: skip


FAILURE = re.compile(r"cuda (driver |runtime )?error|cudaError|CUDA_ERROR_|Triton Error .CUDA|EXECUTION_FAILED", re.I)
"""In what CUDA, cuDNN, Triton and Transformer Engine say of a kernel that was launched."""


def _stopped(error: Exception) -> dict[str, Any]:
    """What is stored of an exception: ``error`` if memory ran out or the GPU failed; else, before a launch,
    ``refused``."""
    said = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
    failed = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
    if isinstance(error, failed) or FAILURE.search(str(error)):
        return {"error": said, "equal": False}
    return {"refused": said}
