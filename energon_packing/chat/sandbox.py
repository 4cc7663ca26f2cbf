"""Renders a Jinja chat template in the sandbox of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

_OF_DICTS = frozenset(dir(dict))
_OF_STRINGS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}
_OF_LOOPS = frozenset({"first", "last", "index", "index0", "length"})


def render_template(
    source: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    *,
    special: Mapping[str, Any],
    track: bool,
    prompt: bool,
) -> tuple[str, Sequence[tuple[int, int]]]:
    """Renders one conversation as ``apply_chat_template`` does.

    If transformers has the functions that ``render_jinja_template`` calls, under their names of 5.12, they are called
    directly with a compiled template that is kept: the wrapper searches the template's text again for every
    conversation, which takes a tenth of the time. The sandbox is the one that transformers creates, with a short way to
    the fields of a message (`_with_short_ways`).

    Args:
        source: the Jinja text.
        messages: of the conversation.
        tools: JSON schemas.
        special: special tokens by name.
        track: whether to return the spans.
        prompt: whether to add the generation prompt.

    Returns:
        The text, and the spans ``[start, end)`` of characters marked as generated; none if ``track`` is False.
    """
    from transformers.utils import chat_template_utils

    tracked = getattr(chat_template_utils, "_render_with_assistant_indices", None)
    compiled = getattr(chat_template_utils, "_compile_jinja_template", None)
    if tracked is None or compiled is None:
        rendered, marked = chat_template_utils.render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=source,
            return_assistant_tokens_mask=track,
            add_generation_prompt=prompt,
            **special,
        )
        return rendered[0], marked[0] if track else ()
    template = _compiled(compiled, source)
    if track:
        text, spans = tracked(template, messages, tools, None, prompt, **special)
        return text, spans
    values = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
    return template.render(**values, **special), ()


@lru_cache(maxsize=64)
def _compiled(compiled: Callable[[str], Any], source: str) -> Any:
    """The template, compiled in a sandbox of its own where transformers lets us have one."""
    anew = getattr(compiled, "__wrapped__", None)  # of the function that keeps templates
    if anew is None:
        return compiled(source)
    template = anew(source)
    template.globals = dict(template.globals)  # in layers, each of which every rendering would search
    _with_short_ways(template.environment)
    return template


def _with_short_ways(environment: Any) -> None:
    """Lets a sandbox answer at once what it would answer after searching; all else goes its own way.

    The sandbox looks for an attribute of an object first, then for a field, and asks a dozen questions about what it
    found; and as many about what it calls. A dict has the attributes of its class and no others; those that are
    answered here of a string or a loop are none that it refuses or wraps; and it lets a template call its own macros.
    """
    from jinja2.runtime import LoopContext, Macro

    own, own_call = environment.getattr, environment.call

    def found(obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            try:
                return obj[attribute]
            except KeyError:
                return environment.undefined(obj=obj, name=attribute)
        if (kind is str and attribute in _OF_STRINGS) or (kind is LoopContext and attribute in _OF_LOOPS):
            return getattr(obj, attribute)
        return own(obj, attribute)

    def called(context: Any, what: Any, /, *given: Any, **named: Any) -> Any:
        if type(what) is not Macro:
            return own_call(context, what, *given, **named)
        named.pop("_block_vars", None)  # of the calling block, which macros do not see
        named.pop("_loop_vars", None)
        try:
            return what(context.eval_ctx, *given, **named)
        except StopIteration:
            return environment.undefined("value was undefined because a callable raised a StopIteration exception")

    environment.getattr, environment.call = found, called
