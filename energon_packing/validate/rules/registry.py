"""All rules, and the judgement of a run by them. Needs neither torch nor Bridge, and takes microseconds.

Bridge stops at its first error; `judge` lists every rule that does not hold, each with the values and the fix. A
conformance test compares the verdicts with the installed Bridge, rule by rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from energon_packing.registry import Registry
from energon_packing.validate.rules.rule import Finding, Rule
from energon_packing.validate.run_view import RunView

_REGISTRY: Registry[Rule] = Registry(
    "rule",
    folder="energon_packing.validate.rules",
    declared=lambda module: {value.id: value for value in vars(module).values() if isinstance(value, Rule)},
    setting="the rule",
)


@cache
def all_rules() -> tuple[Rule, ...]:
    """Returns Bridge's rules in the order in which it tests them, then Megatron-Core's and ours, then others'."""
    return tuple(sorted(map(_REGISTRY.find, _REGISTRY.names()), key=lambda rule: rule.order))


def register_rule(rule: Rule) -> None:
    """Adds a rule of another package, for this process; an entry point in ``energon_packing.validate.rules`` lasts.

    Raises:
        ConfigError: its id is taken.
    """
    _REGISTRY.add(rule.id, rule)
    all_rules.cache_clear()


RULES = all_rules()
"""Those of this package, and those that installed packages declare."""

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
        One judgement per rule, in the order of `all_rules`. The first error among those with ``bridge_says`` is what
        Bridge's ``validate()`` raises; only ``bridge/pack-size`` comes earlier for Bridge's own text data sets.
    """
    judgements = []
    for rule in all_rules():
        concerned = rule.concerns(view)
        finding = rule.check(view) if concerned else None
        outcome: Outcome = rule.severity if finding else "ok" if concerned else "not applicable"
        judgements.append(Judgement(rule=rule, outcome=outcome, finding=finding))
    return judgements


def violations(view: RunView) -> list[Judgement]:
    """Returns the judgements of rules of severity ``error`` that do not hold."""
    return [judgement for judgement in judge(view) if judgement.outcome == "error"]


def rule_that_bridge_named(message: str) -> Rule | None:
    """Returns the rule for a message of ``ConfigContainer.validate()``; None if it concerns something else."""
    for rule in all_rules():
        # Our data set config enforces what a provider escapes, by id.
        if f"(rule {rule.id})" in message or any(fragment in message for fragment in rule.bridge_says):
            return rule
    return None
