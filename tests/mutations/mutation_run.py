"""Puts each bug of the mutation tables back, one at a time, and runs the test that must notice it.

    python tests/mutations/mutation_run.py [--only 7 --only 12] [--drawn] [--jobs 2] [--json]

Exit codes: 0 every mutation was noticed, 1 one was not (or a test fails without any mutation), 2 the table does
not fit the code. The working tree is only read: every mutation gets a copy of the package of its own in a fresh
temporary directory. torch, transformers and Bridge are imported once, in a process that never imports the package for
good; each mutation runs in a fork of it, so it pays for its own test and little more. What the tests import besides is
known after a run of some of them on the package as it is, and is imported there too. ``--drawn``, which the tests use,
puts back one bug in eight, others for each state of the package.
"""

import argparse
import compileall
import contextlib
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from forking_python import PACKAGE, ROOT, freeze_for_good, import_slow_modules
from mutation_table import MUTATIONS, TRAPS, Mutation

OTHERS = (
    *("media", "template", "convert", "budget", "validate", "family", "bridge", "state", "offline", "see", "target"),
    *("megatron_lm", "reader", "engine", "sharing", "store", "band", "cluster", "remote_reading", "stage", "advice"),
)
"""Areas with a module of tables each, in the order of docs/correctness.md."""
_TABLES = {area: vars(importlib.import_module(f"{area}_mutations")) for area in OTHERS}
ALL_MUTATIONS = sum((_TABLES[area][f"{area.upper()}_MUTATIONS"] for area in OTHERS), MUTATIONS)
TABLES: tuple[dict[int, str], ...] = (TRAPS, *(_TABLES[area][f"{area.upper()}_TRAPS"] for area in OTHERS))
PYTEST = ("-ppytest_timeout", "--timeout=0", "--tb=native", "--assert=plain")
LIMIT_S = 300
"""A test that has not ended by then is stopped; a mutation that makes code hang counts as not noticed."""
UNCHANGED_LIMIT_S = 1500
"""The same for the run of one test of every folder on the package as it is."""


class Recorder:
    """Pytest plugin: what became of each test, and where the package was imported from."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else str(report.longrepr or "")
            first = message.splitlines()[0][:200] if message.strip() else ""
            self.reports.append(
                {"test": report.nodeid, "when": report.when, "outcome": report.outcome, "message": first}
            )


class OneCase:
    """Pytest plugin: keeps one case of each folder, of the fast tier where there is one."""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        kept: dict[Path, Any] = {}
        for item in sorted(items, key=lambda item: item.get_closest_marker("full") is not None):
            kept.setdefault(item.path.parent, item)
        items[:] = kept.values()


def edited(mutation: Mutation) -> dict[str, str]:
    """The files that a mutation edits, below the package, and their new text.

    Raises:
        ValueError: where a text to replace does not occur exactly once.
        SyntaxError: where the new text is no Python.
    """
    found: dict[str, str] = {}
    for file, old, new in mutation.edits:
        source = found.get(file) or (ROOT / PACKAGE / file).read_text(encoding="utf-8")
        if source.count(old) != 1:
            raise ValueError(f"mutation {mutation.name!r}: {file} holds {old!r} {source.count(old)} times, not once")
        found[file] = source.replace(old, new)
        compile(found[file], file, "exec")
    return found


def drawn(mutations: Sequence[Mutation]) -> list[Mutation]:
    """About one in eight, chosen by what the package's files hold: none stays out of many commits."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    state = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return [mutation for mutation in mutations if zlib.crc32(f"{state} {mutation.name}".encode()) % 8 == 0]


def copy_package(folder: Path, mutation: Mutation | None, compiled: Path | None = None) -> None:
    """A copy of the package under `folder`, with the mutation's edits.

    Args:
        folder: gets the copy.
        mutation: its edits; None makes none.
        compiled: folder of a copy whose bytecode is copied too; None compiles on import.

    Raises:
        ValueError, SyntaxError: as `edited` does.
    """
    if compiled is None:
        shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copytree(compiled / PACKAGE, folder / PACKAGE, copy_function=os.link)
    if mutation is None:
        return
    for file, changed in edited(mutation).items():
        path = folder / PACKAGE / file
        path.unlink()  # the other copies may be the same file
        path.write_text(changed, encoding="utf-8")
        for bytecode in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            bytecode.unlink()


