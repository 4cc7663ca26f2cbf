"""All rules, and the judgement of a run by them. Needs neither torch nor Bridge, and takes microseconds.

Bridge stops at its first complaint; `judge` lists every rule that does not hold, each with the values and the way out.
A conformance test compares the verdicts with the installed Bridge, rule by rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from energon_packing.errors import PackingError
from energon_packing.validate.rules.batches import BATCH_RULES
from energon_packing.validate.rules.core import CORE_RULES
from energon_packing.validate.rules.data import DATA_RULES
from energon_packing.validate.rules.experts import EXPERT_RULES
from energon_packing.validate.rules.families import OWN_RULES
from energon_packing.validate.rules.in_batch import IN_BATCH_RULES
from energon_packing.validate.rules.layout import LAYOUT_RULES
from energon_packing.validate.rules.lengths import LENGTH_RULES
from energon_packing.validate.rules.models import MODEL_RULES
from energon_packing.validate.rules.native import NATIVE_RULES
from energon_packing.validate.rules.packing_modes import PACKING_MODE_RULES
from energon_packing.validate.rules.rule import Finding, Rule
from energon_packing.validate.rules.steps import STEP_RULES
from energon_packing.validate.run_view import RunView

BRIDGES_ORDER = (
    "bridge/epochs-need-finite-data",
    "bridge/epochs-need-whole-batches",
    "bridge/one-packing-mode",
    "bridge/specs-with-offline-packing",
    "bridge/fixed-boundaries-need-fixed-width",
    "bridge/graphs-need-fixed-width",
    "bridge/graphs-need-fixed-boundaries",
    "bridge/native-buffer-size",
    "bridge/native-one-packing-mode",
    "bridge/native-not-left-to-the-step",
    "bridge/native-one-pack-a-micro-batch",
    "bridge/native-task-encoder",
    "bridge/micro-batch-size",
    "bridge/native-per-token-loss",
    "bridge/native-no-average-in-collective",
    "bridge/native-no-multi-token-prediction",
    "bridge/native-no-graphs",
    "bridge/native-no-dist-train",
    "bridge/native-no-pipeline",
    "bridge/seq-length-multiple",
    "bridge/local-graphs-of-iterations",
    "bridge/comm-type-of-each-layer",
    "bridge/world-size",
    "bridge/eval-micro-batch-size",
    "bridge/eval-world-size",
    "bridge/eval-global-batch-size",
    "bridge/no-nan-check-in-graph",
    "bridge/model-seq-length",
    "bridge/per-token-loss",
    "bridge/no-average-in-collective",
    "bridge/hierarchical-sizes-present",
    "bridge/hierarchical-sizes-product",
    "bridge/pack-size",
    "bridge/one-pack-a-micro-batch",
    "bridge/in-batch-needs-several",
    "bridge/same-seq-length",
    "bridge/fixed-width",
    "bridge/variable-lengths",
    "bridge/native-no-overlap",
)
"""Bridge's rules in the order in which ``ConfigContainer.validate()`` tests them; the notes come last."""


def _in_bridges_order(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    by_id = {rule.id: rule for rule in rules}
    if sorted(by_id) != sorted(BRIDGES_ORDER):
        raise PackingError(f"rules without a place in Bridge's order: {sorted(set(by_id) ^ set(BRIDGES_ORDER))}")
    return tuple(by_id[rule] for rule in BRIDGES_ORDER)


RULES: tuple[Rule, ...] = (
    *_in_bridges_order((*NATIVE_RULES, *PACKING_MODE_RULES, *BATCH_RULES, *LENGTH_RULES, *LAYOUT_RULES)),
    *CORE_RULES,
    *STEP_RULES,
    *EXPERT_RULES,
    *OWN_RULES,
    *MODEL_RULES,
    *DATA_RULES,
    *IN_BATCH_RULES,
)
"""Bridge's rules in the order in which it tests them, then Megatron-Core's and ours."""

Outcome = Literal["ok", "error", "warning", "note", "not applicable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What one rule says about one run; `finding` is there where the rule does not hold."""

    rule: Rule
    outcome: Outcome
    finding: Finding | None = None


def judge(view: RunView) -> list[Judgement]:
    """Applies every rule to a run.

    Returns:
        One judgement a rule, in the order of `RULES`. The first error among those with ``bridge_says`` is the one that
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
    """The rule behind a message of ``ConfigContainer.validate()``; None where it concerns something else."""
    for rule in RULES:
        if f"(rule {rule.id})" in message:  # our data set config enforces what a provider escapes, and says so
            return rule
        if any(fragment in message for fragment in rule.bridge_says):
            return rule
    return None
