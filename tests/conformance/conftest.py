"""What the Bridge conformance tests share: synthetic samples of each family, and a place to run a model in."""

import functools
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.bridge_cpu.samples import Samples

VOCABULARY = 512


def require_bridge() -> None:
    """Skips where Megatron-Bridge is missing."""
    import bridge_here  # noqa: F401


@pytest.fixture(autouse=True)
def losses_of_experts_begin_anew():
    """Megatron-Core keeps them for as many layers as the first model of a process has."""
    yield
    if kept := sys.modules.get("megatron.core.transformer.moe.moe_logging"):
        kept.destroy_moe_metrics_tracker()


@pytest.fixture(autouse=True)
def megatron_core_is_its_own(monkeypatch):
    """What a forward step replaces there for its process ends with the test."""
    if utils := sys.modules.get("megatron.core.models.common.embeddings.rope_utils"):
        own = utils._apply_rotary_pos_emb_thd
        monkeypatch.setattr(utils, "_apply_rotary_pos_emb_thd", getattr(own, "__wrapped__", own))


class Endless:
    """Batches over and over, with the iterator contract of an external data loader."""

    def __init__(self, batches):
        self.batches = batches
        self.read = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.read += 1
        return self.batches[(self.read - 1) % len(self.batches)]


@pytest.fixture(scope="session")
def ready_batches():
    """Makes a Bridge `DatasetProvider` that hands out ready batches."""
    require_bridge()
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    from megatron.bridge.data.base import DatasetProvider

    @dataclass
    class ReadyBatches(DatasetProvider):
        train: Any = field(default_factory=list)
        held_out: Any = None
        dataloader_type: str = "external"
        num_workers: int = 0

        def build_datasets(self, context):
            return Endless(self.train), Endless(self.held_out) if self.held_out else None, None

    return ReadyBatches


@pytest.fixture(scope="session")
def make_samples():
    """`Samples` as a factory: ``make_samples(family, seed)``."""
    return Samples


@pytest.fixture(scope="session")
def tiny_provider():
    """``tiny_provider(family, seq_length=...)``: a Bridge model provider; ``"text"`` has no vision tower."""
    require_bridge()
    from support.bridge_cpu import tiny_models

    tokens = tiny_models.SpecialTokens(
        vision_start=Samples.start, vision_end=Samples.end, image=Samples.image, video=Samples.video
    )

    return functools.partial(tiny_models.provider, vocab_size=VOCABULARY, tokens=tokens)


@pytest.fixture(scope="module")
def stand_ins():
    """The CPU stand-ins while a module runs; it asks with ``usefixtures``."""
    require_bridge()
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    yield
    stand_ins.uninstall()


@pytest.fixture(scope="module")
def cpu_world():
    """A gloo group of one process with the CPU stand-ins, and neither of them after the module."""
    require_bridge()
    from support.bridge_cpu import stand_ins, training_run

    with training_run.process_groups():
        yield
    stand_ins.uninstall()
