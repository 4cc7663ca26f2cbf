"""Rows that ranks share, each with a context-parallel size of its own, from a plan.

A global batch is the next packs of the plan, as many as with a fixed size; `energon_packing.packing.dynamic_context`
says which ranks share which of their samples. Each rank finds that out by itself, from the lengths in the plan, and
reads the samples of its own rows. So the position in the plan is the whole state, and the ranks are free when a run
continues.
"""

import copy
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from energon_packing.config import PlanConfig, from_mapping
from energon_packing.drops import CRASH, ENDED, QUARANTINED, TIMEOUT, DroppedSample
from energon_packing.energon.epoch_end import EpochReport
from energon_packing.energon.samples import Pack
from energon_packing.errors import ConfigError, UserError
from energon_packing.ledger import Ledger, quarantine
from energon_packing.offline.blend import group_numbers
from energon_packing.offline.loader import PlannedLoader
from energon_packing.offline.packs import PlannedPacks
from energon_packing.offline.plan import Plan, step_samples
from energon_packing.offline.source import Place
from energon_packing.packing.dynamic_context import Domain, StepSamples, best_size, share_step, static_step
from energon_packing.thd.batch import Shared
from energon_packing.validate.run_view import installed_version

STEPS = 4
"""Global batches at the beginning of a plan by which a run finds out whether a size of each row is worth it."""
ONLY_HERE = (TIMEOUT, CRASH, ENDED, QUARANTINED, "render_error")
"""Reasons of drops that may hold on one rank of a row and not on the others."""
HELD = 8  # row groups of a plan that a worker keeps: a global batch is in several


class RowIndex(NamedTuple):
    """A row of one rank."""

    position: int  # of its global batch
    place: int  # among the rows of the rank
    samples: tuple[tuple[int, int, int], ...]  # of each, position and number of its pack, and its place there
    shared: Shared


