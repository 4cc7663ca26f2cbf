"""The end of a finite epoch: every sample that was read is reported, and a run that dropped too much is stopped."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import processor_path
from energon_packing.energon.loader import build_loader
from energon_packing.errors import UserError
from energon_packing.ledger import DropBudgetExceeded, NothingToPack


def source_of(path: Any, lengths: list[int]) -> Any:
    """Conversations with answers of so many words."""
    records = [
        {
            "messages": [
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": "word " * words},
            ]
        }
        for number, words in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """700 conversations of 10 words, of which those of 300 words are too long for a row."""
    made: dict[Any, Any] = {}

    def make(lengths: tuple[int, ...]) -> Any:
        if lengths not in made:
            root = tmp_path_factory.mktemp("epochs")
            source = source_of(root / "chats.jsonl", list(lengths))
            convert(ConvertConfig(sources=(source,), out=root / "data", split={"train": 1.0}, workers=0))
            made[lengths] = root / "data"
        return made[lengths]

    return make


def config_of(path: Any, *, workers: int = 0, **packing: Any) -> RunConfig:
    return RunConfig(
        data=DataConfig(path=str(path), workers=workers, repeat=False, shuffle_buffer=1),
        encoder=EncoderConfig(processor=str(processor_path("text"))),
        packing=PackingConfig(**{"seq_length": 128, "window": 16, "drop_budget": 1.0} | packing),
    )


def check(report: Any, emitted: int, dropped: Counter[str], read: int) -> None:
    assert report.complete
    assert (report.read, report.emitted, report.dropped) == (read, emitted, dropped)
    assert report.read == report.emitted + report.dropped.total()


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("buffer", [None, 8])
def test_everything_read_is_emitted_or_dropped_by_reason_in_every_epoch(texts, workers, buffer):
    lengths = (10, 10) + (300,) * 50  # two of four workers make no pack
    loader = build_loader(config_of(texts(lengths), workers=workers), packing_buffer_size=buffer)
    for _ in range(2):
        packs = list(loader)
        assert all(pack.keys for pack in packs)
        check(loader.epoch_report, sum(len(pack.keys) for pack in packs), Counter(oversize=50), len(lengths))
        in_packs = sum(len(pack.dropped) for pack in packs)
        assert in_packs + len(loader.epoch_report.dropped_at_end) == 50
        assert bool(loader.epoch_report.dropped_at_end) == (workers == 4)
        assert loader.epoch_report.packs == len(packs)
        if buffer is not None:
            break


@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.sampled_from([3, 30, 90, 300]), min_size=1, max_size=60), data=st.data())
def test_an_epoch_that_is_resumed_reports_what_is_left_of_it(texts, lengths, data):
    if all(length == 300 for length in lengths):
        lengths.append(3)
    config = config_of(texts(tuple(lengths)), window=4)
    loader = build_loader(config)
    packs, states = [], []
    for pack in loader:
        packs.append(pack)
        states.append(loader.save_state())
    at = data.draw(st.integers(0, len(packs) - 1))
    again = build_loader(config)
    again.restore_state(states[at])
    rest = list(again)
    assert [pack.keys for pack in rest] == [pack.keys for pack in packs[at + 1 :]] or not rest[0].index
    report = again.epoch_report
    assert report.read == report.emitted + report.dropped.total()
    assert report.emitted == sum(len(pack.keys) for pack in rest)


@pytest.mark.parametrize("workers", [0, 4])
def test_a_finite_run_that_makes_no_pack_ends_with_the_reason(texts, workers):
    loader = build_loader(config_of(texts((300,) * 700), workers=workers))
    with pytest.raises(NothingToPack) as caught:
        list(loader)
    assert "700 samples were read and 700 dropped (700 oversize; one is chats" in str(caught.value)
    assert isinstance(caught.value, UserError)
    check(loader.epoch_report, 0, Counter(oversize=700), 700)


def test_the_budget_is_asked_over_all_workers_at_the_end(texts):
    """Each of four workers reads too few samples for the budget to judge; all of them together read enough."""
    lengths = (10, 300) * 300
    loader = build_loader(config_of(texts(lengths), workers=4, drop_budget=0.1))
    with pytest.raises(DropBudgetExceeded, match="300 of the 600 samples of the epoch were dropped"):
        list(loader)
    assert list(build_loader(config_of(texts(lengths), workers=4, drop_budget=0.6)))
