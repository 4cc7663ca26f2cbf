"""The drop budget's rule: never a false stop, always a true one, at any number of reads.

The oracles are the binomial distribution of SciPy, and the exact probability that a run is ever stopped, summed over
all runs.
"""

import contextlib
import itertools
import random
import re
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
from forking_python import quick_python
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from energon_packing.drops import BUDGET_STARTS_AT, FALSE_STOP, RECENT, Shares, over_budget
from energon_packing.energon.loader import pool_shares
from energon_packing.ledger import DropBudgetExceeded, Ledger

BUDGETS = (0.01, 0.1, 0.5, 0.9)


def limits(budget: float, reads: int) -> list[int]:
    """For each number of reads the smallest number of drops that stops a run; more than all where none does."""
    found, dropped = [], 0
    for read in range(reads + 1):
        if read < BUDGET_STARTS_AT:
            found.append(read + 1)
            continue
        while dropped <= read and not over_budget(dropped, read, budget):
            dropped += 1  # it never falls: more reads excuse more drops
        found.append(dropped)
    return found


def chance_of_a_stop(share: float, budget: float, reads: int) -> float:
    """Exact: the distribution of the drops of all runs that go on, sample by sample."""
    limit = limits(budget, reads)
    alive, stopped = np.zeros(reads + 2), 0.0
    alive[0] = 1.0
    for read in range(1, reads + 1):
        alive[1:] = alive[1:] * (1 - share) + alive[:-1] * share
        alive[0] *= 1 - share
        stopped += float(alive[limit[read] :].sum())
        alive[limit[read] :] = 0.0
    return stopped


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_share_within_the_budget_is_never_stopped(budget: float) -> None:
    for share in (budget, 0.9 * budget):
        assert chance_of_a_stop(share, budget, 4000) <= FALSE_STOP


@pytest.mark.parametrize(
    ("share", "budget", "usual", "late"),
    [(0.05, 0.01, 423, 1179), (0.2, 0.1, 378, 954), (0.3, 0.1, 200, 275), (0.7, 0.5, 200, 460), (1.0, 0.9, 200, 200)],
)
def test_a_share_above_the_budget_is_stopped_within_the_stated_number_of_reads(
    share: float, budget: float, usual: int, late: int
) -> None:
    assert chance_of_a_stop(share, budget, usual) > 0.4
    assert chance_of_a_stop(share, budget, late) >= 0.98


@given(budget=st.floats(0.001, 0.999), read=st.integers(1, 10**6), data=st.data())
def test_the_rule_is_the_binomial_probability_that_its_page_gives(
    budget: float, read: int, data: st.DataObject
) -> None:
    binom = pytest.importorskip("scipy.stats").binom
    near = int(read * budget + 8 * (read * budget) ** 0.5) + 20
    dropped = data.draw(st.integers(0, min(near, read)))
    evidence = np.log(read + 1) + binom.logpmf(dropped, read, budget)
    if abs(evidence - np.log(FALSE_STOP)) < 1e-5:
        return  # too near for the last digits of either
    expected = read >= BUDGET_STARTS_AT and dropped > budget * read and evidence <= np.log(FALSE_STOP)
    assert over_budget(dropped, read, budget) == expected


READERS = (1, 8, 64)


def ledgers(count: int, read: int = 0) -> list[Ledger]:
    """Readers of one run, which have read so many good samples together."""
    shares, made = Shares(), []
    for number in range(count):
        made.append(Ledger(None, budget=0.1, name=str(number), most_pending=10**9))
        made[-1].join(shares, number, count)
        own, step = read // count, RECENT // count
        late = ((own - own % step - step, 0), (own - own % step, 0)) if read else ((0, 0), (0, 0))
        made[-1].resume({"read": own, "reasons": {}, "late": late})
    return made


def stopped_after(readers: list[Ledger], streams: list[Iterable[bool]]) -> int | None:
    """Samples that all read, in turns, until one is stopped; None if all reach their end."""
    for number, (ledger, bad) in enumerate(
        (ledger, bad) for turn in zip(*streams, strict=True) for ledger, bad in zip(readers, turn, strict=True)
    ):
        assert number < 2 * RECENT, "nobody is stopped"
        ledger.count_read()
        try:
            if bad:
                ledger.drop("key", "corrupt_media", "")
        except DropBudgetExceeded:
            return number + 1
    return None


def drawn(share: float, seed: int) -> Iterator[bool]:
    draw = random.Random(seed)
    return (draw.random() < share for _ in itertools.count())


@pytest.mark.parametrize("share", [0.15, 0.2, 0.9])
def test_a_run_of_any_number_of_readers_is_stopped_after_as_many_samples(share: float) -> None:
    stops = {}
    for count in READERS:
        stops[count] = stopped_after(ledgers(count), [drawn(share, number) for number in range(count)])
    assert max(stops.values()) <= 2 * min(stops.values()), stops


def test_a_store_that_goes_bad_late_is_found_as_soon_by_any_number_of_readers() -> None:
    stops = {}
    for count in READERS:
        streams = [drawn(0.9, number) for number in range(count)]
        stops[count] = stopped_after(ledgers(count, read=10_000_000), streams)
    assert max(stops.values()) <= 2 * min(stops.values()), stops
    assert max(stops.values()) < 0.3 * RECENT


