"""What importing costs, and that modules import only from their own floor's package or from floors below."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
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
# A vertical in one folder stands on two floors: what conversion and packing need of it, and its loader.
WAN_LOADER = ("caption_encoder", "clip", "encoder", "latent_encoder", "loader", "task_encoder")
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("file_lock", "line_file", "pack_sums", "read_again"),
    (
        *("drop_budget", "executors", "ledger_report", "metrics_report", "quarantine"),
        *("plain_yaml", "remote_files", "stored_record", "thd"),
    ),
    ("conversation", "packing"),
    ("config",),
    ("drop_reasons",),
    ("chat", "media", "ledger", "ledger_place", "wan"),
    ("families", "convert"),
    ("encoders",),
    ("energon",),
    ("wan_loader",),
    ("demo", "bridge_cpu"),
    ("validate",),
    ("offline",),
    ("bridge", "megatron_lm"),
    ("report",),
    ("cli",),
)
# Sideways all the same, with the reason.
EXCEPTIONS: dict[tuple[str, str], str] = {}
FLOOR_OF = {unit: number for number, floor in enumerate(FLOORS) for unit in floor}


def unit_of(module: str) -> str:
    """``energon_packing.families.base`` -> ``families``."""
    _, name, *rest = module.split(".")
    return "wan_loader" if name == "wan" and rest and rest[0] in WAN_LOADER else name


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def only_for_types(tree: ast.AST) -> set[int]:
    """Nodes under ``if TYPE_CHECKING:``, which nothing executes."""
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }


@functools.cache
def statements(source: str) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import anywhere in a file, in functions too, and whether it is for types only."""
    tree = ast.parse(source)
    skipped = only_for_types(tree)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return [(node, id(node) in skipped) for node in imports]


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere in it, in functions too."""
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node, only_types in statements(path.read_text(encoding="utf-8")):
        if only_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            # `from energon_packing import thd` names a module, not a value.
            yield from (f"{name}.{alias.name}" for alias in node.names) if name == "energon_packing" else (name,)


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def needs() -> dict[str, set[str]]:
    """Modules of the package -> those that each imports: anywhere in its file, for types too.

    Only the public names of packages are left out, which an ``__init__`` loads on first use.
    """
    files = {module_of(path): path for path in sources()}
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        found[module] = set()
        for node, only_types in statements(path.read_text(encoding="utf-8")):
            if only_types and path.name == "__init__.py":
                continue
            if isinstance(node, ast.Import):
                found[module].update(alias.name for alias in node.names)
            else:
                name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                # Of `from package import name` the name may be a module of the package, or a value in it.
                whole = {f"{name}.{alias.name}" for alias in node.names}
                found[module].update({name} if whole - set(files) else (), whole)
        found[module] &= set(files) - {module}
    return found


def cycle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """The modules of one cycle, the first of them again at its end; none where there is no cycle."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_two_modules_need_each_other() -> None:
    """Not even inside functions or for types: of two such files neither can be read or tested alone."""
    assert cycle(needs()) == []


def test_the_search_for_cycles_sees_every_form_of_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = (
        "import energon_packing.b",
        "from energon_packing import b",
        "from energon_packing.b import x",
        "from . import b",
        "from .b import x",
        "def late():\n    from energon_packing.b import x",
        "if TYPE_CHECKING:\n    from energon_packing.b import x",
    )
    package = tmp_path / "energon_packing"
    package.mkdir()
    (package / "__init__.py").write_text("if TYPE_CHECKING:\n    from energon_packing.a import x\n")
    (package / "b.py").write_text("from energon_packing.a import x\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", package)
    for form in forms:
        (package / "a.py").write_text(f"{form}\n")
        assert set(cycle(needs())) == {"energon_packing.a", "energon_packing.b"}, form
    (package / "a.py").write_text("import energon_packing\n")
    assert cycle(needs()) == []


def test_every_module_has_a_floor() -> None:
    units = {unit_of(module) for path in sources() if "." in (module := module_of(path))}
    assert units <= set(FLOOR_OF), "a new package or module needs a place in FLOORS"


def test_imports_go_down_only() -> None:
    wrong = []
    for path in sources():
        module = module_of(path)
        if module == "energon_packing":
            continue  # the public names, loaded on first use; see the tests below
        here = unit_of(module)
        for name in imported(path):
            if not name.startswith("energon_packing."):
                continue
            there = unit_of(name)
            if there.startswith("__"):
                continue  # `from energon_packing import __version__`
            if there == here or (here, there) in EXCEPTIONS:
                continue
            if FLOOR_OF.get(there, len(FLOORS)) >= FLOOR_OF[here]:
                wrong.append(f"{module} ({here}) imports {name} ({there})")
    assert not wrong, "\n".join(wrong)


def test_packing_and_thd_stand_on_numpy_and_torch_alone() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "torch", "energon_packing"}
    # Conversions to a container of Megatron's import it when they are called, which the last line holds.
    theirs = ("batch", "boundaries", "expert_masks", "routers", "visual_container")
    extra = {f"energon_packing.thd.{name}": {"megatron"} for name in theirs}
    for path in sources():
        module = module_of(path)
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


@pytest.mark.parametrize(
    "code",
    [
        "from energon_packing import Conversation, ConfigError, RunConfig, load_config; load_config(None)",
        "from energon_packing.thd.alignment import alignment_multiple",
        "dir(__import__('energon_packing'))",
    ],
)
def test_conversations_and_configurations_cost_neither_tensors_nor_models(code: str) -> None:
    heavy_ones = heavy(loaded_by(code)) - heavy(loaded_by("pass"))
    assert not heavy_ones & {"torch", "numpy", "transformers", "tokenizers", "megatron", "webdataset", "PIL", "av"}


LOADERS = {"torch", "transformers", "tokenizers", "megatron", "webdataset", "PIL", "av", "pyarrow", "pandas"}
HUB = {"huggingface_hub", "httpx", "requests"}
RUN = """
encoder: {processor: somebody/not-on-this-machine}
packing: {seq_length: 4096}
training: {global_batch_size: 8, model: qwen3_vl, step: vlm_step}
"""


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (["--help"], {*LOADERS, *HUB, "numpy", "yaml", "rich", "orjson", "sqlite3", "asyncio"}),
        (["--version"], {*LOADERS, *HUB, "numpy", "yaml", "rich", "orjson", "sqlite3", "asyncio"}),
        (["validate", "--help"], {*LOADERS, *HUB, "numpy"}),
        (["validate", "RUN", "--no-bridge"], {*LOADERS, "httpx", "requests", "numpy", "asyncio"}),
        (["validate", "RUN", "--no-bridge", "--no-data"], {*LOADERS, "httpx", "requests", "numpy", "asyncio"}),
        (["convert", "--help"], {*LOADERS, *HUB}),
        (["fill", "--help"], {*LOADERS, *HUB}),
        (["preview", "--help"], {*LOADERS, *HUB}),
        (["parity", "--help"], {*LOADERS, *HUB}),
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
    loaded = {name.split(".")[0] for name in loaded_by(code) - loaded_by("pass")}
    assert not loaded & unwanted


def test_every_public_name_is_there_and_is_what_its_module_defines() -> None:
    for name in energon_packing.__all__:
        assert getattr(energon_packing, name) is not None
        assert name in dir(energon_packing)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        energon_packing.nothing  # noqa: B018
