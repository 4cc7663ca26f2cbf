"""Random runs, judged by Bridge's unmodified ``ConfigContainer.validate()`` and by our rules; prints what came of them.

    python tests/conformance/judge_runs.py 9000

judges by the Bridge that Python would import. For its main branch, put the checkout's ``src`` and the Megatron-Core of
its ``3rdparty/Megatron-LM`` first on ``PYTHONPATH``.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import sys
from collections.abc import Iterable

from drawn_runs import drawn

from energon_packing.validate import verdict
from energon_packing.validate.rules.registry import RULES, violations
from energon_packing.validate.run_view import RunView, installed_version
from energon_packing.validate.verdict import bridge_verdict

SEED = 20261122
EARLY = "bridge/pack-size"
"""The rule whose place in Bridge's order depends on the data set: ``GPTSFTDatasetConfig`` tests it by itself."""


@dataclasses.dataclass
class Tally:
    """What came of the runs.

    Attributes:
        false_accepts: runs that Bridge refuses and none of our rules does.
        false_refusals: runs that Bridge accepts and a rule refuses that restates Bridge.
        other_rule: runs that both refuse, Bridge for another rule than the first of ours that restates it.
        by_ours_alone: accepted by Bridge, refused by rules of ours or of Megatron-Core.
        refusals: rule that Bridge's ``validate()`` does not have -> runs that it refuses.
    """

    version: str = ""
    runs: int = 0
    accepted_by_both: int = 0
    refused_by_both: int = 0
    false_accepts: list[str] = dataclasses.field(default_factory=list)
    false_refusals: list[str] = dataclasses.field(default_factory=list)
    other_rule: list[str] = dataclasses.field(default_factory=list)
    by_ours_alone: int = 0
    refusals: dict[str, int] = dataclasses.field(default_factory=dict)


def tallied(views: Iterable[RunView]) -> Tally:
    """Judges every run by Bridge and by the rules."""
    found, refusals = Tally(version=installed_version("megatron-bridge") or ""), collections.Counter[str]()
    verdict.prepare_bridge()
    with verdict.without_output():
        for view in views:
            ours = [judgement.rule for judgement in violations(view)]
            restated = [rule.id for rule in ours if rule.bridge_says]
            answer = bridge_verdict(view)
            if answer.accepted is None:
                raise RuntimeError(answer.message)
            found.runs += 1
            refusals.update(rule.id for rule in ours if not rule.bridge_says)
            named = None if answer.rule is None else answer.rule.id
            told = f"ours {restated}, Bridge {named}: {answer.message[:160]!r}; {view}"
            if answer.accepted:
                found.accepted_by_both += not ours
                found.by_ours_alone += bool(ours) and not restated
                found.false_refusals += [told] * bool(restated)
            elif not ours:
                found.false_accepts.append(told)
            else:
                found.refused_by_both += 1
                same = named is not None and named in (restated[:1] or [None])
                early = named == EARLY and EARLY in restated
                found.other_rule += [] if same or early else [told]
    found.refusals = dict(sorted(refusals.items()))
    return found


def lines(found: Tally) -> Iterable[str]:
    """The figures for a reader, with the line of source behind each rule of ours."""
    yield f"Megatron-Bridge {found.version}: {found.runs} runs"
    for name in ("accepted_by_both", "refused_by_both", "by_ours_alone"):
        yield f"{name.replace('_', ' '):20}{getattr(found, name):>8}"
    for name in ("false_accepts", "false_refusals", "other_rule"):
        yield f"{name.replace('_', ' '):20}{len(getattr(found, name)):>8}"
    sources = {rule.id: rule.sources for rule in RULES}
    for rule, runs in found.refusals.items():
        line = sources[rule][0]
        yield f"{rule:50}{runs:>7}  {line.file}: {line.says}"


def main(runs: int, as_json: bool) -> int:
    """Prints the figures; 1 where Bridge and the rules that restate it disagree."""
    found = tallied(drawn(runs, SEED))
    print(json.dumps(dataclasses.asdict(found)) if as_json else "\n".join(lines(found)))
    wrong = found.false_accepts + found.false_refusals + found.other_rule
    print("\n".join(wrong[:5]), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), "--json" in sys.argv[2:]))