@pytest.mark.parametrize("count", READERS)
def test_a_fiftieth_in_one_stretch_is_within_the_budget(count: int) -> None:
    """One reader reads the source in order; several are dealt chunks of 48, which they take in another order."""
    stopped = 0
    for seed in range(20):
        chunks = [0.49 <= number / 2080 < 0.51 for number in range(2080 - 2080 % count)]
        if count > 1:
            random.Random(seed).shuffle(chunks)
        streams = [[bad for bad in chunks[number::count] for _ in range(48)] for number in range(count)]
        stopped += stopped_after(ledgers(count), streams) is not None
    assert stopped <= 1, "by chance, a quarter of eight readers may begin with it"


def test_a_reader_that_runs_ahead_with_its_bad_samples_counts_the_others_as_far() -> None:
    first, *_ = readers = ledgers(64)
    alone = Ledger(None, budget=0.1, name="x", most_pending=10**9)
    for ledger in (first, alone):
        with contextlib.suppress(DropBudgetExceeded):
            for _ in range(1000):
                ledger.count_read()
                ledger.drop("key", "corrupt_media", "")
    assert (alone.read, first.read, len(readers)) == (BUDGET_STARTS_AT, 1000, 64)


def test_what_is_of_late_is_not_mixed_with_the_counts_since_the_beginning() -> None:
    (reader,) = ledgers(1)
    for number in range(2 * RECENT):
        reader.count_read()
        if number % 50 == 0:
            reader.drop("key", "oversize", "")

    def go_bad() -> None:
        for _ in range(RECENT):
            reader.count_read()
            reader.drop("key", "corrupt_media", "")

    with pytest.raises(DropBudgetExceeded) as stopped:
        go_bad()
    text = str(stopped.value)
    found = re.match(r"(\d+) of the last (\d+) samples read were dropped \(since the beginning (.*)\), more than", text)
    dropped, read, counts = found.groups()
    assert dict(reversed(each.split()) for each in counts.split(", ")) == {
        name: str(count) for name, count in reader.reasons.items()
    }
    assert int(dropped) < int(read) < 2 * RECENT < reader.read


def test_a_reader_that_lags_counts_what_the_others_have_read() -> None:
    first, *others = ledgers(8)
    for ledger, number in itertools.product(others, range(10_000)):
        ledger.count_read()
        if number % 20 == 0:
            ledger.drop("key", "corrupt_media", "")
    for _ in range(100):
        first.count_read()
        first.drop("key", "corrupt_media", "")
    assert first.read == 100


def test_what_is_of_late_goes_on_after_a_restart() -> None:
    (before,) = ledgers(1)
    for _ in range(3 * RECENT):
        before.count_read()
    again = Ledger(None, budget=0.1, name="x", most_pending=10**9)
    again.resume(before.counts())
    assert again.counts() == before.counts()
    assert 0.09 * RECENT < stopped_after([again], [itertools.repeat(True)]) < 0.25 * RECENT


@pytest.mark.parametrize(
    ("late", "as_many"),
    [pytest.param(0.0, {0: 1, 1: 2, 2: 2}, id="over"), pytest.param(300.0, {0: 8, 1: 8, 2: 8}, id="not over")],
)
def test_ranks_learn_the_drops_of_each_other_and_those_that_read_the_same_count_once(
    late: float, as_many: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("energon_packing.energon.loader.LATE_SECONDS", late)  # in which others may begin
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    before = store.num_keys()
    try:
        ranks = [Shares() for _ in range(3)]
        for shares, read in zip(ranks, (100, 1000, 1000), strict=True):
            shares.row(3)[0], shares.row(3)[1], shares.ranks[0] = read, read // 10, 8

        known: dict[int, list[int]] = {}
        counted: dict[int, int] = {}

        def exchange(rank: int, *steps: Callable[[], object], counts: bool = True) -> None:
            def note() -> bool:
                known[rank], counted[rank] = list(ranks[rank].others)[:2], ranks[rank].ranks[0]
                return True

            left = iter([*steps, note])
            pool_shares(ranks[rank], "here", counts, lambda: bool(next(left)()))

        def others() -> None:
            exchange(1, lambda: False)
            exchange(2, lambda: False, counts=False)  # reads what the rank before does

        exchange(0, lambda: False, others)
        assert known == {0: [1000, 100], 1: [100, 10], 2: [100, 10]}
        assert counted == as_many, "a rank that tells nothing for long counts, or one that is late does not"
        # Nobody is told any more: each has a budget of its own.
        assert [(list(shares.others), shares.ranks[0]) for shares in ranks] == [([0] * 4, 1)] * 3
        assert store.num_keys() == before, "the numbers of a loader that ended stay in the store"
    finally:
        distributed.destroy_process_group()


RANK = """
import sys, time
from torch import distributed
from energon_packing.drops import Shares
from energon_packing.energon.loader import LoaderBase

class Loader(LoaderBase):
    _fingerprint = {}

Loader.__abstractmethods__ = frozenset()
rank, port, seconds = sys.argv[1:]
distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2)
loader = Loader(rank=int(rank), world_size=2, shares=Shares())
loader._pool()
time.sleep(float(seconds))
print(loader._shares.ranks[0], flush=True)
"""


def test_a_rank_that_outlives_the_first_one_goes_on_without_a_trace_of_the_store() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [quick_python(), "-c", RANK, rank, port, seconds],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, seconds in (("0", "2"), ("1", "8"))
    ]
    (first, _), (other, said) = (rank.communicate(timeout=120) for rank in ranks)
    assert (first, other, ranks[1].returncode) == ("2\n", "1\n", 0)
    assert "TCPStore" not in said
