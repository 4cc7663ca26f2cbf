"""All looks at what a run reads, in the order of `LOOKS`."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from energon_packing.chat.prompt_files import prompt_text
from energon_packing.config import EncoderConfig, RunConfig
from energon_packing.conversation import PREFERENCE, PairCounts
from energon_packing.energon.data_identity import known_pairs
from energon_packing.errors import ConfigError, UserError
from energon_packing.validate.looks.data import LOOKS, REMOTE, Look, LookOutcome, look_at_data
from energon_packing.validate.looks.samples import look_at_samples
from energon_packing.validate.run_facts import cached_directory, is_hub_name, offline
from energon_packing.validate.run_source import RunReads
from energon_packing.validate.verdict import without_output

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_CONFIGURATIONS = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json", "config.json")


def look_at_processor(config: EncoderConfig, place: str, template_place: str) -> tuple[list[Look], Any]:
    """Loads the processor from this machine, and builds the run's encoder on it. Returns looks at processor and
    template, which the run calls ``place`` and ``template_place``, and the processor: None unless both are ``ok``."""
    name, own = config.processor, config.chat_template is None
    outcome, why, fix, processor = _processor(config)
    look = Look("processor", f"{place}: {name}" if name else place, outcome, why, fix)
    at = f"{template_place}: {'of the processor' if own else config.chat_template}"
    fits = Look("chat-template", at, "ok", "it fits the tokenizer")
    try:
        if config.chat_template is not None:
            prompt_text(config.chat_template)
    except ConfigError as error:
        why, _, fix = _plain(error).partition("; ")
        return [look, replace(fits, outcome="error", why=why, fix=fix)], None
    if processor is None:
        known = "and so is its template" if own else "the file is there"
        why = f"without a processor its tokens are unknown{', ' if own else '; '}{known}"
        return [look, replace(fits, outcome="not looked at", why=why)], None
    from energon_packing.encoders.encoder import ConversationEncoder

    try:
        with offline():
            ConversationEncoder(config, processor=processor)
    except UserError as error:
        fix = f"name a template with {template_place}" if own else "correct it, or name another template"
        template = replace(fits, outcome="error", why=_plain(error), fix=fix)
        if own and not Path(config.processor).exists():  # a cache may hold a part of what the run will load
            why = f"the hub's cache has none that can be used: {_plain(error)}"
            template = replace(fits, outcome="not looked at", why=why)
        return [look, template], None
    return [look, fits], processor


def _processor(config: EncoderConfig) -> tuple[LookOutcome, str, str, Any]:
    name = config.processor
    if not name:
        return "not looked at", "no processor is named", "", None
    local = Path(name).exists()
    directory = Path(name) if local else cached_directory(name)
    if directory is None and is_hub_name(name):
        why = f"{name} is not on this machine: no such directory, and not in the hub's cache"
        return "not looked at", why, "", None
    if directory is None:
        why = f"there is no directory {name}, and the hub has no names of this form"
        return "error", why, "name an existing directory, or a model of the hub as owner/name", None
    if lacking := _lacking_files(directory):
        if not local:
            return "not looked at", f"the hub's cache has only a part of it: {lacking}", "", None
        return "error", lacking, "name a directory that 'save_pretrained' of a processor or tokenizer wrote", None
    try:
        import transformers  # noqa: F401

        from energon_packing.families.registry import build_family, load_processor
    except ImportError as error:
        return "not looked at", f"this needs torch and transformers: {error}", "", None
    try:
        with offline():
            processor = load_processor(config)
    except ConfigError as error:
        if not local:  # a cache may hold a part of what the run will load
            return "not looked at", f"it cannot be loaded without the network: {_plain(error)}", "", None
        return "error", _plain(error), "copy the whole processor there, or name another one", None
    try:
        family = build_family(processor, config)
    except ConfigError as error:
        return "error", _plain(error), "name another processor or family", None
    return "ok", f"a {type(processor).__name__}, served by the family {family.name}", "", processor


def _lacking_files(directory: Path) -> str:
    """Why a path cannot be a processor; empty if it may be one."""
    if not directory.is_dir():
        return f"{directory} is a file; a processor is a directory"
    there = {file.name for file in directory.iterdir()}
    lacking = (files for files in (_TOKENIZERS, _CONFIGURATIONS) if not there & set(files))
    return next((f"{directory} lacks {' or '.join(files[:2])}" for files in lacking), "")


def _plain(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def look_at_run(reads: RunReads, *, data_parallel: int = 1) -> list[Look]:
    """One or more looks per id of `LOOKS`, in order, for ``data_parallel`` ranks that read different samples. Downloads
    and decodes nothing, starts no process. torch, transformers and Energon are imported only for a named processor."""
    if reads.config is None:
        why = "its settings cannot be used" if reads.problem else reads.unread
        looks = [Look(id=id, at="the run", outcome="not looked at", why=why) for id in LOOKS]
        if reads.problem:
            looks[0] = replace(looks[0], outcome="error", why=reads.problem, fix="correct the setting")
        return looks
    config, places = reads.config, reads.places
    elsewhere = reads.validation_path
    data = look_at_data(config.data.path, config.data.split, places, {} if elsewhere else reads.other_splits)
    looks = data.looks
    for setting, split in reads.other_splits.items() if elsewhere else ():
        where = {"data.path": "dataset.validation_path", "data.split": setting}
        looks = looks + look_at_data(elsewhere, split, where, {}).looks
    looks = sorted(looks, key=lambda look: list(LOOKS).index(look.id))
    ledger = look_at_ledger(config.packing.ledger, places["packing.ledger"])
    at = f"{places['data.path']}: {config.data.path}" if config.data.path else places["data.path"]
    unread = Look("samples", at, "not looked at", "there is no data set to read")
    with without_output():
        unrendered = "without a processor and a template nothing can be rendered"
        if reads.encoder:
            unrendered = f"{reads.encoder} reads it, which is not run here"
            unlooked = Look("processor", f"dataset.encoder: {reads.encoder}", "not looked at", unrendered)
            of_processor, processor = [unlooked, replace(unlooked, id="chat-template")], None
        else:
            settings = places["encoder.processor"], places["encoder.chat_template"]
            of_processor, processor = look_at_processor(config.encoder, *settings)
        samples = [unread]
        if data.readable:
            try:  # the run stops where it does not choose what is trained of the pairs that `convert` counted
                counts = known_pairs(config.data.path, config.data.split)
                counts.check(config.data.path, config.packing.pairs)
            except ConfigError as error:
                why, _, fix = str(error).partition("; ")
                return [*looks, ledger, *of_processor, replace(unread, outcome="error", why=why, fix=fix.rstrip("."))]
            samples = [replace(unread, why=unrendered)]
            if processor is not None:
                samples = look_at_samples(config, processor, data, at, data_parallel=data_parallel)
            samples[0] = _with_pairs(samples[0], config, counts) if counts else samples[0]
    return [*looks, ledger, *of_processor, *samples]


def look_at_ledger(ledger: str | None, place: str) -> Look:
    """Whether files can be created in ``packing.ledger`` hours into a run, or the directory itself. Writes nothing."""
    if ledger is None:
        return Look("packing-ledger", place, "ok", "no ledger is written to disk")
    directory = Path(ledger).absolute()
    there = next(place for place in (directory, *directory.parents) if place.exists())
    why = ""
    if REMOTE in ledger:
        why = f"{ledger} is an address; a ledger is written to a directory"
    elif not there.is_dir():
        why = f"{there} is a file, so no ledger can be written to {ledger}"
    elif not os.access(there, os.W_OK | os.X_OK):
        why = f"{there} cannot be written"
    good = Look("packing-ledger", f"{place}: {ledger}", "ok", "it can be written")
    return replace(good, outcome="error", why=why, fix="name another directory") if why else good


def _with_pairs(look: Look, config: RunConfig, counts: PairCounts) -> Look:
    """The look with the counts; a note where both answers are trained and nothing tells a loss which is which."""
    why = f"{look.why}; {counts}: packing.pairs is {config.packing.pairs}"
    if config.packing.pairs != "both" or PREFERENCE in config.encoder.extra_fields or look.outcome == "error":
        return replace(look, why=why)
    why += ", but without 'preference' in encoder.extra_fields a loss cannot tell rejected answers from others"
    fix = "set encoder.extra_fields to [preference], or packing.pairs to chosen"
    return replace(look, outcome="note", why=why, fix=fix)
