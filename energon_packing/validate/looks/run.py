"""All looks at what a run reads, in the order of `LOOKS`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from energon_packing.config import RunConfig
from energon_packing.conversation import PREFERENCE, PairCounts
from energon_packing.energon.data_identity import known_pairs
from energon_packing.errors import ConfigError
from energon_packing.validate.looks.data import look_at_data
from energon_packing.validate.looks.leaves import REMOTE
from energon_packing.validate.looks.look import LOOKS, Look
from energon_packing.validate.looks.processor import look_at_processor
from energon_packing.validate.run_source import RunReads
from energon_packing.validate.verdict import without_output


def look_at_run(reads: RunReads, *, data_parallel: int = 1) -> list[Look]:
    """Looks at everything on this machine. Downloads nothing, decodes no media, starts no process.

    Files of the data set are looked at first, which takes milliseconds; torch, transformers and Energon are imported
    only where the run names a processor.

    Args:
        reads: what it reads.
        data_parallel: ranks that read different samples.

    Returns:
        One or more looks per id of `LOOKS`, in that order.
    """
    if reads.config is None:
        why = "its settings cannot be used" if reads.problem else reads.unread
        looks = [Look(id=id, at="the run", outcome="not looked at", why=why) for id in LOOKS]
        if reads.problem:
            looks[0] = replace(looks[0], outcome="error", why=reads.problem, fix="correct the setting")
        return looks
    config, places = reads.config, reads.places
    data = look_at_data(config.data.path, config.data.split, places, reads.other_splits)
    ledger = look_at_ledger(config.packing.ledger, places["packing.ledger"])
    at = f"{places['data.path']}: {config.data.path}" if config.data.path else places["data.path"]
    unread = Look(id="samples", at=at, outcome="not looked at", why="there is no data set to read")
    with without_output():
        of_processor, processor = look_at_processor(
            config.encoder, places["encoder.processor"], places["encoder.chat_template"]
        )
        if not data.readable:
            samples = [unread]
        elif refused := _refused_pairs(config):
            why, _, fix = refused.partition("; ")
            samples = [replace(unread, outcome="error", why=why, fix=fix.rstrip("."))]
        else:
            samples = [replace(unread, why="without a processor and a template nothing can be rendered")]
            if processor is not None:
                from energon_packing.validate.looks.samples import look_at_samples

                samples = look_at_samples(config, processor, data, at, data_parallel=data_parallel)
            if counts := known_pairs(config.data.path, config.data.split):
                samples[0] = _with_pairs(samples[0], config, counts)
    return [*data.looks, ledger, *of_processor, *samples]


def look_at_ledger(ledger: str | None, place: str) -> Look:
    """Whether files can be created in the directory, or the directory itself if it does not exist. Writes nothing.

    Args:
        ledger: ``packing.ledger``, which workers write hours into a run.
        place: name of that setting in the run.
    """
    if ledger is None:
        return Look(id="packing-ledger", at=place, outcome="ok", why="no ledger is written to disk")
    directory = Path(ledger).absolute()
    there = next(place for place in (directory, *directory.parents) if place.exists())
    why = ""
    if REMOTE in ledger:
        why = f"{ledger} is an address; a ledger is written to a directory"
    elif not there.is_dir():
        why = f"{there} is a file, so no ledger can be written to {ledger}"
    elif not os.access(there, os.W_OK | os.X_OK):
        why = f"{there} cannot be written"
    ok = Look(id="packing-ledger", at=f"{place}: {ledger}", outcome="ok", why="it can be written")
    return replace(ok, outcome="error", why=why, fix="name another directory") if why else ok


def _refused_pairs(config: RunConfig) -> str:
    """Why the run stops at what `convert` counted in the data sets, where it did not choose what is trained."""
    try:
        known_pairs(config.data.path, config.data.split).check(config.data.path, config.packing.pairs)
    except ConfigError as error:
        return str(error)
    return ""


def _with_pairs(look: Look, config: RunConfig, counts: PairCounts) -> Look:
    """The look with the counts; a note where both answers are trained and nothing tells a loss which is which."""
    why = f"{look.why}; {counts}: packing.pairs is {config.packing.pairs}"
    if config.packing.pairs != "both" or PREFERENCE in config.encoder.extra_fields or look.outcome == "error":
        return replace(look, why=why)
    why += ", but without 'preference' in encoder.extra_fields a loss cannot tell rejected answers from others"
    fix = "set encoder.extra_fields to [preference], or packing.pairs to chosen"
    return replace(look, outcome="note", why=why, fix=fix)
