"""``scripts/soak.py``: its smallest form passes, and what it must find is found."""

import json
import subprocess
from collections import Counter

import pytest
import soak
from forking_python import quick_python

pytest.importorskip("pyarrow", reason="pyarrow is not installed")
KEYS = {f"text-{number:06d}": number % 2 == 0 for number in range(3000)}
FAULTY = {
    key for key, media in KEYS.items() if (fault := soak.fault_of(key)) and (media or fault[0] in ("cook", "measure"))
}
FAULTY |= {key for key in KEYS if (fault := soak.fault_of(key)) and fault[0] == "render"}
SOUND = [key for key in KEYS if key not in FAULTY]


def test_a_run_that_drops_the_faulty_samples_alone_is_as_expected():
    assert 20 < len(FAULTY) < 100
    assert {soak.fault_of(key) for key in KEYS} - {None} <= {(s, e) for s in soak.STAGES for e in soak.ERRORS}
    assert soak.unexpected(KEYS, {"plan": Counter(SOUND)}, FAULTY) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda emitted, dropped: emitted.pop(SOUND[7]), f"{SOUND[7]} with fault None: of 0 readers"),
        (lambda emitted, dropped: emitted.update([SOUND[7]] * 2), f"plan emitted {SOUND[7]} 3 times, others 1 times"),
        (lambda emitted, dropped: dropped.add(SOUND[7]), f"{SOUND[7]} with fault None: of 1 readers, dropped: True"),
        (lambda emitted, dropped: emitted.update([min(FAULTY)]), f"{min(FAULTY)} with fault"),
    ],
    ids=["lost", "doubled", "dropped", "faulty"],
)
def test_a_sample_that_is_lost_doubled_or_judged_wrongly_is_found(change, found):
    emitted, dropped = Counter(SOUND), set(FAULTY)
    change(emitted, dropped)
    (wrong,) = soak.unexpected(KEYS, {"plan": emitted}, dropped)
    assert wrong.startswith(found)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_two_ranks_that_are_killed_give_what_ranks_give_that_nobody_kills():
    words = ["--conversations", "60", "--workers", "1", "--kills", "1", "--mean-seconds", "0.5"]
    done = subprocess.run(
        [quick_python(), "-W", "ignore", str(soak.__file__), *words], capture_output=True, text=True, check=False
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (rows, done.stderr[-2000:])
    assert [row["soak"] for row in rows] == ["online", "planned"]
    assert all(row["passed"] and row["samples"] > 150 for row in rows)
    assert sum(row["kills"] for row in rows) > 0
