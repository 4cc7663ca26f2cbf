"""Looks at processor and chat template: their files, and whether transformers and our encoder can use them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from energon_packing.chat.prompt_files import builtin_prompts
from energon_packing.config import EncoderConfig
from energon_packing.errors import ConfigError, UserError
from energon_packing.validate.looks.hub import cached_directory, is_hub_name, offline
from energon_packing.validate.looks.look import Look

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_CONFIGURATIONS = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json", "config.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorLooks:
    """What the looks found.

    Attributes:
        looks: at processor and chat template.
        processor: loaded; None unless both looks ended with ``ok``.
    """

    looks: list[Look]
    processor: Any = None


def look_at_processor(config: EncoderConfig, place: str, template_place: str) -> ProcessorLooks:
    """Loads the processor from this machine, and builds the encoder of the run on it.

    Args:
        config: the run's section.
        place, template_place: names of ``encoder.processor`` and ``encoder.chat_template`` in the run.
    """
    look, processor = _processor(config, f"{place}: {config.processor}" if config.processor else place)
    own = config.chat_template is None
    at = f"{template_place}: {'of the processor' if own else config.chat_template}"
    template = _missing_template(config, at)
    if template is None and processor is None:
        why = (
            f"without a processor its tokens are unknown{', and so is its template' if own else '; the file is there'}"
        )
        template = Look(id="chat-template", at=at, outcome="not looked at", why=why)
    if template is not None:
        return ProcessorLooks(looks=[look, template])
    from energon_packing.encoders.encoder import ConversationEncoder

    fits = Look(id="chat-template", at=at, outcome="ok", why="it fits the tokenizer")
    try:
        with offline():
            ConversationEncoder(config, processor=processor)
    except UserError as error:
        fix = f"name a template with {template_place}" if own else "correct it, or name another template"
        template = replace(fits, outcome="error", why=_plain(error), fix=fix)
        if own and not Path(config.processor).exists():  # a cache may hold a part of what the run will load
            why = f"the hub's cache has none that can be used: {_plain(error)}"
            template = replace(fits, outcome="not looked at", why=why)
        return ProcessorLooks(looks=[look, template])
    return ProcessorLooks(looks=[look, fits], processor=processor)


def _processor(config: EncoderConfig, at: str) -> tuple[Look, Any]:
    """The look at the processor, and the processor itself."""

    def unread(why: str) -> tuple[Look, Any]:
        return Look(id="processor", at=at, outcome="not looked at", why=why), None

    def wrong(why: str, fix: str) -> tuple[Look, Any]:
        return Look(id="processor", at=at, outcome="error", why=why, fix=fix), None

    name = config.processor
    if not name:
        return unread("no processor is named")
    local = Path(name).exists()
    directory = Path(name) if local else cached_directory(name)
    if directory is None:
        if is_hub_name(name):
            return unread(f"{name} is not on this machine: no such directory, and not in the hub's cache")
        fix = "name an existing directory, or a model of the hub as owner/name"
        return wrong(f"there is no directory {name}, and the hub has no names of this form", fix)
    lacking = _lacking_files(directory)
    if lacking and not local:
        return unread(f"the hub's cache has only a part of it: {lacking}")
    if lacking:
        return wrong(lacking, "name a directory that 'save_pretrained' of a processor or tokenizer wrote")
    try:
        import transformers  # noqa: F401

        from energon_packing.families.registry import build_family, load_processor
    except ImportError as error:
        return unread(f"this needs torch and transformers: {error}")
    try:
        with offline():
            processor = load_processor(config)
    except ConfigError as error:
        if not local:  # a cache may hold a part of what the run will load
            return unread(f"it cannot be loaded without the network: {_plain(error)}")
        return wrong(_plain(error), "copy the whole processor there, or name another one")
    try:
        family = build_family(processor, config)
    except ConfigError as error:
        return wrong(_plain(error), "name another processor or family")
    kind = type(processor).__name__
    return Look(id="processor", at=at, outcome="ok", why=f"a {kind}, served by the family {family.name}"), processor


def _lacking_files(directory: Path) -> str:
    """Why a path cannot be a processor; empty if it may be one."""
    if not directory.is_dir():
        return f"{directory} is a file; a processor is a directory"
    there = {file.name for file in directory.iterdir()}
    lacking = (files for files in (_TOKENIZERS, _CONFIGURATIONS) if not there & set(files))
    return next((f"{directory} lacks {' or '.join(files[:2])}" for files in lacking), "")


def _missing_template(config: EncoderConfig, at: str) -> Look | None:
    """The look at a template that is not a file; None if it may be one."""
    name = config.chat_template
    known = builtin_prompts()
    if name is None or name in known:
        return None
    if not Path(name).is_file():
        near = difflib.get_close_matches(name, known, n=1)
        return Look(
            id="chat-template",
            at=at,
            outcome="error",
            why=f"{name} is neither a file nor a built-in prompt format",
            fix=f"did you mean {near[0]!r}?" if near else f"built in are {', '.join(known)}",
        )
    return None


def _plain(error: Exception) -> str:
    """The sentence of an error, without its full stop."""
    return " ".join(str(error).split()).rstrip(".")
