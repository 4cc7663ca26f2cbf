"""The loader of a plan or a packed directory: global packs from any position, for any number of ranks and workers."""

import collections
import copy
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.data

from energon_packing.config import PACK_LIMITS, RunConfig, TrainingConfig, to_mapping
from energon_packing.config.setting import changing
from energon_packing.conversation import PairCounts
from energon_packing.energon.epoch_end import EpochReport
from energon_packing.energon.loader import LoaderBase
from energon_packing.energon.samples import Pack
from energon_packing.energon.states import check_fingerprint, tell_of_accepted
from energon_packing.energon.workers import in_workers
from energon_packing.errors import ConfigError, PackingError, UserError, refuse
from energon_packing.ledger import LedgerLock
from energon_packing.offline.files import differing, read_as
from energon_packing.offline.index import differing_lengths, pair_counts
from energon_packing.offline.measure import measuring_fingerprint
from energon_packing.offline.packs import PositionedPacks
from energon_packing.offline.plan import Plan
from energon_packing.offline.source import PACKS_AHEAD, check_there
from energon_packing.packing.pipeline import Layout, best_order, operations, stage_costs
from energon_packing.sample_kind import KINDS, AnyRun, kind_of_config

STATE_FORMAT = "energon_packing plan 1"
Costs = Callable[[int, int], np.ndarray]
ORDER, OLDER = 3, 2
"""Of the packs after the plan's last one; a state of version 2 goes on in its order. Version 1 had the plan's own."""


