"""Pages that are made from code, each with the function that writes it; tests compare them with what they would be."""

import ast
import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from energon_packing.registry import Registry
from manual import DOCS, ROOT

WRITE = "python scripts/manual.py write"
PACKAGES = (
    ("energon_packing", "The names that most code needs."),
    ("energon_packing.convert", "From conversation files to an Energon data set."),
    ("energon_packing.packing", "Which samples share a row: lengths in, groups of indices out."),
    ("energon_packing.thd", "Rows of many samples: assembly, checks, boundaries, slices of context-parallel ranks."),
    ("energon_packing.bridge", "What a Megatron-Bridge recipe and its training script import."),
    ("energon_packing.megatron_lm", "What a Megatron-LM script imports."),
    ("energon_packing.demo", "Data and processors to try things with."),
)
"""Packages of the reference, with a line about each."""
MODULES = (
    ("energon_packing.energon.metrics", "Figures of the packs of a run.", ("watched",)),
    (
        "energon_packing.energon.samples",
        "What a loader yields, and what a cooker returns.",
        ("ConversationSample", "Pack"),
    ),
    ("energon_packing.energon.states", "States of loaders in files.", ("read_state",)),
    ("energon_packing.megatron_lm.gpt", "The step of a GPT.", ("forward_step",)),
    ("energon_packing.megatron_lm.vlm", "The step of a vision-language model.", ("forward_step",)),
    ("energon_packing.wan.bridge", "Clips in a recipe.", ("PackedWanDatasetConfig",)),
    ("energon_packing.wan.config", "Configurations of clips.", ("load_text_to_video_config",)),
    ("energon_packing.wan.task_encoder", "Packs of clips.", ("build_text_to_video_loader",)),
    ("energon_packing.encoders.sample_encoder", "For an encoder of your own.", ("PlainMeasured",)),
    ("energon_packing.families.base", "For a family of your own.", ("MediaPlan", "require")),
    (
        "energon_packing.validate.rules.rule",
        "For a rule of your own.",
        ("Finding", "Judgement", "Rule", "SourceLine", "judge", "register_rule", "rule"),
    ),
    ("energon_packing.validate.run_source", "What `validate` judges.", ("run_source",)),
    ("energon_packing.convert.layouts.layout", "For a layout of your own.", ("Layout", "register_layout", "without")),
    ("energon_packing.config.setting", "For a setting of your own.", ("setting",)),
    (
        "energon_packing.executors.work",
        "For an executor of your own.",
        ("Executor", "ExecutorEntry", "Work", "register_executor"),
    ),
    ("energon_packing.offline.measure", "The command `measure`.", ("MeasureConfig", "MeasureReport", "measure")),
    ("energon_packing.offline.planner", "The command `plan`.", ("make_plan",)),
    (
        "energon_packing.offline.pack",
        "The command `pack`, and for a pack format of your own.",
        ("PackConfig", "PackFormat", "PackReport", "PackTask", "pack", "register_pack_format"),
    ),
    ("energon_packing.offline.files", "Files that are there whole or not at all.", ("replacing",)),
)
"""Modules of which single names are public."""


def written() -> dict[Path, Callable[[], str]]:
    """File -> what it must hold."""
    from energon_packing.report.settings import json_schema

    return {
        DOCS / "cli.md": commands,
        DOCS / "api.md": names,
        DOCS / "settings.md": settings_page,
        DOCS / "settings.schema.json": lambda: json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n",
        DOCS / "validate.md": rules,
    }


def commands() -> str:
    """docs/cli.md: every command as its own ``--help`` has it."""
    from energon_packing.cli.main import SUBCOMMANDS, cli, load

    parts = [
        "# Commands\n\n"
        f"Every command of `energon-packing`, as `--help` shows it. `{WRITE}` makes this page; a\n"
        "test keeps it in step.\n"
        "\nEvery command (of `state`: `state convert`) takes `--json`. Exit codes: 0 done, 1 a check failed, 2\n"
        "unusable input. `energon-packing --debug COMMAND` shows the traceback of an error.\n"
    ]
    for name, (_, *extras) in sorted(SUBCOMMANDS.items()):
        context = click.Context(cli, info_name="energon-packing")
        parts.append(f"\n## {name}\n\n")
        if extras:
            parts.append(f"Needs `pip install '.[{','.join(extras)}]'`.\n\n")
        parts.append(_command(load(name), name, context))
    return "".join(parts)


