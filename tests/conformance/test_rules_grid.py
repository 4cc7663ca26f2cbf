"""Our verdicts and the installed Bridge's on a grid of runs: sound ones, and sound ones with one to three faults.

Every run is judged by Bridge's unmodified ``ConfigContainer.validate()``. ``pytest -s`` prints the counts by rule.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools

import pytest
from drawn_runs import grid

from energon_packing.validate import verdict
from energon_packing.validate.rules.registry import RULES, violations
from energon_packing.validate.run_view import RunView, installed_version
from energon_packing.validate.verdict import bridge_verdict

if installed_version("megatron-bridge") is None:
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

RUNS = 10_000
ALONE = 20
"""Runs in which a rule must be the only one violated."""
HERE = RunView.of(bridge_version=installed_version("megatron-bridge")).bridge_release
ERRORS = [rule.id for rule in RULES if rule.severity == "error" and rule.speaks_of(HERE)]
BRIDGES = [rule.id for rule in RULES if rule.bridge_says and rule.speaks_of(HERE)]
MEETING = [rule for rule in BRIDGES if not rule.startswith(("bridge/epochs-", "bridge/native-"))]
"""Rules about epochs and Bridge's own packing speak of one kind of data set each: most pairs with them cannot be."""
NEVER_ALONE = {
    "bridge/native-one-packing-mode": "one sample a micro-batch breaks bridge/in-batch-needs-several too",
    "ours/processor-fits-the-model": "drawn runs have no processor; see test_processor_of_the_model",
    "bridge/native-no-average-in-collective": "it breaks two more rules about the average",
}
EARLY = "bridge/pack-size"
"""The rule whose place in Bridge's order depends on the data set: ``GPTSFTDatasetConfig`` tests it by itself."""


@dataclasses.dataclass
class Counts:
    runs: int = 0
    accepted: int = 0
    by_ours_alone: int = 0
    named: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    violated: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    alone: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    pairs: collections.Counter[frozenset[str]] = dataclasses.field(default_factory=collections.Counter)
    disagreements: list[str] = dataclasses.field(default_factory=list)


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> Counts:
    verdict.prepare_bridge()
    with verdict.without_output():  # once, not four times for every run
        return judged(RUNS)


def judged(runs: int) -> Counts:
    """The whole grid, judged by Bridge and by us."""
    found = Counts()
    for view in grid(runs):
        ours = [judgement.rule for judgement in violations(view)]
        bridges = [rule.id for rule in ours if rule.bridge_says]
        answer = bridge_verdict(view)
        found.runs += 1
        named = None if answer.rule is None else answer.rule.id
        expected = None if not bridges else named if EARLY in bridges and named == EARLY else bridges[0]
        if answer.accepted is None or answer.accepted == bool(bridges) or named != expected:
            found.disagreements.append(f"ours {bridges}, Bridge {named}: {answer.message[:120]!r}; {view}")
            continue
        found.accepted += bool(answer.accepted)
        found.by_ours_alone += bool(answer.accepted and ours)
        found.named.update([named] if named else [])
        found.violated.update(rule.id for rule in ours)
        if len(ours) == 1:
            found.alone[ours[0].id] += 1
        found.pairs.update(frozenset(pair) for pair in itertools.combinations([rule.id for rule in ours], 2))
    return found


def test_bridge_and_we_agree_on_every_run_and_name_the_same_rule(counts: Counts) -> None:
    print(f"\n{counts.runs} runs: {counts.accepted} accepted by Bridge, {counts.by_ours_alone} of them not by us")
    print(f"{'rule':50}{'violated':>10}{'alone':>8}{'named by Bridge':>18}")
    for rule in ERRORS:
        named = counts.named[rule] if rule in BRIDGES else "-"
        print(f"{rule:50}{counts.violated[rule]:>10}{counts.alone[rule]:>8}{named:>18}")
    assert counts.disagreements == []
    assert counts.runs >= 5000
    assert counts.accepted >= 1000


@pytest.mark.full
def test_every_rule_of_severity_error_is_the_only_one_violated_many_times(counts: Counts) -> None:
    few = {rule: counts.alone[rule] for rule in ERRORS if counts.alone[rule] < ALONE}
    assert set(few) == set(NEVER_ALONE) & set(ERRORS), few


# Why two of Bridge's rules cannot be violated by one run.
EXCLUDE_EACH_OTHER = {
    frozenset(("bridge/one-packing-mode", "bridge/pack-size")): "pack rules wait until one mode is on",
    frozenset(("bridge/one-packing-mode", "bridge/one-pack-a-micro-batch")): "as above",
    frozenset(("bridge/one-packing-mode", "bridge/in-batch-needs-several")): "as above",
    frozenset(("bridge/pack-size", "bridge/in-batch-needs-several")): "offline packing; in-batch packing",
    frozenset(("bridge/one-pack-a-micro-batch", "bridge/in-batch-needs-several")): "as above",
    frozenset(
        ("bridge/fixed-boundaries-need-fixed-width", "bridge/graphs-need-fixed-boundaries")
    ): "pad_cu_seqlens on; off",
    frozenset(
        ("bridge/graphs-need-fixed-width", "bridge/local-graphs-of-iterations")
    ): "graphs of an iteration or of Transformer Engine; others",
    frozenset(("bridge/graphs-need-fixed-boundaries", "bridge/local-graphs-of-iterations")): "as above",
    frozenset(("bridge/local-graphs-of-iterations", "bridge/no-nan-check-in-graph")): "as above",
    frozenset(("bridge/hierarchical-sizes-present", "bridge/hierarchical-sizes-product")): "sizes missing; given",
}


@pytest.mark.full
def test_every_pair_of_bridges_rules_that_can_meet_does(counts: Counts) -> None:
    missing = {
        frozenset(pair) for pair in itertools.combinations(MEETING, 2) if not counts.pairs[frozenset(pair)]
    } - set(EXCLUDE_EACH_OTHER)
    met = sum(1 for pair in itertools.combinations(MEETING, 2) if counts.pairs[frozenset(pair)])
    print(f"\n{met} pairs of Bridge's rules met, {len(EXCLUDE_EACH_OTHER)} exclude each other")
    assert sorted(sorted(pair) for pair in missing) == []
    assert [sorted(pair) for pair in EXCLUDE_EACH_OTHER if counts.pairs[pair]] == []
