"""Renders a Jinja chat template in the sandbox of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


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
    directly with the compiled template, which transformers caches: the wrapper searches the template's text again for
    every conversation, which takes a tenth of the time. The sandbox is the one that transformers creates.

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
    if track:
        text, spans = tracked(compiled(source), messages, tools, None, prompt, **special)
        return text, spans
    values = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
    return compiled(source).render(**values, **special), ()