class PlannedLoader(LoaderBase):
    """Iterates the packs of one data-parallel rank from a plan, or from the packed directory that was made of it.

    The packs of a step are adjacent: with D ranks, rank r takes the positions r, r + D, r + 2 D and so on. So the state
    is one number, the position of the next step's first pack, and ranks and workers are free when a run continues.

    `packs` are those of the plan, whatever they are read from. So many `workers` make them, this process with 0, each
    `prefetch` in advance. `repeat` goes on after the last pack, see `Passes`; else the iteration ends there, and the
    next one has that. `unfinished` says why the packs cannot come again, if so; see `PlanFacts.unfinished`. With the
    packs of one `evaluation`, over all ranks, the iteration has the positions below this number again and again; those
    after the last pack have no samples; None is a training's. A `pipeline` comes with the micro-batches of a global
    batch on each rank, and `Plan.costs`: each batch is then read in `best_order`. It has the same packs, so a state
    after its last pack is free to continue in any layout. So many packs of a `step` are read together, over all ranks;
    None is one of each. A saved state must match the `fingerprint`, but for the names of ``data.accept_changed``. The
    rest, ``epoch_end``, ``padding``, ``agree``, ``group`` and ``capacity``, is that of `LoaderBase`.
    """

    def __init__(
        self,
        packs: PositionedPacks,
        *,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        prefetch: int = 2,
        repeat: bool = True,
        unfinished: str | None = None,
        evaluation: int | None = None,
        pipeline: tuple[Layout, int, Costs] | None = None,
        step: int | None = None,
        keep_memory: bool = True,
        fingerprint: Mapping[str, Any] | None = None,
        accept_changed: Sequence[str] = (),
        extends: tuple[str, int] | None = None,
        **base: Any,
    ) -> None:
        super().__init__(rank=rank, world_size=world_size, shares=packs.shares, **base)
        self._packs, self._step = packs, step or world_size
        if evaluation is not None and (evaluation < 1 or evaluation % self._step):
            raise PackingError(f"{self._step} packs at a time cannot make up an evaluation of {evaluation} packs")
        if evaluation is not None:
            packs.passes = None
        self._unfinished, self._evaluation = unfinished, evaluation
        self._end: int | None = None  # of the iteration, if it has one
        self._pipeline, self._taken = pipeline, 0  # packs of a global batch that is not through
        self._workers, self._prefetch = workers, prefetch
        self._repeat, self._keep_memory = repeat, keep_memory
        self._fingerprint, self._accept_changed = dict(fingerprint or {}), tuple(accept_changed)
        self._extends = extends
        self._position = 0  # of the first pack of the next step, over all ranks
        self._pinned = torch.cuda.is_available()

    def _own_packs(self, report: EpochReport) -> Iterator[Pack]:
        step, period, stop = self._step, self._evaluation, self._stop()
        first = self._position + self._rank - self._taken * step
        every: Iterable[int] = itertools.count(first, step) if stop is None else range(first, stop, step)
        if self._pipeline is not None:
            every = itertools.islice(self._in_order(iter(every), *self._pipeline), self._taken, None)
        for pack in self._read(position if period is None else position % period for position in every):
            self._position += self._world_size
            self._taken = (self._taken + 1) % self._pipeline[1] if self._pipeline else 0
            report.read += len(pack.keys) + len(pack.dropped)
            yield pack
        self._ended()

    def _stop(self) -> int | None:
        """The position at which the iteration ends; None if it goes on. Raises UserError: the plan's packs cannot come
        again."""
        passes = self._packs.passes
        # A run that goes on at the end of a pass has no more of it.
        self._end = None if passes is None or self._repeat else passes.end(self._position - self._resumed)
        over = self._unfinished is not None and self._evaluation is None
        if over and (self._end or self._position + self._step) > len(self._packs):
            raise UserError(str(self._unfinished))
        if over and self._end is None:  # all ranks stop at the same step
            return len(self._packs) - (len(self._packs) - self._position) % self._step
        return self._end

    def _read(self, every: Iterable[Any]) -> Iterator[Pack]:
        loader: torch.utils.data.DataLoader[Pack] = torch.utils.data.DataLoader(
            _ReadAhead(self._packs) if self._packs.in_store() else self._packs,
            batch_size=None,
            sampler=_with_next(every, self._workers or 1) if self._packs.in_store() else iter(every),
            num_workers=self._workers,
            prefetch_factor=self._prefetch if self._workers else None,
            collate_fn=lambda pack: pack,
            pin_memory=self._pinned,
            # Else torch draws a seed for the workers from the global generator; see `PackLoader`.
            generator=torch.Generator(),
        )
        in_workers(loader, keep_memory=self._keep_memory)
        yield from loader

    def _ended(self) -> None:
        if self._end is None:
            raise UserError(str(self._unfinished))
        self._position, self._taken = self._end, 0

    def _in_order(self, every: Iterator[int], layout: Layout, count: int, costs: Costs) -> Iterator[int]:
        """Positions of this rank, those of each global batch in `best_order`; what is too few for one as they come."""
        while len(batch := list(itertools.islice(every, count))) == count:
            own = [costs(at, at + 1) for each in batch if (at := self._packs.number(each)) is not None]
            yield from map(batch.__getitem__, best_order(*stage_costs(np.concatenate(own), layout), layout))
        yield from batch

    def _batch(self, taken: int) -> Sequence[Any]:  # what a state says after so many packs of a global batch
        return [taken, self._pipeline[1], self._world_size, *self._pipeline[0]] if self._pipeline and taken else ()

    def _taken_of(self, batch: Any) -> int | None:
        """Packs that were taken of the global batch of a state; None if it is ordered in another way here."""
        batches = [*map(self._batch, range(self._pipeline[1] if self._pipeline else 1))]
        return batches.index(batch) if batch in batches else None

    def save_state(self) -> dict[str, Any]:
        """Returns the state after the last yielded pack; it is the same on every rank."""
        # Where ranks do not divide the packs, the last step ends beyond the pass for those that had a pack in it.
        state = planned_state(min(self._position, self._end or self._position), self._fingerprint)
        state |= {"batch": batch} if (batch := self._batch(self._taken)) else {}
        return state | ({"order": OLDER} if self._packs.passes and self._packs.passes.older else {})

    def restore_state(self, state: Any) -> None:
        """Continues at the position of a saved state, which may come from any rank of a run of any size. Raises
        ConfigError: it is not the state of a plan, or of another plan."""
        if not isinstance(state, Mapping) or state.get("format") != STATE_FORMAT:
            why = "data.path was another data set then; name it again, or start the data over"
            raise ConfigError(f"The saved loader state is not that of a plan: {why}.")
        position, saved = state.get("position"), state.get("fingerprint")
        if not isinstance(position, int) or isinstance(position, bool) or position < 0:
            raise ConfigError("The saved loader state of the plan is damaged: it has no position; start the data over.")
        alike = math.inf  # packs at the beginning that are those of the state's plan
        if self._extends and isinstance(saved, Mapping) and saved.get("plan") == self._extends[0]:
            if position > self._extends[1]:
                raise ConfigError(
                    f"The saved loader state is at pack {position} of a plan of which data.path keeps only the packs "
                    f"before {self._extends[1]}; make the plan once more with --from {position}, or restore a state of "
                    "before."
                )
            saved, alike = {**saved, "plan": self._fingerprint.get("plan")}, self._extends[1]
        differs = check_fingerprint(saved, self._fingerprint, self._accept_changed)
        if position > len(self._packs) and state.get("order") not in (OLDER, ORDER):
            older = (
                f"at position {position}, after the last of {len(self._packs)} packs, where the version that saved it "
                "had another order"
            )
            if "order" not in self._accept_changed:
                raise ConfigError(
                    f"The saved loader state was {older}; restore an earlier state, go on in the new order with "
                    'data.accept_changed=["order"], or start the data over.'
                )
            differs.append(older)
        if self._packs.passes is not None:
            self._packs.passes.older = position > len(self._packs) and state.get("order") == OLDER
        taken = self._taken_of(batch := state.get("batch", ()))
        left = self._pipeline[1] - (taken or 0) if self._pipeline else 1  # steps up to the end of its global batch
        if taken is None or (taken and position + left * self._step > alike):
            raise ConfigError(
                f"The saved loader state was inside a global batch ({batch}), which had another order there "
                "(data.order_micro_batches, rows of their own size, or a plan that keeps a part of it); restore one "
                "that was saved after a step, or go on with the layout, batch and plan of that run."
            )
        self._taken = taken
        self._position, self._resumed = position, position > 0
        tell_of_accepted(differs)

    def start_at(self, position: int) -> None:
        """Continues at a global position, without a saved state."""
        self._position, self._taken = position, 0

    def share_unpinned(self) -> None:
        self._pinned = False


