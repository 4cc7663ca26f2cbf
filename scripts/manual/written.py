"""Pages that are made from code, each with the function that writes it; tests compare them with what they would be."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import click

from manual import DOCS, ROOT

WRITE = "python scripts/manual.py write"
PACKAGES = (
    ("energon_packing", "The names that most code needs."),
    ("energon_packing.convert", "From conversation files to an Energon data set."),
    ("energon_packing.packing", "Which samples share a row: lengths in, groups of indices out."),
    ("energon_packing.thd", "Rows of many samples: assembly, checks, boundaries, slices of context-parallel ranks."),
    ("energon_packing.bridge", "Data sets of Megatron-Bridge recipes."),
    ("energon_packing.megatron_lm", "What a Megatron-LM script imports."),
)
"""Packages of the reference, with a line about each."""


def written() -> dict[Path, Callable[[], str]]:
    """File -> what it must hold."""
    from energon_packing.report import settings
    from manual.concepts import concepts

    return {
        DOCS / "cli.md": commands,
        DOCS / "api.md": names,
        DOCS / "settings.md": settings.markdown,
        DOCS / "settings.schema.json": lambda: json.dumps(settings.json_schema(), indent=1, ensure_ascii=False) + "\n",
        DOCS / "images" / "concepts.svg": concepts,
    }


def commands() -> str:
    """docs/cli.md: every command as its own ``--help`` has it."""
    from energon_packing.cli.main import SUBCOMMANDS, cli

    parts = [
        "# Commands\n\n"
        f"Every command of `energon-packing`, as `--help` shows it. `{WRITE}` makes this page; a\n"
        "test keeps it in step.\n"
        "\nEvery command takes `--json`, and exits with 0 for done, 1 where a check failed, 2 for unusable input.\n"
        "`energon-packing --debug COMMAND` shows the traceback of an error.\n"
    ]
    for name, entry in sorted(SUBCOMMANDS.items()):
        context = click.Context(cli, info_name="energon-packing")
        parts.append(f"\n## {name}\n\n")
        if entry.extras:
            parts.append(f"Needs `pip install 'energon-packing[{','.join(entry.extras)}]'`.\n\n")
        parts.append(_command(entry.load(), name, context))
    return "".join(parts)


def _command(command: click.Command, name: str, parent: click.Context, level: int = 3) -> str:
    context = click.Context(command, info_name=name, parent=parent)
    told = (command.help or "").replace("\b", "").strip()
    parts = [f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n\n{_prose(told)}\n"]
    rows = [row for parameter in command.get_params(context) if (row := _option(parameter, context))]
    if rows:
        parts.append("\n| option | |\n| --- | --- |\n" + "".join(rows))
    if command.epilog:
        parts.append(f"\n```text\n{command.epilog.replace(chr(8), '').strip()}\n```\n")
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None
            parts.append(f"\n{'#' * level} {name} {inner}\n\n" + _command(found, inner, context, level + 1))
    return "".join(parts)


def _option(parameter: click.Parameter, context: click.Context) -> str:
    """A line of the table; a list of choices goes into the text, because bars in a table's code are not shown alike."""
    record = parameter.get_help_record(context)
    if record is None or record[0].endswith("--help") or not record[1]:
        return ""
    names, told = record
    if isinstance(parameter.type, click.Choice):
        choices = [str(choice) for choice in parameter.type.choices]
        names = names.replace(f"[{'|'.join(choices)}]", "NAME")
        told += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
    assert "|" not in names, names
    return f"| `{names}` | {_prose(told).replace('|', '&#124;')} |\n"


def _prose(text: str) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def names() -> str:
    """docs/api.md: the public names, for mkdocstrings to fill from their docstrings."""
    parts = [
        "# Python names\n\nThe public names of each package, from their docstrings. Names that are not here may change "
        f"in any release. `{WRITE}` makes\nthe list; the site fills it.\n"
    ]
    for package, about in PACKAGES:
        parts.append(f"\n## {package}\n\n{about}\n")
        for name in sorted(_public(package)):
            parts.append(f"\n### {name}\n\n::: {_home(package, name)}\n")
    return "".join(parts)


def _public(package: str) -> list[str]:
    module = importlib.import_module(package)
    return [name for name in module.__all__ if not name.startswith("__") and f"{package}.{name}" not in dict(PACKAGES)]


def _home(package: str, name: str) -> str:
    """Where a public name is defined, read off the sources: importing Bridge's part would need Bridge.

    Raises:
        LookupError: no import of the package and no file in it binds the name.
    """
    folder = ROOT / package.replace(".", "/")
    imports = [node for node in ast.walk(_parsed(folder / "__init__.py")) if isinstance(node, ast.ImportFrom)]
    for node in imports:
        if node.module and any((alias.asname or alias.name) == name for alias in node.names):
            file = ROOT / f"{node.module.replace('.', '/')}.py"
            return f"{node.module}.{name}" if file.is_file() else _home(node.module, name)
    for file in [folder / "__init__.py", *sorted(folder.glob("*.py"))]:
        if any(_binds(node, name) for node in _parsed(file).body):
            return f"{package}.{file.stem}.{name}".replace(".__init__", "")
    raise LookupError(f"{package}.{name} is defined nowhere")


def _binds(node: ast.stmt, name: str) -> bool:
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            return node.name == name
        case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)):
            return found == name
        case ast.TypeAlias(name=ast.Name(id=found)):
            return found == name
    return False


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))
