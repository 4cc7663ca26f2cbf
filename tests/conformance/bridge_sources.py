"""Source trees of Megatron-Bridge whose facts the rules and the table of families state: the installed one, and main.

Nothing is imported from them: facts are read from syntax trees, so that a checkout of main needs no environment.
"""

import ast
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = "ENERGON_PACKING_BRIDGE_MAIN"
"""Environment variable: a checkout of Megatron-Bridge's main branch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgeSource:
    """The folder ``megatron/bridge`` of one version."""

    folder: Path

    @property
    def version(self) -> str:
        """``0.6.2``"""
        numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)$", self.text("package_info.py"), re.MULTILINE)
        return ".".join(numbers)

    @property
    def release(self) -> tuple[int, int]:
        """``(0, 6)``"""
        major, minor = map(int, self.version.split(".")[:2])
        return major, minor

    def text(self, path: str) -> str:
        """A file, by its path below the folder."""
        return (self.folder / path).read_text(encoding="utf-8")

    def names(self, path: str) -> set[str]:
        """What a module imports and defines at its top."""
        found: set[str] = set()
        for node in ast.parse(self.text(path)).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                found |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
        return found

    def keywords_of_calls(self, path: str, function: str) -> list[set[str]]:
        """Names of the keyword arguments of every call of a function or method in a file."""
        calls = [node for node in ast.walk(ast.parse(self.text(path))) if isinstance(node, ast.Call)]
        return [
            {keyword.arg for keyword in call.keywords if keyword.arg}
            for call in calls
            if function in (getattr(call.func, "attr", None), getattr(call.func, "id", None))
        ]

    def fields_of_providers(self) -> dict[str, set[str]]:
        """Every provider of models -> its settings, inherited ones included."""
        own: dict[str, set[str]] = {}
        bases: dict[str, list[str]] = {}
        for file in sorted((self.folder / "models").rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and node.name.endswith(("ModelProvider", "DenseProvider")):
                    bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                    targets = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                    own[node.name] = {target.id for target in targets if isinstance(target, ast.Name)}

        def all_of(name: str) -> set[str]:
            return own.get(name, set()).union(*map(all_of, bases.get(name, ())))

        return {name: all_of(name) for name in own}


def installed_source() -> BridgeSource | None:
    """The version that is imported in these tests; None where there is none."""
    found = importlib.util.find_spec("megatron.bridge") if importlib.util.find_spec("megatron") else None
    return BridgeSource(folder=Path(str(found.origin)).parent) if found and found.origin else None


def installed_release() -> tuple[int, int]:
    """``(0, 6)``: of the version that is imported in these tests, where there is one."""
    source = installed_source()
    assert source is not None
    return source.release


def sources() -> list[object]:
    """Parameters of a test: every version, skipped with a reason where it is not here."""
    source = installed_source()
    installed = source and source.folder
    checkout = os.environ.get(CHECKOUT)
    main = Path(checkout) / "src" / "megatron" / "bridge" if checkout else None
    return [
        pytest.param(
            None if folder is None else BridgeSource(folder=folder),
            id=name,
            marks=() if folder is not None and folder.is_dir() else pytest.mark.skip(reason=missing),
        )
        for name, folder, missing in (
            ("installed", installed, "Megatron-Bridge is not installed"),
            ("main", main, f"{CHECKOUT} names no checkout of Megatron-Bridge"),
        )
    ]


def path_of_main() -> list[Path] | str:
    """What to put first on the path for a program on main; a reason where that cannot be.

    Main runs on the Megatron-Core of its own submodule, not on a release.
    """
    checkout = os.environ.get(CHECKOUT)
    if not checkout:
        return f"{CHECKOUT} names no checkout of Megatron-Bridge"
    core = Path(checkout) / "3rdparty" / "Megatron-LM"
    if not (core / "megatron" / "core").is_dir():
        return f"{core} has no Megatron-Core; `git submodule update --init` gets it"
    return [Path(checkout) / "src", core]
