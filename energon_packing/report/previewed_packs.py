"""The packs that a preview shows: the first ones, those from a number on, or those that hold a key."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from energon_packing.config import RunConfig
from energon_packing.conversation import PairCounts
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.energon.data_identity import known_pairs
from energon_packing.energon.loader import build_task_encoder, task_encoder_of
from energon_packing.energon.samples import Pack
from energon_packing.energon.task_encoder import PackingTaskEncoder
from energon_packing.errors import UserError
from energon_packing.ledger import without_ledger
from energon_packing.offline.data_paths import is_packed, is_plan
from energon_packing.offline.index import pair_counts
from energon_packing.offline.loader import PlannedLoader
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.packed import Packed
from energon_packing.offline.plan import Plan
from energon_packing.report.drawn_pack import drawn_pack, source_names
from energon_packing.report.preview import describe
from energon_packing.report.preview_page import text_per_sample
from energon_packing.report.watched_packs import WatchedTaskEncoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Which packs to show.

    Attributes:
        packs: how many.
        first: number of the first one, from 0, in the order of one rank without workers, or of the plan.
        key: of a sample; only packs that hold it count. None takes all.
    """

    packs: int
    first: int = 0
    key: str | None = None

    def holds(self, pack: Pack) -> bool:
        """Whether the pack has the key; a piece or an answer of a sample has its sample's key too."""
        if self.key is None:
            return True
        return any(
            self.key in (name, name.rpartition("#")[0], name.rpartition("/")[0])
            for name in (*pack.keys, *pack.batch.sample_keys)
        )


Tell = Callable[[str], None]
"""Called with each sentence about frequent drops."""
Progress = Callable[[str, int, int], None]
"""Called with a stage, what is done of it, and all of it: ``skipped`` packs before the first one, ``packs`` shown."""


def _quiet(*_: object) -> None: ...


def described(
    config: RunConfig, wanted: Wanted, *, progress: Progress = _quiet, tell: Tell = _quiet
) -> list[dict[str, Any]]:
    """The packs as plain values, for a terminal and for programs; see `energon_packing.report.preview.PackView`.

    Raises:
        UserError: the data cannot be read, or no pack has the key.
    """
    config = without_ledger(config)
    encoder = build_task_encoder(config)
    family = _family(encoder)
    return [
        describe(pack, family, seq_length=config.packing.seq_length).to_json()
        for pack, _ in _packs(config, encoder, wanted, progress, tell)
    ]


def drawn_packs(
    config: RunConfig, wanted: Wanted, *, progress: Progress = _quiet, tell: Tell = _quiet
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The packs as values that a page draws, and the facts of the run: what `preview_page` takes.

    Raises:
        UserError: as `described`.
    """
    config = without_ledger(config)
    encoder = task_encoder_of(config, WatchedTaskEncoder)
    family = _family(encoder)
    drawn = []
    progress("packs", 0, wanted.packs)
    most = 0
    for pack, sources in _packs(config, encoder, wanted, progress, tell):
        # Of the first pack's samples follows how many the page will have.
        most = most or text_per_sample(pack.batch.num_samples * wanted.packs)
        drawn.append(
            drawn_pack(
                pack,
                family,
                seq_length=config.packing.seq_length,
                context_parallel=config.parallel.context_parallel,
                media=encoder.media_of,
                sources=sources,
                most=most,
            )
        )
        progress("packs", len(drawn), wanted.packs)
    facts = {
        "path": config.data.path,
        "seq_length": config.packing.seq_length,
        "multiple": config.parallel.multiple,
        "context_parallel": config.parallel.context_parallel,
    }
    return drawn, facts


def pairs_at(config: RunConfig) -> PairCounts:
    """Pairs and unwanted answers in the data of a run, as far as somebody counted them."""
    path = config.data.path
    if is_plan(path):
        return pair_counts(Plan.open(path).facts.datasets)
    if is_packed(path):
        return pair_counts(Packed.open(path).plan.facts.datasets)
    return known_pairs(path, config.data.split)


def _family(encoder: PackingTaskEncoder) -> Any:
    assert isinstance(encoder.encoder, ConversationEncoder)  # what a configuration always builds
    return encoder.encoder.family


def _packs(
    config: RunConfig, encoder: PackingTaskEncoder, wanted: Wanted, progress: Progress, tell: Tell
) -> Iterator[tuple[Pack, tuple[str, ...]]]:
    """The wanted packs, each with the source of every segment."""
    if wanted.key is not None:  # the search ends with the epoch
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, repeat=False))
    loader = open_loader(config, task_encoder=encoder)
    loader.tell = tell
    if is_plan(config.data.path):
        found = _planned(config, loader, wanted)
    else:
        start = _started(loader, wanted.first) if is_packed(config.data.path) else wanted.first
        packs = _after(loader, start, progress)
        found = ((pack, source_names(pack)) for pack in packs if wanted.holds(pack))
    empty = True
    for pack in itertools.islice(found, wanted.packs):
        empty = False
        yield pack
    loader.tell_of_drops(final=True)
    if wanted.key is not None and empty:
        raise UserError(
            f"No pack of this epoch has {wanted.key!r}; `energon-packing explain {wanted.key} "
            f"{config.data.path}` says what became of it."
        )
    if wanted.first and empty:
        raise UserError(f"The epoch of {config.data.path} ends before pack {wanted.first}; packs are numbered from 0.")


def _after(loader: Any, first: int, progress: Progress) -> Iterator[Pack]:
    """The packs from number `first` on; online packs have no number until those before them are made."""
    for number, pack in enumerate(loader):
        if number >= first:
            yield pack
        else:
            progress("skipped", number + 1, first)


def _started(loader: Any, first: int) -> int:
    """Moves a loader of positioned packs to its start; returns how many packs are left to skip."""
    if isinstance(loader, PlannedLoader):
        loader.start_at(first)
        return 0
    return first


def _planned(config: RunConfig, loader: Any, wanted: Wanted) -> Iterator[tuple[Pack, tuple[str, ...]]]:
    from energon_packing.offline.explain import explanation

    plan = Plan.open(config.data.path)
    if wanted.first >= len(plan):
        raise UserError(f"{plan.path} has {len(plan)} packs, numbered from 0; --pack {wanted.first} is not among them.")
    numbers: Iterator[int] = iter(range(wanted.first, len(plan)))
    if wanted.key is not None:
        numbers = iter(sorted({each["pack"] for each in explanation(plan, wanted.key)["packed"]}))
    for number in numbers:
        loader.start_at(number)
        pack = next(iter(loader))
        (planned,) = plan.packs(number, number + 1)
        places = {
            each.name: f"{plan.facts.datasets[each.dataset].name}/"
            f"{plan.facts.datasets[each.dataset].shards[each.shard].name}, sample {each.row}"
            for each in planned.samples
        }
        names = pack.batch.sample_keys
        yield pack, tuple(places.get(name) or places.get(name.rpartition("/")[0], "") for name in names)
