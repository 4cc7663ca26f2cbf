"""A worker makes a state after every pack: it is the one that Energon makes, in as many steps at any size.

The tests print milliseconds, and count calls, which a busy machine cannot change.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import Counter

import pytest
from megatron.energon.rng import SystemRng

from energon_packing.convert import ConvertConfig, convert
from energon_packing.energon.loader import build_loader

MOST_CALLS = 1500
"""Of Python and C, for one state. Copying a buffer of 100 samples item by item takes 4,000, of 10,000 370,000."""
ENDLESS = {"repeat": True, "workers": 0}


def loader_of(config, packs=1, **arguments):
    """A loader that has given some packs, and the data set that its workers would save."""
    loader = build_loader(config, **arguments)
    stream = iter(loader)
    list(itertools.islice(stream, packs))
    return stream, loader._loader.dataset


def slow_again(dataset):
    """Gives all data sets back the ``save_state`` of their classes, which Energon wrote."""
    vars(dataset).pop("save_state", None)
    for each in getattr(dataset, "datasets", ()):
        slow_again(each)


@pytest.fixture
def blend(dataset, tmp_path):
    """The data set twice, as a metadataset."""
    part = f"{{weight: 1, path: {dataset / 'dataset.yaml'}}}"
    text = f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {{train: {{blend: [{part}, {part}]}}}}"
    (tmp_path / "blend.yaml").write_text(text)
    return str(tmp_path / "blend.yaml")


@pytest.mark.parametrize(
    ("data", "arguments"),
    [
        ({"shuffle_buffer": 20, "shuffle_over_epochs": 3}, {"sequence": 1}),
        ({"shuffle_buffer": 20}, {"packing_buffer_size": 16}),
        ({"shuffle_buffer": 1}, {}),
        ({"shuffle_buffer": 20, "path": "blend"}, {}),
    ],
    ids=["slices", "disjoint buffers", "plain", "blend"],
)
def test_a_state_is_the_one_that_energon_saves_and_does_not_change_with_the_loader(run_config, blend, data, arguments):
    data = ENDLESS | data | ({"path": blend} if "path" in data else {})
    packs, saved = loader_of(run_config(data=data, seq_length=2048, drop_budget=1.0), 4, **arguments)
    state = saved.save_state()
    before = repr(state)
    slow_again(saved)
    assert saved.save_state() == state
    list(itertools.islice(packs, 4))
    assert repr(state) == before != repr(saved.save_state())


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """70 short conversations, which come again and again."""
    root = tmp_path_factory.mktemp("texts")
    ask, say = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "A word or two."}
    (root / "chats.jsonl").write_text(f"{json.dumps({'messages': [ask, say]})}\n" * 70)
    convert(ConvertConfig(sources=(root / "chats.jsonl",), out=root / "data", split={"train": 1.0}, workers=0))
    return str(root / "data")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "arguments", "window"),
    [
        *(({"shuffle_buffer": size}, {}, 32) for size in (10_000, 1_000, 100)),
        ({"shuffle_buffer": 1}, {}, 16_384),
        ({"shuffle_buffer": 1, "shuffle_over_epochs": 300}, {"sequence": 1}, 32),
        ({"shuffle_buffer": 10_000, "shuffle_over_epochs": 300}, {"sequence": 1}, 16_384),
    ],
    ids=["buffer of 10,000", "buffer of 1,000", "buffer of 100", "window of 16,384", "21,000 slices", "all of it"],
)
def test_a_state_takes_as_few_steps_at_any_size(run_config, texts, data, arguments, window):
    config = run_config(data=ENDLESS | data | {"path": texts}, family="text", seq_length=256, window=window)
    _, saved = loader_of(config, **arguments)

    def seconds():
        """What Energon's worker does after a pack takes of its own time."""
        began = time.thread_time()
        SystemRng.save_state()
        saved.save_state()
        return time.thread_time() - began

    milliseconds = 1000 * min(seconds() for _ in range(20))
    calls = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    saved.save_state()
    sys.setprofile(None)
    steps = calls["call"] + calls["c_call"]
    print(f"{data} {arguments} window {window}: {milliseconds:.2f} ms and {steps} calls per pack")
    assert steps <= MOST_CALLS