class _ReadAhead(torch.utils.data.Dataset[Pack]):
    """Packs, each by its index with those that this worker is asked for after it."""

    def __init__(self, packs: PositionedPacks) -> None:
        self._packs = packs

    def __getitem__(self, indexes: Sequence[Any]) -> Pack:
        self._packs.expect(indexes)
        return self._packs[indexes[0]]


def _with_next(every: Iterable[Any], workers: int) -> Iterator[list[Any]]:
    """Each index, and the next ones that torch, which deals them out in turn, gives to the same worker."""
    indexes = iter(every)
    coming = collections.deque(itertools.islice(indexes, PACKS_AHEAD * workers))
    while coming:
        yield [*coming][::workers]
        coming.popleft()
        coming.extend(itertools.islice(indexes, 1))


def planned_state(position: int, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a run that goes on at a global position."""
    return {"format": STATE_FORMAT, "order": ORDER, "position": position, "fingerprint": dict(fingerprint)}


def too_short(plan: Plan, packs: int | None = None) -> str | None:
    """Why a run cannot read `packs` packs of a plan, counted from its beginning over all ranks; None if it can. More
    than the plan has if `packs` is None."""
    facts = plan.facts
    if facts.unfinished is None or (packs is not None and packs <= facts.packs):
        return None
    alike = ", with the same --extend and --from" if "extends" in facts.decided else ""
    if facts.stages:
        return (
            f"{plan.path} ends after {facts.packs} packs, with the last of its stages; plan again{alike}, with one "
            'more in plan.stages. A state goes on with it and data.accept_changed=["plan"]: it begins with these packs.'
        )
    if packs is None:
        rarest = min(each["per_epoch"] for each in facts.summary["datasets"] if each["per_epoch"])
        wanted = f"what the run reads; {math.ceil(1 / (rarest + 1e-12))} goes through every data set once"
    else:
        wanted = f"{-(-facts.epochs * packs // facts.packs)} or more for the {packs} packs of this run"
    way = 'Start over with it: it has another order, and going on with data.accept_changed=["plan"] would lose samples.'
    if all("share_reached" in each for each in facts.summary["datasets"]):  # plans have had this order since
        way = 'A state goes on with it and data.accept_changed=["plan"]: it begins with the packs of this one.'
    return (
        f"{plan.path} ends after {facts.packs} packs, in the middle of {facts.unfinished}; begun again, it would give "
        f"the same samples once more, and never the others. Plan more epochs{alike}: plan.epochs is {facts.epochs}; "
        f"set it to {wanted}. {way}"
    )


def plan_fingerprint(plan: Plan, encoder: Any) -> dict[str, Any]:
    """What a state of a run on a plan must match."""
    own = {"plan": plan.facts.id, **encoder.encoder.fingerprint()}
    own.pop("ftfy", None)  # `check_plan` compares it where captions are still read
    return own


def loader_of(
    plan: Plan,
    packs_of: Callable[[Any, int], PositionedPacks],
    config: AnyRun,
    *,
    free: Collection[str] = (),
    rank: int = 0,
    split: str | None = None,
    workers: int | None = None,
    task_encoder: Any = None,
    data_parallel_group: Any = None,
    evaluation: int | None = None,
    loader: type[PlannedLoader] = PlannedLoader,
    **reading: Any,
) -> PlannedLoader:
    """The loader of the packs of a plan; its states fit every other loader of this plan. Encoder and row of `config`
    must be those of the plan. `packs_of` are the packs for an encoder and a rank, whatever they are read from; `free`
    and `split` as for `check_plan`, `evaluation` as for `PlannedLoader`; the others, and ``world_size``, ``prefetch``
    and ``agree`` in `reading`, as for `energon_packing.energon.loader.build_loader`. Raises ConfigError: as
    `check_plan`."""
    kind = kind_of_config(config)
    if plan.facts.kind != kind.name:
        what = f"{plan.path} is a plan of {plan.facts.kind}, but this run reads {kind.name}"
        raise ConfigError(f"{what}; name a plan of those.")
    encoder = kind.task_encoder(config) if task_encoder is None else task_encoder
    noted = any(each.asked for each in plan.facts.datasets)  # else a metadataset may have named the split otherwise
    if not plan.facts.splits:
        several = f"{plan.path} has samples of several splits, of which its version did not note the one asked for"
        if "plan" not in config.data.accept_changed or evaluation is not None:
            raise ConfigError(f'{several}; measure and plan again, or train on all with data.accept_changed=["plan"].')
        warnings.warn(f"{several}; all are read (data.accept_changed).", stacklevel=2)
    check_plan(plan, config, encoder, split or (config.data.split if noted else None), free, evaluation is not None)
    packs = packs_of(encoder, rank)
    check_there(packs.roots())
    return loader(
        packs,
        rank=rank,
        workers=config.data.workers if workers is None else workers,
        repeat=config.data.repeat,
        unfinished=too_short(plan),
        extends=plan.facts.decided.get("extends"),
        evaluation=evaluation,
        pipeline=None if evaluation is not None else _pipeline(plan, config, reading.get("world_size", 1)),
        keep_memory=config.data.keep_memory,
        patience=config.data.storage_patience,
        fingerprint=plan_fingerprint(plan, encoder),
        accept_changed=config.data.accept_changed,
        epoch_end=config.data.epoch_end,
        padding=encoder.padding_pack,
        capacity=encoder.capacity,
        lock=LedgerLock(config.packing.ledger, rank),
        group=data_parallel_group,
        **reading,
    )


def _pipeline(plan: Plan, config: AnyRun, ranks: int) -> tuple[Layout, int, Costs] | None:
    """The layout of a run that orders its micro-batches, their number in a global batch on each rank, and costs."""
    parallel, training = config.parallel, getattr(config, "training", TrainingConfig())
    layout = Layout(parallel.pipeline_parallel, parallel.virtual_pipeline, parallel.microbatch_group_size_per_vp_stage)
    if not config.data.order_micro_batches or layout.ranks == 1:
        return None
    count, left = divmod(training.global_batch_size, training.micro_batch_size * ranks)
    refuse(
        (not config.data.repeat, "data.order_micro_batches needs data.repeat: true; a pass may end inside a batch."),
        (
            count < 2 or left,
            f"data.order_micro_batches needs training.global_batch_size, now {training.global_batch_size}: set the "
            f"run's, a multiple of {ranks} data-parallel ranks with 2 packs or more for each, or turn ordering off.",
        ),
    )
    if parallel.expert_parallel > parallel.most_context_parallel:
        why = f"With parallel.expert_parallel {parallel.expert_parallel} replicas may meet in every micro-batch; then"
        warnings.warn(f"{why} data.order_micro_batches can make steps longer, so compare with it off.", stacklevel=2)
    operations(count, layout)  # refuses what Megatron-Core does
    return layout, count, copy.copy(plan).costs  # a copy, since workers have the file of `plan`


def check_plan(
    plan: Plan, config: AnyRun, encoder: Any, split: str | None, free: Collection[str] = (), alone: bool = False
) -> None:
    """Compares a run with the plan that it is to read, but for the names of the encoder's fingerprint that are `free`;
    `split` must be one of the plan's if it is given, and if it has to be `alone`, the only one. Raises ConfigError: a
    setting on which the packs depend differs, and both values are named; or the run does not pack."""
    if getattr(encoder, "stands_for", type(encoder)) is not KINDS.find(plan.facts.kind).encoder_class:
        raise ConfigError(f"{plan.path} is a plan, which holds packs; {type(encoder).__name__} does not read them.")
    splits, held = plan.facts.splits, ", ".join(sorted({each.asked_split for each in plan.facts.datasets}))
    if splits and split is not None and (split not in splits or (alone and len(splits) > 1)):
        raise ConfigError(
            f"{plan.path} is a plan of the split {held}, not of {split!r}{' alone' if split in splits else ''}; name a "
            "plan of that split or a data set, or have the run ask for its split if these samples are meant."
        )
    if isinstance(config, RunConfig):
        known = plan.facts.summary.get("pair_counts")  # plans of before do not sum them up
        counts = pair_counts(plan.facts.datasets) if known is None else read_as(PairCounts, known)
        counts.check(plan.path, config.packing.pairs)
    own_lengths = measuring_fingerprint(encoder, config)
    for name, before, own in differing_lengths(plan.facts.fingerprint, own_lengths, config):
        if name not in free:
            what = f"{plan.path} was made with {name}={before}, but this run has {own}"
            fix = "install or remove ftfy" if name == "ftfy" else "restore the setting"
            raise ConfigError(f"{what}; {fix}, or measure and plan again.")
    length, multiple = plan.facts.decided["seq_length"], int(plan.facts.decided["multiple"])
    if length != config.packing.seq_length:
        own = config.packing.seq_length
        raise ConfigError(f"{plan.path} has rows of packing.seq_length {length}, but this run has {own}; plan again.")
    if multiple % encoder.multiple:
        needed = f"the parallel sizes of this run need {encoder.multiple}; plan again with these sizes"
        raise ConfigError(f"{plan.path} aligns samples to {multiple} tokens, but {needed}.")
    for name in dict.fromkeys(each for each in (*plan.facts.decided, *PACK_LIMITS) if each.startswith("max_")):
        most, own = plan.facts.decided.get(name), getattr(config.packing, name, None)
        if own is None or (name == "max_padded_pixels_per_pack" and encoder.limits.padded_pixels is None):
            continue  # no limit, or one that says nothing of a family that pads no images
        if most is None or own < most:
            what = f"{plan.path} was made with packing.{name}={most}"
            raise ConfigError(f"{what}, and its packs may hold more than this run's {own}; plan again.")
    rows, planned = changing(config.packing, "rows"), plan.facts.config["packing"]
    for name, before, own in differing(planned, to_mapping(config.packing), to_mapping(type(config.packing)())):
        if name in rows:
            what = f"{plan.path} was made with packing.{name}={before!r}, but this run has {own!r}"
            raise ConfigError(f"{what}; restore the setting, or plan again.")
