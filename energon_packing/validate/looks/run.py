"""All looks at what a run reads, in the order of `LOOKS`."""

from __future__ import annotations

from energon_packing.validate.looks.data import look_at_data
from energon_packing.validate.looks.ledger import look_at_ledger
from energon_packing.validate.looks.look import LOOKS, Look
from energon_packing.validate.sources.run_reads import RunReads
from energon_packing.validate.verdict import without_output


def look_at_run(reads: RunReads) -> list[Look]:
    """Looks at everything on this machine. Downloads nothing, decodes no media, starts no process.

    Files of the data set are looked at first, which takes milliseconds; torch, transformers and Energon are imported
    only where the run names a processor.

    Returns:
        One or more looks per id of `LOOKS`, in that order.
    """
    if reads.problem:
        wrong = Look(id="data-path", at="the run", outcome="error", why=reads.problem, fix="correct the setting")
        return [wrong, *(_unread(look, "its settings cannot be used") for look in LOOKS if look != wrong.id)]
    if reads.config is None:
        return [_unread(look, reads.unread) for look in LOOKS]
    config, places = reads.config, reads.places
    data = look_at_data(config.data.path, config.data.split, places, reads.other_splits)
    ledger = look_at_ledger(config.packing.ledger, places["packing.ledger"])
    from energon_packing.validate.looks.processor import look_at_processor

    with without_output():
        found = look_at_processor(config.encoder, places["encoder.processor"], places["encoder.chat_template"])
        at = f"{places['data.path']}: {config.data.path}" if config.data.path else places["data.path"]
        if not data.readable:
            samples = [Look(id="samples", at=at, outcome="not looked at", why="there is no data set to read")]
        elif found.processor is None:
            why = "without a processor and a template nothing can be rendered"
            samples = [Look(id="samples", at=at, outcome="not looked at", why=why)]
        else:
            from energon_packing.validate.looks.samples import look_at_samples

            samples = look_at_samples(config, found.processor, data, at)
    return [*data.looks, ledger, *found.looks, *samples]


def _unread(look: str, why: str) -> Look:
    return Look(id=look, at="the run", outcome="not looked at", why=why)
