"""The table of attention kernels beside Transformer Engine's own choice, from its sources and where it is installed.

``ENERGON_PACKING_TRANSFORMER_ENGINE_SOURCE`` names checkouts of Transformer Engine (joined by ``:``). Without
any, the table is compared with what six versions chose for the same cases when they were run, by their digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.te_selection import Selection, parameters

from energon_packing.validate.kernel_table import GPUS, KERNELS, Attention, Machine, refused
from energon_packing.validate.rules.kernels import machine_of

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [Path(each) for each in os.environ.get("ENERGON_PACKING_TRANSFORMER_ENGINE_SOURCE", "").split(":") if each]
CASES = int(os.environ.get("ENERGON_PACKING_KERNEL_CASES", "4000"))
CUDNN = ((9, 6), (9, 10, 0), (9, 14, 0), (9, 17), (9, 18, 1), (9, 19, 0), (9, 25))
WIDTHS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))


def drawn(te: tuple[int, ...], cases: int) -> Iterator[tuple[Attention, Machine]]:
    """The same attentions and machines on every run, one generation of FlashAttention each."""
    rng = random.Random(str(te))
    for _ in range(cases):
        width, values = rng.choice(WIDTHS)
        heads, groups = rng.choice(((16, 16), (16, 8), (15, 5)))
        comm = rng.choice(("", "", "p2p", "a2a", "all_gather", "a2a+p2p"))
        flags = {name: rng.random() < share for name, share in (("padded", 0.5), ("window", 0.3), ("sinks", 0.3))}
        yield (
            Attention(
                width=width,
                value_width=values,
                heads=heads,
                groups=groups,
                causal=rng.random() < 0.7,
                deterministic=rng.random() < 0.3,
                comm=comm,
                ranks=4 if comm == "a2a+p2p" else 2 if comm else 1,
                **flags,
            ),
            Machine(sm=rng.choice(sorted(GPUS.values())), te=te, cudnn=rng.choice(CUDNN), flash=(rng.choice((2, 3)),)),
        )


def left(attention: Attention, machine: Machine) -> set[str]:
    return set(KERNELS) - set(refused(attention, machine))


def let_through(attention: Attention, te: tuple[int, ...]) -> set[str]:
    """Kernels that Transformer Engine chooses although they spoil padded rows: they are refused here. So are sinks
    before cuDNN 9.26, which the compiled 2.20.2 refuses on an H200 and the checkout of August does not."""
    if attention.sinks and te >= (2, 20):
        return {"cuDNN"}
    unfused = {"unfused"} if (2, 11) <= te < (2, 16) else set()
    return (unfused | ({"FlashAttention 3"} if te >= (2, 16) else set())) if attention.padded else set()


def digest(answers: list[list[str]]) -> str:
    return hashlib.sha256(repr(answers).encode()).hexdigest()[:16]


# Of `CASES` drawn cases, what these versions chose themselves, without what `let_through` names.
CHOSEN = {
    (2, 9, 0): "95ce28dcc338b17f",
    (2, 11, 0): "b386b064a6496dd8",
    (2, 15, 0): "1dbb114b508c3149",
    (2, 17, 1): "49c95913d821b0c9",
    (2, 18, 0): "a67501913e520a0f",
    (
        2,
        20,
        2,
    ): "d1092d52f3e53cd3",  # whose cuDNN rule, compiled, is that of the main branch of August 2026 but for sinks
}


@pytest.mark.parametrize("te", CHOSEN, ids=lambda te: ".".join(map(str, te)))
def test_the_table_has_the_kernels_that_six_versions_of_transformer_engine_chose(te):
    if CASES != 4000:
        pytest.skip("the digests are those of 4,000 cases")
    assert digest([sorted(left(*case)) for case in drawn(te, CASES)]) == CHOSEN[te]


@pytest.mark.parametrize("source", SOURCES or [None], ids=lambda source: source.name if source else "none")
def test_transformer_engines_own_code_has_the_kernels_of_the_table_and_no_other(source):
    if source is None:
        pytest.skip("ENERGON_PACKING_TRANSFORMER_ENGINE_SOURCE names no checkout of Transformer Engine")
    if not (source / "transformer_engine/common/fused_attn/fused_attn.cpp").is_file():
        pytest.skip(f"{source} has no fused_attn.cpp")
    answers, some = [], set[str]()
    with Selection(source).installed() as selection:
        for attention, machine in drawn(selection.version, CASES):
            theirs = selection.kernels(attention, machine)
            through = (theirs & let_through(attention, selection.version)) - left(attention, machine)
            assert theirs - through == left(attention, machine), (attention, machine)
            answers.append(sorted(theirs - through))
            some |= theirs
    print(selection.version, digest(answers))
    assert some >= {"cuDNN", "FlashAttention 2", "FlashAttention 3"}  # the control: no empty table passes
    assert CASES != 4000 or digest(answers) == CHOSEN.get(selection.version, digest(answers))


@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is None,
    reason="needs a GPU and Transformer Engine",
)
def test_the_installed_transformer_engine_asks_its_cudnn_and_has_the_kernels_of_the_table():
    utils = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.backends")
    major, minor, patch = utils.get_cudnn_version()
    known = utils.FlashAttentionUtils
    flash = "".join(
        str(n)
        for n, there in ((2, known.is_installed), (3, known.v3_is_installed), (4, known.v4_is_installed))
        if there
    )
    machine = machine_of(None, f"cudnn={major}.{minor}.{patch},flash={'+'.join(flash)}")
    assert machine is not None
    wrong = []
    for attention, _ in drawn(machine.te, 400):
        one = dataclasses.replace(attention, comm="", ranks=1)
        *_, available = utils.get_attention_backend(utils.AttentionParams(**parameters(utils, one)))
        theirs = {name for name, there in zip(("Flash", "cuDNN", "unfused"), available, strict=True) if there}
        theirs -= {name.split()[0][:5] if name.startswith("Flash") else name for name in let_through(one, machine.te)}
        ours = {name.split()[0][:5] if name.startswith("Flash") else name for name in left(one, machine)}
        wrong += [(one, theirs, ours)] if theirs != ours else []
    assert wrong == [], machine


COLUMNS = {
    "samples side by side": Attention(),
    "padding between samples": Attention(padded=True),
    "the same, heads 256 wide": Attention(padded=True, width=256, value_width=256),
    "the same, MLA (192, 128)": Attention(padded=True, width=192, value_width=128),
    "side by side, MLA": Attention(width=192, value_width=128),
    "padding, window, `a2a`": Attention(padded=True, window=True, comm="a2a", ranks=2),
    "side by side, sinks": Attention(sinks=True),
}


def cell(attention: Attention, sm: int) -> str:
    """The kernels for an attention on a GPU, each with the first versions that have it."""
    said = []
    for kernel in KERNELS:
        versions = [
            (te, cudnn)
            for te in ((2, 9), (2, 10), (2, 11), (2, 12), (2, 14), (2, 15), (2, 16), (2, 17), (2, 18), (2, 19), (2, 20))
            for cudnn in ((9, 6), (9, 7), (9, 11), (9, 18), (9, 18, 1), (9, 25))
            if kernel in left(attention, Machine(sm=sm, te=te, cudnn=cudnn, flash=(2, 3)))
        ]
        if versions:
            te, cudnn = ((".".join(map(str, number))) for number in min(versions))
            first = f" {cudnn}" if kernel == "cuDNN" else ""
            said.append(f"{kernel}{first}" + (f" (TE {te})" if te != "2.9" else ""))
    return ", ".join(said) or "none"


def test_the_page_says_what_runs_on_which_gpu_with_which_versions():
    rows = [["GPU", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    for names, sm in GPUS.items():
        rows.append([f"sm{sm} ({', '.join(names.split())})", *(cell(attention, sm) for attention in COLUMNS.values())])
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    page = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    written = re.search(r"^\| GPU .*?(?=\n\n|\Z)", page, re.M | re.S)
    assert written is not None
    assert f"{written[0]}\n" == table, table