class SharedPacks(PlannedPacks):
    """The rows of one rank of a domain, by `RowIndex`, of a plan for dynamic context parallelism; `batch` are the packs
    of a global batch. `size` is None where each row has a size of its own; the one of all rows where that would gain
    too little. Raises ConfigError: the plan was made for a fixed size, or the domain cannot hold its rows."""

    def __init__(self, plan: Plan, encoder: Any, *, rank: int, domain: Domain, batch: int) -> None:
        super().__init__(plan, encoder, rank=rank)
        plan.hold(HELD)
        self._sizes = copy.copy(plan).sizes  # of a copy, since workers have the file of `plan`
        # The cost of a token without attention, which only plans for dynamic context parallelism have.
        self._token = float(plan.facts.decided.get("token_cost", 0))
        if not self._token:
            fix = "plan again with parallel.context_parallel: dynamic"
            raise ConfigError(f"{plan.path} was made for a fixed context-parallel size; {fix}.")
        self.domain, self.batch = domain, batch
        planned = from_mapping(PlanConfig, plan.facts.decided["plan"], where="plan")
        self._groups = group_numbers(plan.facts.datasets, planned)
        steps = range(max(1, min(STEPS, len(plan) // batch)))
        first = [self._samples([*range(at * batch, min((at + 1) * batch, len(plan)))])[0] for at in steps]
        self.size, *_ = best_size(first, domain, int(plan.facts.decided["seq_length"]))
        facts = repr((domain, batch, self.size, sorted(encoder.limits.limited.items())))
        self.layout = hashlib.sha256(facts.encode()).hexdigest()[:12]
        self._encoders = {size: copy.copy(encoder) for size in domain.sizes}
        for size, each in self._encoders.items():  # assembles rows of so many ranks
            each.multiple = domain.alignment(size)
            each.packing = replace(each.packing, seq_length=size * domain.tokens)
        self.quarantined = self.left_out = quarantine(encoder.packing.ledger)  # of all ranks, see `SharedLoader.alike`
        # Of rows that another rank enters in the ledger.
        self._aside = Ledger(None, budget=1.0, name="", most_pending=1 << 62, quarantined=self.quarantined)
        self._aside.tells = False

    def _samples(self, numbers: Sequence[int]) -> tuple[StepSamples, list[tuple[int, int]]]:
        """The samples of some packs, and where each is in the plan."""
        table, places = self._sizes(numbers)
        found = step_samples(table, places[:, 1], self._groups, self._token, self._encoder.limits)
        return found, [(at, place) for place, at in places.tolist()]

    def rows(self, position: int, stop: int | None = None) -> list[RowIndex]:
        """This rank's rows of the global batch at a position, or of its packs before `stop`. All ranks have equally
        many. Raises ConfigError: a sample is longer than all ranks hold."""
        stop = position + self.batch if stop is None else min(stop, position + self.batch)
        packs = [(at, number) for at in range(position, stop) if (number := self.number(at)) is not None]
        samples, places = self._samples([number for _, number in packs])
        step = share_step(samples, self.domain) if self.size is None else static_step(samples, self.domain, self.size)
        own, lengths = step.rows[self._rank], samples.lengths
        sums = int(lengths.sum()), int((lengths**2).sum())
        held = (tuple((*packs[places[at][0]], places[at][1]) for at in row.samples) for row in own)
        shared = (Shared(row.size, len(own), *sums) for row in own)
        return [RowIndex(position, place, *both) for place, both in enumerate(zip(held, shared, strict=True))]

    def _stages(self, index: RowIndex) -> Iterator[list[Place]]:
        yield self._places(self._plan.sample(number, place) for _, number, place in index.samples)

    def __getitem__(self, index: RowIndex) -> Pack:  # type: ignore[override]
        real, size = self._opened(), index.shared.local_cp_size
        ledger = self._aside if self._rank % size else real
        planned = [self._plan.sample(number, place) for _, number, place in index.samples]
        encoder = self._encoders[size]
        rendered = self._rendered(planned, ledger, [position for position, _, _ in index.samples])
        pack = self._assembled([*rendered.values()], encoder) or encoder.padding_pack()
        keys: dict[tuple[int, str], list[str]] = {}
        for at in rendered:
            of = index.samples[at][0], self._plan.facts.datasets[planned[at].dataset].root
            keys.setdefault(of, []).append(planned[at].name)
        for (position, data), some in keys.items():
            changed = [each for each in pack.changed if each.key in some]
            ledger.emit(position, some, changed=changed, part_of=data)
        pack = self._told(pack, index.position, ledger)
        vision = int(pack.vision_cost)
        pack.cost = vision + (int(pack.cost) - vision) // size
        pack.batch = replace(pack.batch, shared=index.shared)
        if size > 1:
            self._check_drops(pack.dropped, size, real)
        if ledger is not real:
            pack.counts, pack.dropped, pack.read = False, (), Counter()
        return pack

    def _check_drops(self, dropped: Sequence[DroppedSample], size: int, real: Ledger) -> None:
        """Raises UserError: a sample of a row of so many ranks was dropped that others may have; it is in quarantine
        from then on."""
        for each in dropped:
            if each.reason not in ONLY_HERE or (each.data, each.key) in self.left_out:
                continue
            real.keep_out(data=each.data, key=each.key, reason=each.reason, detail=each.detail)
            first = self._rank - self._rank % size
            kept = "it is in quarantine then" if self._encoder.packing.ledger else "set packing.ledger, then"
            raise UserError(
                f"sample {each.key} could not be read on rank {self._rank} ({each.reason}: {each.detail}), and ranks "
                f"{first} to {first + size - 1} share its row: one that has it would wait for one that has not. Start "
                f"the run again; {kept} all leave it out."
            )


class SharedLoader(PlannedLoader):
    """Iterates the rows of one rank of a domain; its position is that of a global batch."""

    _packs: SharedPacks

    def __init__(self, packs: SharedPacks, **arguments: Any) -> None:
        super().__init__(packs, **arguments | {"capacity": packs.domain.tokens, "step": packs.batch})

    def _own_packs(self, report: EpochReport) -> Iterator[Pack]:
        stop, period = self._stop(), self._evaluation
        begins = itertools.takewhile(lambda at: stop is None or at < stop, itertools.count(self._position, self._step))
        rows = (self._packs.rows(at if period is None else at % period, stop) for at in begins)
        every = itertools.chain.from_iterable(rows)
        if self._taken:
            begun = next(rows, [])
            if self._taken >= len(begun):
                raise ConfigError("The saved loader state of the plan is damaged; start the data over.")
            every = itertools.chain(begun[self._taken :], every)
        for pack in self._read(every):
            self._taken += 1
            if self._taken == pack.batch.shared.micro_batches:  # type: ignore[union-attr]  # see `SharedPacks`
                self._position, self._taken = self._position + self._step, 0
            report.read += len(pack.keys) + len(pack.dropped)
            yield pack
        self._ended()

    def _batch(self, taken: int) -> Sequence[Any]:
        return [taken, self._packs.layout] if taken else ()

    def _taken_of(self, batch: Any) -> int | None:
        if not batch:
            return 0
        taken = batch[0] if isinstance(batch, list) and type(batch[0]) is int and batch[0] > 0 else 0
        return taken if taken and batch == self._batch(taken) else None

    def alike(self) -> dict[str, Any]:
        return super().alike() | {
            **{name: installed_version(name) for name in ("pillow", "av", "torch", "numpy")},
            "who shares what": self._packs.layout,
            "domain": repr(self._packs.domain),
            "samples in quarantine": sorted(self._packs.left_out),
        }