def rules() -> str:
    """docs/validate.md, with the table of all rules between the lines that mark it."""
    from energon_packing.validate.rules.rule import all_rules

    rows = ["| rule | severity | what holds | a provider | versions | place |", "| --- | --- | --- | --- | --- | --- |"]
    for rule in all_rules():
        versions = "{}.{} on".format(*rule.since) if rule.since > (0, 6) else "all"
        if rule.before is not None:
            versions = "before {}.{}".format(*rule.before)
        provider = "escapes" if rule.provider_escapes else ""
        rows.append(f"| `{rule.id}` | {rule.severity} | {rule.checks} | {provider} | {versions} | {rule.place} |")
    begin, end = "<!-- rules: begin -->", "<!-- rules: end -->"
    before, _, rest = (DOCS / "validate.md").read_text(encoding="utf-8").partition(begin)
    return "\n".join([before + begin, "", *rows, "", end + rest.partition(end)[2]])


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
    """docs/api.md: the public names, with signatures and docstrings."""
    parts = [
        "# Python names\n\nThe public names of each package, with signatures and docstrings. Names that are not here "
        f"may change in any release. `{WRITE}`\nmakes this page; a test keeps it in step.\n"
    ]
    for package, about, public in (*((*each, _public(each[0])) for each in PACKAGES), *MODULES):
        parts.append(f"\n## {package}\n\n{about}\n")
        for name in sorted(public):
            module, _, own = _home(package, name).rpartition(".")
            found = [node for node in _parsed(_file(module)).body if _binds(node, own)][-1]  # after its overloads
            parts.append(f"\n### {name}\n\nIn `{module}`.\n\n```text\n{_described(found)}\n```\n")
    return "".join([*parts, *_registered()])


def _file(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _described(node: ast.stmt) -> str:
    """A definition without its body, and its docstring; of a class also its fields and public methods."""
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        return ast.unparse(node)
    parts = [_signature(node), *filter(None, [ast.get_docstring(node)])]
    if isinstance(node, ast.ClassDef):
        for entry, told in pairwise(node.body):
            if isinstance(entry, ast.AnnAssign) and isinstance(told, ast.Expr) and isinstance(told.value, ast.Constant):
                parts.append(f"{ast.unparse(entry.target)}\n    {' '.join(str(told.value.value).split())}")
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name[0] != "_"]
        for method in methods:
            first = " ".join((ast.get_docstring(method) or "").split("\n\n")[0].split())
            parts.append(f"{_signature(method)}\n    {first}".rstrip())
    return "\n\n".join(parts)


def _signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    """One line; of a class its bases, and a line for each field and for how it is made."""
    if isinstance(node, ast.FunctionDef):
        returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        is_property = "property" in map(ast.unparse, node.decorator_list)
        return node.name + ("" if is_property else f"({ast.unparse(node.args)})") + returned
    stated = [each for each in node.body if isinstance(each, ast.AnnAssign) and ast.unparse(each.target)[0] != "_"]
    fields = [ast.unparse(each.target) + f": {ast.unparse(each.annotation)}" + _default(each.value) for each in stated]
    made = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    bases = ", ".join(map(ast.unparse, node.bases))
    lines = [f"class {node.name}" + (f"({bases})" if bases else "")]
    lines += ["    " + field for field in fields]
    return "\n".join(lines + (["    " + _signature(made)] if made else []))


def _registered() -> Iterator[str]:
    """What a file of a folder declares for a setting to name, each with the first sentence of its file."""
    from energon_packing.convert.layouts.layout import LAYOUTS
    from energon_packing.executors.work import EXECUTORS
    from energon_packing.families.registry import FAMILIES
    from energon_packing.offline.pack import PACK_FORMATS
    from energon_packing.packing.policies import POLICIES

    yield "\n## Names of families, policies, layouts, executors and pack formats\n\n"
    yield "Each is a file of the folder; a package outside declares its own in the entry points of that name.\n"
    registries: tuple[Registry[Any], ...] = (FAMILIES, POLICIES, LAYOUTS, EXECUTORS, PACK_FORMATS)
    for registry in registries:
        yield f"\n| `{registry.setting}` (`{registry.folder}`) | |\n| --- | --- |\n"
        folder = importlib.import_module(registry.folder)
        for file in sorted(pkgutil.iter_modules(folder.__path__), key=lambda file: file.name):
            module = importlib.import_module(f"{registry.folder}.{file.name}")
            names = ", ".join(f"`{name}`" for name in registry.declared(module))
            told = " ".join((module.__doc__ or "").split("\n\n")[0].split()).replace("``", "`")
            if names:
                yield f"| {names} | {told.partition('. ')[0].rstrip('.')}. |\n"


