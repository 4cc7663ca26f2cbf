"""The sandbox of transformers with shorter ways for what a chat template does most.

Jinja's sandbox answers ``message.role`` by asking the dict for an attribute first, whose absence is an exception; it
asks a counter of a loop whether it is a method of a list; and it calls a macro of the template through the checks that
it makes of any callable. A conversation of a dozen turns takes a hundred such steps, a quarter of the template's time.
Here each of them is answered at once where the sandbox's answer is known; all else goes the sandbox's own way.
"""

from __future__ import annotations

import functools
from typing import Any

from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

_ATTRIBUTES_OF_A_DICT = frozenset(dir(dict))
_COUNTERS = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"})
"""Of a loop: whole numbers and truth values, never something that came with the conversation."""


class DirectSandbox(ImmutableSandboxedEnvironment):
    """Renders and refuses what `jinja2.sandbox.ImmutableSandboxedEnvironment` renders and refuses."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """``obj.attribute`` of a template; a key where ``obj`` is a plain dict without such an attribute."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _ATTRIBUTES_OF_A_DICT:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif kind is LoopContext and attribute in _COUNTERS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """``obj(...)`` of a template; a macro is the template's own code, which the sandbox watches inside."""
        if type(__obj) is not Macro:
            return super().call(__context, __obj, *args, **kwargs)
        # Jinja's own names for the scopes of the caller, which it takes off before any call.
        kwargs.pop("_block_vars", None)
        kwargs.pop("_loop_vars", None)
        try:
            return __obj(__context.eval_ctx, *args, **kwargs)
        except StopIteration as end:
            return __self.undefined(f"the macro {__obj.name} raised {end!r}")


@functools.lru_cache(maxsize=128)
def compiled(source: str) -> Any:
    """The ``jinja2.Template`` that transformers makes of a chat template, in a `DirectSandbox`.

    Filters, globals and the tracker of generated spans are the same objects. As transformers made it, where its sandbox
    is no longer Jinja's own class.

    Args:
        source: the Jinja text.

    Raises:
        jinja2.TemplateSyntaxError: the text is no template.
        AttributeError: this transformers has no such function.
    """
    from transformers.utils import chat_template_utils

    template = chat_template_utils._compile_jinja_template(source)
    if type(template.environment) is not ImmutableSandboxedEnvironment:
        return template
    sandbox = object.__new__(DirectSandbox)
    sandbox.__dict__.update(template.environment.__dict__)
    return sandbox.from_string(source)
