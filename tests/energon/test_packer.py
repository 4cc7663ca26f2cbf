"""The packing window with a packer that is no task encoder, and a state that it saved when it took seven callbacks."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from megatron.energon import WorkerConfig

from energon_packing.energon.internals import FlexState, SavableDataset
from energon_packing.energon.samples import MeasuredSample, Pack, RenderedSample
from energon_packing.energon.window import WindowPackingDataset
from energon_packing.errors import PackingError, SampleRejected
from energon_packing.ledger import Ledger

SAMPLES = 12


class Numbers(SavableDataset[MeasuredSample]):
    """Samples "0" to "11", of no content."""

    _savable_fields = ("next",)

    def __init__(self, worker_config: WorkerConfig) -> None:
        super().__init__(worker_config=worker_config)
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self.next = 0

    def len_worker(self, worker_idx: int | None = None) -> int:
        return SAMPLES

    def worker_has_samples(self) -> bool:
        return True

    def config(self) -> dict[str, Any]:
        return {}

    def restore_sample(self, restore_key: tuple[Any, ...]) -> MeasuredSample:
        (number,) = restore_key
        nothing: Any = object()
        return MeasuredSample(__key__=str(number), __restore_key__=restore_key, __subflavors__={}, measured=nothing)

    def __iter__(self) -> Iterator[MeasuredSample]:
        while self.next < SAMPLES:
            self.next += 1
            yield self.restore_sample((self.next - 1,))
        self.next = 0


class OldestWithNewest:
    """Packs the oldest sample of the window with the newest, and turns every block of packs around."""

    def __init__(self, damaged: Sequence[str] = ()) -> None:
        self.damaged = damaged

    def make_ledger(self, worker_config: WorkerConfig) -> Ledger:
        return Ledger(None, budget=1.0, name="n", most_pending=10**9)

    def select_pack(self, samples: Sequence[MeasuredSample], ended: bool) -> Sequence[int]:
        return [0, len(samples) - 1] if len(samples) > 2 else range(len(samples))

    def order_plans(self, plans: Sequence[Sequence[MeasuredSample]], block: int) -> Sequence[int]:
        return range(len(plans))[::-1]

    def fewest_packs(self, samples: Sequence[MeasuredSample]) -> int:
        return -(-len(samples) // 2)

    def postencode_sample(self, sample: MeasuredSample) -> RenderedSample:
        if sample.__key__ in self.damaged:
            raise SampleRejected("corrupt_media", "cannot be decoded")
        return RenderedSample.derive_from(sample, rows=())

    def arrange(self, samples: Sequence[Any]) -> Sequence[int]:
        return range(len(samples))

    def pack_selected_samples(self, samples: list[RenderedSample]) -> Pack:
        nothing: Any = None
        keys = tuple(sample.__key__ for sample in samples)
        return Pack(__key__="", __restore_key__=(), __subflavors__={}, batch=nothing, keys=keys)


@pytest.fixture
def windowed():
    """Makes the data set of a packer; the worker is this process."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)

    def make(packer: Any) -> WindowPackingDataset:
        return WindowPackingDataset(
            Numbers(config),
            window=4,
            balance_window=2,
            packer=packer,
            fingerprint={"seq_length": 4},
            worker_config=config,
        )

    config.worker_activate(0)
    yield make
    config.worker_deactivate()


EPOCH = [("1", "5"), ("0", "3"), ("4", "9"), ("2", "7"), ("8", "10"), ("6", "11")]
SAVED = {
    "__class__": "WindowPackingDataset",
    "datasets": [{"__class__": "Numbers", "next": 8}],
    "_window": {"__class__": "WindowBuffer", "_restore_keys": [(4,), (6,)], "_arrivals": [4, 6]},
    "_planned": {"__class__": "WindowBuffer", "_restore_keys": [(2,), (7,)], "_arrivals": [2, 7]},
    "_plan_lengths": [2],
    "_ready": 0,
    "_block": 1,
    "_draining": False,
    "_arrived": 8,
    "_render_index": 4,
    "_pack_index": 2,
    "fingerprint": {"seq_length": 4},
    "counts": {"read": 8, "reasons": {}},
}
"""After two packs of `EPOCH`, word for word as commit 5bbc667 saved it."""
KEY = ("WindowPackingDataset", 3, ("WindowPackingDataset", 6, 2), ("WindowPackingDataset", 7, 7))
"""Restore key of the fourth pack, by that commit."""


def flexible(state: dict[str, Any]) -> FlexState:
    """The mapping with each state in it as Energon's class, as a checkpoint gives it back."""
    return FlexState(
        **{
            name: flexible(value)
            if isinstance(value, dict) and "__class__" in value
            else [flexible(inner) for inner in value]
            if name == "datasets"
            else value
            for name, value in copy.deepcopy(state).items()
        }
    )


def test_any_object_with_the_methods_of_a_packer_can_pack(windowed):
    assert [pack.keys for pack in windowed(OldestWithNewest())] == EPOCH


def test_states_and_restore_keys_are_those_of_earlier_releases(windowed):
    dataset = windowed(OldestWithNewest())
    packs = iter(dataset)
    assert [next(packs).keys for _ in range(2)] == EPOCH[:2]
    assert dataset.save_state() == SAVED
    next(packs)
    assert next(packs).__restore_key__ == KEY


def test_a_state_that_an_earlier_release_saved_goes_on_with_the_next_pack(windowed):
    dataset = windowed(OldestWithNewest())
    dataset.restore_state(flexible(SAVED))
    assert [pack.keys for pack in dataset] == EPOCH[2:]


def test_a_restore_key_of_an_earlier_release_gives_its_pack(windowed):
    pack = windowed(OldestWithNewest()).restore_sample(KEY)
    assert (pack.keys, pack.index) == (("2", "7"), 3)


def test_a_sample_that_the_packer_cannot_render_costs_itself_alone(windowed):
    packs = list(windowed(OldestWithNewest(damaged=["3", "8", "10"])))
    assert [pack.keys for pack in packs] == [("1", "5"), ("0",), ("4", "9"), ("2", "7"), ("6", "11")]
    assert [drop.key for pack in packs for drop in pack.dropped] == ["3", "8", "10"]


@pytest.mark.parametrize("choice", [[], [1, 2], [0, 0], [0, 3, 2], [0, 4]])
def test_a_packer_that_passes_over_the_oldest_sample_or_names_one_twice_stops_the_run(windowed, choice):
    packer = OldestWithNewest()
    packer.select_pack = lambda samples, ended: choice
    with pytest.raises(PackingError, match="begin with the oldest, 0"):
        list(windowed(packer))
