"""Looks at processor and chat template: their files, and whether transformers and our encoder can use them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from energon_packing.chat.prompt_files import prompt_text
from energon_packing.config import EncoderConfig
from energon_packing.errors import ConfigError, UserError
from energon_packing.validate.looks.hub import cached_directory, is_hub_name, offline
from energon_packing.validate.looks.look import Look, LookOutcome

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_CONFIGURATIONS = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json", "config.json")


def look_at_processor(config: EncoderConfig, place: str, template_place: str) -> tuple[list[Look], Any]:
    """Loads the processor from this machine, and builds the encoder of the run on it.

    Returns the looks at processor and chat template, and the processor: None unless both ended with ``ok``.

    Args:
        config: the run's section.
        place, template_place: names of ``encoder.processor`` and ``encoder.chat_template`` in the run.
    """
    name, own = config.processor, config.chat_template is None
    outcome, why, fix, processor = _processor(config)
    look = Look(id="processor", at=f"{place}: {name}" if name else place, outcome=outcome, why=why, fix=fix)
    at = f"{template_place}: {'of the processor' if own else config.chat_template}"
    fits = Look(id="chat-template", at=at, outcome="ok", why="it fits the tokenizer")
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
    """Outcome, sentence and fix of the look at the processor, and the processor itself, if it can be used."""
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
    """The sentence of an error, without its full stop."""
    return " ".join(str(error).split()).rstrip(".")