def run_tests(folder: Path, tests: Sequence[str], *, one_case: bool) -> None:
    """In the fork: runs the tests against the package in `folder`, writes ``result.json`` there, never returns."""
    code = 1
    try:
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(folder)
        # This process has run no backward pass yet, so tests may fork ranks from it instead of importing all again.
        os.environ["ENERGON_PACKING_FORK_RANKS"] = "1"
        sys.path.insert(0, str(folder))
        sys.dont_write_bytecode = True
        import hypothesis
        import pytest

        # The first failing example is enough; shrinking it would take most of the time.
        hypothesis.settings.register_profile(
            "mutations", phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate), database=None, derandomize=True
        )
        hypothesis.settings.load_profile("mutations")
        # Other packages' plugins would be imported anew in every fork: most of its time.
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        recorder = Recorder()
        places = [str(ROOT / test) for test in tests]
        status = pytest.main(
            [*places, f"--rootdir={ROOT}", f"-c{ROOT / 'pyproject.toml'}", "-pno:cacheprovider", "-x", *PYTEST],
            plugins=[recorder, *([OneCase()] if one_case else [])],
        )
        imported = Path(sys.modules[PACKAGE].__file__ or "").resolve()
        result = {
            "status": int(status),
            "reports": recorder.reports,
            "mutated_copy": imported.is_relative_to(folder.resolve()),
            "libraries": [name for name, module in [*sys.modules.items()] if is_library(module)],  # threads import
        }
        (folder / "result.json").write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def is_library(module: Any) -> bool:
    """Whether a module belongs to a package that is installed, with nothing of this repository in it."""
    return "site-packages" in (getattr(module, "__file__", None) or "")


def import_libraries(result: Path) -> None:
    """Imports what the tests of a run imported, once instead of in every fork."""
    for name in json.loads(result.read_text())["libraries"] if result.exists() else ():
        if name not in sys.modules:
            with contextlib.suppress(Exception), contextlib.redirect_stderr(None):
                importlib.import_module(name)
    freeze_for_good()


