"""The chat templates that trl ships, as published with models, and a tokenizer that knows the tokens of each.

    python tests/chat/published_templates.py [DIRECTORY ...]

prints the table of docs/correctness.md: what each template shows of a conversation. A directory holds the tokenizer of
a model with the chat template that it was published with. Of trl only the files are read. With ``--pairs`` as the first
argument, the command counts exact, refused and wrong pairs of a template and a record (`template_pairs`).
"""

import functools
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from energon_packing.chat.template import ChatTemplate
from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, Turn
from energon_packing.demo import processor_path
from energon_packing.errors import ConfigError, SampleRejected

_SPECIAL = re.compile(
    r"<[|｜][^<>'\"\s]{1,40}?[|｜]?>|<[^<>'\"\s/|｜]{1,40}\|>|</?s>|<(?:start|end)_of_\w+>|\[gMASK\]|<sop>|<eos>|<bos>"
)
# The end of a sequence that each model was published with.
_EOS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "diffusion_gemma": "<turn|>",
    "gemma4": "<turn|>",
    "gemma": "<end_of_turn>",
    "glm4moe": "<|endoftext|>",
    "gptoss": "<|return|>",
    "idefics3": "<end_of_utterance>",
    "smolvlm": "<end_of_utterance>",
    "llama3": "<|eot_id|>",
    "llava_next": "</s>",
    "muse": "<|eot|>",
    "phi3": "<|endoftext|>",
}


DATE = "2026-01-31"
"""The day that templates are told which ask for it."""


def chat_template(
    tokenizer: Any, source: str | None = None, *, date: str | None = None, stops: tuple[str, ...] = (), **settings: Any
) -> ChatTemplate:
    return ChatTemplate(tokenizer, EncoderConfig(template_date=date, **settings), source=source, stops=stops)


def templates() -> dict[str, str]:
    """Name -> Jinja text; empty where trl is not installed."""
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        return {}
    folder = Path(found.submodule_search_locations[0]) / "chat_templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


def end_of_sequence(name: str) -> str:
    """What the model of a template ends a sequence with."""
    known = [prefix for prefix in _EOS if name.startswith(prefix)]
    return _EOS[max(known, key=len)] if known else "<|im_end|>"


@functools.cache
def tokenizer_of(name: str) -> Any:
    """The shipped tokenizer, with every token that looks like one in the template."""
    source = templates()[name]
    tokenizer = AutoTokenizer.from_pretrained(processor_path("text"))
    eos = end_of_sequence(name)
    tokenizer.add_tokens([*dict.fromkeys(_SPECIAL.findall(source)), eos, "<think>", "</think>"], special_tokens=True)
    tokenizer.eos_token = eos
    if "bos_token" in source:
        tokenizer.add_tokens(["<bos>"], special_tokens=True)
        tokenizer.bos_token = "<bos>"
    return tokenizer


def turn(role: str, text: str = "", **fields: Any) -> Turn:
    """A turn of one text."""
    return Turn(role=role, parts=(text,) if text else (), **fields)  # type: ignore[arg-type]


TOOL = {
    "type": "function",
    "function": {
        "name": "find_weather",
        "description": "Weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "description": "Its name."}, "days": {"type": "integer"}},
            "required": ["town"],
        },
    },
}
CALL = {
    "id": "a1b2c3d4e",
    "type": "function",
    "function": {"name": "find_weather", "arguments": {"town": "Rome", "days": 3}},
}
ASKED = turn("user", "Will it rain in Rome?")
CALLED = turn("assistant", tool_calls=(CALL,))
TOLD = turn("tool", '{"sky": "clear"}', tool_call_id="a1b2c3d4e")
ANSWERED = turn("assistant", "No, it stays dry.")
CONVERSATIONS: dict[str, tuple[tuple[Turn, ...], bool]] = {
    "two answers": (
        (
            turn("user", "What is two?"),
            turn("assistant", "A number."),
            turn("user", "And three?"),
            turn("assistant", "One more."),
        ),
        False,
    ),
    "call": ((ASKED, CALLED), False),
    "definition": ((ASKED, ANSWERED), True),
    "result": ((ASKED, CALLED, TOLD, ANSWERED), False),
    "two systems": (
        (
            turn("system", "Be brief."),
            ASKED,
            ANSWERED,
            turn("system", "Be kind."),
            turn("user", "Thanks."),
            turn("assistant", "Welcome."),
        ),
        False,
    ),
    "empty system": ((turn("system"), ASKED, ANSWERED), False),
    "thinking": (
        (
            ASKED,
            turn("assistant", "<think>\nRome is dry.\n</think>\n\nNo."),
            turn("user", "Sure?"),
            turn("assistant", "<think>\nIt is summer.\n</think>\n\nYes."),
        ),
        False,
    ),
}


def conversation(name: str) -> Conversation:
    """One of `CONVERSATIONS`."""
    turns, tools = CONVERSATIONS[name]
    return Conversation(key=name.replace(" ", "_"), turns=turns, tools=(TOOL,) if tools else None)


def verdict(template: ChatTemplate, name: str) -> str:
    """What becomes of a conversation: shown, shown in part by design, or refused with its reason."""
    try:
        text = template.render(conversation(name)).text
    except SampleRejected as error:
        return f"refused: {error.reason}"
    if name == "thinking" and "Rome is dry." not in text:
        return "the last one"
    return "shown"


def rows(directories: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Template and verdicts, for all of trl and for the tokenizers of directories."""
    for name, source in templates().items():
        yield name, verdicts(chat_template(tokenizer_of(name), source=source, date=DATE))
    for directory in directories:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)  # runs no code of the directory's
        try:
            yield Path(directory).name, verdicts(chat_template(tokenizer, date=DATE))
        except ConfigError as error:
            yield Path(directory).name, dict.fromkeys(CONVERSATIONS, str(error))


def verdicts(template: ChatTemplate) -> dict[str, str]:
    """What becomes of each of `CONVERSATIONS`."""
    return {name: verdict(template, name) for name in CONVERSATIONS}


def table(directories: list[str]) -> str:
    """The table of the documentation."""
    lines = ["| template | " + " | ".join(CONVERSATIONS) + " |", "| --- |" + " --- |" * len(CONVERSATIONS)]
    for name, found in rows(directories):
        lines.append(f"| `{name}` | " + " | ".join(found.values()) + " |")
    return "\n".join(lines)


def sources(directories: list[str]) -> Iterator[tuple[str, Any, str]]:
    """Name, tokenizer and Jinja text of every template."""
    for name, source in templates().items():
        yield name, tokenizer_of(name), source
    for directory in directories:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)  # runs no code of the directory's
        yield Path(directory).name, tokenizer, tokenizer.chat_template


if __name__ == "__main__":
    if sys.argv[1:2] == ["--pairs"]:
        from template_pairs import pair_table

        print(pair_table(sources(sys.argv[2:])))
    else:
        print(table(sys.argv[1:]))
