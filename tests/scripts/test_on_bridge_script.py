"""``scripts/on_bridge.sh``: a command on a checkout of Megatron-Bridge in place of the installed one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "on_bridge.sh"


def on_bridge(*words, **environment):
    kept = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHON": sys.executable}
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, words)],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd="/",
    )


def package(folder, name, version):
    folder = folder / "megatron" / name
    folder.mkdir(parents=True)
    numbers = [f"{part} = {number}" for part, number in zip(("MAJOR", "MINOR", "PATCH"), version, strict=True)]
    (folder / "package_info.py").write_text("\n".join([*numbers, 'PRE_RELEASE = ""', ""]))
    (folder / "__init__.py").write_text("")


@pytest.fixture
def checkout(tmp_path):
    """What a clone of Megatron-Bridge with its submodule has, as far as the script looks."""
    root = tmp_path / "a bridge"
    package(root / "src", "bridge", (8, 1, 2))
    package(root / "3rdparty" / "Megatron-LM", "core", (9, 3, 0))
    return root


def test_the_command_imports_the_checkout_and_the_rest_from_the_environment(checkout):
    asks = (
        "import importlib.metadata as m, importlib.util as u\n"
        "print(u.find_spec('megatron.bridge').origin)\n"
        "print(u.find_spec('megatron.core').origin)\n"
        "print(u.find_spec('energon_packing').origin)\n"
        "print(m.version('megatron-bridge'), m.version('megatron-core'))\n"
        "print(u.find_spec('pytest') is not None)\n"
    )
    done = on_bridge(checkout, "python", "-c", asks)
    assert done.stdout.splitlines() == [
        str(checkout / "src" / "megatron" / "bridge" / "__init__.py"),
        str(checkout / "3rdparty" / "Megatron-LM" / "megatron" / "core" / "__init__.py"),
        str(ROOT / "energon_packing" / "__init__.py"),
        "8.1.2 9.3.0",
        "True",
    ], done.stderr


def test_the_status_of_the_command_is_that_of_the_script_and_no_file_stays_behind(checkout, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    before = sorted(path for path in checkout.rglob("*"))
    done = on_bridge(checkout, "python", "-B", "-c", "raise SystemExit(3)", TMPDIR=str(folder))
    assert done.returncode == 3
    assert list(folder.iterdir()) == []
    assert sorted(path for path in checkout.rglob("*")) == before


def test_every_mistake_is_one_sentence_that_says_what_to_do(checkout, tmp_path):
    for words, environment, sentence in (
        ((), {}, "usage"),
        ((checkout,), {}, "usage"),
        ((tmp_path / "nowhere", "true"), {}, "is not a directory"),
        ((tmp_path, "true"), {}, "has no src/megatron/bridge"),
        ((checkout, "true"), {"PYTHON": "/nowhere/python"}, "run: bash scripts/setup.sh"),
    ):
        done = on_bridge(*words, **environment)
        assert (done.returncode, done.stdout) == (2, "")
        assert sentence in done.stderr
        assert done.stderr.count("\n") == 1
    (checkout / "3rdparty" / "Megatron-LM" / "megatron" / "core" / "package_info.py").unlink()
    done = on_bridge(checkout, "true")
    assert done.returncode == 2
    assert "submodule update --init 3rdparty/Megatron-LM" in done.stderr


def test_one_word_runs_bridges_own_tests_of_packing_in_the_checkout(checkout, tmp_path):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text('#!/bin/bash\npwd\nprintf "%s\\n" "${@:3}"\n')
    python.chmod(0o755)
    done = on_bridge(checkout, "bridges_packing_tests", "-x", PYTHON=str(python))
    place, *words = done.stdout.splitlines()
    names = ("utils/test_packed_seq_utils", "test_config", "test_vlm_step")
    assert (done.returncode, place, words[-1]) == (0, str(checkout), "-x"), done.stderr
    assert [word for word in words if word.endswith(".py")] == [
        f"tests/unit_tests/training/{name}.py" for name in names
    ]
