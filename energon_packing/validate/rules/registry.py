"""All rules, and the judgement of a run by them. Needs neither torch nor Bridge, and takes microseconds.

Bridge stops at its first error; `judge` lists every rule that does not hold, each with the values and the fix. A
conformance test compares the verdicts with the installed Bridge, rule by rule.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from energon_packing.errors import PackingError
from energon_packing.validate.rules import (
    batches,
    bridges_packing,
    core,
    epochs,
    experts,
    families,
    kernels,
    layout,
    lengths,
    loader,
    losses,
    native,
    packing_modes,
    prepared,
    steps,
    tokens,
    weights,
)
from energon_packing.validate.rules.rule import Finding, Rule
from energon_packing.validate.run_view import RunView

TOPICS = (
    core,
    steps,
    experts,
    losses,
    families,
    prepared,
    kernels,
    tokens,
    native,
    epochs,
    loader,
    bridges_packing,
    packing_modes,
    batches,
    lengths,
    layout,
    weights,
)
"""The modules that define rules."""


def rules_of(topics: Sequence[ModuleType]) -> list[Rule]:
    """The rules that modules define, in the order of the modules and of their definitions."""
    return [value for topic in topics for value in vars(topic).values() if isinstance(value, Rule)]


def in_order(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Bridge's rules in the order in which it tests them, then the others in their given order.

    Raises:
        PackingError: two rules share an id or a place in Bridge's order.
    """
    found = list(rules)
    ids = collections.Counter(rule.id for rule in found)
    orders = collections.Counter(rule.order for rule in found if rule.order is not None)
    twice = [id for id, count in ids.items() if count > 1]
    twice += [rule.id for rule in found if rule.order is not None and orders[rule.order] > 1]
    if twice:
        raise PackingError(f"Rules with one id or one order: {', '.join(sorted(set(twice)))}.")
    bridges = [(rule.order, rule) for rule in found if rule.order is not None]
    return (*(rule for _, rule in sorted(bridges, key=lambda pair: pair[0])), *(r for r in found if r.order is None))


RULES: tuple[Rule, ...] = in_order(rules_of(TOPICS))
"""Bridge's rules in the order in which it tests them, then Megatron-Core's and ours."""

Outcome = Literal["ok", "error", "warning", "note", "not applicable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """The result of one rule for one run; `finding` is set if the rule does not hold."""

    rule: Rule
    outcome: Outcome
    finding: Finding | None = None


def judge(view: RunView) -> list[Judgement]:
    """Applies every rule to a run.

    Returns:
        One judgement per rule, in the order of `RULES`. The first error among those with ``bridge_says`` is what
        Bridge's ``validate()`` raises; only ``bridge/pack-size`` comes earlier for Bridge's own text data sets.
    """
    judgements = []
    for rule in RULES:
        if not rule.concerns(view):
            judgements.append(Judgement(rule=rule, outcome="not applicable"))
            continue
        finding = rule.check(view)
        judgements.append(Judgement(rule=rule, outcome=rule.severity if finding else "ok", finding=finding))
    return judgements


def violations(view: RunView) -> list[Judgement]:
    """The judgements of rules of severity ``error`` that do not hold."""
    return [judgement for judgement in judge(view) if judgement.outcome == "error"]


def rule_that_bridge_named(message: str) -> Rule | None:
    """The rule for a message of ``ConfigContainer.validate()``; None if it concerns something else."""
    for rule in RULES:
        if f"(rule {rule.id})" in message:  # our data set config enforces what a provider escapes, by id
            return rule
        if any(fragment in message for fragment in rule.bridge_says):
            return rule
    return None
