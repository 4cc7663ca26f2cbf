"""What ``encoder.chat_template`` names: a built-in prompt format, or a Jinja file.

A prompt format is a chat template that marks what is trained with ``{% generation %}``. What it needs besides, its
opening comment declares, a JSON list per line::

    {#- ChatML with tools.
    tokens: ["<|im_start|>", "<|im_end|>"]
    tokens of tools: ["<tool_call>"]
    -#}

``tokens`` must be one token each, or the model was not trained on the format. If one of the ``tokens of tools`` is not,
the template finds it as ``lacking`` and refuses tools. A template with ``tokens`` also finds the texts of the processor
for an image or video in ``media`` (`energon_packing.chat.template.media_texts`). Any other template is taken as it is.
"""

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from energon_packing.errors import ConfigError

_DIRECTORY = Path(__file__).parent / "prompts"
LARGEST_FILE = 2**20  # Most bytes of a template; a larger file is something else
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_TOKENS = re.compile(r"^\s*(tokens|tokens of tools):(.*)$", re.MULTILINE)


def builtin_prompts() -> list[str]:
    """Returns the names of the built-in prompt formats, sorted."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.jinja"))


def template_source(name: str, tokenizer: Any, media: Mapping[str, str]) -> str:
    """Returns the Jinja text that ``encoder.chat_template`` stands for: a built-in name, or the path of a Jinja file.
    The tokenizer must have the tokens that a prompt format declares; ``media`` has the texts of ``image``, ``video``,
    ``image_token`` and ``video_token``, as far as the processor has them. Raises ConfigError: there is no such prompt
    or file, it cannot be read, or it does not fit the tokenizer."""
    source = prompt_text(name)
    comment = _COMMENT.match(source.lstrip())
    declared: dict[str, list[str]] = {}
    for line in _TOKENS.finditer(comment[0] if comment else ""):
        try:
            declared[line[1]] = [str(token) for token in json.loads(line[2])]
        except (ValueError, TypeError) as error:
            why = f"encoder.chat_template: {name!r} declares {line[0].strip()!r}, which is no JSON list of texts."
            raise ConfigError(why) from error
    if "tokens" not in declared:
        return source
    if tokenizer.eos_token is None and "eos_token" in _COMMENT.sub("", source):
        raise ConfigError(f"The prompt {name} writes eos_token, but the tokenizer has no end-of-sequence token.")
    vocabulary: Mapping[str, int] = tokenizer.get_added_vocab()
    if any(token not in vocabulary for tokens in declared.values() for token in tokens):
        vocabulary = tokenizer.get_vocab()  # built from all tokens at every call
    missing, lacking = (
        [token for token in declared.get(what, ()) if token not in vocabulary] for what in ("tokens", "tokens of tools")
    )
    if missing:
        raise ConfigError(
            f"The prompt {name} needs {missing[0]!r} as one token, which the tokenizer does not have; choose another "
            "encoder.chat_template, or add the token to the tokenizer and train its embedding."
        )
    values = {"media": dict(media)} | ({"lacking": lacking[0]} if lacking else {})
    given = (f"{{%- set {key} = {json.dumps(value, ensure_ascii=False)} -%}}\n" for key, value in values.items())
    return "".join(given) + source


def prompt_text(name: str) -> str:
    """Returns the text of a built-in prompt format or of a Jinja file."""
    names = builtin_prompts()
    path = _DIRECTORY / f"{name}.jinja" if name in names else Path(name)
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(
            f"encoder.chat_template: {name!r} is a prompt format in YAML; formats are Jinja files now. Convert it with "
            f"'python scripts/prompt_yaml.py {name} > {path.with_suffix('.jinja')}' and name that file."
        )
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ConfigError(f"encoder.chat_template: {name!r} is larger than the limit of 1 MiB for a template.")
        source = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"encoder.chat_template: {name!r} cannot be read ({error}); give a Jinja file, or one of "
            f"{', '.join(names)}.{hint}"
        ) from error
    if not source.strip():
        raise ConfigError(f"encoder.chat_template: {name!r} is empty; give a Jinja file.")
    return source