def _default(value: ast.expr | None) -> str:
    """`` = value``, of `setting` and `field` the default that they name."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("setting", "field"):
        made = {each.arg: f"{ast.unparse(each.value)}()" for each in value.keywords if each.arg == "default_factory"}
        return "".join(f" = {each}" for each in [*map(ast.unparse, value.args), *made.values()][:1])
    return "" if value is None else f" = {ast.unparse(value)}"


def _public(package: str) -> list[str]:
    module = importlib.import_module(package)
    return [name for name in module.__all__ if not name.startswith("__") and f"{package}.{name}" not in dict(PACKAGES)]


def _home(package: str, name: str) -> str:
    """Where a public name is defined, read off the sources: importing Bridge's part would need Bridge.

    Raises:
        LookupError: no import of the package and no file in it binds the name.
    """
    folder = ROOT / package.replace(".", "/")
    imports = [node for node in ast.walk(_parsed(_file(package))) if isinstance(node, ast.ImportFrom)]
    for node in imports:
        if node.module and any((alias.asname or alias.name) == name for alias in node.names):
            file = ROOT / f"{node.module.replace('.', '/')}.py"
            return f"{node.module}.{name}" if file.is_file() else _home(node.module, name)
    for file in [_file(package), *sorted(folder.glob("*.py"))]:
        if any(_binds(node, name) for node in _parsed(file).body):
            own = package if file == _file(package) else f"{package}.{file.stem}"
            return f"{own}.{name}"
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


def settings_page() -> str:
    """docs/settings.md."""
    from energon_packing.report.settings import SECTION_TEXT, settings, shown

    found = settings()
    parts = [_SETTINGS]
    for section, text in SECTION_TEXT.items():
        own = [each for each in found if each.section == section]
        parts.append(f"\n## {section}\n\n{text}\n\n| setting | default | unit | fingerprint | what it does |\n")
        parts.append("| --- | --- | --- | --- | --- |\n")
        for each in own:
            last = each.name.rpartition(".")[2]
            kind = _choices(each.hint)
            told = each.text + (f" One of {', '.join(f'`{choice}`' for choice in kind)}." if kind else "")
            cells = (f"`{last}`", f"`{shown(each.default)}`", each.unit, _effect(each.name), told)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


_SETTINGS = """# Settings

Every setting of a configuration file for conversations; other kinds of sample have settings of their own.
`python scripts/manual.py write` makes this page of the classes of `energon_packing/config/`; a test keeps it in step.

* `energon-packing init DATASET --processor NAME` writes a file with comments, `energon-packing validate FILE` judges
  one, and `--set section.key=value` of a command that reads one (all but `measure`) changes a value.
* [settings.schema.json](settings.schema.json) is the JSON Schema, for editors: put
  `# yaml-language-server: $schema=PATH` into the first line of a file.
* An unknown key is an error that names the nearest known one.

The column *fingerprint* says what a changed value means for a saved loader state ([resume.md](resume.md)):

* `compared`: a state of another value is refused, unless `data.accept_changed` names the setting.
* `compared as 'X'`: what the setting leads to is compared, under that name.
* `another plan`: the plan gets another id, and states of the old one are refused.
* `none`: change it freely.
"""


def _choices(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return tuple(map(str, get_args(hint)))
    return next(filter(None, map(_choices, get_args(hint))), ())


def _effect(name: str) -> str:
    """What a changed setting means for a saved loader state, in a few words."""
    from energon_packing.energon.states import FIELDS

    section, top = name.partition(".")[0], ".".join(name.split(".")[:2])
    if section == "plan":
        return "another plan"
    if section in ("training", "metrics") or FIELDS[top].metadata.get("changes") == "nothing":
        return "none"
    stated = FIELDS[top].metadata.get("stated")
    return f"compared as {stated!r}" if stated else "compared"
