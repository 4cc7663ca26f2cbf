"""Every trap has a test, and every such test turns red when the bug is put back."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from forking_python import quick_python
from mutation_run import ALL_MUTATIONS as ALL
from mutation_run import ROOT, TABLES, drawn, edited
from mutation_table import Mutation

ALL_TRAPS = {number: trap for table in TABLES for number, trap in table.items()}
TABLE = ROOT / "docs" / "correctness.md"


def table_row(mutation: Mutation) -> str:
    """A mutation as a row of the table in ``docs/correctness.md``."""
    file, _, test = mutation.test.partition("::")
    return f"| {mutation.trap} | `{Path(file).name}`: `{test}` | {mutation.name} | {mutation.oracle} |"


def test_every_trap_has_a_mutation_and_every_mutation_a_name_of_its_own():
    numbers = {*range(1, 29), 31, 37, 38, *range(40, 113), 117, 118, 126, 127, *range(142, 147), *range(148, 158)}
    numbers |= {*range(160, 164), *range(170, 176), *range(180, 185), *range(190, 207), 208, *range(210, 225)}
    numbers |= {*range(225, 280)}
    assert all(ALL_TRAPS[number] == trap for table in TABLES for number, trap in table.items()), "two traps, one number"
    assert {mutation.trap for mutation in ALL} == set(ALL_TRAPS) == numbers
    assert len({mutation.name for mutation in ALL}) == len(ALL)


def test_the_documented_table_is_the_one_that_runs():
    if not TABLE.exists():
        pytest.skip("the documentation is not installed")
    rows = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    written = [line for line in rows if line.count(" | ") in (1, 3)]  # not those of the tables of figures
    traps = [f"| {number} | {text} |" for number, text in ALL_TRAPS.items()]
    expected = traps + [table_row(mutation) for mutation in ALL]
    assert [line for line in written if line.split("|")[1].strip().isdigit()][: len(expected)] == expected


def test_every_bug_fits_the_code_that_it_is_put_into():
    unfit = []
    for mutation in ALL:
        try:
            edited(mutation)
        except (ValueError, SyntaxError, OSError) as error:  # a quoted line has moved, or the edited file is no Python
            unfit.append(str(error))
    assert not unfit, "\n".join(unfit)


@pytest.fixture(scope="module")
def verdicts():
    """Mutation -> verdict and detail, from one run of what is drawn of them in a process of its own."""
    script = str(Path(__file__).with_name("mutation_run.py"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [quick_python(), script, "--json", "--drawn", "--jobs", "3"],  # one of them may wait for a deadline
        env=environment,
        capture_output=True,
        text=True,
        timeout=2400,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return {(row["trap"], row["mutation"]): (row["verdict"], row["detail"]) for row in json.loads(done.stdout)}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("mutation", drawn(ALL), ids=lambda mutation: f"{mutation.trap} {mutation.name}")
def test_a_bug_put_back_turns_its_test_red(verdicts, mutation):
    verdict, detail = verdicts[mutation.trap, mutation.name]
    if verdict == "skipped":
        pytest.skip(detail)
    assert verdict == "noticed", detail


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_without_any_bug_a_named_test_of_every_folder_is_green(verdicts):
    verdict, detail = verdicts[0, "none"]
    assert verdict == "green", detail
