"""The wheel in fresh environments: the base install and each small extra run what the command line says they run.

An environment is a directory of links to the packages that the wheel's metadata asks for, and nothing else.
"""

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packaging.requirements import Requirement

from energon_packing.cli.main import SUBCOMMANDS
from energon_packing.sample_kind import EXTRA_OF, KINDS

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.full
PROGRAM = """
import json, sys
sys.path[:] = [path for path in sys.path if path] + json.loads(sys.argv[1])
from click.testing import CliRunner
from energon_packing.cli.main import cli
found = []
for arguments in json.loads(sys.argv[2]):
    result = CliRunner().invoke(cli, arguments)
    found.append([result.exit_code, result.stdout, result.stderr])
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed without its dependencies."""
    work = tmp_path_factory.mktemp("wheel")
    commands = [["-m", "hatchling", "build", "-t", "wheel", "-d", str(work / "dist")]]
    target = ["--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(work / "target")]
    for arguments in [*commands, ["-m", "pip", "install", "-q", *target]]:
        built = [str(path) for path in (work / "dist").glob("*.whl")] if "pip" in arguments else []
        subprocess.run([sys.executable, *arguments, *built], cwd=ROOT, check=True, capture_output=True)
    return work / "target"


def needed(requirements: list[str], extras: set[str]) -> set[str]:
    """Names of the distributions that requirements lead to."""
    found: set[str] = set()
    for text in requirements:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ({""} | extras)):
            own = metadata.requires(requirement.name) or []
            found |= {requirement.name} | needed(own, set(requirement.extras))
    return found


def environment(wheel: Path, folder: Path, extras: set[str]) -> list[str]:
    """The paths to search for modules."""
    (info,) = wheel.glob("*.dist-info")
    requires = metadata.Distribution.at(info).requires or []
    folder.mkdir()
    site = Path(sysconfig.get_path("purelib"))
    for name in needed(requires, extras):
        tops = {file.parts[0] for file in metadata.files(name) or [] if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            if not (folder / top).exists():
                (folder / top).symlink_to(site / top)
    return [str(wheel), str(folder)]


def run(paths: list[str], *commands: list[str]) -> list[Any]:
    """Exit code and output of commands of an environment."""
    given = [json.dumps(paths), json.dumps(commands)]
    done = subprocess.run([sys.executable, "-I", "-S", "-c", PROGRAM, *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source of each kind, in a directory of its own."""
    folder = tmp_path_factory.mktemp("files")
    records = [{"instruction": "a", "output": "b"}] * 3
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    pq.write_table(pa.Table.from_pylist(records), folder / "a.parquet")
    return folder


USES: dict[str, list[str]] = {
    "convert": ["{files}/a.jsonl", "--out", "{out}/{extras}", "--workers", "1"],
    "explain": ["key", "nothing", "--config", "{files}/run.yaml"],
    "init": ["nothing", "--processor", "nothing", "--out", "{out}/run-{extras}.yaml"],
    "ledger": ["nothing"],
    "measure": ["nothing", "--config", "nothing.yaml", "--out", "nothing"],
    "pack": ["nothing.parquet", "--out", "nothing"],
    "plan": ["nothing", "--config", "{files}/run.yaml", "--out", "nothing.parquet"],
    "preview": ["nothing", "--config", "{files}/run.yaml"],
    "state": ["convert", "nothing", "--index", "nothing", "--config", "{files}/run.yaml", "--out", "nothing.parquet"],
    "stats": ["nothing"],
    "validate": ["--world-size", "8", "--no-data", "--json", "--", "--seq-length", "4096"],
    "verify": ["nothing"],
}
"""Arguments with which each command begins its work; most then find that their input is not there."""


@pytest.mark.parametrize("extras", [(), ("offline",)], ids=lambda names: "+".join(names) or "base")
def test_each_command_of_an_environment_begins_or_names_its_extras(
    wheel: Path, files: Path, tmp_path: Path, extras: tuple[str, ...]
) -> None:
    assert set(USES) == set(SUBCOMMANDS)
    (files / "run.yaml").write_text("data: {path: nothing}\nencoder: {processor: nothing}\n")
    paths = environment(wheel, tmp_path / "env", set(extras))
    place = {"files": files, "out": tmp_path, "extras": "-".join(extras) or "base"}
    commands = [[name, *(word.format(**place) for word in words)] for name, words in USES.items()]
    helps = [[name, "--help"] for name in USES]
    parquet = ["convert", f"{files}/a.parquet", "--out", f"{tmp_path}/parquet", "--workers", "1"]
    found = run(paths, ["--help"], *helps, *commands, parquet)
    assert [code for code, _, _ in found[: 1 + len(helps)]] == [0] * (1 + len(helps))
    for name, (code, stdout, stderr) in zip(USES, found[1 + len(helps) : -1], strict=True):
        missing = set(SUBCOMMANDS[name][1:]).difference(extras)
        if missing:
            wanted = ",".join(sorted(SUBCOMMANDS[name][1:]))
            assert (code, f"pip install '.[{wanted}]'" in stderr) == (2, True), (name, stderr)
            assert sum(not line.endswith(" ...") for line in stderr.splitlines()) == 1, (name, stderr)
        else:
            assert "pip install" not in stdout + stderr, (name, stdout, stderr)
            assert "Unexpected" not in stderr, (name, stderr)
            expected = {"convert": (0,), "validate": (0, 1)}.get(name, (2,))
            assert code in expected, (name, stdout, stderr)
    assert found[-1][0] == (0 if extras else 2), found[-1]
    assert extras or ".[convert]" in found[-1][2]


def test_the_long_description_links_to_nothing_that_an_index_does_not_have(wheel: Path) -> None:
    (info,) = wheel.glob("*.dist-info")
    text = str(metadata.Distribution.at(info).metadata.get_payload())
    assert "## Install" in text
    assert "<!--" not in text
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]*)\)", text)), text


def test_every_package_of_an_extra_leads_to_an_extra_that_has_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(SUBCOMMANDS) == set(USES)
    extras = project["optional-dependencies"]
    names = {extra: {Requirement(text).name.replace("-", "_") for text in extras[extra]} for extra in extras}
    called = {"multistorageclient": "multi_storage_client"}
    brought = {**EXTRA_OF, **{module: extra for kind in KINDS for module, extra in kind.extras.items()}}
    for module, extra in brought.items():
        package = {"megatron": "megatron.energon"}.get(module, called.get(module, module)).replace(".", "_")
        assert package in names[extra], module
    packages = {called.get(module, module).replace(".", "_") for module in brought}
    assert set().union(*(names[extra] for extra in extras if extra not in ("test", "docs"))) <= packages
    for _, *needed in SUBCOMMANDS.values():
        assert set(needed) <= set(extras)
