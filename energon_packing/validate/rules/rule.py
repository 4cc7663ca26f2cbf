"""What a rule is, all rules, and the judgement of a run by them. Needs neither torch nor Bridge.

Nothing else reports the rules ``ours/...`` before GPUs are taken, and some not even then: the run computes something
other than what it claims. Bridge stops at its first error; `judge` lists every rule that does not hold, each with the
values and the fix. A conformance test compares the verdicts with the installed Bridge, rule by rule.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

from energon_packing.errors import PackingError
from energon_packing.registry import Registry
from energon_packing.validate.run_view import RunView

Severity = Literal["error", "warning", "note"]

LAST = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Why a rule does not hold, with the values, and what to change; ``severity`` where it is not the rule's."""

    why: str
    fix: str
    severity: Severity | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Versioned:
    """What is true from one version of Megatron-Bridge on, by its first two numbers, and maybe not from a later one."""

    since: tuple[int, int] = (0, 6)
    before: tuple[int, int] | None = None

    def speaks_of(self, release: tuple[int, int]) -> bool:
        """Returns whether it is true of this version of Megatron-Bridge."""
        return self.since <= release and (self.before is None or release < self.before)


@dataclass(frozen=True, slots=True)
class SourceLine(Versioned):
    """A rule's place in the source of the program that it is about: a file from the root of its package
    (``megatron/core/...``, ``transformer_engine/...``, ``energon_packing/...``), and a text of it, part of one line."""

    file: str
    says: str


def _line_of(folder: str, file: str, says: str, **versions: Any) -> SourceLine:
    return SourceLine(f"{folder}/{file}", says, **versions)


core = partial(_line_of, "megatron/core")
bridge = partial(_line_of, "megatron/bridge")
qwen3_vl = partial(_line_of, "megatron/bridge/models/qwen_vl/modelling_qwen3_vl")
ours = partial(_line_of, "energon_packing")
attention = partial(_line_of, "transformer_engine/pytorch/attention/dot_product_attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule(Versioned):
    """One rule.

    Attributes:
        id: ``origin/name``; it never changes and is never reused.
        checks: what is true when the rule holds.
        place: where the rule comes from.
        finds: returns why the rule does not hold, or None if it holds after all; asked where ``holds`` is false.
        order: place among all rules. Below 1000: where Bridge's ``validate()`` tests it, in steps of ten so that a new
            one fits between two; silent changes by Bridge come last. From there on: the others.
        provider_escapes: whether Bridge tests it for its own data set classes only, and no other ``DatasetProvider``.
        severity: ``error`` makes the run impossible or wrong, ``warning`` may, ``note`` states what Bridge will change.
        bridge_says: fragments of the messages that Bridge's ``validate()`` raises for it; empty if it has no such rule.
        sources: lines that justify a rule that nobody raises before GPUs are taken; ``bridge_says`` does it for others.
    """

    id: str
    checks: str
    place: str
    finds: Callable[[RunView], Finding | None]
    applies: Callable[[RunView], bool] = lambda _view: True
    holds: Callable[[RunView], bool] = lambda _view: False
    severity: Severity = "error"
    order: int = LAST
    provider_escapes: bool = False
    bridge_says: tuple[str, ...] = ()
    sources: tuple[SourceLine, ...] = ()

    def __post_init__(self) -> None:
        if self.origin != "bridge" and not self.sources:
            raise PackingError(f"{self.id} has no source line that justifies it.")

    @property
    def origin(self) -> str:
        """Who enforces it: ``bridge`` (its ``validate()``), ``core`` after GPUs are taken, or this package."""
        return self.id.partition("/")[0]

    def concerns(self, view: RunView) -> bool:
        """Returns whether the rule applies to such a run on the installed Bridge."""
        escapes = self.provider_escapes and view.dataset_kind == "provider"
        return not escapes and self.speaks_of(view.bridge_release) and self.applies(view)


def rule(
    *,
    applies: Callable[[RunView], bool] = lambda _view: True,
    holds: Callable[[RunView], bool] = lambda _view: False,
    why: str | Callable[[RunView], str] = "",
    fix: str | Callable[[RunView], str] = "",
    **settings: Any,
) -> Any:
    """A decorator that turns the function that finds what is wrong into a rule; its arguments are fields of `Rule`.
    With ``why`` and ``fix`` (texts, where ``{view.model}`` is the run's, or functions) it is the rule itself."""
    of = partial(Rule, applies=applies, holds=holds, **settings)

    def finding(view: RunView) -> Finding:
        said = [text(view) if callable(text) else text.format(view=view) for text in (why, fix)]
        return Finding(why=said[0], fix=said[1])

    return of(finds=finding) if why else lambda finds: of(finds=finds)


warning_rule = partial(rule, severity="warning")
bridges_rule = partial(rule, place="megatron.bridge.training.config.ConfigContainer.validate")
"""`rule` for those of Bridge's ``validate()``."""
data_set_rule = partial(bridges_rule, provider_escapes=True)
"""The same for those that Bridge tests for its own data set classes only."""


def unless(holds: bool, *, why: str, fix: str) -> Finding | None:
    """Returns a finding, or None where the rule holds after all."""
    return None if holds else Finding(why=why, fix=fix)


_REGISTRY: Registry[Rule] = Registry(
    "rule",
    folder="energon_packing.validate.rules",
    declared=lambda module: {value.id: value for value in vars(module).values() if isinstance(value, Rule)},
    setting="the rule",
)


@cache
def all_rules() -> tuple[Rule, ...]:
    """Returns Bridge's rules in the order in which it tests them, then Megatron-Core's and ours, then others'. Not to
    be called while modules are imported: a rule's own may be the first of them, and would be found empty."""
    return tuple(sorted(_REGISTRY, key=lambda rule: rule.order))


def register_rule(rule: Rule) -> None:
    """Adds a rule of another package, for this process; an entry point in ``energon_packing.validate.rules`` lasts.
    Raises ConfigError: its id is taken."""
    _REGISTRY.add(rule.id, rule)
    all_rules.cache_clear()


Outcome = Literal["ok", "error", "warning", "note", "not applicable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """The result of one rule for one run; `finding` is set if the rule does not hold."""

    rule: Rule
    outcome: Outcome
    finding: Finding | None = None


def judge(view: RunView) -> list[Judgement]:
    """One judgement per rule on a run, in the order of `all_rules`. The first error among those with ``bridge_says`` is
    what Bridge's ``validate()`` raises; only ``bridge/pack-size`` comes earlier for its text data sets."""
    judgements = []
    for rule in all_rules():
        concerned = rule.concerns(view)
        finding = rule.finds(view) if concerned and not rule.holds(view) else None
        if finding is not None:
            finding = replace(finding, why=view.in_own_keys(finding.why), fix=view.in_own_keys(finding.fix))
        outcome: Outcome = finding.severity or rule.severity if finding else "ok" if concerned else "not applicable"
        judgements.append(Judgement(rule=rule, outcome=outcome, finding=finding))
    return judgements


def violations(view: RunView) -> list[Judgement]:
    """Returns the judgements of rules of severity ``error`` that do not hold."""
    return [judgement for judgement in judge(view) if judgement.outcome == "error"]


def rule_that_bridge_named(message: str) -> Rule | None:
    """Returns the rule for a message of ``ConfigContainer.validate()``; None if it concerns something else."""
    # Our data set config enforces what a provider escapes, by id.
    named = (rule for rule in all_rules() if any(said in message for said in (f"(rule {rule.id})", *rule.bridge_says)))
    return next(named, None)
