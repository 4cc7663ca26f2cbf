"""What importing costs, and that modules import only from their own floor's package or from floors below."""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

import energon_packing

PACKAGE = Path(energon_packing.__file__).parent
HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "megatron",
    "webdataset",
    "PIL",
    "av",
    "pyarrow",
    "yaml",
    "rich",
    "click",
)

# From the bottom. A module may import its own unit, and any unit of a lower floor; units of one floor know nothing of
# each other. A unit is a subpackage or a module.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("line_file", "registry"),
    (*("executors", "plain_yaml", "remote_files", "stored_record", "thd", "trust"),),
    ("conversation", "packing"),
    ("config",),
    ("drops", "sample_kind"),
    ("chat", "media", "ledger"),
    ("families", "convert"),
    ("encoders",),
    ("energon",),
    ("demo",),
    ("validate",),
    ("offline",),
    ("kinds",),
    ("bridge", "megatron_lm"),
    ("report",),
    ("cli",),
    # An add-on: nothing imports it, it is found by `energon_packing.kinds`.
    ("wan",),
)
# Sideways all the same, with the reason.
EXCEPTIONS = {("validate", "megatron_lm"): "the run itself judges its arguments there, which needs `config` only"}
FLOOR_OF = {unit: number for number, floor in enumerate(FLOORS) for unit in floor}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def unit_of(module: str) -> str:
    """``energon_packing.families.base`` -> ``families``."""
    return module.split(".")[1]


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.stmt)]


