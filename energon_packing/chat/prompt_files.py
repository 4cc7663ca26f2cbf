"""What ``encoder.chat_template`` names: a built-in prompt format, a YAML file of one, or a Jinja file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from energon_packing.chat.prompt import PromptFormat
from energon_packing.chat.prompt_jinja import compile_prompt
from energon_packing.config import from_mapping
from energon_packing.errors import ConfigError
from energon_packing.plain_yaml import load_yaml

_DIRECTORY = Path(__file__).parent / "prompts"
LARGEST_FILE = 2**20
"""Most bytes of a template or prompt file; a larger file is something else."""


def builtin_prompts() -> list[str]:
    """Names of the built-in prompt formats, sorted."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.yaml"))


def template_source(name: str, tokenizer: Any, media: Mapping[str, str]) -> str:
    """The Jinja text that ``encoder.chat_template`` stands for.

    Args:
        name: a built-in name, or the path of a ``.yaml``, ``.yml`` or Jinja file. A built-in name wins over a file.
        tokenizer: must have the tokens that a prompt format needs.
        media: see `compile_prompt`.

    Raises:
        ConfigError: there is no such prompt or file, it cannot be read, or it does not fit the tokenizer.
    """
    if name in builtin_prompts():
        return _compile(name, load_prompt(_DIRECTORY / f"{name}.yaml"), tokenizer, media)
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return _compile(path.name, load_prompt(path), tokenizer, media)
    source = _read(path)
    if not source.strip():
        raise ConfigError(f"encoder.chat_template: {name!r} is empty; give a Jinja file.")
    return source


def load_prompt(path: Path) -> PromptFormat:
    """A prompt format from its YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds an unknown key or a wrong value.
    """
    import yaml

    text = _read(path)
    try:
        values = load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        line = f" (line {place.line + 1})" if place is not None else ""
        raise ConfigError(f"{path}{line} is not valid YAML: {getattr(error, 'problem', error)}.") from error
    missing = [key for key in ("user", "assistant") if not isinstance(values, Mapping) or key not in values]
    if missing:
        raise ConfigError(f"{path} has no {missing[0]!r}; a prompt needs at least 'user' and 'assistant'.")
    try:
        return from_mapping(PromptFormat, values, where=str(path))
    except ConfigError as error:
        raise error if str(path) in str(error) else ConfigError(f"{path}: {error}") from error


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ConfigError(f"encoder.chat_template: {str(path)!r} is larger than the limit of 1 MiB for a template.")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        names = builtin_prompts()
        near = difflib.get_close_matches(str(path), names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"encoder.chat_template: {str(path)!r} cannot be read ({error}); give a Jinja or YAML file, or one of "
            f"{', '.join(names)}.{hint}"
        ) from error


def _compile(name: str, prompt: PromptFormat, tokenizer: Any, media: Mapping[str, str]) -> str:
    if prompt.needs_eos and tokenizer.eos_token is None:
        raise ConfigError(f"The prompt {name} writes {{eos}}, but the tokenizer has no end-of-sequence token.")
    vocabulary: Mapping[str, int] = tokenizer.get_added_vocab()
    if any(token not in vocabulary for token in (*prompt.tokens, *prompt.tools.tokens)):
        vocabulary = tokenizer.get_vocab()  # built from all tokens at every call
    for token in prompt.tokens:
        if token not in vocabulary:
            raise ConfigError(
                f"The prompt {name} needs {token!r} as one token, which the tokenizer does not have; choose another "
                "encoder.chat_template, or add the token to the tokenizer and train its embedding."
            )
    lacking = [token for token in prompt.tools.tokens if token not in vocabulary]
    return compile_prompt(name, prompt, media, lacking=lacking)
