"""The script that plays a new user: what it refuses; its commands are those of the page with its log."""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from forking_python import quick_python

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "new_user.sh"


def run(*arguments, **environment):
    words = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=280, check=False, env=os.environ | environment, cwd=ROOT
    )


def test_a_missing_data_directory_and_a_used_folder_are_one_sentence(tmp_path):
    for done in (run(), run(tmp_path / "nowhere"), run(tmp_path, tmp_path.parent)):
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1


def commands_of(log):
    return re.findall(r"^\$ (.*)$", log, flags=re.MULTILINE)


def test_the_log_of_the_page_has_at_most_nine_commands_and_they_are_the_scripts():
    page = (ROOT / "docs" / "start.md").read_text()
    logged = commands_of(page)
    assert 7 <= len(logged) <= 9
    steps = re.findall(r'^(?:\[\[.*\|\| )?step "?(?:\$bin/)?([\w-]+)"? (\S+)', SCRIPT.read_text(), flags=re.MULTILINE)
    assert [tuple(command.split()[:2]) for command in logged] == steps


@pytest.mark.full
def test_a_new_user_gets_from_conversations_to_a_falling_loss(tmp_path):
    """With 4 steps in place of 20."""
    from energon_packing.demo import make_data

    data = make_data(tmp_path / "made", conversations=24, seed=3, defects=True)
    commands = tmp_path / "venv" / "bin"
    commands.mkdir(parents=True)
    for name, words in (
        ("python", '"$@" train.train_iters=4'),
        ("energon-packing", '-m energon_packing.cli.main "$@"'),
    ):
        (commands / name).write_text(f"#!/bin/sh\nexec {quick_python()} {words}\n")
        (commands / name).chmod(0o755)
    with tempfile.TemporaryDirectory(prefix="u") as short:  # a long path is printed in two lines, and is not found
        done = run(data, Path(short) / "new_user", VENV=str(tmp_path / "venv"), PYTHONPATH=str(ROOT))
        page = Path(short) / "new_user" / "packs.html"
        written = page.stat().st_size if page.exists() else 0
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([0-9.]+)$", done.stdout, flags=re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.1
    assert short not in done.stdout, "a log shows no path of this machine"
    assert written > 10_000
