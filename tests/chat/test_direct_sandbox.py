"""The shorter ways of our sandbox give and refuse what the sandbox of transformers gives and refuses."""

from __future__ import annotations

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from energon_packing.chat import direct_sandbox

KEYS = [
    "role",
    "content",
    "items",
    "keys",
    "get",
    "update",
    "copy",
    "__class__",
    "__dict__",
    "format",
    "index",
    "missing",
]
names = st.one_of(st.sampled_from(KEYS), st.text(st.sampled_from("abz_"), min_size=1, max_size=8))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=4)),
    max_leaves=8,
)
LOOPS = (
    "index",
    "index0",
    "revindex",
    "revindex0",
    "first",
    "last",
    "length",
    "depth",
    "depth0",
    "previtem",
    "nextitem",
)


def told(source, template, **given):
    try:
        return template(source).render(**given)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        return type(error).__name__, str(error)


def both(source, **given):
    """What transformers' template says, and what ours says."""
    return [
        told(source, make, **given) for make in (chat_template_utils._compile_jinja_template, direct_sandbox.compiled)
    ]


def test_ours_is_in_use():
    assert type(direct_sandbox.compiled("{{ a.b }}").environment) is direct_sandbox.DirectSandbox


@settings(max_examples=300, deadline=None)
@given(value=values, name=names, other=names)
def test_an_attribute_of_any_value_is_the_sandboxs(value, name, other):
    """Keys that hide behind methods of a dict, missing ones, private ones, attributes of texts, numbers and lists."""
    for source in (
        "{{ v.NAME }}",
        "{{ v.NAME.OTHER }}",
        "{{ v.NAME is defined }}",
        "{{ v.NAME() }}",
        "{{ v['NAME'] }}",
    ):
        source = source.replace("NAME", name).replace("OTHER", other)
        theirs, ours = both(source, v=value)
        assert hide_addresses(ours) == hide_addresses(theirs)


def hide_addresses(said):
    return said if isinstance(said, tuple) else said.split(" at 0x")[0]


@settings(max_examples=100, deadline=None)
@given(items=st.lists(values, max_size=4))
def test_what_a_loop_says_of_itself_is_the_sandboxs(items):
    for name in LOOPS:
        theirs, ours = both(f"{{% for v in items %}}{{{{ loop.{name} }}}},{{% endfor %}}", items=items)
        assert ours == theirs


def test_the_counters_are_whole_numbers_and_truth_values_of_a_loop():
    loop = LoopContext([{"format": "{0.__class__}"}], lambda: None, None)
    next(iter(loop))
    assert {type(getattr(loop, name)) for name in direct_sandbox._COUNTERS} == {int, bool}


MACROS = [
    "{% macro say(a, b='x') %}<{{ a }}|{{ b }}|{{ varargs }}|{{ kwargs }}>{% endmacro %}{{ say(1) }}",
    "{% macro say(a, b='x') %}<{{ a }}|{{ b }}|{{ varargs }}|{{ kwargs }}>{% endmacro %}{{ say(1, 2, 3, c=4) }}",
    "{% macro say(a) %}{{ a }}{% endmacro %}{{ say(1, 2) }}",
    "{% macro say(a) %}{{ a }}{% endmacro %}{{ say(b=2) }}",
    "{% macro say(a) %}{{ caller() }}{{ a }}{% endmacro %}{% call say(1) %}inside{% endcall %}",
    "{% macro say(a) %}{{ caller() }}{% endmacro %}{{ say(1) }}",
    "{% macro say(n) %}{% if n %}{{ say(n - 1) }}{% endif %}.{% endmacro %}{% for n in [2] %}{{ say(n) }}{% endfor %}",
    "{% macro say(n) %}{{ raise_exception('no ' ~ n) }}{% endmacro %}{{ say(1) }}",
    "{% macro say(n) %}{{ n.__class__.__mro__ }}{% endmacro %}{{ say('') }}",
    "{% macro say(n) %}{{ missing.role }}{% endmacro %}{{ say(1) }}",
    "{% macro say(n) %}{{ n.pop() }}{% endmacro %}{{ say([1]) }}",
    "{% macro say() %}{{ n }}{% endmacro %}{% for n in [1] %}{{ say() }}{% endfor %}",
    "{% macro a() %}A{% endmacro %}{% set b = a %}{{ b() }}{{ a.name }}{{ a.arguments }}{{ a._func }}",
]


@pytest.mark.parametrize("source", MACROS)
def test_a_macro_says_what_it_says_in_the_sandbox(source):
    theirs, ours = both(source)
    assert ours == theirs


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ v.__class__ }}",
    "{{ v['__class__'] }}",
    "{{ v.get.__self__ }}",
    "{{ v.update({'a': 1}) }}",
    "{{ v.pop('role') }}",
    "{{ v.setdefault('a', 1) }}",
    "{{ v.clear() }}",
    "{{ '{0.__class__}'.format(v) }}",
    "{{ '{a.__class__}'.format_map({'a': v}) }}",
    "{{ v.role.format.__globals__ }}",
    "{% for a in [1] %}{{ loop.__init__.__globals__ }}{{ loop._iterator }}{% endfor %}",
    "{% macro say() %}{% endmacro %}{{ say.__call__.__globals__ }}{{ say._environment }}",
    "{{ raise_exception.__globals__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_way_out_of_the_sandbox_is_as_closed_as_it_was(source):
    value = {"role": "user"}
    theirs, ours = both(source, v=value)
    assert hide_addresses(ours) == hide_addresses(theirs)
    assert value == {"role": "user"}
    assert "<class" not in str(ours)


def test_another_sandbox_of_transformers_is_left_as_it_is(monkeypatch):
    class Stricter(ImmutableSandboxedEnvironment):
        pass

    monkeypatch.setattr(chat_template_utils, "_compile_jinja_template", lambda source: Stricter().from_string(source))
    assert type(direct_sandbox.compiled.__wrapped__("{{ a.b }}").environment) is Stricter