def start(folder: Path, tests: Sequence[str], *, one_case: bool) -> int:
    """Forks a process group that runs `tests`, or one case of each of their folders; returns its id."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        run_tests(folder, tests, one_case=one_case)
    return child


def outcome(folder: Path, mutation: Mutation | None, status: int = 0) -> tuple[str, str]:
    """``(verdict, detail)``: ``noticed``, ``survived``, ``skipped`` or ``broken``; without mutation ``green``. The
    status is that of the process."""
    try:
        result = json.loads((folder / "result.json").read_text())
    except FileNotFoundError:
        log = (folder / "log.txt").read_text(errors="replace") if (folder / "log.txt").exists() else ""
        how = os.waitstatus_to_exitcode(status)
        return "broken", f"the test process ended ({how}) without a result: {' | '.join(log.strip().splitlines()[-3:])}"
    reports = result["reports"]
    if not result["mutated_copy"]:
        return "broken", "the package was not imported from the copy"
    if not reports or result["status"] not in (0, 1):
        return "broken", f"pytest ended with status {result['status']} and {len(reports)} reports"
    failed = [report for report in reports if report["outcome"] == "failed"]
    if mutation is None:
        if failed:
            return "broken", f"{failed[0]['test']} fails without any mutation: {failed[0]['message']}"
        return "green", f"{len(reports)} tests"
    in_call = [report for report in failed if report["when"] == "call"]
    if in_call:
        return "noticed", in_call[0]["message"]
    if failed:
        return "broken", f"failed outside the test itself ({failed[0]['when']}): {failed[0]['message']}"
    if all(report["outcome"] == "skipped" for report in reports):
        return "skipped", reports[0]["message"]
    return "survived", f"{len(reports)} tests passed"


def run_all(mutations: Sequence[Mutation], *, jobs: int, has_bridge: bool, keep: Path) -> list[dict[str, Any]]:
    """Runs a test of each file without a mutation, then every mutation, `jobs` at a time."""
    rows: list[dict[str, Any]] = []
    todo: list[tuple[Mutation | None, list[str]]] = []
    usable = [mutation for mutation in mutations if has_bridge or not mutation.needs_bridge]
    # Without mutation one test of each folder: that it passes here, as the tests' own run says of all, shows that what
    # fails below does not fail for want of a file, a fixture or a variable.
    todo += [(None, sorted({mutation.test for mutation in usable}))]
    todo += [(mutation, [mutation.test]) for mutation in usable]
    rows += [
        {"trap": m.trap, "mutation": m.name, "test": m.test, "verdict": "skipped", "detail": "Bridge is not installed"}
        for m in mutations
        if m not in usable
    ]
    running: dict[int, tuple[Mutation | None, Path, float]] = {}
    most: dict[bool, int] = {True: UNCHANGED_LIMIT_S, False: LIMIT_S}
    number = 0
    # The forks write no bytecode; compiled once, not in every one of them.
    compiled = keep / "compiled"
    copy_package(compiled, None)
    compileall.compile_dir(compiled / PACKAGE, quiet=1)
    while todo or running:
        # Nothing starts beside the first, after which this process has more imports.
        while todo and len(running) < jobs and None not in [mutation for mutation, _, _ in running.values()]:
            mutation, tests = todo.pop(0)
            folder = keep / f"{number:03d}"
            number += 1
            copy_package(folder, mutation, compiled)
            running[start(folder, tests, one_case=mutation is None)] = (mutation, folder, time.monotonic())
        for child, (mutation, folder, since) in list(running.items()):
            ended, status, used = os.wait4(child, os.WNOHANG)
            late = time.monotonic() - since > most[mutation is None]
            if not ended and late:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                _, _, used = os.wait4(child, 0)
            if not ended and not late:
                continue
            del running[child]
            verdict, detail = "survived", f"not ended after {most[mutation is None]} s"
            if ended:
                verdict, detail = outcome(folder, mutation, status)
            rows.append(
                {
                    "trap": mutation.trap if mutation else 0,
                    "mutation": mutation.name if mutation else "none",
                    "test": mutation.test if mutation else "the named tests",
                    "verdict": verdict,
                    "detail": detail,
                    "seconds": round(time.monotonic() - since, 1),
                    "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
                }
            )
            if mutation is None:
                import_libraries(folder / "result.json")
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)
    return sorted(rows, key=lambda row: row["trap"])


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, action="append", metavar="TRAP", help="this trap; may be repeated")
    parser.add_argument("--drawn", action="store_true", help="those of `drawn` alone")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="mutations at a time (default 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    options = parser.parse_args(arguments)
    chosen = [mutation for mutation in ALL_MUTATIONS if not options.only or mutation.trap in options.only]
    chosen = drawn(chosen) if options.drawn else chosen
    if not chosen or options.jobs < 1:
        parser.error("no mutation chosen" if not chosen else "--jobs must be at least 1")
    began = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import hypothesis  # noqa: F401
    from _pytest.config import get_config

    get_config()  # imports pytest's own plugins, which every fork would import
    has_bridge = import_slow_modules()
    keep = Path(tempfile.mkdtemp(prefix="energon-packing-mutations-"))
    try:
        rows = run_all(chosen, jobs=options.jobs, has_bridge=has_bridge, keep=keep)
    except (ValueError, SyntaxError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(keep, ignore_errors=True)
    if options.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(f"{row['trap'] or '-':>3} {row['verdict']:<9} {row['mutation']}  ({row['test']})  {row['detail']}")
        counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("noticed", "skipped")}
        total = sum(row["trap"] > 0 for row in rows)
        print(
            f"{counts['noticed']} of {total} mutations noticed, {counts['skipped']} skipped, "
            f"{time.monotonic() - began:.0f} s"
        )
    return 0 if all(row["verdict"] in ("noticed", "skipped", "green") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
