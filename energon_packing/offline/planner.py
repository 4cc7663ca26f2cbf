"""Makes a plan: from indexes and a configuration to the Parquet file."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from energon_packing.config import to_mapping
from energon_packing.config.setting import marked
from energon_packing.drop_budget import WISHED, over_budget
from energon_packing.errors import ConfigError, UserError
from energon_packing.offline import plan as plan_file
from energon_packing.offline.array_limits import AnyLimits
from energon_packing.offline.epoch_packs import policy_of
from energon_packing.offline.fitting_samples import Drop, Samples, fitting_samples
from energon_packing.offline.index import MEDIA, IndexedDataset, pair_counts
from energon_packing.offline.kinds import kind_of_config
from energon_packing.offline.ordered_packs import OrderedPacks, ordered_packs
from energon_packing.offline.parquet import said
from energon_packing.offline.plan import PlanFacts, write_plan
from energon_packing.offline.plan_drops import written_drops
from energon_packing.offline.plan_summary import summary_of
from energon_packing.offline.remeasured import Remeasure
from energon_packing.offline.rest_of_epoch import Left, digest_of, rows_left
from energon_packing.offline.sample_kind import AnyRun
from energon_packing.offline.sources import Sources
from energon_packing.remote_files import check_local

LARGEST_NARROW = 1 << 30
"""Bytes of keys, positions and media that are held with offsets of 32 bits, which end at 2 GiB of names."""
_CONTENT = pa.schema(
    [
        pa.field("key", pa.large_string()),
        pa.field("offset", pa.int64()),
        pa.field("size", pa.int32()),
        pa.field(
            "media",
            pa.large_list(
                pa.struct(
                    [
                        pa.field("name", pa.large_string()),
                        *(field for field in MEDIA.value_type if field.name != "name"),
                    ]
                )
            ),
        ),
    ]
)
"""What a row of the plan has from its source, with offsets of 64 bits."""


def make_plan(
    directories: Sequence[str | Path],
    config: AnyRun,
    out: Path,
    *,
    limits: AnyLimits | None = None,
    remeasure: Remeasure | None = None,
    force: bool = False,
    left: Left | None = None,
) -> PlanFacts:
    """Makes a plan of all samples of these indexes.

    Args:
        directories: indexes, all measured with the encoder of `config`.
        config: of the run.
        out: the plan; its drops are written beside it.
        limits: of a pack; None takes those of `SampleKind.limits`, for which a dummy image is too much.
        remeasure: measures samples again that fit no pack as they are; see `fitting_samples`.
        force: whether to replace an existing plan.
        left: what an online run has still to give in its epoch; the plan then begins with that.

    Raises:
        UserError: the plan exists or cannot be written, an index cannot be used, nothing is left to pack, more samples
            are dropped than ``packing.drop_budget`` allows, or a sample does not fit under ``oversize: raise``.
        ConfigError: the configuration does not suit the indexes.
    """
    check_local("the plan", out)
    if out.exists() and not force:
        raise UserError(f"{out} exists already; name another file, or replace it with --force.")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is not a directory; make it, or name another file.")
    limits = limits or kind_of_config(config).limits(config)
    sources = Sources.open(directories, config.encoder)
    samples, drops = fitting_samples(sources, limits, config, remeasure)
    _check_measured(directories, sources, samples, config)
    _check_drops(sources, samples, drops, config)
    rest = None if left is None else rows_left(left, sources, samples)
    packs = ordered_packs(sources, samples, limits, config, rest)
    facts = _facts(sources, samples, drops, packs, limits, config, left)
    try:
        with written_drops(out, facts.id, drops, sources):  # takes its place after the plan
            write_plan(out, facts, _tables(sources, samples, packs, facts))
    except OSError as error:
        raise UserError(f"{out} cannot be written ({said(error)}); an existing plan is as it was.") from error
    return facts


def _check_measured(directories: Sequence[str | Path], sources: Sources, samples: Samples, config: AnyRun) -> None:
    """Compares the settings of packs on which the measured samples depend.

    Raises:
        ConfigError: the run refuses pairs and the indexes hold some, or they were measured with another setting.
    """
    where = ", ".join(map(str, directories))
    for name in marked(config.packing, "newer"):
        own = getattr(config.packing, name)
        if name == "pairs":  # an older index did not count them
            known, seen = pair_counts(sources.datasets), int(np.count_nonzero(samples.sizes.second))
            replace(known, pairs=max(known.pairs, seen)).check(where, own)
        measured = sources.fingerprint.get(f"packing.{name}", getattr(type(config.packing)(), name))
        if measured != own:
            raise ConfigError(
                f"{where} was measured with packing.{name}={measured!r}, the configuration has {own!r}; measure again "
                "with this configuration."
            )


def _check_drops(sources: Sources, samples: Samples, drops: list[Drop], config: AnyRun) -> None:
    if len(samples) == 0:
        said = f"; the most frequent reason is {_reasons(drops)}" if drops else ""
        raise UserError(f"None of the {len(sources)} samples can be packed{said}.")
    samples_read = len(sources) - len({drop.source for drop in drops if drop.reason in WISHED})
    drops = [drop for drop in drops if drop.reason not in WISHED]
    lost = len({drop.source for drop in drops})
    if over_budget(lost, samples_read, config.packing.drop_budget):
        raise UserError(
            f"{lost} of {samples_read} samples would be dropped ({_reasons(drops)}; the first is {drops[0].key}: "
            f"{drops[0].detail}), more than packing.drop_budget={config.packing.drop_budget} allows; correct the cause "
            "or raise the budget."
        )


def _reasons(drops: list[Drop]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in Counter(drop.reason for drop in drops).most_common(3))


def _facts(
    sources: Sources,
    samples: Samples,
    drops: list[Drop],
    packs: OrderedPacks,
    limits: AnyLimits,
    config: AnyRun,
    left: Left | None,
) -> PlanFacts:
    packing = config.packing
    decided = {
        "seq_length": packing.seq_length,
        "multiple": limits.multiple,
        **kind_of_config(config).decided(config, limits),
        "policy": policy_of(packing),
        "oversize": packing.oversize,
        "plan": to_mapping(config.plan),
        **({} if left is None else {"rest": digest_of(left)}),
    }
    groups = _row_groups(packs.offsets)
    values: dict[str, Any] = {
        "config": to_mapping(config),
        "fingerprint": sources.fingerprint,
        "decided": decided,
        "packs": packs.count,
        "samples": int(packs.order.size),
        "max_data_parallel": config.plan.max_data_parallel,
        "epoch_ends": packs.epoch_ends,
        "row_groups": tuple(groups),
        "drops": dict(sorted(Counter(drop.reason for drop in drops).items())),
    }
    # Neither settings on which no pack depends nor where the shards are: a state of one plan continues with its equal.
    known = {name: value for name, value in values.items() if name not in ("config", "row_groups")}
    digest = hashlib.sha256(json.dumps([known, *map(_content, sources.datasets)], sort_keys=True).encode())
    chosen = packs.order
    columns = [samples.source, samples.piece, samples.sizes.length, samples.sizes.second]
    if samples.sizes.text_tokens is not None:
        columns.append(samples.sizes.text_tokens)
    for array in (packs.offsets.astype(np.int64), *(column[chosen] for column in columns)):
        digest.update(np.ascontiguousarray(array).data)
    return PlanFacts(
        id=digest.hexdigest()[:32],
        datasets=sources.datasets,
        summary=summary_of(sources.datasets, samples, packs, limits, config),
        **values,
    )


def _content(dataset: IndexedDataset) -> dict[str, Any]:
    """What a data set holds, wherever it is."""
    names = ("bytes", "index_uuid", "media_uuid")
    shards = [
        (shard.name, *(shard.identity[name] for name in names if name in shard.identity)) for shard in dataset.shards
    ]
    return {"split": dataset.split, "subflavors": dict(dataset.subflavors), "shards": shards}


def _row_groups(offsets: np.ndarray) -> list[int]:
    """The first pack of each row group."""
    packs = offsets.size - 1
    firsts = [0]
    while True:
        following = int(np.searchsorted(offsets, offsets[firsts[-1]] + plan_file.ROW_GROUP))
        if following >= packs:
            return firsts
        firsts.append(following)


def _tables(sources: Sources, samples: Samples, packs: OrderedPacks, facts: PlanFacts) -> Iterator[pa.Table]:
    """The rows of the plan, one row group at a time."""
    names = tuple(_CONTENT.names)
    schema = plan_file.SCHEMAS[facts.kind]
    parts = [table for _, table in sources.tables(names)]
    if sum(table.nbytes for table in parts) > LARGEST_NARROW:
        parts = [table.cast(_CONTENT) for table in parts]
    content = pa.concat_tables(parts).combine_chunks()
    del parts
    bounds = [*facts.row_groups, facts.packs]
    for first, stop in pairwise(bounds):
        low, high = int(packs.offsets[first]), int(packs.offsets[stop])
        rows = packs.order[low:high]
        source = samples.source[rows]
        dataset, shard, row = sources.place(source)
        found = content.take(pa.array(source))
        columns = {
            "pack": np.repeat(np.arange(first, stop), np.diff(packs.offsets[first : stop + 1])),
            "dataset": dataset,
            "shard": shard,
            "row": row,
            "length": samples.sizes.length[rows],
            "second": samples.sizes.second[rows],
            "piece": samples.piece[rows],
            **{name: found.column(name).cast(schema.field(name).type) for name in names},
        }
        if samples.sizes.text_tokens is not None:
            columns["text_tokens"] = samples.sizes.text_tokens[rows]
        yield pa.table({name: columns[name] for name in schema.names}, schema=schema)
