"""All rules, and the judgement of a run by them. Needs neither torch nor Bridge, and takes microseconds.

Bridge stops at its first error; `judge` lists every rule that does not hold, each with the values and the fix. A
conformance test compares the verdicts with the installed Bridge, rule by rule.

    python -m energon_packing.validate.rules.registry docs/validate.md

writes the table of all rules into the page, between the lines that mark it; a test compares the two.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from energon_packing.errors import PackingError
from energon_packing.registry import Registry
from energon_packing.validate.rules.rule import LAST, Finding, Rule
from energon_packing.validate.run_view import RunView

_REGISTRY: Registry[Rule] = Registry(
    "rule",
    folder="energon_packing.validate.rules",
    declared=lambda module: {value.id: value for value in vars(module).values() if isinstance(value, Rule)},
    setting="the rule",
)


def in_order(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Returns rules by their ``order``, those without one last.

    Raises:
        PackingError: two rules share an id or a place.
    """
    unordered = list(rules)
    counts = collections.Counter([*(rule.id for rule in unordered), *(rule.order for rule in unordered)])
    twice = [rule.id for rule in unordered if counts[rule.id] > 1 or (counts[rule.order] > 1 and rule.order != LAST)]
    if twice:
        raise PackingError(f"Rules with one id or one order: {', '.join(sorted(set(twice)))}.")
    return tuple(sorted(unordered, key=lambda rule: rule.order))


@cache
def all_rules() -> tuple[Rule, ...]:
    """Returns Bridge's rules in the order in which it tests them, then Megatron-Core's and ours, then others'."""
    return in_order(map(_REGISTRY.find, _REGISTRY.names()))


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


BEGIN, END = "<!-- rules: begin -->", "<!-- rules: end -->"


def markdown_rows() -> Iterator[str]:
    """The table, line by line: one row per rule, in the order of `RULES`."""
    yield "| rule | severity | what holds | a provider | versions | place |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for rule in RULES:
        versions = "{}.{} on".format(*rule.since) if rule.since > (0, 6) else "all"
        if rule.before is not None:
            versions = "before {}.{}".format(*rule.before)
        provider = "escapes" if rule.provider_escapes else ""
        yield f"| `{rule.id}` | {rule.severity} | {rule.checks} | {provider} | {versions} | {rule.place} |"


def with_table(page: str) -> str:
    """Returns the page of ``docs/validate.md`` with the current table."""
    before, _, rest = page.partition(BEGIN)
    return "\n".join([before + BEGIN, "", *markdown_rows(), "", END + rest.partition(END)[2]])


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_table(file.read_text(encoding="utf-8")), encoding="utf-8")