@functools.cache
def imported(path: Path, *, types: bool = False) -> frozenset[str]:
    """Every module that a file imports anywhere in it, in functions too; under ``if TYPE_CHECKING:`` if asked for.

    A package is one only where something is imported that is no module in it.
    """
    nodes = nodes_of(path)
    for_types = [node for node in nodes if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"]
    skipped = set() if types else {id(inner) for node in for_types for inner in ast.walk(node)}
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in skipped:
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            whole = {f"{base}{alias.name}" for alias in node.names}
            names |= whole if whole <= set(MODULES) or not base else {*whole, base.rstrip(".")}
    return frozenset(names)


def cycle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """The modules of one cycle, the first of them again at its end; none where there is no cycle."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_two_modules_need_each_other() -> None:
    """Not even inside functions or for types: of two such files neither can be read or tested alone."""
    graph = {
        module: imported(path, types=path.name != "__init__.py") & set(MODULES) - {module}
        for module, path in MODULES.items()
    }
    assert cycle(graph) == []


def test_imports_go_down_only() -> None:
    assert {unit_of(module) for module in MODULES if "." in module} <= set(FLOOR_OF), "a new package needs a floor"
    wrong = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        if module != "energon_packing"  # the public names, loaded on first use; see the tests below
        for name in imported(path)
        if name.startswith("energon_packing.") and not unit_of(name).startswith("__")
        if unit_of(name) != unit_of(module)
        and (unit_of(module), unit_of(name)) not in EXCEPTIONS
        and FLOOR_OF.get(unit_of(name), len(FLOORS)) >= FLOOR_OF[unit_of(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_packing_and_thd_stand_on_numpy_and_torch_alone() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "torch", "energon_packing"}
    # Conversions to a container of Megatron's import it when they are called, which the last line holds.
    theirs = ("batch", "boundaries", "rotary", "routers")
    extra = {f"energon_packing.thd.{name}": {"megatron"} for name in theirs}
    for module, path in MODULES.items():
        if "." in module and unit_of(module) in ("packing", "thd"):
            names = {name.split(".")[0] for name in imported(path)}
            assert names <= allowed | extra.get(module, set()), module
    loaded = loaded_by("import energon_packing.packing, energon_packing.thd.assembly, energon_packing.thd.checks")
    assert not heavy(loaded) & {"megatron", "transformers", "webdataset", "PIL", "av"}


def test_the_lowest_floors_and_the_configuration_need_no_tensors() -> None:
    units = [PACKAGE / f"{unit}.py" for unit in ("errors", "thd/__init__", "thd/alignment", "conversation", "ledger")]
    for unit in (*units, *(PACKAGE / "config").glob("*.py")):
        names = {name.split(".")[0] for name in imported(unit)}
        assert not names & {"torch", "numpy", "transformers", "megatron"}, unit


@functools.cache
def loaded_by(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter holds after running ``code``."""
    command = [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    return set(json.loads(done.stdout.splitlines()[-1]))


def heavy(modules: set[str]) -> set[str]:
    return {name.split(".")[0] for name in modules} & set(HEAVY)


def test_importing_the_package_loads_nothing_heavy() -> None:
    modules = loaded_by("import energon_packing")
    assert not heavy(modules) - heavy(loaded_by("pass")), "site-packages' own start-up files are not counted"
    assert {name for name in modules if name.startswith("energon_packing")} == {"energon_packing"}


def test_conversations_and_configurations_cost_neither_tensors_nor_models() -> None:
    code = "from energon_packing import Conversation, ConfigError, RunConfig, load_config; load_config(None)"
    code += "; from energon_packing.thd.alignment import alignment_multiple; dir(__import__('energon_packing'))"
    heavy_ones = heavy(loaded_by(code)) - heavy(loaded_by("pass"))
    assert not heavy_ones & {"torch", "numpy", "transformers", "tokenizers", "megatron", "webdataset", "PIL", "av"}


LOADERS = {"torch", "transformers", "tokenizers", "megatron", "webdataset", "PIL", "av", "pyarrow", "pandas"}
HUB = {"huggingface_hub", "httpx", "requests"}
METADATA = {"importlib.metadata", "rich.progress"}
RUN = """
encoder: {processor: somebody/not-on-this-machine}
packing: {seq_length: 4096}
training: {global_batch_size: 8, model: qwen3_vl, step: vlm_step}
"""


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (["--help"], {*LOADERS, *HUB, "numpy", "yaml", "rich", "orjson", "sqlite3", "asyncio"}),
        (["validate", "RUN", "--no-bridge"], {*LOADERS, "httpx", "requests", "numpy", "asyncio"}),
        (["convert", "--help"], {*LOADERS, *HUB}),
        (["stats", "--help"], {*LOADERS, *HUB}),
        (["preview", "--help"], {*LOADERS, *HUB}),
        (["plan", "nowhere", "--out", "plan.parquet", "--json"], {"torch", "sqlite3", *METADATA}),
        (["convert", "nowhere.jsonl", "--dry-run", "--json"], {"torch", *METADATA}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_imports_nothing_that_it_does_not_need(
    arguments: list[str], unwanted: set[str], tmp_path: Path
) -> None:
    """Start-up is imports: tensors, models and the hub's client are for the commands that use them."""
    run = tmp_path / "run.yaml"
    run.write_text(RUN)
    arguments = [str(run) if argument == "RUN" else argument for argument in arguments]
    code = (
        "import contextlib, io, sys\n"
        f"sys.argv = ['energon-packing', *{arguments!r}]\n"
        "from energon_packing.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):\n"
        "    code = main()\n"
        "assert said.getvalue()"
    )
    loaded = loaded_by(code) - loaded_by("pass")
    assert not (loaded | {name.split(".")[0] for name in loaded}) & unwanted


def test_every_public_name_is_there_and_is_what_its_module_defines() -> None:
    for name in energon_packing.__all__:
        assert getattr(energon_packing, name) is not None
        assert name in dir(energon_packing)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        energon_packing.nothing  # noqa: B018


def test_commands_say_what_they_do_before_they_import_what_takes_long() -> None:
    code = (
        "import click\n"
        "class Said(BaseException): pass\n"
        "def echo(text, **form): raise Said(text)\n"
        "click.echo = echo\n"
        "from energon_packing.cli.main import cli\n"
        "for words in ('validate x.yaml', 'stats data', 'preview data', 'measure data --config x --out y', "
        "'explain k d', 'plan index --out y.parquet', 'pack plan --out y', 'verify packs', "
        "'state convert 0.pt --index x --config y --out z'):\n"
        "    try: cli.main(words.split())\n"
        "    except Said as said:\n"
        "        what = words.removeprefix('state ').split()[1]\n"
        "        assert what[-4:] in str(said) and str(said).endswith(' ...'), said\n"
    )
    assert not {name.split(".")[0] for name in loaded_by(code) - loaded_by("pass")} & {*LOADERS, *HUB, "numpy"}
